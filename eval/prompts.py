"""Finds class names and prompt templates for zero-shot classification.

A label stands for a class in folders or tables ('n01440764'); a name stands for it in prompts
('tench'). Torch is imported only for CLIP's names and templates.
"""

from __future__ import annotations

import importlib.resources
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mclclip.data.shard_scan import read_text_file
from mclclip.eval.classification import Metric, check_metric
from mclclip.eval.images import CLASS_NAMES, as_words, class_names, class_shards, labels_of
from mclclip.util.files import needed, parse_json, read_json

IMAGENET = "imagenet1k"
CLIP_BENCHMARK = "clip_benchmark:"
TEMPLATES = ("simple", "bare", "clip_7", "clip_80")
"""Names of templates: ``simple`` is 'a photo of a {}.', ``bare`` is '{}'; CLIP's authors recommend
``clip_7`` for ImageNet, and report figures with ``clip_80``."""

_WORDNET_ID = re.compile(r"\bn\d{8}\b")
_NAMES, _PROMPTS = "en_classnames.json", "en_zeroshot_classification_templates.json"


# --- names of classes --------------------------------------------------------------------------


Classes = str | Mapping[str, str] | None


def find_names(labels: Sequence[str], classes: Classes, root: Path) -> dict[str, str]:
    """Maps the label of every class that can be an answer to its name, in a fixed order.

    ``classes``:
      - None: labels are names, with underscores as spaces; shards have ``classnames.txt``.
      - ``imagenet1k``: the names that CLIP's authors use (open_clip ships them).
      - ``clip_benchmark:DATASET``: the English names in clip-benchmark (needs the extra ``eval``).
      - a file below ``root``: a ``.json`` with an object label: name or a list of names; otherwise
        text with a line per class, ``LABEL<TAB>name`` or ``LABEL``.
      - a mapping from labels to names, for suites.

    A mapping may name classes without images; these can be answers too. A list of names is matched
    to ``labels`` in one of three ways. WordNet ids get names by their order among ImageNet's 1,000
    sorted ids, even if only some occur. The numbers from 0 to the last name get the name of this
    number. Other labels get the name with the same words; a folder's position never counts.

    Raises ValueError for a label without a name and for a name that holds a WordNet id (no caption
    says "n01440764"), and FileNotFoundError for a missing file.
    """
    if classes is None and class_shards(root) and (listed := class_names(root)):
        names = _match_names(labels, listed, CLASS_NAMES)
    elif classes is None:
        names = {label: as_words(label) for label in labels}
    elif not isinstance(classes, str):
        names = dict(classes)
    else:
        read = read_names(classes, root)
        names = read if isinstance(read, dict) else _match_names(labels, read, classes)
    if strangers := [label for label in labels if label not in names]:
        source = classes if isinstance(classes, str) else "the mapping 'classes'"
        raise ValueError(
            f"{source} has no name for {len(strangers)} of {len(labels)} classes, such as "
            f"{strangers[0]!r}: set classes=FILE with a line '{strangers[0]}<TAB>name' for each"
        )
    nameless = [label for label, name in names.items() if not name or _WORDNET_ID.search(name)]
    if nameless:
        raise ValueError(
            f"the names of {len(nameless)} of {len(names)} classes hold WordNet ids or nothing, "
            f"such as that of {nameless[0]!r}: set classes={IMAGENET}, or classes=FILE with a line "
            f"'{nameless[0]}<TAB>name' for each"
        )
    return names


def read_names(classes: str, root: Path) -> dict[str, str] | list[str]:
    """Reads the names of classes: those of ImageNet, of a clip_benchmark data set, or of a file
    below ``root``, as ``classes`` says. Returns label -> name, or the names in order."""
    if classes == IMAGENET:
        from mclclip.models.clip import IMAGENET_NAMES

        return list(IMAGENET_NAMES)
    if classes.startswith(CLIP_BENCHMARK):
        return _of_clip_benchmark(classes, _NAMES, "class names")
    path = root / classes
    if not path.is_file():
        raise FileNotFoundError(
            f"no file of classes at {path}: give a file below {root}, {IMAGENET}, or "
            f"{CLIP_BENCHMARK}DATASET, such as {CLIP_BENCHMARK}pets"
        )
    if path.suffix != ".json":
        cells = [line.partition("\t") for line in _lines(path)]
        labels = Counter(label for label, _, _ in cells)
        if twice := [label for label, count in labels.items() if count > 1]:
            raise ValueError(f"{path} names the class {twice[0]!r} twice")
        return {label: name.strip() if tab else as_words(label) for label, tab, name in cells}
    tree = read_json(path, unique_keys=True)
    names = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else [0]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} must hold an object of label: name, or a list of names")
    checked: dict[str, str] | list[str] = tree
    return checked


def _lines(path: Path) -> list[str]:
    """The lines of a text file without blank ones, stripped."""
    return [line.strip() for line in read_text_file(path).splitlines() if line.strip()]


def _match_names(labels: Sequence[str], names: Sequence[str], source: str) -> dict[str, str]:
    """Maps labels to names of a list, as ``find_names`` says; labels without a name are left
    out."""
    if all(map(_WORDNET_ID.fullmatch, labels)):
        ids = _imagenet_ids()
        if len(names) != len(ids):
            raise ValueError(
                f"{source} has {len(names)} names, and {labels[0]!r} is a WordNet id: wanted the "
                f"{len(ids)} names of ImageNet-1k, or a file with a line '{labels[0]}<TAB>name' "
                "for each class"
            )
        name_of = dict(zip(ids, names, strict=True))
        return {label: name_of[label] for label in labels if label in name_of}
    if all(label.isdecimal() for label in labels):
        numbers = [int(label) for label in labels]
        if sorted(numbers) != list(range(len(names))):
            raise ValueError(
                f"{source} has {len(names)} names, which belong to the numbers 0 to "
                f"{len(names) - 1}: the {len(labels)} classes run from {min(numbers)} to "
                f"{max(numbers)}; give a file with a line 'LABEL<TAB>name' for each class"
            )
        return {label: names[number] for label, number in zip(labels, numbers, strict=True)}
    exact, counts = set(names), Counter(map(_words, names))
    worded = {_words(name): name for name in names if counts[_words(name)] == 1}
    worded |= {label: label for label in labels if label in exact}
    joined = {label: worded.get(label, worded.get(_words(label))) for label in labels}
    return {label: name for label, name in joined.items() if name is not None}


def _words(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text).strip().casefold()


@cache
def _imagenet_ids() -> tuple[str, ...]:
    """The WordNet ids of ImageNet-1k's classes, sorted, so in the order of its class numbers."""
    import mclclip.util.torchvision_fix  # noqa: F401

    # isort: split
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


# --- templates ---------------------------------------------------------------------------------


def find_templates(templates: str | Sequence[str], root: Path) -> list[str]:
    """Returns prompt templates, which have ``{}`` for the class name.

    ``templates`` is a list of them; a name of ``TEMPLATES``; ``clip_benchmark:DATASET``, for those
    of clip-benchmark for a data set (needs the extra ``eval``); or a file below ``root``, text with
    a template per line or a ``.json`` with a list. ``{c}``, as clip-benchmark writes it, is read as
    ``{}``. Raises ValueError for anything else.
    """
    texts = _find_templates(templates, root) if isinstance(templates, str) else templates
    prompts = [str(template).replace("{c}", "{}") for template in texts]
    wrong = [template for template in prompts if template.count("{}") != 1]
    if wrong or not prompts:
        problem = f"the template {wrong[0]!r}" if wrong else "no template"
        raise ValueError(
            f"templates={templates!r} has {problem}: wanted some with one {{}} for the class name, "
            "such as 'a photo of a {}.'"
        )
    return prompts


def _find_templates(name: str, root: Path) -> Sequence[Any]:
    if name in ("clip_7", "clip_80"):
        from mclclip.models.clip import IMAGENET_TEMPLATES, RECOMMENDED_TEMPLATES

        return RECOMMENDED_TEMPLATES if name == "clip_7" else IMAGENET_TEMPLATES
    if name in TEMPLATES:
        return ["a photo of a {}." if name == "simple" else "{}"]
    if name.startswith(CLIP_BENCHMARK):
        return _of_clip_benchmark(name, _PROMPTS, "templates")
    path = root / name
    if not path.is_file():
        raise ValueError(
            f"unknown templates {name!r}: use {', '.join(TEMPLATES)}, {CLIP_BENCHMARK}DATASET, "
            f"a file below {root} with one per line, or a list"
        )
    content = read_json(path) if path.suffix == ".json" else _lines(path)
    if not isinstance(content, list):
        raise ValueError(f'{path} must hold a list of templates, such as ["a photo of a {{}}."]')
    return content


# --- both --------------------------------------------------------------------------------------


def check(
    root: Path,
    *,
    labels: str | None = None,
    classes: Classes = None,
    templates: str | Sequence[str] = "simple",
    metric: Metric = "accuracy",
    **_: Any,
) -> None:
    """Raises those errors of ``zeroshot.evaluate`` that show without reading the images."""
    names = find_names(labels_of(root, labels, present=True), classes, root)
    check_metric(metric, len(names), labels)
    find_templates(templates, root)


def _of_clip_benchmark(choice: str, file: str, what: str) -> list[str]:
    """Reads from a file of clip-benchmark the entry for ``choice``, 'clip_benchmark:DATASET'.

    ``what`` is 'class names' or 'templates', for the message of the ValueError.
    """
    dataset = choice.removeprefix(CLIP_BENCHMARK)
    package = importlib.resources.files(
        needed("clip_benchmark", choice, "pip install 'mclclip[eval]'")
    )
    entries = parse_json((package / "datasets" / file).read_bytes(), file)
    if dataset not in entries:
        datasets = ", ".join(sorted(entries))
        raise ValueError(f"clip-benchmark has no {what} for {dataset!r}: it has {datasets}")
    entry: list[str] = entries[dataset]
    return entry
