"""README.md of a converted export: what it is, where it comes from, how far it may be trusted.

Its front matter is that of model cards on the Hugging Face hub. What lies in the run directory of
the export goes in; of a folder that was moved away from it, only the certificates are known.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from mclclip import __version__, config, files
from mclclip.config import Config
from mclclip.eval import results
from mclclip.eval.results import Result
from mclclip.export.certificate import Certificate
from mclclip.export.target import Source
from mclclip.models.clip import is_without_weights
from mclclip.run import artifacts
from mclclip.run.layout import Layout

FILE = "README.md"

_LIBRARY = {"hf": "transformers", "llava": "transformers", "timm": "timm", "onnx": "onnx"}
_MOST_ROWS = 60
_OF_STAGES = ("export", "embeddings")
_LICENCES = {"openai": "mit"}  # of pretrained tags, where it is beyond doubt (NOTICE.md)


def text(to: str, source: Source, found: list[Certificate]) -> str:
    """The card of the export of `source` to the layout `to`, with what was certified."""
    run = source.run_dir
    options = _options(run)
    front: dict[str, object] = {"tags": ["mclclip", "clip"]}
    if to in _LIBRARY:
        front["library_name"] = _LIBRARY[to]
    if to in ("hf", "onnx") and source.reads_texts:
        front["pipeline_tag"] = "zero-shot-image-classification"
    if options is not None and (licence := _LICENCES.get(str(options.model.pretrained))):
        front["license"] = licence
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=True)}---\n",
        f"# {_shown(source.name)}\n",
        f"Written by mclclip {__version__} with `mclclip export --to {to}`.\n",
        *(_origin(source, run, options) if run is not None else []),
        _certificates(found),
        *([_results(rows)] if (rows := _rows(source, run)) else []),
        "## Licence\n\nFine-tuned weights carry the terms of the base's weights and of the data "
        "they were trained on. Name both where you publish them.\n",
    ]
    return "\n".join(parts)


def _shown(value: object) -> str:
    """Text of others in a line of Markdown, where it is neither a link nor a cell nor HTML."""
    text = re.sub(r"([\\\[\]|*])", r"\\\1", files.shown(str(value)))
    return text.replace("<", "&lt;").replace("`", "'")


def _options(run: Path | None) -> Config | None:
    try:
        return None if run is None else config.load(run / "config.yaml")
    except (ValueError, OSError):
        return None  # an older run's options may have other names


def _origin(source: Source, run: Path, options: Config | None) -> list[str]:
    """How it was trained: base, stages, data, configuration. No path of the machine is written."""
    rows = [] if options is None else _trained(options)
    layout = Layout(run)
    if artifacts.is_finished(layout.index):
        manifest = artifacts.read_manifest(layout.index, "index")
        rows.append(("digest of the data's index", f"`{_shown(manifest.digest)}`"))
    rows.append(("digest of weights and their configuration", f"`{source.digest}`"))
    if options is not None:
        digest = files.digest_json(config.dump(options))
        rows.append(("digest of the configuration", f"`{digest}`"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return ["## Origin\n", f"| what | value |\n|---|---|\n{table}\n"]


def _trained(options: Config) -> list[tuple[str, object]]:
    name, weights = options.model.name, options.model.pretrained
    base = _shown(Path(name).name) if isinstance(name, str) else "a configuration of its own"
    if weights:
        base += f", weights {_shown(Path(weights).name)}"
    elif is_without_weights(name):
        base += ", random weights"
    return [
        ("base", base),
        ("stages after the base", options.num_stages),
        ("objective", f"`{_shown(options.train.objective.kind)}`"),
        ("data", ", ".join(_shown(name) for name in options.data.sources) or "none"),
    ]


def _certificates(found: list[Certificate]) -> str:
    lines = [
        f"| {_shown(proof.runtime)} | {proof.num_images} | {proof.num_texts} | "
        f"{proof.image_features:.2g} | {_number(proof.text_features)} | "
        f"{_number(proof.pixels)} | {_number(proof.tokens)} |"
        for proof in found
    ]
    notes = [f"- {_shown(note)}" for proof in found for note in proof.notes]
    return "\n".join([
        "## Held against its source\n",
        "Largest difference of features of equal pixels and tokens; of pixels in shades of 255; "
        "and texts that become other tokens. `certificate.json` has more.\n",
        "| runtime | images | texts | image features | text features | pixels | tokens |",
        "|---|---|---|---|---|---|---|",
        *lines, "", *notes, *([""] if notes else []),
    ])  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _rows(source: Source, run: Path | None) -> list[Result]:
    """The rows of results.jsonl of this very encoder, by its name in the run."""
    path, name = _named(source, run)
    if path is None or not path.is_file():
        return []
    return [row for row in results.read(path) if row.model == name][:_MOST_ROWS]


def _named(source: Source, run: Path | None) -> tuple[Path | None, str]:
    """The results.jsonl that an encoder's rows are in, and its name there; None for a folder that
    is not one of `Layout`."""
    if run is None:
        return None, ""
    parts = source.directory.resolve().relative_to(run.resolve()).parts
    path, variant = Layout(run).results, "mcl"
    if parts[0] == "pilot":
        path, parts = Layout(run, "pilot").results, parts[1:]
    if parts[:1] == ("controls",) and len(parts) > 1:
        variant, parts = parts[1], parts[2:]
    joined = len(parts) == 2 and parts[0] == "exports"
    stage = len(parts) == 2 and parts[0].startswith("stage_") and parts[1] in _OF_STAGES
    if not (joined or stage):
        return None, ""
    return path, Layout(run, variant).model_name(source.name)


def _results(rows: list[Result]) -> str:
    lines = []
    for row in rows:
        digits = row.unit.decimals([row.value])
        value, low, high = (f"{n:.{digits}f}" for n in (row.value, row.ci_low, row.ci_high))
        lines.append(
            f"| {_shown(row.benchmark)} | {_shown(row.metric)} | {value} | "
            f"{_shown(row.unit.name)} | {low} to {high} | {row.count} | "
            f"{_shown(json.dumps(row.protocol))[:200]} |"
        )
    head = (
        "| benchmark | metric | value | unit | 95 % interval | items | protocol |\n"
        "|---|---|---|---|---|---|---|"
    )
    return "\n".join(["## Results\n", head, *lines, ""])
