"""Small pictures as data URIs, within a budget of bytes; those that cannot be shown are counted."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from mclclip.data.decode import DecodeError, as_picture, decode
from mclclip.data.options import DataConfig
from mclclip.data.samples import BadSample
from mclclip.files import read_bounded
from mclclip.opened_run import Run

SIDE = 96
"""Pixels of the longer side."""

_SMALL = 64  # pictures of at most this side keep every pixel
BUDGET_BYTES = 3_000_000
"""Bytes of all pictures of a page, as they stand in it."""

BEYOND = "beyond the size of the page"

LONGEST = 400
"""Characters of a caption or statement that are shown."""

_MAX_FILE_BYTES = 1 << 26


@dataclass(frozen=True)
class Picture:
    """A picture of the page: ``uri`` is empty where it cannot be shown, for ``reason``."""

    uri: str
    text: str
    reason: str = ""
    small: bool = False


class Thumbnails:
    """Makes the pictures of the page of a run; counts those that cannot be shown, by reason."""

    def __init__(self, run: Run, budget_bytes: int = BUDGET_BYTES) -> None:
        data = DataConfig() if run.config is None else run.config.data
        self.run, self.max_image_pixels, self.left_bytes = run, data.max_image_pixels, budget_bytes
        self._made: dict[Hashable, Picture] = {}
        self._captions: dict[int, str] = {}
        self._beyond = 0

    def of_sample(self, sample_id: int) -> Picture:
        """The picture of a sample, with its caption as its text."""

        def stored() -> bytes:
            (raw,) = self.run.dataset.read_many([sample_id])
            if isinstance(raw, BadSample):
                raise DecodeError(raw.reason, "it cannot be read")
            return raw.image

        return self._picture(sample_id, self.caption(sample_id), stored)

    def of_file(self, path: Path, text: str) -> Picture:
        """The picture in a file."""
        return self._picture(path, text, lambda: read_bounded(path, _MAX_FILE_BYTES))

    def caption(self, sample_id: int) -> str:
        """The first caption; empty where there is none, or it cannot be read any more."""
        if sample_id not in self._captions:
            try:
                captions = self.run.dataset.captions(sample_id)
            except (OSError, RuntimeError):
                captions = []
            self._captions[sample_id] = captions[0] if captions else ""
        return self._captions[sample_id]

    def lost(self) -> dict[str, int]:
        """Number of pictures that cannot be shown, by reason; ``BEYOND`` counts every place."""
        lost = Counter(picture.reason for picture in self._made.values() if picture.reason)
        return dict(lost) | ({BEYOND: self._beyond} if self._beyond else {})

    def _picture(self, name: Hashable, whole: str, read: Callable[[], bytes]) -> Picture:
        text = shortened(whole)
        if name not in self._made:
            self._made[name] = self._of_bytes(read, text)
        picture = self._made[name]
        if len(picture.uri) > self.left_bytes:
            self._beyond += 1
            return Picture("", text, BEYOND)
        self.left_bytes -= len(picture.uri)
        return picture

    def _of_bytes(self, read: Callable[[], bytes], text: str) -> Picture:
        try:
            image = decode(read(), self.max_image_pixels, reads_arrays=True)
        except DecodeError as error:
            return Picture("", text, error.reason)
        except FileNotFoundError:
            return Picture("", text, "missing file")
        except (OSError, ValueError, RuntimeError):
            return Picture("", text, "unreadable")
        if isinstance(image, np.ndarray):
            image = Image.fromarray(np.ascontiguousarray(as_picture(image)))
        small = max(image.size) <= _SMALL
        sink = io.BytesIO()
        if small:
            image.save(sink, "PNG", optimize=True)
        else:
            image.thumbnail((SIDE, SIDE))
            image.save(sink, "JPEG", quality=80, optimize=True)
        kind, data = "png" if small else "jpeg", base64.b64encode(sink.getvalue()).decode()
        return Picture(f"data:image/{kind};base64,{data}", text, small=small)


def shortened(text: str) -> str:
    """The first ``LONGEST`` characters, with three dots for the others."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
