"""README.md of a converted export: what it is, where it comes from, how far it may be trusted.

Its front matter is that of model cards on the Hugging Face hub. What lies in the run directory of
the export goes in; of a folder that was moved away from it, only the certificates are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from mclclip import __version__, config, files
from mclclip.config import Config
from mclclip.eval import results
from mclclip.eval.results import Result
from mclclip.export.certificate import Certificate
from mclclip.export.targets import Source
from mclclip.models.clip import is_without_weights
from mclclip.run import artifacts
from mclclip.run.layout import Layout

FILE = "README.md"

_MOST_ROWS = 60
_LICENCES = {"openai": "mit"}  # of pretrained tags, where it is beyond doubt (NOTICE.md)


def text(to: str, front: Mapping[str, str], source: Source, proofs: Sequence[Certificate]) -> str:
    """The card of the export of `source` to the layout `to`, with its certificates. `front` is the
    layout's front matter."""
    run = source.run_dir
    fields: dict[str, Any] = dict(front)
    if "pipeline_tag" in fields and not source.reads_texts:
        del fields["pipeline_tag"]
    try:
        options = None if run is None else config.load(run / "config.yaml")
    except (ValueError, OSError):
        options = None  # an older run's options may have other names
    if options is not None and (licence := _LICENCES.get(str(options.model.pretrained))):
        fields["license"] = licence
    parts = [
        f"---\n{ModelCardData(tags=['mclclip', 'clip'], **fields).to_yaml()}\n---\n",
        f"# {_escaped(source.name)}\n",
        f"Written by mclclip {__version__} with `mclclip export --to {to}`.\n",
    ]
    if run is not None:
        rows = [(name, str(value)) for name, value in origin(source, run, options).items()]
        parts += ["## Origin\n", _table("what | value", rows), ""]
    parts += [*_certificates(proofs), ""]
    if rows_of_run := benchmark_rows(source, run):
        parts += ["## Results\n", _results_table(rows_of_run), ""]
    parts.append(
        "## Licence\n\nFine-tuned weights carry the terms of the base's weights and of the data "
        "they were trained on. Name both where you publish them.\n"
    )
    return "\n".join(parts)


def _escaped(value: object) -> str:
    """Text of others in a line of Markdown, where it is neither a link nor a cell nor HTML."""
    text = re.sub(r"([\\\[\]|*])", r"\\\1", files.shown(str(value)))
    return text.replace("<", "&lt;").replace("`", "'")


def _table(heads: str, rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; its cells are escaped already."""
    lines = [f"| {heads} |", "|" + "---|" * (heads.count("|") + 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def origin(source: Source, run: Path, options: Config | None) -> dict[str, object]:
    """How it was trained: base, stages, data, configuration. No path of the machine is in it."""
    rows: dict[str, object] = {}
    if options is not None:
        name, weights = options.model.name, options.model.pretrained
        base = _escaped(Path(name).name) if isinstance(name, str) else "a configuration of its own"
        if weights:
            base += f", weights {_escaped(Path(weights).name)}"
        elif is_without_weights(name):
            base += ", random weights"
        rows["base"] = base
        rows["stages after the base"] = options.num_stages
        rows["objective"] = f"`{_escaped(options.train.objective.kind)}`"
        rows["data"] = ", ".join(map(_escaped, options.data.sources)) or "none"
    index = Layout(run).index
    if artifacts.is_finished(index):
        digest = artifacts.read_manifest(index, "index").digest
        rows["digest of the data's index"] = f"`{_escaped(digest)}`"
    rows["digest of weights and their configuration"] = f"`{source.digest}`"
    if options is not None:
        rows["digest of the configuration"] = f"`{files.digest_json(config.dump(options))}`"
    return rows


def _certificates(proofs: Sequence[Certificate]) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2g}"

    rows = [
        (
            _escaped(proof.runtime),
            str(proof.num_images),
            str(proof.num_texts),
            number(proof.image_features),
            number(proof.text_features),
            number(proof.pixels),
            number(proof.tokens),
        )
        for proof in proofs
    ]
    notes = [f"- {_escaped(note)}" for proof in proofs for note in proof.notes]
    heads = "runtime | images | texts | image features | text features | pixels | tokens"
    return [
        "## Held against its source\n",
        "Largest difference of features of equal pixels and tokens; of pixels in shades of 255; "
        "and texts that become other tokens. `certificate.json` has more.\n",
        _table(heads, rows),
        *(["", *notes] if notes else []),
    ]


def benchmark_rows(source: Source, run: Path | None) -> list[Result]:
    """The rows of results.jsonl of this very encoder, by its name in the run; none for a folder
    that is not one of `Layout`. A control, a pilot and MCL have stages of the same names."""
    if run is None:
        return []
    parts = source.directory.resolve().relative_to(run.resolve()).parts
    path, variant = Layout(run).results, "mcl"
    if parts[0] == "pilot":
        path, parts = Layout(run, "pilot").results, parts[1:]
    if parts[:1] == ("controls",) and len(parts) > 1:
        variant, parts = parts[1], parts[2:]
    is_joined = len(parts) == 2 and parts[0] == "exports"
    is_stage = len(parts) == 2 and parts[0].startswith("stage_")
    if not (is_joined or (is_stage and parts[1] in ("export", "embeddings"))):
        return []
    if not path.is_file():
        return []
    name = Layout(run, variant).model_name(source.name)
    return [row for row in results.read(path) if row.model == name][:_MOST_ROWS]


def _results_table(rows: Sequence[Result]) -> str:
    cells = []
    for row in rows:
        digits = row.unit.decimals([row.value])
        value, low, high = (f"{n:.{digits}f}" for n in (row.value, row.ci_low, row.ci_high))
        protocol = _escaped(json.dumps(row.protocol))[:200]
        names = (_escaped(row.benchmark), _escaped(row.metric), value, _escaped(row.unit.name))
        cells.append((*names, f"{low} to {high}", str(row.count), protocol))
    heads = "benchmark | metric | value | unit | 95 % interval | items | protocol"
    return _table(heads, cells)
