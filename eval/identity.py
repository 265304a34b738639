"""Digests of models, data and options, by which rows of results.jsonl are seen to be up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mclclip.data.text_rows import folders_beside
from mclclip.eval.protocols import BenchmarkConfig
from mclclip.models import transformers_folder
from mclclip.models.weights import SUFFIXES
from mclclip.run.artifacts import MANIFEST, parse_manifest
from mclclip.util.files import digest_file, digest_json

_TEXTS = (".csv", ".tsv", ".json", ".jsonl", ".txt", ".token")


def evaluation_digest(benchmark: BenchmarkConfig, identity: str, precision: str) -> str:
    """Returns a digest of everything that a row depends on; a row with this digest is up to date.

    Of the data, which may change in place, it covers what a verb has recorded in the folder or
    above it, the tables and texts in the folder, and the names and sizes of its other files, but
    not what lies in folders below it.
    """
    parts: list[Any] = [benchmark.kind, benchmark.path, dict(benchmark.options), precision]
    parts.append(identity)
    folder = Path(benchmark.path)
    parts += [_recorded(each / MANIFEST) for each in (folder, folder.parent)]
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file() and path.name != MANIFEST:
            is_text = path.suffix in _TEXTS
            parts.append([path.name, digest_file(path) if is_text else path.stat().st_size])
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
    members = [p for p in directory.rglob("*") if p.suffix in SUFFIXES]
    # A manifest holds the time of writing, so it does not count.
    members = sorted(path for path in members if path.stem != "manifest")
    files_of_model = [(path.relative_to(directory), digest_file(path)) for path in members]
    return digest_json([*files_of_model, *rows])
