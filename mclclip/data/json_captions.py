"""Reads images and captions from one JSON document: objects of columns, or a published layout.

Objects stand in a list, or in an object by the names of their pictures, as in kohya's metadata; a
caption or a list of captions may stand in the place of each. The layouts are COCO's, Karpathy's,
and ShareGPT4V's and LLaVA's conversations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mclclip.data.decode import PICTURE_SUFFIXES, suffix_of
from mclclip.data.findings import Findings
from mclclip.data.table_formats import IMAGE_COLUMNS, Format, Rows, examples_of, present_columns
from mclclip.util.files import read_json

NamedTexts = tuple[Iterable[str], Sequence[tuple[str, str]]]
"""All images by their file names, with or without a caption; and (file name, caption) pairs."""


def json_format(path: Path) -> Format:
    """Opens a JSON document as a table. Raises ValueError for content of another kind."""
    content = objects_of(read_json(path, unique_keys=True))
    if is_list_of_objects(content):

        def rows(_: Findings) -> Rows:
            for number, entry in enumerate(content, start=1):
                # An entry that is no object has no picture, and is counted as such.
                yield f"{path.name} entry {number}", dict(entry) if isinstance(entry, dict) else {}

        return Format(examples_of(rows(Findings())), rows, len(content))
    names, pairs = _entries_of_json(content, path, None, strict=False)
    splits = _splits_of(content)

    def rows_of_pairs(_: Findings) -> Rows:
        yield from ((path.name, {"file_name": name, "caption": []}) for name in names)
        for number, (name, text) in enumerate(pairs, start=1):
            split = {"split": splits[name]} if name in splits else {}
            yield f"{path.name} caption {number}", {"file_name": name, "caption": text, **split}

    return Format({"file_name": "", "caption": ""}, rows_of_pairs, fixed=("file_name", "caption"))


def objects_of(content: Any) -> Any:
    """Returns objects of columns as a list, if they stand in an object by the names of pictures, or
    as its only list, or if names and captions are pairs; other content as it is."""
    if isinstance(content, list) and all(isinstance(e, list) and len(e) == 2 for e in content):
        return [{"file_name": name, "caption": caption} for name, caption in content]
    if not isinstance(content, dict) or not content or "images" in content:
        return content
    lists = [v for v in content.values() if isinstance(v, list) and any(map(_is_object, v))]
    if lists:
        # Beside a list there may be facts such as a version, but no captions that would be lost.
        others = [name for name, value in content.items() if value is not lists[0]]
        facts = [name for name in others if not isinstance(content[name], list | dict)]
        is_alone = facts == others and not any(suffix_of(n) in PICTURE_SUFFIXES for n in facts)
        return lists[0] if is_alone and is_list_of_objects(lists[0]) else content
    objects = {n: v if _is_object(v) else {"caption": v} for n, v in content.items()}
    captions = (row["caption"] for name, row in objects.items() if row is not content[name])
    if not all(caption is None or isinstance(caption, str | list) for caption in captions):
        return content
    return [_with_name(name, row) for name, row in objects.items()]


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _with_name(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Adds its name to an object, unless it names a picture itself and ``name`` does not."""
    columns = present_columns(row, IMAGE_COLUMNS)
    if columns and suffix_of(name) not in PICTURE_SUFFIXES:
        return row
    return {"file_name": name, **{n: value for n, value in row.items() if n not in columns}}


def is_list_of_objects(content: Any) -> bool:
    """Returns True for a list of objects with columns, such as ``{image, caption}``.

    ShareGPT4V's are none, since their captions lie in conversations.
    """
    return isinstance(content, list) and not any(
        isinstance(entry, dict) and "conversations" in entry for entry in content
    )


def captions_of_json(path: Path, split: str | None = None) -> NamedTexts:
    """Reads file names and captions from a JSON document.

    Its layout is COCO's, Karpathy's (of which one ``split`` is read) or ShareGPT4V's. Raises
    ValueError for other content.
    """
    names, pairs = _entries_of_json(read_json(path, unique_keys=True), path, split, strict=True)
    texts = [*names, *(item for pair in pairs for item in pair)]
    if strange := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"{path} has {strange[0]!r} where a file name or a caption is wanted")
    return names, pairs


def _entries_of_json(content: Any, path: Path, split: str | None, *, strict: bool) -> NamedTexts:
    """Reads file names and captions, which may be null unless ``strict``."""
    keys = content.keys() if isinstance(content, dict) else set()
    try:
        if isinstance(content, list):
            return (), [_pair_of(entry) for entry in content]
        if {"images", "annotations"} <= keys:
            return _coco(content, path, strict)
        if "images" in keys and all("sentences" in image for image in content["images"]):
            return _karpathy(content, split)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} lacks a field of COCO's, Karpathy's or ShareGPT4V's layout, or has another "
            f"type there: {error!r}"
        ) from None
    raise ValueError(
        f"{path} holds neither COCO captions (images, annotations) nor Karpathy's split (images "
        "with sentences), nor objects such as {image, caption}, nor captions by pictures' names"
    )


def _pair_of(entry: Any) -> tuple[Any, Any]:
    """Returns the file name and the caption of an entry of ShareGPT4V's.

    The caption is the first ``value`` that is ``from`` "gpt".
    """
    if not isinstance(entry, dict):
        return None, None
    image = next((entry[name] for name in present_columns(entry, IMAGE_COLUMNS)), None)
    turns = entry.get("conversations", [])
    return image, next((turn["value"] for turn in turns if turn.get("from") == "gpt"), None)


def _coco(content: Mapping[str, Any], path: Path, strict: bool) -> NamedTexts:
    for kind, needed in (("images", {"id", "file_name"}), ("annotations", {"image_id"})):
        for number, entry in enumerate(content[kind], start=1):
            fits = isinstance(entry, dict) and needed <= entry.keys()
            if not fits or any(isinstance(entry[name], list | dict) for name in needed):
                raise ValueError(
                    f"{path} has {str(entry)[:100]!r} as number {number} of {kind!r}, wanted an "
                    f"object with {' and '.join(sorted(needed))}"
                )
    names: dict[str, Any] = {}
    for image in content["images"]:
        if names.setdefault(_id_of(image["id"]), image["file_name"]) != image["file_name"]:
            raise ValueError(
                f"{path} gives the id {image['id']} to two images, so that a caption may be of "
                "either: number them anew"
            )
    strangers = {_id_of(note["image_id"]) for note in content["annotations"]} - names.keys()
    if strangers and strict:
        raise ValueError(
            f"{path} has captions of images it does not list, such as {min(strangers)}"
        )
    pairs = [(names.get(_id_of(n["image_id"])), n.get("caption")) for n in content["annotations"]]
    return dict.fromkeys(names.values()), pairs  # type: ignore[return-value]


def _id_of(value: Any) -> str:
    """Returns a number as text: some tools write it as text or with a point on one side alone."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _karpathy(content: Mapping[str, Any], split: str | None) -> NamedTexts:
    return (), [
        (_karpathys_name(image), sentence.get("raw"))
        for image in content["images"]
        if split is None or image["split"] == split
        for sentence in image["sentences"]
    ]


def _karpathys_name(image: Mapping[str, Any]) -> str:
    return str(Path(image.get("filepath", "")) / image["filename"])


def _splits_of(content: Any) -> dict[str, str]:
    """Returns the split of each image of Karpathy's layout, by the name of its file."""
    images = content["images"] if isinstance(content, dict) else []
    return {
        _karpathys_name(image): image["split"]
        for image in images
        if {"sentences", "split"} <= image.keys()
    }
