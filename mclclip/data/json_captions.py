"""Reads images and captions from one JSON document: objects of columns, or COCO's or Karpathy's.

Objects stand in a list, or in an object by the names of their pictures, as in kohya's metadata; a
caption or a list of captions may stand in the place of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mclclip.data.decode import PICTURE_SUFFIXES, suffix_of
from mclclip.data.findings import Findings
from mclclip.data.table_formats import (
    IMAGE_COLUMNS,
    Fields,
    Format,
    Rows,
    examples_of,
    is_missing,
    present_columns,
)
from mclclip.util.files import read_json

_COLUMNS = ("file_name", "caption")


def json_format(path: Path) -> Format:
    """Opens a JSON document as a table. Raises ValueError for content of another kind."""
    content = read_json(path, unique_keys=True)
    published = _published_rows(content, path)
    entries = [*_rows_of_objects(content, path)] if published is None else [*published]

    def rows(_: Findings) -> Rows:
        return ((where, dict(fields)) for where, fields in entries)

    columns = examples_of(rows(Findings()))
    if published is None:
        return Format(columns, rows, len(entries))
    return Format(dict.fromkeys(_COLUMNS, "") | columns, rows, fixed=_COLUMNS)


# --- objects with columns -------------------------------------------------------------------------


def _rows_of_objects(content: Any, path: Path) -> Rows:
    """Yields the objects of a document; an entry that is none has no columns."""
    objects = _objects_of(content, path)
    if objects and not any(map(_is_object, objects)):
        raise ValueError(
            f"{path} begins with {str(objects[0])[:100]!r}, wanted an object such as "
            "{image, caption}"
        )
    for number, entry in enumerate(objects, start=1):
        yield f"{path.name} entry {number}", entry if _is_object(entry) else {}


def _objects_of(content: Any, path: Path) -> list[Any]:
    """Returns the list of objects that a document is, or that it has as its only list, or in which
    names and captions are pairs; or its objects by the names of pictures."""
    if isinstance(content, list):
        if all(isinstance(entry, list) and len(entry) == 2 for entry in content):
            return [dict(zip(_COLUMNS, pair, strict=True)) for pair in content]
        return content
    values = content.values() if _is_object(content) else ()
    lists = [value for value in values if isinstance(value, list) and any(map(_is_object, value))]
    # An object with a column of pictures is one row, or pandas' columns by the numbers of rows.
    if values and not lists and not present_columns(content, IMAGE_COLUMNS):
        return [_named(name, value, path) for name, value in content.items()]
    # Beside a list there may be facts such as a version, but no captions that would be lost.
    others = [name for name, value in content.items() if value is not lists[0]] if lists else []
    if lists and not any(
        isinstance(content[name], list | dict) or suffix_of(name) in PICTURE_SUFFIXES
        for name in others
    ):
        return lists[0]
    raise ValueError(
        f"{path} holds neither COCO captions (images, annotations) nor Karpathy's split (images "
        "with sentences), nor objects such as {image, caption}, nor captions by pictures' names"
    )


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _named(name: str, value: Any, path: Path) -> Fields:
    """Makes an object of what stands at the name of a picture: a caption, or an object.

    The object gets the name, unless it names a picture itself and ``name`` does not.
    """
    if not _is_object(value):
        if not (isinstance(value, str | list) or is_missing(value)):
            raise ValueError(f"{path} has {value!r} at {name!r}, where a caption is wanted")
        return {"file_name": name, "caption": value}
    columns = present_columns(value, IMAGE_COLUMNS)
    if columns and suffix_of(name) not in PICTURE_SUFFIXES:
        return dict(value)
    return {"file_name": name, **{n: each for n, each in value.items() if n not in columns}}


# --- published layouts ----------------------------------------------------------------------------


def _published_rows(content: Any, path: Path) -> Rows | None:
    """Yields the rows of COCO's or Karpathy's layout, which may lack names and captions; returns
    None for another one."""
    images = content.get("images") if _is_object(content) else None
    if images is not None and "annotations" in content:
        return _coco(content, path)
    is_karpathys = isinstance(images, list) and any(
        _is_object(i) and "sentences" in i for i in images
    )
    return _rows_of(images, path, "image", _karpathys) if is_karpathys else None


def _rows_of(entries: Any, path: Path, kind: str, read: Callable[[Any], Fields]) -> Rows:
    """Yields what ``read`` makes of each entry; ValueError, which names it, if that fails."""
    if not isinstance(entries, list):
        raise ValueError(f"{path} has no list of {kind}s, as COCO's and Karpathy's files have")
    for number, entry in enumerate(entries, start=1):
        try:
            yield f"{path.name} {kind} {number}", read(entry)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} {kind} {number} is not as in COCO's or Karpathy's files, which have "
                f"file_name and id, image_id, or filename and sentences: {error!r}"
            ) from None


def _coco(content: Mapping[str, Any], path: Path) -> Rows:
    """Yields a row without a caption for each image, and then one for each annotation."""
    names: dict[str, Any] = {}

    def image(entry: Mapping[str, Any]) -> Fields:
        name = entry["file_name"]
        if names.setdefault(_id_of(entry["id"]), name) != name:
            raise ValueError(
                f"{path} gives the id {entry['id']} to two images, so that a caption may be of "
                "either: number them anew"
            )
        return {"file_name": name, "caption": []}

    def annotation(entry: Mapping[str, Any]) -> Fields:
        return {"file_name": names.get(_id_of(entry["image_id"])), "caption": entry.get("caption")}

    yield from _rows_of(content["images"], path, "image", image)
    yield from _rows_of(content["annotations"], path, "annotation", annotation)


def _id_of(value: Any) -> str:
    """Returns a number as text: some tools write it as text or with a point on one side alone."""
    if isinstance(value, list | dict):
        raise TypeError(f"the id is {value}")
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _karpathys(image: Mapping[str, Any]) -> Fields:
    split = {"split": image["split"]} if "split" in image else {}
    texts = [sentence.get("raw") for sentence in image["sentences"]]
    name = str(Path(image.get("filepath", "")) / image["filename"])
    return {"file_name": name, "caption": texts, **split}
