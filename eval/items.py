"""Reads the items of compositional benchmarks in their published layouts.

An item has images and texts, and says which texts are true of which images. Nothing is downloaded:
``LAYOUTS`` says which files a layout needs and where to get them. ``images`` says which errors are
raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from mclclip.data.training_images import path_of
from mclclip.eval.images import SUFFIXES, Region, read_lines
from mclclip.run.artifacts import INTENT
from mclclip.util.caption_rules import RULES
from mclclip.util.files import below, read_bounded, read_json

LayoutName = Literal[
    "sugarcrepe",
    "sugarcrepe_pp",
    "winoground",
    "naturalbench",
    "aro_relation",
    "aro_attribute",
    "aro_order",
    "whatsup",
    "pairs",
]

MAX_LINES_BYTES = 1 << 26
"""The largest size of a file with an item per line."""

CONFUSED = "confused"
"""The part of the layout 'pairs' in which a false caption is that of a picture that an encoder
confuses with the image."""

STRUCK = "struck.txt"
"""A file beside pairs of ``make-pairs`` in which a person names items to leave out."""

MAX_EDGE = 1 << 20
"""The edges of a box are at most so many pixels from the corner of its picture."""


@dataclass(frozen=True)
class Item:
    """Images and texts, of which some texts are true of some images.

    name   unique among the items of the benchmark
    truth  truth[i][t] is True if text t is true of image i
    part   the file of the benchmark that the item is from, for example 'swap_obj'
    kind   its relation or its attributes, if the data set has them, or else empty
    unit   items with the same unit belong together: they share an image or show the same things
    """

    name: str
    images: tuple[Path | Region, ...]
    texts: tuple[str, ...]
    truth: tuple[tuple[bool, ...], ...]
    part: str
    kind: str
    unit: str


PAIR = ((True, False), (False, True))
"""The truth of two images and two texts: text i is true of image i alone."""


@dataclass(frozen=True)
class ItemSet:
    """The items of a benchmark that can be measured.

    items           the items whose images exist and that nobody has struck out
    read            the number of items in the file of each part
    missing_images  the number of images that do not exist
    struck          the number of items that a person has struck out (`STRUCK`)
    """

    items: list[Item]
    read: Mapping[str, int]
    missing_images: int
    struck: int = 0

    @property
    def left_out(self) -> int:
        """The number of items that were left out because images are missing."""
        return sum(self.read.values()) - len(self.items) - self.struck


@dataclass(frozen=True)
class PublishedLayout:
    """How a data set is published.

    files             part -> its file
    sizes             part -> the number of items in the published file, if known
    item              makes an item of a record of a file
    source            for messages: what is needed, where to get it, and under which terms
    captions, images  the folders of the files and of the images
    by_id             True if a file maps ids to records; False if it is a list of records
    numbered          part -> pattern of the names of its images, if items have only their numbers
    made              True if ``make-pairs`` writes it: then files may be missing, and a person may
                      have struck out items
    """

    files: Mapping[str, str]
    sizes: Mapping[str, int]
    item: Callable[[_Record], Item]
    source: str
    captions: str = "."
    images: str = "."
    by_id: bool = False
    numbered: Mapping[str, str] = field(default_factory=dict)
    made: bool = False


# --- the layouts -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """A record of a file, which strangers wrote, and what is needed to make an item of it.

    key        its number or id in the file ``path``
    value      its content
    folder     the folder of the images
    num_texts  the number of texts of the record before it; None for the first one
    """

    path: Path
    key: str | int
    value: Any
    part: str
    layout: PublishedLayout
    folder: Path
    num_texts: int | None

    @property
    def where(self) -> str:
        """For example "data/swap_obj.json item '12'", for messages."""
        return f"{self.path} item {self.key!r}"

    def take(self, *names: str) -> list[Any]:
        """The values of these fields; ValueError if one is missing."""
        missing = [n for n in names if not isinstance(self.value, dict) or n not in self.value]
        if missing:
            raise ValueError(
                f"{self.where} has no field {missing[0]!r}, it is {self.value!r:.200}: wanted an "
                f"object with {', '.join(names)}"
            )
        return [self.value[name] for name in names]

    def texts(self, value: Any, count: int | None = None) -> list[Any]:
        """Returns the candidates of an item, of which the first is true. Raises ValueError unless
        they are a list of ``count`` texts (None: at least two)."""
        expected = "at least 2" if count is None else str(count)
        if not isinstance(value, list) or len(value) < 2 or len(value) != (count or len(value)):
            got = f"{len(value)} texts" if isinstance(value, list) else f"{value!r:.80}"
            raise ValueError(f"{self.where} has {got} to choose from, wanted a list of {expected}")
        return value

    def item(
        self,
        images: Sequence[Any],
        texts: Sequence[Any],
        *,
        id: str | int | None = None,
        right: int = 1,
        kind: str = "",
        unit: str = "",
        box: tuple[int, int, int, int] | None = None,
    ) -> Item:
        """Makes the item of this record. It is named ``id``, or by its key.

        Of one image, the first ``right`` texts are true; of two images, text i is true of image i.
        Raises ValueError for a value that is no text, and for an image outside of the folder.
        """
        name = str(self.key if id is None else id)
        where, pattern = f"{self.path} item {name!r}", self.layout.numbered.get(self.part, "")
        names = [pattern.format(n) if pattern and type(n) is int else n for n in images]
        for text in (*names, *texts):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{where} has {text!r:.80} where a file name or a text is wanted")
        paths = [below(self.folder, image, where) for image in names]
        of_one = (tuple(text < right for text in range(len(texts))),)
        return Item(
            name=f"{self.part}/{name}" if len(self.layout.files) > 1 else name,
            images=tuple(Region(path, box) if box else path for path in paths),
            texts=tuple(texts),
            truth=of_one if len(paths) == 1 else PAIR,
            part=self.part,
            kind=kind,
            unit=f"{self.part}: {unit}" if unit else "",
        )


def _sugarcrepe(record: _Record) -> Item:
    image, *texts = record.take("filename", "caption", "negative_caption")
    return record.item([image], texts)


def _read_made_pair(record: _Record) -> Item:
    """Reads a record as of SugarCrepe, which may have a ``unit``: two items of a pair of confused
    pictures have the same."""
    return replace(_sugarcrepe(record), unit=str(record.value.get("unit", "")))


def _sugarcrepe_pp(record: _Record) -> Item:
    number, image, *texts = record.take("id", "filename", "caption", "caption2", "negative_caption")
    return record.item([image], texts, id=number, right=2)


def _quadruple(record: _Record, key: str) -> Item:
    """Reads a record with two images, two captions and an id in the field ``key``."""
    number, *images = record.take(key, "image_0", "image_1")
    texts = record.take("caption_0", "caption_1")
    for side, name in enumerate(images):
        if isinstance(name, str) and PurePosixPath(name).suffix.lower() not in SUFFIXES:
            images[side] = f"{name}.png"  # Winoground has ex_0_img_0 for the file ex_0_img_0.png
    return record.item(images, texts, id=number)


def _visual_genome(record: _Record, field_of_kind: str) -> Item:
    edges = ("bbox_x", "bbox_y", "bbox_w", "bbox_h")
    image, right, wrong, kind, *box = record.take(
        "image_path", "true_caption", "false_caption", field_of_kind, *edges
    )
    names = map(str, kind if isinstance(kind, list) else [kind])
    if not all(type(edge) is int and abs(edge) <= MAX_EDGE for edge in box) or min(box[2:]) < 1:
        raise ValueError(f"{record.where}: its box {box!r:.80} is not a part of a picture")
    x, y, w, h = box
    cut = (x, y, x + w, y + h)
    return record.item([image], [right, wrong], kind="_".join(names), box=cut)


def _order(record: _Record) -> Item:
    image, options = record.take("image", "caption_options")
    return record.item([image], record.texts(options, record.num_texts))


def _whatsup(record: _Record) -> Item:
    """Reads a record of What'sUp: the number of an image of COCO or Visual Genome, a right and a
    wrong caption; or a photograph, named OBJECT_RELATION_[of_]OBJECT, and four captions."""
    if isinstance(record.value, list) and len(record.value) == 3:
        number, *texts = record.value
        return record.item([number], texts)
    path, options = record.take("image_path", "caption_options")
    words = PurePosixPath(path).stem.split("_") if isinstance(path, str) else []
    if len(words) < 3:
        raise ValueError(
            f"{record.where}: image_path is {path!r:.80}, wanted a name such as "
            "mug_left_of_table.jpeg"
        )
    image, unit = path.removeprefix("data/"), f"{words[0]} and {words[-1]}"
    texts = record.texts(options, 4)
    return record.item([image], texts, id=PurePosixPath(path).stem, kind=words[1], unit=unit)


_COCO = "images: val2017 of COCO (cocodataset.org, terms of Flickr)"


def _aro(part: str, file: str, size: int, field_of_kind: str) -> PublishedLayout:
    return PublishedLayout(
        {part: file},
        {part: size},
        partial(_visual_genome, field_of_kind=field_of_kind),
        f"ARO, {_ARO} (MIT): {file}, images/ (of GQA and Visual Genome, CC BY 4.0)",
        images="images",
    )


_ARO = "github.com/mertyg/vision-language-models-are-bows"
_REPLACED_AND_SWAPPED = dict(
    replace_obj=1652, replace_att=788, replace_rel=1406, swap_obj=245, swap_att=666
)

LAYOUTS: Mapping[str, PublishedLayout] = {
    "sugarcrepe": PublishedLayout(
        {part: f"{part}.json" for part in (*_REPLACED_AND_SWAPPED, "add_obj", "add_att")},
        _REPLACED_AND_SWAPPED | {"add_obj": 2062, "add_att": 692},
        _sugarcrepe,
        f"SugarCrepe, github.com/RAIVNLab/sugar-crepe (MIT): data/*.json; {_COCO}",
        captions="data",
        images="val2017",
        by_id=True,
    ),
    "sugarcrepe_pp": PublishedLayout(
        {part: f"{part}.json" for part in _REPLACED_AND_SWAPPED},
        _REPLACED_AND_SWAPPED,
        _sugarcrepe_pp,
        f"SugarCrepe++, github.com/Sri-Harsha/scpp (CC BY 4.0): data/*.json; {_COCO}",
        captions="data",
        images="val2017",
    ),
    "winoground": PublishedLayout(
        {"winoground": "examples.jsonl"},
        {"winoground": 400},
        partial(_quadruple, key="id"),
        "Winoground, the gated data set facebook/winoground of the Hugging Face hub (research "
        "only): data/examples.jsonl, and data/images.zip unpacked to images/",
        images="images",
    ),
    "naturalbench": PublishedLayout(
        {"naturalbench": "metadata.json"},
        {},
        partial(_quadruple, key="index"),
        "NaturalBench-Retrieval.zip of the data set BaiqiL/NaturalBench of the Hugging Face hub "
        "(terms on its page; images of Flickr30K): metadata.json, images/",
        images="images",
    ),
    "aro_relation": _aro("relation", "visual_genome_relation.json", 23_937, "relation_name"),
    "aro_attribute": _aro("attribute", "visual_genome_attribution.json", 28_748, "attributes"),
    "aro_order": PublishedLayout(
        {"order": "order.json"},
        {},
        _order,
        f"ARO, {_ARO} (MIT), draws the wrong captions of "
        "COCO-Order and Flickr30k-Order anew at each run: write the list test_cases of its class "
        "COCO_Order or Flickr30k_Order as JSON, once for all encoders, and name the file in "
        "captions; images of COCO and Flickr30k (terms of Flickr)",
    ),
    "whatsup": PublishedLayout(
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
    "pairs": PublishedLayout(
        {part: f"{part}.json" for part in (*RULES, CONFUSED)},
        {},
        _read_made_pair,
        "minimal pairs, which 'mclclip make-pairs' writes: data/*.json, images/ (of its shards, "
        "under their terms)",
        captions="data",
        images="images",
        by_id=True,
        made=True,
    ),
}
assert set(LAYOUTS) == set(get_args(LayoutName))


# --- reading -----------------------------------------------------------------------------------


def read_items(
    root: Path,
    name: str,
    *,
    captions: str | None = None,
    images: str | None = None,
    parts: Sequence[str] | None = None,
    leave_out: bool = False,
) -> ItemSet:
    """Reads the items of a benchmark, part by part, in the order of the files.

    ``captions`` is the folder of the layout's files, or its only file, and ``images`` the folder to
    which names of images are relative, both below ``root``; ``parts`` are the parts to read. None
    stands for the published layout. ``leave_out`` leaves out items whose images are missing, which
    otherwise raise FileNotFoundError. Raises ValueError for a part of which nothing is left.
    """
    root, layout = Path(root), LAYOUTS[name]
    there = root / (layout.captions if captions is None else captions)
    beside = there.parent if there.is_file() else there
    on_disk = [p for p, file in layout.files.items() if layout.made and (beside / file).is_file()]
    to_read = list(parts if parts is not None else on_disk or layout.files)
    if layout.made and (root / INTENT).exists():
        raise ValueError(
            f"{root} is not finished: call 'mclclip make-pairs' again as it was called"
        )
    if not to_read or (strange := [part for part in to_read if part not in layout.files]):
        got = repr(strange[0]) if to_read else "empty"
        raise ValueError(f"parts is {got}: the parts of {name} are {', '.join(layout.files)}")
    folder = root / (layout.images if images is None else images)
    items: list[Item] = []
    read: dict[str, int] = {}
    for part in dict.fromkeys(to_read):
        one_file = len(to_read) == 1 and there.is_file()
        path = there if one_file else there / layout.files[part]
        items_of_part = _read_part(path, layout, part, folder)
        items += items_of_part
        read[part] = len(items_of_part)
    paths = dict.fromkeys(path_of(image) for item in items for image in item.images)
    absent = {path for path in paths if not path.is_file()}
    if absent and not leave_out:
        such = ", ".join(path.relative_to(folder).as_posix() for path in sorted(absent)[:3])
        raise FileNotFoundError(
            f"{len(absent)} images of {name} are not in {folder}, such as {such}: get them, or set "
            f"missing: leave_out; {layout.source}"
        )
    others = {*on_disk} - {*read}
    struck = _read_struck(root / STRUCK, {i.name for i in items}, others) if layout.made else set()
    left = [item for item in items if item.name not in struck]
    complete = [item for item in left if not absent & {*map(path_of, item.images)}]
    if not left:
        raise ValueError(f"{root / STRUCK} names all items of {name}: take some out of the list")
    for part in dict.fromkeys(item.part for item in left):
        if not any(item.part == part for item in complete):
            raise ValueError(
                f"no item of the part {part!r} has its images in {folder}: name the parts that do "
                f"in the option parts; {layout.source}"
            )
    return ItemSet(_with_units(complete, folder), read, len(absent), len(items) - len(left))


def _read_struck(path: Path, names: set[str], not_read: set[str]) -> set[str]:
    """Reads the names of the items that a user has struck out of the benchmark, one per line (#
    begins a comment); returns those in ``names``.

    Raises ValueError for an unknown item, unless it is of a part that was ``not_read``.
    """
    if not path.exists():
        return set()
    struck = set()
    text = read_bounded(path, MAX_LINES_BYTES).decode("utf-8-sig", "replace")
    for number, line in enumerate(text.splitlines(), 1):
        name = line.partition("#")[0].strip()
        if name and name not in names and name.partition("/")[0] not in not_read:
            raise ValueError(
                f"{path} line {number}: there is no item {name!r:.80}; wanted a name such as "
                f"{min(names)}: the list may be of pairs that were made with other settings"
            )
        struck.add(name)
    return struck & names


def _read_part(path: Path, layout: PublishedLayout, part: str, folder: Path) -> list[Item]:
    """Reads the items of a part from its file; ValueError for wrong content or a repeated id."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: {layout.source}")
    if path.suffix == ".jsonl":
        lines = read_lines(path, unique_keys=True, max_bytes=MAX_LINES_BYTES)
        content: Any = [value for _, value in lines]
    else:
        content = read_json(path, unique_keys=True)
    top_type = dict if layout.by_id else list
    if not isinstance(content, top_type):
        kind = "an object of ids" if layout.by_id else "a list of items"
        raise ValueError(f"{path} is {type(content).__name__} at its top, wanted {kind}")
    items: dict[str, Item] = {}
    count = None
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        item = layout.item(_Record(path, key, value, part, layout, folder, count))
        if item.name in items:
            name = item.name.removeprefix(f"{part}/")
            raise ValueError(f"{path} has the id {name!r} twice: correct or remove one of them")
        items[item.name], count = item, len(item.texts)
    if not items:
        raise ValueError(f"{path} has no items: {layout.source}")
    return [*items.values()]


def _with_units(items: Sequence[Item], folder: Path) -> list[Item]:
    """Gives items without a unit one: items that share an image, directly or through other items,
    get the same, the name of one of these images relative to ``folder``."""
    above: dict[Path, Path] = {}

    def top(path: Path) -> Path:
        while (up := above.setdefault(path, path)) != path:
            path = up
        return path

    for item in items:
        first, *others = map(path_of, item.images)
        for other in others:
            above[top(other)] = top(first)
    units = [top(path_of(item.images[0])).relative_to(folder).as_posix() for item in items]
    return [
        item if item.unit else replace(item, unit=unit)
        for item, unit in zip(items, units, strict=True)
    ]
