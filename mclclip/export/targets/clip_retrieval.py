"""Writes embeddings in clip-retrieval's layout, for its `clip index` and for autofaiss.

    img_emb/img_emb_0.npy          [n, D], one file per shard of the index
    text_emb/text_emb_0.npy        [n, D], of first captions; only if captions were embedded
    metadata/metadata_0.parquet    image_path, caption, key, in the order of the rows

They are those of one stage, or of all stages of a joined encoder. Numbers in file names have as
many digits as the number of shards. Samples that could not be embedded are left out. `image_path`
is the file that `mclclip pack` made the sample of, or the sample's name within its source, as in
clip-retrieval; `key` is the run's key, `source/key`.
A sample without a caption has an empty one, and zeros as its text row.

For a joined encoder a row has the unit embeddings of its S stages side by side, divided by sqrt(S);
rows of captions too. Queries of `Encoder.query_text` or `query_image` weigh the stages, so that one
index serves all weights (see `join_query_features` in `models/encoder.py`).
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from mclclip.data.arrays import Floats, save_npy
from mclclip.data.row_store import RowStore
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import ExportTarget, Source
from mclclip.models import weights
from mclclip.run import artifacts
from mclclip.run.opened import Run
from mclclip.util import files

_SAMPLED = 1000  # rows that a certificate looks up by key
Integers = npt.NDArray[np.int64]


class _Rows:
    """The rows of a stage, or those of S stages side by side, each divided by sqrt(S).

    run     the run in which the embeddings lie
    images  the embeddings of images, one store for each stage
    texts   stage 0's embeddings of captions; None if there are none, or if a stage may have another
            text tower: stages share it if, by the configuration, they started from stage 0 and did
            not train it
    """

    def __init__(self, source: Source) -> None:
        folder = source.directory.resolve()
        if not source.is_concat:
            artifacts.read_manifest(folder, "embeddings")
        if source.run_dir is None:
            raise FileNotFoundError(
                f"{source.directory} lies in no run directory, whose index names the samples: give "
                "RUN_DIR/stage_N/embeddings, or RUN_DIR/exports/concat_stage_norm"
            )
        self.run = Run.open(source.run_dir)
        folders = _find_embeddings(source, source.run_dir) if source.is_concat else [folder]
        index = self.run.index
        self.images = [
            RowStore.open(path, index.manifest_of(path, "embeddings"), path.parent.name)
            for path in folders
        ]
        config = self.run.config
        shared = all(each.name == "stage_0" for each in self.images)
        shared = shared or (config is not None and config.shares_text_tower)
        finished = artifacts.is_finished(self.run.layout.text_embeddings)
        has_texts = shared and finished and bool(index.num_captions.any())
        self.texts = self.run.stage(0).text_embeddings if has_texts else None

    def of(self, ids: Integers) -> dict[str, Floats]:
        """Returns the rows of samples with these sorted ids: `img`, and, if there are texts, `text`
        of their first captions; a sample without a caption has zeros."""
        parts = {"img": [rows[ids] for rows in self.images]}
        if self.texts is not None:
            index = self.run.index
            has = index.num_captions[ids] > 0
            first_captions = self.texts[index.caption_start[ids[has]]]
            rows = np.zeros((len(ids), first_captions.shape[1]), first_captions.dtype)
            rows[has] = first_captions
            parts["text"] = [rows] * len(self.images)
        if len(self.images) == 1:
            return {kind: rows[0] for kind, rows in parts.items()}
        root = np.float64(len(self.images)) ** 0.5
        return {
            kind: np.concatenate([(p.astype(np.float64) / root).astype(p.dtype) for p in rows], 1)
            for kind, rows in parts.items()
        }


def _find_embeddings(source: Source, run: Path) -> list[Path]:
    """Returns the folders with the embeddings of a joined encoder's stages in its run.

    Raises ValueError for the variant `raw`, since unit embeddings have lost the lengths that it
    needs, and for features before the projection, which texts are not compared with. Raises
    FileNotFoundError if a stage is not embedded, and RuntimeError if embeddings are of another
    encoder.
    """
    if source.encoder.variant == "raw":
        raise ValueError(
            f"{source.directory} joins features of any length (raw), and embeddings have unit "
            "length: give concat_stage_norm"
        )
    folders = []
    for stage in files.read_model_json(source.directory / weights.CONCAT)["stages"]:
        name = str(stage["name"])
        folder = (run if name == "stage_0" else source.directory.resolve().parents[1]) / name
        manifest = artifacts.read_manifest(folder / "embeddings", "embeddings")
        exported = artifacts.read_manifest(folder / "export", "export")
        made_by = files.digest_file(weights.find_weights(folder / "export"))
        if made_by != stage["digest"] or manifest.inputs["encoder"] != exported.digest:
            raise RuntimeError(
                f"embeddings at {folder / 'embeddings'} are not of the {name} that "
                f"{source.directory} joins: run 'mclclip embed --stage {name[6:]} --force', and "
                "'mclclip export --force' where the stage was trained again"
            )
        if manifest.config.get("feature") == "pooled":
            raise ValueError(
                f"embeddings at {folder / 'embeddings'} are features before the projection, which "
                "texts are not compared with: embed with embed.feature=projected"
            )
        folders.append(folder / "embeddings")
    return folders


def inputs(source: Source) -> dict[str, str]:
    """Returns digests of the embeddings of a joined encoder's stages, by stage, and of captions.

    The export depends on them besides the encoder. A single stage has none, since its embeddings
    are the source itself.
    """
    if not source.is_concat:
        return {}
    rows = _Rows(source)
    digests = {stage.name: stage.manifest.digest for stage in rows.images}
    if rows.texts is not None:
        texts = artifacts.read_manifest(rows.run.layout.text_embeddings, "text_embeddings")
        digests["texts"] = texts.digest
    return digests


def write(source: Source, out: Path) -> None:
    """Writes all rows and their metadata.

    Raises FileNotFoundError for a folder without finished embeddings of a run, RuntimeError for
    damaged ones and those of another index, and the errors of `_find_embeddings`.
    """
    rows = _Rows(source)
    index = rows.run.index
    left_out = reduce(np.union1d, [stage.left_out() for stage in rows.images])
    for number, shard in enumerate(index.shards):
        name = f"{number:0{len(str(len(index.shards)))}d}"
        ids = np.setdiff1d(np.arange(shard.start, shard.stop), left_out, assume_unique=True)
        for kind, values in rows.of(ids).items():
            save_npy(out / f"{kind}_emb" / f"{kind}_emb_{name}.npy", values)
        keys = index.keys(ids)
        table = pd.DataFrame(
            {
                "image_path": [
                    file or key.partition("/")[2]
                    for key, file in zip(keys, index.files(ids), strict=True)
                ],
                # The first caption of every sample, or an empty text.
                "caption": [of[0] if of else "" for of in rows.run.captions(ids)],
                "key": keys,
            }
        )
        path = out / "metadata" / f"metadata_{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        files.write_bytes(path, table.to_parquet(index=False))


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """Reads the written files with numpy and pandas, and compares rows with those of the run.

    Samples are drawn by a fixed seed and found by their keys. ``probes`` is not used.
    """
    rows, random = _Rows(source), np.random.default_rng(0)
    index, shards = rows.run.index, rows.run.index.shards
    largest = {"img": 0.0, "text": 0.0}
    parts, count = sorted((out / "metadata").glob("*.parquet")), 0
    for _, path in zip(shards, parts, strict=True):
        keys = pd.read_parquet(path, columns=["key"])["key"]
        count += len(keys)
        drawn = random.permutation(len(keys))[: 1 + _SAMPLED // len(shards)]
        ids = index.ids_of(keys.iloc[drawn].tolist())
        drawn, ids = drawn[np.argsort(ids)], np.sort(ids)
        expected = rows.of(ids)
        for kind, values in expected.items():
            name = path.name.replace("metadata", f"{kind}_emb").replace(".parquet", ".npy")
            stored = np.load(out / f"{kind}_emb" / name, allow_pickle=False)
            if len(stored) != len(keys):
                largest[kind] = float("inf")
                continue
            off = stored[drawn].astype(np.float64) - values
            largest[kind] = max(largest[kind], float(np.abs(off).max(initial=0.0)))
    left_out = len(index) - count
    notes = [f"{left_out} of {len(index)} samples have no embedding"] if left_out else []
    if rows.texts is None:
        notes.append("there are no embeddings of captions that belong to this stage")
    if (stages := len(rows.images)) > 1:
        width = expected["img"].shape[1] // stages
        notes.append(
            f"rows are [z_s] / sqrt({stages}) of {stages} stages, of {width} numbers each: a query "
            "is [w_s t_s] * sqrt(S) with weights of your own (Encoder.query_text)"
        )
    return [
        Certificate(
            f"numpy {np.__version__}, pandas {pd.__version__}, {count} rows",
            min(count, _SAMPLED),
            image_features=largest["img"],
            num_texts=min(count, _SAMPLED) if rows.texts is not None else 0,
            text_features=largest["text"] if rows.texts is not None else None,
            bound=0.0,
            notes=notes,
        )
    ]


TARGET = ExportTarget(write, certify, is_model=False, inputs=inputs)
