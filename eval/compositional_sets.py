"""Loaders of compositional benchmarks in their published layouts; they import no torch.

All of them are one idea: an item has images and texts, and says which texts are true of which
images. Loaders raise FileNotFoundError for missing files and ValueError for wrong content, in one
line. Nothing is downloaded; what a layout needs and where it comes from is in ``LAYOUTS``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from mclclip.eval.datasets import SUFFIXES, Region, check_inside, roots_of
from mclclip.files import below, parse_json, read_bounded, read_json

LayoutName = Literal[
    "sugarcrepe",
    "sugarcrepe_pp",
    "winoground",
    "naturalbench",
    "aro_relation",
    "aro_attribute",
    "aro_order",
    "whatsup",
]

MAX_LINES_BYTES = 1 << 26

MAX_EDGE = 1 << 20
"""Pixels that a box may lie from the corner of its picture."""


@dataclass(frozen=True)
class Item:
    """Images, texts, and ``truth[i][t]``: whether text t is true of image i.

    name: unlike that of any other item; part: the file that it is from; kind: its relation or its
    attributes, where the data set has such; unit: items of equal unit belong together (they share
    an image or show the same things).
    """

    name: str
    images: tuple[Path | Region, ...]
    texts: tuple[str, ...]
    truth: tuple[tuple[bool, ...], ...]
    part: str
    kind: str
    unit: str


@dataclass(frozen=True)
class ItemSet:
    """Items of a benchmark whose images are there.

    read: number of items of every part before any was left out; missing_images: number of images
    that are not there.
    """

    items: list[Item]
    read: Mapping[str, int]
    missing_images: int

    @property
    def left_out(self) -> int:
        """Number of items that were left out."""
        return sum(self.read.values()) - len(self.items)


@dataclass(frozen=True)
class _Draft:
    """An item as a file has it. With one image the first ``right`` texts are true of it; with
    several images text i is true of image i alone."""

    id: str
    images: Sequence[Any]
    texts: Sequence[Any]
    right: int = 1
    kind: str = ""
    unit: str = ""
    box: tuple[int, int, int, int] | None = None


@dataclass(frozen=True)
class Layout:
    """How a data set is published.

    files: part -> its file; sizes: part -> number of items in the published file, where known;
    drafts: content of a file, its name -> items; source: what is needed, from whom, under which
    terms; captions, images: folders of the files and of the images; numbered: part -> name of the
    image of a number, where items give numbers.
    """

    files: Mapping[str, str]
    sizes: Mapping[str, int]
    drafts: Callable[[Any, str], Iterator[_Draft]]
    source: str
    captions: str = "."
    images: str = "."
    numbered: Mapping[str, str] = field(default_factory=dict)


# --- fields of records that others wrote -------------------------------------------------------


def _records(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The place and the fields of every record of a list."""
    if not isinstance(content, list):
        raise ValueError(f"{where} is {type(content).__name__} at its top, wanted a list of items")
    for number, record in enumerate(content):
        yield _checked(record, f"{where} item {number}")


def _checked(record: Any, place: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(record, dict):
        raise ValueError(f"{place} is {record!r:.80}, wanted an object with named fields")
    return place, record


def _take(record: Mapping[str, Any], place: str, *names: str) -> list[Any]:
    if lacking := [name for name in names if name not in record]:
        raise ValueError(
            f"{place} has no field {lacking[0]!r}, it has {', '.join(map(repr, record))}: wanted "
            f"{', '.join(names)}"
        )
    return [record[name] for name in names]


def _whole(value: Any, what: str, place: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{place}: {what} is {value!r:.80}, wanted a whole number")
    return value


def _options(value: Any, place: str, count: int | None = None) -> list[Any]:
    """The candidates of an item, of which the first is true: a list of ``count`` texts."""
    wanted = "at least 2" if count is None else str(count)
    if not isinstance(value, list) or len(value) < 2 or len(value) != (count or len(value)):
        got = f"{len(value)} texts" if isinstance(value, list) else f"{value!r:.80}"
        raise ValueError(f"{place} has {got} to choose from, wanted a list of {wanted}")
    return value


# --- the layouts -------------------------------------------------------------------------------


def _sugarcrepe(content: Any, where: str) -> Iterator[_Draft]:
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {type(content).__name__} at its top, wanted an object of ids")
    for name, value in content.items():
        place, record = _checked(value, f"{where} item {name!r}")
        image, *texts = _take(record, place, "filename", "caption", "negative_caption")
        yield _Draft(name, [image], texts)


def _sugarcrepe_pp(content: Any, where: str) -> Iterator[_Draft]:
    for place, record in _records(content, where):
        name, image, *texts = _take(
            record, place, "id", "filename", "caption", "caption2", "negative_caption"
        )
        yield _Draft(str(_whole(name, "id", place)), [image], texts, right=2)


def _quadruples(key: str) -> Callable[[Any, str], Iterator[_Draft]]:
    """Two images and two captions, caption i true of image i, with an id under ``key``."""

    def drafts(content: Any, where: str) -> Iterator[_Draft]:
        for place, record in _records(content, where):
            name, *rest = _take(record, place, key, "image_0", "image_1", "caption_0", "caption_1")
            yield _Draft(str(_whole(name, key, place)), [*map(_with_suffix, rest[:2])], rest[2:])

    return drafts


def _with_suffix(name: Any) -> Any:
    """A file name with a suffix: Winoground's table gives ``ex_0_img_0`` for ``ex_0_img_0.png``."""
    bare = isinstance(name, str) and PurePosixPath(name).suffix.lower() not in SUFFIXES
    return f"{name}.png" if bare else name


def _visual_genome(field_of_kind: str) -> Callable[[Any, str], Iterator[_Draft]]:
    edges = ("bbox_x", "bbox_y", "bbox_w", "bbox_h")

    def drafts(content: Any, where: str) -> Iterator[_Draft]:
        for number, (place, record) in enumerate(_records(content, where)):
            image, right, wrong, kind, *box = _take(
                record, place, "image_path", "true_caption", "false_caption", field_of_kind, *edges
            )
            names = kind if isinstance(kind, list) else [kind]
            if not names or not all(isinstance(name, str) and name for name in names):
                raise ValueError(f"{place}: {field_of_kind} is {kind!r:.80}, wanted a name")
            x, y, w, h = (
                _whole(value, name, place) for name, value in zip(edges, box, strict=True)
            )
            if min(w, h) < 1 or max(map(abs, (x, y, w, h))) > MAX_EDGE:
                raise ValueError(
                    f"{place}: its box is {w} x {h} pixels at ({x}, {y}), not a part of a picture"
                )
            cut = (x, y, x + w, y + h)
            yield _Draft(str(number), [image], [right, wrong], kind="_".join(names), box=cut)

    return drafts


def _order(content: Any, where: str) -> Iterator[_Draft]:
    count = None
    for number, (place, record) in enumerate(_records(content, where)):
        image, options = _take(record, place, "image", "caption_options")
        texts = _options(options, place, count)
        count = len(texts)
        yield _Draft(str(number), [image], texts)


def _whatsup(content: Any, where: str) -> Iterator[_Draft]:
    """Photographs with four captions (objects), or COCO's and Visual Genome's images by number with
    two (lists of number, right caption, wrong caption)."""
    if not isinstance(content, list):
        raise ValueError(f"{where} is {type(content).__name__} at its top, wanted a list of items")
    for number, record in enumerate(content):
        place = f"{where} item {number}"
        if isinstance(record, dict):
            yield _controlled(record, place)
        elif isinstance(record, list) and len(record) == 3:
            image = _whole(record[0], "the number of its image", place)
            yield _Draft(str(number), [image], record[1:])
        else:
            raise ValueError(
                f"{place} is {record!r:.80}, wanted an object with image_path and caption_options, "
                "or a list of the number of an image and two captions"
            )


def _controlled(record: Mapping[str, Any], place: str) -> _Draft:
    """A photograph of a set of four, named after OBJECT_RELATION_[of_]OBJECT."""
    path, options = _take(record, place, "image_path", "caption_options")
    words = PurePosixPath(path).stem.split("_") if isinstance(path, str) else []
    if len(words) < 3:
        raise ValueError(
            f"{place}: image_path is {path!r:.80}, wanted a name such as mug_left_of_table.jpeg"
        )
    image, unit = path.removeprefix("data/"), f"{words[0]} and {words[-1]}"
    texts = _options(options, place, 4)
    return _Draft(PurePosixPath(path).stem, [image], texts, kind=words[1], unit=unit)


_COCO = "images: val2017 of COCO (cocodataset.org, terms of Flickr)"

LAYOUTS: Mapping[str, Layout] = {
    "sugarcrepe": Layout(
        {
            part: f"{part}.json"
            for part in (
                *("replace_obj", "replace_att", "replace_rel"),
                *("swap_obj", "swap_att", "add_obj", "add_att"),
            )
        },
        dict(replace_obj=1652, replace_att=788, replace_rel=1406)
        | dict(swap_obj=245, swap_att=666, add_obj=2062, add_att=692),
        _sugarcrepe,
        f"SugarCrepe, github.com/RAIVNLab/sugar-crepe (MIT): data/*.json; {_COCO}",
        captions="data",
        images="val2017",
    ),
    "sugarcrepe_pp": Layout(
        {
            part: f"{part}.json"
            for part in ("replace_obj", "replace_att", "replace_rel", "swap_obj", "swap_att")
        },
        dict(replace_obj=1652, replace_att=788, replace_rel=1406, swap_obj=245, swap_att=666),
        _sugarcrepe_pp,
        f"SugarCrepe++, github.com/Sri-Harsha/scpp (CC BY 4.0): data/*.json; {_COCO}",
        captions="data",
        images="val2017",
    ),
    "winoground": Layout(
        {"winoground": "examples.jsonl"},
        {"winoground": 400},
        _quadruples("id"),
        "Winoground, the gated data set facebook/winoground of the Hugging Face hub (research "
        "only): data/examples.jsonl, and data/images.zip unpacked to images/",
        images="images",
    ),
    "naturalbench": Layout(
        {"naturalbench": "metadata.json"},
        {},
        _quadruples("index"),
        "NaturalBench-Retrieval.zip of the data set BaiqiL/NaturalBench of the Hugging Face hub "
        "(terms on its page; images of Flickr30K): metadata.json, images/",
        images="images",
    ),
    "aro_relation": Layout(
        {"relation": "visual_genome_relation.json"},
        {"relation": 23_937},
        _visual_genome("relation_name"),
        "ARO, github.com/mertyg/vision-language-models-are-bows (MIT): "
        "visual_genome_relation.json, images/ (of GQA and Visual Genome, CC BY 4.0)",
        images="images",
    ),
    "aro_attribute": Layout(
        {"attribute": "visual_genome_attribution.json"},
        {"attribute": 28_748},
        _visual_genome("attributes"),
        "ARO, github.com/mertyg/vision-language-models-are-bows (MIT): "
        "visual_genome_attribution.json, images/ (of GQA and Visual Genome, CC BY 4.0)",
        images="images",
    ),
    "aro_order": Layout(
        {"order": "order.json"},
        {},
        _order,
        "ARO, github.com/mertyg/vision-language-models-are-bows (MIT), draws the wrong captions of "
        "COCO-Order and Flickr30k-Order anew at each run: write the list test_cases of its class "
        "COCO_Order or Flickr30k_Order as JSON, once for all encoders, and name the file in "
        "captions; images of COCO and Flickr30k (terms of Flickr)",
    ),
    "whatsup": Layout(
        {
            "controlled_a": "controlled_images_dataset.json",
            "controlled_b": "controlled_clevr_dataset.json",
            "coco_one": "coco_qa_one_obj.json",
            "coco_two": "coco_qa_two_obj.json",
            "vg_one": "vg_qa_one_obj.json",
            "vg_two": "vg_qa_two_obj.json",
        },
        dict(controlled_a=412, controlled_b=408, coco_one=2247, coco_two=440)
        | dict(vg_one=1160, vg_two=291),
        _whatsup,
        "What'sUp, github.com/amitakamath/whatsup_vlms (MIT), its folder data: the JSON files, "
        "controlled_images/, controlled_clevr/, val2017/ of COCO, vg_images/ of Visual Genome",
        numbered={
            "coco_one": "val2017/{:012}.jpg",
            "coco_two": "val2017/{:012}.jpg",
            "vg_one": "vg_images/{}.jpg",
            "vg_two": "vg_images/{}.jpg",
        },
    ),
}
assert set(LAYOUTS) == set(get_args(LayoutName))


# --- reading -----------------------------------------------------------------------------------


@dataclass
class _Reader:
    """Drafts -> items, with what is known of all of them so far."""

    root: Path
    layout: Layout
    folder: Path
    prefixed: bool
    names: Counter[str] = field(default_factory=Counter)

    def item(self, draft: _Draft, part: str, where: str) -> Item:
        """The item of a draft; ValueError for an id given twice and for what is no text."""
        name = f"{part}/{draft.id}" if self.prefixed else draft.id
        self.names[name] += 1
        if self.names[name] > 1:
            raise ValueError(
                f"{where} has the id {draft.id!r} twice: correct or remove one of them"
            )
        place, pattern = f"{where} item {draft.id!r}", self.layout.numbered.get(part, "")
        names = [pattern.format(n) if pattern and type(n) is int else n for n in draft.images]
        for text in (*names, *draft.texts):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{place} has {text!r:.80} where a file name or a text is wanted")
        paths = [below(self.folder, image, place) for image in names]
        images = [Region(path, draft.box) if draft.box else path for path in paths]
        several = len(images) > 1
        truth = tuple(
            tuple(
                text == image if several else text < draft.right for text in range(len(draft.texts))
            )
            for image in range(len(images))
        )
        unit = f"{part}: {draft.unit}" if draft.unit else ""
        return Item(name, tuple(images), tuple(draft.texts), truth, part, draft.kind, unit)


def read_items(
    root: Path,
    name: str,
    *,
    captions: str | None = None,
    images: str | None = None,
    parts: Sequence[str] | None = None,
    leave_out: bool = False,
) -> ItemSet:
    """The items of a benchmark below ``root``, in file order, part by part.

    ``captions``: folder of the layout's files, or the file itself where there is one; ``images``:
    folder that the names of images start from; both from ``root``, default: as published.
    ``parts``: these only. Where images are missing, FileNotFoundError, or with ``leave_out`` the
    items that need them are left out. ValueError for a part of which nothing is left.
    """
    layout = LAYOUTS[name]
    chosen = list(layout.files) if parts is None else list(parts)
    if not chosen or (strange := [part for part in chosen if part not in layout.files]):
        got = repr(strange[0]) if chosen else "empty"
        raise ValueError(f"parts is {got}: the parts of {name} are {', '.join(layout.files)}")
    folder = Path(root) / (layout.images if images is None else images)
    reader = _Reader(Path(root), layout, folder, len(layout.files) > 1)
    items, read = [], {}
    for part in dict.fromkeys(chosen):
        path = _file_of(reader, part, captions, len(chosen) == 1)
        found = [
            reader.item(draft, part, str(path)) for draft in layout.drafts(_load(path), str(path))
        ]
        if not found:
            raise ValueError(f"{path} has no items: {layout.source}")
        items += found
        read[part] = len(found)
    absent = _absent(items, reader, images is not None)
    if absent and not leave_out:
        such = ", ".join(path.relative_to(folder).as_posix() for path in sorted(absent)[:3])
        raise FileNotFoundError(
            f"{len(absent)} images of {name} are not in {folder}, such as {such}: get them, or set "
            f"missing: leave_out; {layout.source}"
        )
    kept = [item for item in items if not absent & {*map(_path, item.images)}]
    for part in read:
        if not any(item.part == part for item in kept):
            raise ValueError(
                f"no item of the part {part!r} has its images in {folder}: name the parts that do "
                f"in the option parts; {layout.source}"
            )
    return ItemSet(_with_units(kept, folder), read, len(absent))


def _file_of(reader: _Reader, part: str, captions: str | None, alone: bool) -> Path:
    place = reader.root / (reader.layout.captions if captions is None else captions)
    path = place if alone and place.is_file() else place / reader.layout.files[part]
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: {reader.layout.source}")
    return path


def _load(path: Path) -> Any:
    """The content of a JSON file; that of a ``.jsonl`` is a list of its lines."""
    if path.suffix != ".jsonl":
        return read_json(path, unique_keys=True)
    lines = read_bounded(path, MAX_LINES_BYTES).split(b"\n")
    return [
        parse_json(line, f"{path} line {number}", unique_keys=True)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _path(image: Path | Region) -> Path:
    return image.path if isinstance(image, Region) else image


def _absent(items: Iterable[Item], reader: _Reader, named: bool) -> set[Path]:
    """Images that are not there. ValueError for one that leads out of the benchmark's folder, and
    out of the folder of images where the user has ``named`` it."""
    paths = dict.fromkeys(_path(image) for item in items for image in item.images)
    check_inside(paths, roots_of(reader.root, *([reader.folder] if named else [])), reader.root)
    return {path for path in paths if not path.is_file()}


def _with_units(items: Sequence[Item], folder: Path) -> list[Item]:
    """Items that share an image, directly or through others, get one unit: the name of one of
    these images, from ``folder``. Those that have a unit already keep it."""
    above: dict[Path, Path] = {}

    def top(path: Path) -> Path:
        while (up := above.setdefault(path, path)) != path:
            path = up
        return path

    for item in items:
        first, *others = map(_path, item.images)
        for other in others:
            above[top(other)] = top(first)
    units = [top(_path(item.images[0])).relative_to(folder).as_posix() for item in items]
    return [
        item if item.unit else replace(item, unit=unit)
        for item, unit in zip(items, units, strict=True)
    ]
