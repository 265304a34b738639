"""Embeddings of a stage, or of all stages of a joined encoder, in clip-retrieval's layout, for its
`clip index` and for autofaiss.

    img_emb/img_emb_0.npy          [n, D], one file per shard of the index
    text_emb/text_emb_0.npy        [n, D], of the first caption; where captions were embedded
    metadata/metadata_0.parquet    image_path, caption, key, in the order of the rows

Numbers of files have as many digits as the number of shards. Samples that could not be embedded are
left out. `image_path` is the key within its source, as clip-retrieval writes it of shards; `key` is
the run's own, `source/key`. A sample without a caption has an empty one, and zeros as its text row.

Of a joined encoder a row is [z_s] / sqrt(S), the unit embeddings of its S stages side by side, and
so are rows of captions. A query of `Encoder.query_text` or `query_image` weighs the stages,
so that one index serves all weights (`join_query_features` of `models/encoder.py`).
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from mclclip import config, files
from mclclip.data.arrays import Floats
from mclclip.data.options import DataConfig
from mclclip.data.row_store import RowStore
from mclclip.data.sample_index import SampleIndex, Shard
from mclclip.data.samples import TarDataset
from mclclip.export.certificate import Certificate
from mclclip.export.target import Material, Source
from mclclip.models import weights
from mclclip.run import artifacts
from mclclip.run.layout import Layout

_SAMPLED = 1000  # rows that a certificate looks up by key


@dataclass(frozen=True)
class _Embedded:
    """The embeddings of a stage in its run directory."""

    directory: Path
    run: Path

    @cached_property
    def index(self) -> SampleIndex:
        return SampleIndex.open(Layout(self.run).index)

    @cached_property
    def options(self) -> config.Config | None:
        """The run's configuration; None where verbs were called one by one, which keep none."""
        path = self.run / "config.yaml"
        return config.load(path) if path.is_file() else None

    @cached_property
    def images(self) -> RowStore:
        """The rows of the samples; RuntimeError where they are of another index, or damaged."""
        return self._rows(self.directory, "embeddings")

    @cached_property
    def texts(self) -> RowStore | None:
        """The captions' embeddings; None where there are none that belong to this stage's images:
        they are stage 0's, and other stages share them if the configuration says that they
        started from it and that their text tower was not trained."""
        found = Layout(self.run).text_embeddings
        if not artifacts.is_finished(found) or not self.index.num_captions.any():
            return None
        if self.directory.parent.name != "stage_0":
            if self.options is None or not self.options.shares_text_tower:
                return None
        return self._rows(found, "text_embeddings")

    def _rows(self, directory: Path, kind: str) -> RowStore:
        manifest = self.index.manifest_of(directory, kind)
        return RowStore.open(directory, manifest, len(self.index.shards))

    @cached_property
    def _left_out(self) -> npt.NDArray[np.int64]:
        return self.images.left_out()

    def kept(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Ids of a shard's samples that have an embedding."""
        ids = np.arange(shard.start, shard.stop)
        return np.setdiff1d(ids, self._left_out, assume_unique=True)

    def text_rows(self, ids: npt.NDArray[np.int64]) -> Floats:
        """Rows of the first captions of samples by sorted ids, zeros where there is none."""
        assert self.texts is not None
        has = self.index.num_captions[ids] > 0
        rows = self.texts[self.index.caption_start[ids[has]]]
        found = np.zeros((len(ids), rows.shape[1]), rows.dtype)
        found[has] = rows
        return found


@dataclass(frozen=True)
class _Rows:
    """The rows of a stage, or those of several stages side by side, each divided by sqrt(S)."""

    stages: tuple[_Embedded, ...]

    @property
    def index(self) -> SampleIndex:
        return self.stages[0].index

    @property
    def options(self) -> config.Config | None:
        return self.stages[0].options

    @property
    def have_texts(self) -> bool:
        """Whether there are embeddings of captions that belong to every stage."""
        return all(stage.texts is not None for stage in self.stages)

    def kept(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Ids of a shard's samples that have an embedding in every stage."""
        return reduce(np.intersect1d, (stage.kept(shard) for stage in self.stages))

    def images(self, ids: npt.NDArray[np.int64]) -> Floats:
        return self._joined([stage.images[ids] for stage in self.stages])

    def texts(self, ids: npt.NDArray[np.int64]) -> Floats:
        return self._joined([stage.text_rows(ids) for stage in self.stages])

    def _joined(self, parts: list[Floats]) -> Floats:
        if len(parts) == 1:
            return parts[0]
        root = np.float64(len(parts)) ** 0.5
        rows = [(part.astype(np.float64) / root).astype(part.dtype) for part in parts]
        return np.concatenate(rows, axis=1)


def inputs(source: Source) -> dict[str, str]:
    """Digests of the embeddings of the stages of a joined encoder, by stage, and of the captions':
    what the export is made from beside the encoder itself."""
    if not source.is_concat:
        return {}
    found = _opened(source)
    own = {stage.directory.parent.name: stage.directory for stage in found.stages}
    digests = {n: artifacts.read_manifest(p, "embeddings").digest for n, p in own.items()}
    if found.have_texts:
        texts = Layout(found.stages[0].run).text_embeddings
        digests["texts"] = artifacts.read_manifest(texts, "text_embeddings").digest
    return digests


def _opened(source: Source) -> _Rows:
    path = source.directory.resolve()
    if not source.is_concat:
        artifacts.read_manifest(path, "embeddings")
    if source.run_dir is None:
        raise FileNotFoundError(
            f"{source.directory} lies in no run directory, whose index names the samples: give "
            "RUN_DIR/stage_N/embeddings, or RUN_DIR/exports/concat_stage_norm"
        )
    if not source.is_concat:
        return _Rows((_Embedded(path, source.run_dir),))
    return _Rows(tuple(_Embedded(p, source.run_dir) for p in _of_stages(source, source.run_dir)))


def _of_stages(source: Source, run: Path) -> list[Path]:
    """The folders of the embeddings of the stages of a joined encoder in its run.

    Raises ValueError for the variant `raw`, whose similarity has lengths that unit embeddings have
    lost, and for features that texts are not compared with; FileNotFoundError where a stage is not
    embedded, and RuntimeError where embeddings are of another encoder.
    """
    encoder = source.encoder
    assert encoder.variant is not None
    if encoder.variant == "raw":
        raise ValueError(
            f"{source.directory} joins features of any length (raw), and embeddings have unit "
            "length: give concat_stage_norm or concat_weighted, which export.concat makes"
        )
    found = []
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
        found.append(folder / "embeddings")
    return found


def write(source: Source, out: Path) -> None:
    """Writes all rows; see the module. Raises FileNotFoundError for a folder that holds no finished
    embeddings of a run, and RuntimeError for damaged ones and those of another index; of a joined
    encoder the errors of `_of_stages`."""
    given = _opened(source)
    digits = len(str(len(given.index.shards)))
    for number, shard in enumerate(given.index.shards):
        name, ids = f"{number:0{digits}d}", given.kept(shard)
        _save(out / "img_emb" / f"img_emb_{name}.npy", given.images(ids))
        captions = _captions(given, ids)
        if given.have_texts:
            _save(out / "text_emb" / f"text_emb_{name}.npy", given.texts(ids))
        keys = given.index.keys(ids)
        table = pd.DataFrame(
            {
                "image_path": [key.partition("/")[2] for key in keys],
                "caption": captions,
                "key": keys,
            }
        )
        stream = io.BytesIO()
        table.to_parquet(stream, index=False)
        path = out / "metadata" / f"metadata_{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        files.write_bytes(path, stream.getvalue())


def _save(path: Path, rows: np.ndarray) -> None:
    path.parent.mkdir(exist_ok=True)
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(rows))
    files.write_bytes(path, stream.getvalue())


def _captions(given: _Rows, ids: np.ndarray) -> list[str]:
    """The first caption of every sample, empty where there is none; read from the shards."""
    data = DataConfig() if given.options is None else given.options.data
    dataset = TarDataset(
        given.index,
        transform=None,
        reads_captions=False,
        max_image_pixels=data.max_image_pixels,
        max_open_files=data.max_open_files,
        remote=data.remote,
    )
    return [of[0] if of else "" for of in dataset.captions_of(ids.tolist())]


def certify(source: Source, out: Path, material: Material) -> list[Certificate]:
    """The files as numpy and pandas read them: samples drawn by a seed are looked up by their key,
    and their rows compared with the run's. The pictures and texts of `material` are not used."""
    given = _opened(source)
    random, shards = np.random.default_rng(0), given.index.shards
    largest = {"img": 0.0, "text": 0.0}
    parts, count = sorted((out / "metadata").glob("*.parquet")), 0
    for _, path in zip(shards, parts, strict=True):
        keys = pd.read_parquet(path, columns=["key"])["key"]
        count += len(keys)
        drawn = random.permutation(len(keys))[: 1 + _SAMPLED // len(shards)]
        ids = given.index.ids_of(keys.iloc[drawn].tolist())
        drawn, ids = drawn[np.argsort(ids)], np.sort(ids)
        wanted = {"img": given.images(ids)}
        if given.have_texts:
            wanted["text"] = given.texts(ids)
        for kind, rows in wanted.items():
            name = path.name.replace("metadata", f"{kind}_emb").replace(".parquet", ".npy")
            found = np.load(out / f"{kind}_emb" / name, allow_pickle=False)
            if len(found) != len(keys):
                largest[kind] = float("inf")
                continue
            off = found[drawn].astype(np.float64) - rows
            largest[kind] = max(largest[kind], float(np.abs(off).max(initial=0.0)))
    left_out = len(given.index) - count
    notes = [f"{left_out} of {len(given.index)} samples have no embedding"] if left_out else []
    if not given.have_texts:
        notes.append("there are no embeddings of captions that belong to this stage")
    if (stages := len(given.stages)) > 1:
        notes.append(
            f"rows are [z_s] / sqrt({stages}) of {stages} stages, of {rows.shape[1] // stages} "
            "numbers each: a query is [w_s t_s] * sqrt(S) with weights of your own "
            "(Encoder.query_text)"
        )
    return [
        Certificate(
            f"numpy {np.__version__}, pandas {pd.__version__}, {count} rows",
            min(count, _SAMPLED),
            image_features=largest["img"],
            num_texts=min(count, _SAMPLED) if given.have_texts else 0,
            text_features=largest["text"] if given.have_texts else None,
            bound=0.0,
            notes=notes,
        )
    ]
