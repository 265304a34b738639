"""Writes the model card (README.md) of a model that was converted for another library.

The card says what the model is, how it was trained, and how far it differs from its source. Its
facts come from the run directory in which the export lies; without one, the card has only the
certificates.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from mclclip import __version__, config
from mclclip.config import Config
from mclclip.eval.results import Result
from mclclip.export import targets
from mclclip.export.certificate import Certificate
from mclclip.export.targets import Source
from mclclip.models.clip import is_without_weights
from mclclip.run import artifacts
from mclclip.run.artifacts import RunPaths
from mclclip.run.opened import Run
from mclclip.util import files

log = logging.getLogger("mclclip")

_OF_THE_RUN = {"settings", "data", "evaluation", "export", "outcomes", "stage_dim", "level"}
_MOST_ROWS = 60
_LICENCES = {"openai": "mit"}  # by tag of weights; others are in doubt (NOTICE.md)


def write_card(out: Path, to: str, source: Source, proofs: Sequence[Certificate]) -> None:
    """Writes the card of `source`, converted to the layout `to` (for example "hf"), into `out`.

    `proofs` are the certificates of the conversion, one for each runtime.
    """
    run = source.run_dir
    front: dict[str, Any] = dict(targets.find(to).card)
    if "pipeline_tag" in front and not source.encoder.stages[0].reads_texts:
        del front["pipeline_tag"]
    try:
        options = None if run is None else config.load(run / "config.yaml")
    except (ValueError, OSError):
        options = None  # damaged or gone
    if options is not None and (licence := _LICENCES.get(str(options.model.pretrained))):
        front["license"] = licence
    parts = [
        f"---\n{ModelCardData(tags=['mclclip', 'clip'], **front).to_yaml()}\n---\n",
        f"# {_escaped(source.name)}\n",
        f"Written by mclclip {__version__} with `mclclip export --to {to}`.\n",
    ]
    if run is not None:
        rows = [(name, str(value)) for name, value in origin(source, run, options).items()]
        parts += ["## Origin\n", _table("what | value", rows), ""]
    if usage := targets.find(to).usage:
        parts += ["## How to load it\n", usage(source), ""]
    parts += [
        "## Held against its source\n",
        "Largest difference of features of equal pixels and tokens, and their lowest cosine; "
        "largest difference of pixels in shades of 255; and texts that become other tokens. "
        "`certificate.json` has more.\n",
    ]
    cells = []
    for proof in proofs:
        differences = (proof.image_features, proof.text_features, proof.pixels, proof.tokens)
        numbers = ["-" if value is None else f"{value:.2g}" for value in differences]
        numbers.insert(2, f"{proof.cosine:.4f}")
        counts = (str(proof.num_images), str(proof.num_texts))
        cells.append((_escaped(proof.runtime), *counts, *numbers))
    heads = "runtime | images | texts | image features | text features | cosine | pixels | tokens"
    parts.append(_table(heads, cells))
    if notes := [f"- {_escaped(note)}" for proof in proofs for note in proof.notes]:
        parts += ["", *notes]
    parts.append("")
    measured = []
    for row in benchmark_rows(source, run):
        digits = row.unit.decimals([row.value])
        value, low, high = (f"{n:.{digits}f}" for n in (row.value, row.ci_low, row.ci_high))
        protocol = _escaped(_in_words(row.protocol))
        names = (_escaped(row.benchmark), _escaped(row.metric), value, _escaped(row.unit.name))
        measured.append((*names, f"{low} to {high}", str(row.count), protocol))
    heads = "benchmark | metric | value | unit | 95 % interval | items | protocol"
    parts += ["## Results\n", _table(heads, measured), ""] if measured else []
    parts.append(
        "## Licence\n\nFine-tuned weights carry the terms of the base's weights and of the data "
        "they were trained on. Name both where you publish them.\n"
    )
    files.write_bytes(out / "README.md", "\n".join(parts).encode())


def _escaped(value: object) -> str:
    """Escapes a stranger's text for a line of Markdown, so that it forms no link, cell or HTML."""
    text = re.sub(r"([\\\[\]|*])", r"\\\1", files.printable(str(value)))
    return text.replace("<", "&lt;").replace("`", "'")


def _table(heads: str, rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown of escaped cells; ``heads`` is for example "what | value"."""
    lines = [f"| {heads} |", "|" + "---|" * (heads.count("|") + 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def origin(source: Source, run: Path, options: Config | None) -> dict[str, object]:
    """Returns rows about a model's training: base, stages, data, digests. They name no path."""
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
    index = RunPaths(run).index
    if artifacts.is_finished(index):
        digest = artifacts.read_manifest(index, "index").digest
        rows["digest of the data's index"] = f"`{_escaped(digest)}`"
    rows["digest of weights and their configuration"] = f"`{source.digest}`"
    if options is not None:
        rows["digest of the configuration"] = f"`{files.digest_json(config.dump(options))}`"
    return rows


def benchmark_rows(source: Source, run: Path | None) -> list[Result]:
    """Returns the encoder's rows of results.jsonl, at most 60.

    The encoder's name follows from its folder in the run, since a control's stages have the names
    of MCL's. A folder that is no encoder's place in a run has no rows.
    """
    if run is None:
        return []
    parts = source.directory.resolve().relative_to(run.resolve()).parts
    variant = "mcl"
    if parts[:1] == ("controls",) and len(parts) > 1:
        variant, parts = parts[1], parts[2:]
    is_joined = len(parts) == 2 and parts[0] == "exports"
    is_stage = len(parts) == 2 and parts[0].startswith("stage_")
    if not (is_joined or (is_stage and parts[1] in ("export", "embeddings"))):
        return []
    name = RunPaths(run, variant).model_name(source.name)
    return [row for row in Run(run).result_rows if row.model == name][:_MOST_ROWS]


def _in_words(protocol: Mapping[str, Any]) -> str:
    """Describes a protocol for the card, for example "split: test, templates: 80 values", without
    what only the run needs to know its rows."""
    shown = {
        name: f"{len(value)} values" if isinstance(value, list | dict) else value
        for name, value in protocol.items()
        if name not in _OF_THE_RUN
    }
    return ", ".join(f"{name}: {value}" for name, value in shown.items())
