"""Image-text retrieval, R@k in both directions, under named protocols.

Source of the protocols: Karpathy and Fei-Fei (CVPR 2015) for the test splits; Long-CLIP (ECCV 2024)
for COCO val2017 with the first five captions and for the whole of Flickr30k, which MCL reports.
Ties count against the model; where there are any, the optimistic figure stands beside.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mclclip.eval.features import Extractor, Features
from mclclip.eval.metrics import IntArray, hits_at, ranks_with_ties
from mclclip.eval.results import Figure, proportion
from mclclip.ranks.collectives import gather_objects, together

KS = (1, 5, 10)
CHUNK_BYTES = 128 * 2**20
"""Size of the float32 similarity block that is held at once; its working copies are a few more."""


@dataclass(frozen=True)
class Protocol:
    """What a named protocol reads and what size it must have.

    ``captions_per_image``: only the first so many, in file order; None: all of them.
    ``num_images``, ``num_captions``: the size that makes it this protocol; None: any.
    """

    split: str | None = None
    captions_per_image: int | None = None
    num_images: int | None = None
    num_captions: int | None = None


PROTOCOLS = {
    "coco_val2017_5k_first5": Protocol(None, 5, 5000, 25_000),
    "karpathy_coco5k": Protocol("test", None, 5000, 25_010),
    "karpathy_flickr1k": Protocol("test", None, 1000, 5000),
    "flickr30k_all_31k": Protocol(None, None, 31_783, 158_915),
    "table": Protocol(),
}


@dataclass(frozen=True)
class ImageTexts:
    """Images and captions; ``caption_image`` [C] is the row of each caption's image."""

    images: list[Path]
    captions: list[str]
    caption_image: IntArray

    @classmethod
    def of(cls, root: Path, pairs: Iterable[tuple[str, str]]) -> ImageTexts:
        """From (file below ``root``, caption) pairs; equal files are one image."""
        rows: dict[str, int] = {}
        owners, captions = [], []
        for name, caption in pairs:
            owners.append(rows.setdefault(name, len(rows)))
            captions.append(caption)
        images = [Path(root) / name for name in rows]
        return cls(images, captions, np.array(owners, dtype=np.int64))

    def first_captions(self, limit: int) -> ImageTexts:
        """Only the first ``limit`` captions of each image, in file order."""
        seen = np.zeros(len(self.images), dtype=np.int64)
        kept = []
        for row, image in enumerate(self.caption_image):
            if seen[image] < limit:
                kept.append(row)
            seen[image] += 1
        return ImageTexts(
            self.images, [self.captions[row] for row in kept], self.caption_image[kept]
        )


def read_table(path: Path, images: Path, split: str | None = None) -> ImageTexts:
    """A CSV (or .tsv) with the columns filepath, title and perhaps split."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        wanted = ["filepath", "title", *(["split"] if split else [])]
        if missing := [name for name in wanted if name not in (rows.fieldnames or [])]:
            raise ValueError(f"{path} has the columns {rows.fieldnames}, missing {missing}")
        return ImageTexts.of(
            images,
            ((r["filepath"], r["title"]) for r in rows if split is None or r["split"] == split),
        )


def read_json(path: Path, images: Path, split: str | None = None) -> ImageTexts:
    """COCO captions (``images`` and ``annotations``) or Karpathy's file (``sentences`` inside).

    Images without a caption are kept as candidates. ValueError for a file that is neither.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    keys = content.keys() if isinstance(content, dict) else set()
    if not {"images", "annotations"} <= keys:
        if "images" in keys and all("sentences" in image for image in content["images"]):
            return _karpathy(content["images"], images, split)
        raise ValueError(
            f"{path} holds neither COCO captions (images, annotations) nor Karpathy's split "
            f"(images with sentences)"
        )
    names = {image["id"]: image["file_name"] for image in content["images"]}
    row = {image_id: number for number, image_id in enumerate(names)}
    if strangers := {a["image_id"] for a in content["annotations"]} - names.keys():
        raise ValueError(
            f"{path} has captions of images it does not list, such as {min(strangers)}"
        )
    return ImageTexts(
        [Path(images) / name for name in names.values()],
        [annotation["caption"] for annotation in content["annotations"]],
        np.array([row[a["image_id"]] for a in content["annotations"]], dtype=np.int64),
    )


def _karpathy(records: Sequence[dict[str, Any]], root: Path, split: str | None) -> ImageTexts:
    chosen = [record for record in records if split is None or record["split"] == split]
    return ImageTexts.of(
        root,
        (
            (str(Path(record.get("filepath", "")) / record["filename"]), sentence["raw"])
            for record in chosen
            for sentence in record["sentences"]
        ),
    )


def read_tokens(path: Path, images: Path) -> ImageTexts:
    """Flickr30k's ``results_20130124.token``: lines of ``FILE#NUMBER<TAB>caption``."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        head, tab, caption = line.partition("\t")
        if not tab or "#" not in head:
            raise ValueError(f"{path} line {number} is not FILE#NUMBER<TAB>caption: {line!r}")
        pairs.append((head.rpartition("#")[0], caption))
    return ImageTexts.of(images, pairs)


def read_captions(
    path: Path, images: Path, protocol: str = "table", *, split: str | None = None
) -> ImageTexts:
    """The images and captions of a named protocol, of the size that the protocol has.

    ``path``: .csv or .tsv (``read_table``), .json (``read_json``) or .token (``read_tokens``).
    ``split`` overrides the protocol's. ValueError where the size is another.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown protocol {protocol!r}: use one of {', '.join(PROTOCOLS)}")
    path, images, rule = Path(path), Path(images), PROTOCOLS[protocol]
    for needed in (path, images):
        if not needed.exists():
            raise FileNotFoundError(f"no {needed}: retrieval needs captions and an image folder")
    split = split or rule.split
    if path.suffix == ".json":
        data = read_json(path, images, split)
    elif path.suffix == ".token":
        data = read_tokens(path, images)
    elif path.suffix in (".csv", ".tsv"):
        data = read_table(path, images, split)
    else:
        raise ValueError(f"{path}: captions come as .csv, .tsv, .json or .token")
    if rule.captions_per_image:
        data = data.first_captions(rule.captions_per_image)
    got, wanted = (len(data.images), len(data.captions)), (rule.num_images, rule.num_captions)
    if 0 in got:
        raise ValueError(f"{path} has no captions" + (f" in the split {split!r}" if split else ""))
    if any(right is not None and have != right for have, right in zip(got, wanted, strict=True)):
        raise ValueError(
            f"{path} has {got[0]} images and {got[1]} captions, {protocol} has {wanted[0]} and "
            f"{wanted[1]}: use the protocol 'table' for other data"
        )
    return data


def rank_queries(
    queries: Features,
    query_image: IntArray,
    candidates: Features,
    candidate_image: IntArray,
    *,
    device: torch.device | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[IntArray, IntArray]:
    """Rank of each query's best candidate of the same image, in bounded memory.

    queries [Q, E], candidates [C, E]; ``query_image`` [Q] and ``candidate_image`` [C] say which
    image each row is or describes. Returns ranks with ties against and for the model (see
    ``ranks_with_ties``), equal to those of the whole matrix for any ``chunk_bytes``: similarities
    are summed in float64 and rounded to float32, so that equal features tie exactly wherever they
    stand in a block.
    """
    rows = max(1, chunk_bytes // (4 * len(candidates)))
    strict = np.empty(len(queries), dtype=np.int64)
    optimistic = np.empty(len(queries), dtype=np.int64)
    for start in range(0, len(queries), rows):
        chunk = slice(start, start + rows)
        similarity = _similarity(queries[chunk], candidates, device)
        positive = query_image[chunk, None] == candidate_image[None, :]
        strict[chunk], optimistic[chunk] = ranks_with_ties(similarity, positive)
    return strict, optimistic


def _similarity(
    queries: Features, candidates: Features, device: torch.device | None, block: int = 8192
) -> Features:
    """[q, C] float32, candidates in blocks so that no float64 copy of all of them is held."""
    out = np.empty((len(queries), len(candidates)), dtype=np.float32)
    left = torch.from_numpy(queries).to(device, torch.float64)
    for start in range(0, len(candidates), block):
        right = torch.from_numpy(candidates[start : start + block]).to(device, torch.float64)
        out[:, start : start + block] = (left @ right.T).float().cpu().numpy()
    return out


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    captions: str,
    images: str = ".",
    protocol: str = "table",
    split: str | None = None,
    prompt: str = "",
    ks: Sequence[int] = KS,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[Figure]:
    """R@k of image_to_text and text_to_image, in percent, each over its own queries.

    ``captions``: the file of captions (see ``read_captions``); ``images``: the folder that its file
    names start from; both below ``root``. ``prompt`` is put before every caption.
    An image is right at k where any of its captions is among the first k, a caption where its
    image is. Images without a caption are candidates but no queries. ``R@k_optimistic`` (ties for
    the model) appears in a direction that has ties. Ranks share the queries out; figures do not
    depend on their number.
    """
    root = Path(root)
    data = together(lambda: read_captions(root / captions, root / images, protocol, split=split))
    settings = {
        "name": protocol,
        "prompt": prompt,
        "precision": extractor.precision,
        "ties": "against the model",
        "num_images": len(data.images),
        "num_captions": len(data.captions),
        "captions_per_image": PROTOCOLS[protocol].captions_per_image or "all",
    }
    image_features = extractor.images(data.images)
    text_features = extractor.texts([prompt + caption for caption in data.captions])
    asked = np.unique(data.caption_image)  # images that have a caption
    every = np.arange(len(data.images))
    sides = {
        "image_to_text": (image_features[asked], asked, text_features, data.caption_image),
        "text_to_image": (text_features, data.caption_image, image_features, every),
    }
    figures = []
    for direction, side in sides.items():
        ranks = _over_ranks(extractor, side, chunk_bytes)
        figures += _figures(direction, *ranks, ks, settings | {"num_candidates": len(side[2])})
    return figures


def _over_ranks(
    extractor: Extractor,
    side: tuple[Features, IntArray, Features, IntArray],
    chunk_bytes: int,
) -> tuple[IntArray, IntArray]:
    """``rank_queries`` with this process's share of the queries, joined in rank order."""
    queries, query_image, candidates, candidate_image = side
    where = extractor.context
    share = slice(
        len(queries) * where.rank // where.world_size,
        len(queries) * (where.rank + 1) // where.world_size,
    )
    own = together(
        lambda: rank_queries(
            queries[share],
            query_image[share],
            candidates,
            candidate_image,
            device=where.device,
            chunk_bytes=chunk_bytes,
        )
    )
    parts = gather_objects(own)
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _figures(
    direction: str,
    ranks: IntArray,
    optimistic: IntArray,
    ks: Sequence[int],
    settings: dict[str, Any],
) -> list[Figure]:
    tied = int(np.count_nonzero(ranks != optimistic))
    protocol = settings | {"direction": direction, "tied_queries": tied}
    names = {"": ranks} | ({"_optimistic": optimistic} if tied else {})
    return [
        proportion(f"{direction}/R@{k}{suffix}", hits_at(of, k), len(of), protocol)
        for suffix, of in names.items()
        for k in ks
    ]
