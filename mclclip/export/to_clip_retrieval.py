"""A stage's embeddings in clip-retrieval's layout, for its `clip index` and for autofaiss.

    img_emb/img_emb_0.npy          [n, D], one file per shard of the index
    text_emb/text_emb_0.npy        [n, D], of the first caption; where captions were embedded
    metadata/metadata_0.parquet    image_path, caption, key, in the order of the rows

Numbers of files have as many digits as the number of shards. Samples that could not be embedded are
left out. `image_path` is the key within its source, as clip-retrieval writes it of shards; `key` is
the run's own, `source/key`. A sample without a caption has an empty one, and zeros as its text row.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from mclclip import config, files
from mclclip.config.options import DataConfig
from mclclip.data import embeddings
from mclclip.data.arrays import Floats
from mclclip.data.embeddings import StoredRows
from mclclip.data.sample_index import SampleIndex, Shard
from mclclip.data.samples import TarDataset
from mclclip.export.certificate import Certificate
from mclclip.export.target import Material, Source
from mclclip.run import artifacts
from mclclip.run.artifacts import Manifest
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
    def images(self) -> StoredRows:
        """The rows of the samples; RuntimeError where they are of another index, or damaged."""
        return self._rows(self.directory, "embeddings")

    @cached_property
    def texts(self) -> StoredRows | None:
        """The captions' embeddings; None where there are none that belong to this stage's images:
        they are stage 0's, and other stages share them if the configuration says that they
        started from it and that their text tower was not trained."""
        found = Layout(self.run).text_embeddings
        if not artifacts.is_finished(found) or not self.index.num_captions.any():
            return None
        if self.directory.parent.name != "stage_0":
            options = self.options
            if options is None or options.trained_model is not None:
                return None
            if options.train.start != "base" or options.train.lock.text:
                return None
        return self._rows(found, "text_embeddings")

    def _rows(self, directory: Path, kind: str) -> StoredRows:
        manifest = self.index.manifest_of(directory, kind)
        return StoredRows(directory, manifest, self._num_files(manifest))

    def _num_files(self, manifest: Manifest) -> int:
        return int(manifest.counts.get("shards", len(self.index.shards)))

    @cached_property
    def _left_out(self) -> npt.NDArray[np.int64]:
        manifest = self.index.manifest_of(self.directory, "embeddings")
        return embeddings.left_out(self.directory, self._num_files(manifest))

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


def _opened(source: Source) -> _Embedded:
    path = source.directory.resolve()
    artifacts.read_manifest(path, "embeddings")
    if source.run_dir is None:
        raise FileNotFoundError(
            f"{source.directory} lies in no run directory, whose index names the samples: give "
            "RUN_DIR/stage_N/embeddings"
        )
    return _Embedded(path, source.run_dir)


def write(source: Source, out: Path) -> None:
    """Writes all rows; see the module. Raises FileNotFoundError for a folder that holds no finished
    embeddings of a run, and RuntimeError for damaged ones and those of another index."""
    given = _opened(source)
    digits = len(str(len(given.index.shards)))
    for number, shard in enumerate(given.index.shards):
        name, ids = f"{number:0{digits}d}", given.kept(shard)
        _save(out / "img_emb" / f"img_emb_{name}.npy", given.images[ids])
        captions = _captions(given, ids)
        if given.texts is not None:
            _save(out / "text_emb" / f"text_emb_{name}.npy", given.text_rows(ids))
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


def _captions(given: _Embedded, ids: np.ndarray) -> list[str]:
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
        wanted = {"img": given.images[ids]}
        if given.texts is not None:
            wanted["text"] = given.text_rows(ids)
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
    if given.texts is None:
        notes.append("there are no embeddings of captions that belong to this stage")
    return [
        Certificate(
            f"numpy {np.__version__}, pandas {pd.__version__}, {count} rows",
            min(count, _SAMPLED),
            image_features=largest["img"],
            num_texts=min(count, _SAMPLED) if given.texts is not None else 0,
            text_features=largest["text"] if given.texts is not None else None,
            bound=0.0,
            notes=notes,
        )
    ]
