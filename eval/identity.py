"""Digests of models, data and options, by which rows of results.jsonl are seen to be up to date."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mclclip.data.decode import PICTURE_SUFFIXES
from mclclip.data.table_formats import DELIMITERS, LINES
from mclclip.data.text_rows import folders_beside
from mclclip.eval.protocols import BenchmarkConfig, evaluator
from mclclip.models import transformers_folder
from mclclip.models.weights import SUFFIXES
from mclclip.run.artifacts import MANIFEST, parse_manifest
from mclclip.util.files import digest_file, digest_json

_TEXTS = (*DELIMITERS, *LINES, ".json")
_DATA = (*_TEXTS, ".parquet", ".tar", *(f".{suffix}" for suffix in PICTURE_SUFFIXES))


def fields_of_rows(
    benchmark: BenchmarkConfig, data: str, identity: str, precision: str
) -> dict[str, Any]:
    """Returns what the rows of a model on ``benchmark`` record of what they depend on.

    settings    the kind of the benchmark and its options, without those that have their defaults
    data        the ``data_digest`` of the benchmark
    evaluation  a digest of everything: rows with this digest are up to date
    """
    settings = _settings(benchmark)
    folder = Path(benchmark.path)
    manifests = [_recorded(each / MANIFEST) for each in (folder, folder.parent)]
    parts = [settings, os.path.realpath(folder), data, *manifests, identity, precision]
    return {"settings": settings, "data": data, "evaluation": digest_json(parts)[:16]}


def benchmark_digest(benchmark: BenchmarkConfig) -> str:
    """Returns a digest of what is measured: settings and data, wherever the data lie. Raises
    FileNotFoundError if there is no such folder."""
    if not os.path.exists(benchmark.path):
        raise FileNotFoundError(f"the data of a benchmark are not at {benchmark.path}")
    return digest_json([_settings(benchmark), data_digest(benchmark)])


def _settings(benchmark: BenchmarkConfig) -> dict[str, Any]:
    options = evaluator(benchmark.kind).options.model_validate(benchmark.options)
    return {"kind": benchmark.kind, **options.model_dump(mode="json", exclude_defaults=True)}


def data_digest(benchmark: BenchmarkConfig) -> str:
    """Returns a digest of a benchmark's data, which may change in place: the names and sizes of the
    pictures, tables, texts and shards below its folder, and the bytes of tables and texts that
    lie in the folder itself.

    Hidden files, manifests and a README do not count. A folder to which several links lead counts
    once, so a link to a folder above makes no endless tree.
    """
    root, parts, seen = Path(benchmark.path), [], set[str]()
    for folder, folders, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for path in (Path(folder, name) for name in sorted(names)):
            is_data = path.suffix.lower() in _DATA and path.name[0] != "."
            is_data &= path.stem.upper() != "README"
            if is_data and path.name != MANIFEST and path.is_file():
                is_text = path.parent == root and path.suffix.lower() in _TEXTS
                content = digest_file(path) if is_text else path.stat().st_size
                parts.append([str(path.relative_to(root)), content])
    return digest_json(parts)[:16]


def _recorded(path: Path) -> Any:
    """Returns the options and inputs that a manifest records; of another file its digest."""
    if not path.is_file():
        return None
    try:
        manifest = parse_manifest(path)
    except ValueError:  # somebody else's manifest.json
        return digest_file(path)
    return [manifest.config, manifest.inputs]


def identity_of(model: str | Path, pretrained: str | None = None) -> str:
    """Returns a digest of the files of a model, or of its name if it is no file or directory."""
    if str(model).startswith(transformers_folder.PREFIX):
        return transformers_folder.digest(str(model))
    directory = Path(str(model).removeprefix("local-dir:"))
    if not directory.is_dir():
        files = [Path(name) for name in (str(model), pretrained) if name]
        return digest_json([digest_file(f) if f.is_file() else str(f) for f in files])
    rows = [parse_manifest(folder / MANIFEST).digest for folder in folders_beside(directory)]
    members = [p for p in directory.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
    # A manifest holds the time of writing, so it does not count.
    members = sorted(path for path in members if path.stem != "manifest")
    files_of_model = [(path.relative_to(directory), digest_file(path)) for path in members]
    return digest_json([*files_of_model, *rows])
