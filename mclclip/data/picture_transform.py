"""The base of transforms: how a decoded picture becomes the tensor of one view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.data import default_collate


class PictureTransform:
    """Returns pictures as they are. A subclass changes them, and says what a reader must know.

    The defaults are those of open_clip's transforms, which `as_transform` wraps.
    """

    reads_arrays: ClassVar[bool] = False
    """True: it takes the arrays uint8 [H, W, C] of ``.npy`` members as well as pictures."""
    reads_pixels: ClassVar[bool] = False
    """True: it takes pictures as arrays uint8 [H, W, 3] (`decode.decode_pixels`), not as PIL's."""
    draws_from_torch_alone: ClassVar[bool] = False
    """True: it draws from torch's generator only, so that the other generators are not seeded."""

    def __call__(self, picture: Any) -> Any:
        """Makes one view [C, H, W] of an upright RGB picture (PIL), or of an array."""
        return picture

    def draw(self, picture: Any) -> Any:
        """Does the random part of one view; `finish` does the rest for all views of a batch."""
        return self(picture)

    def finish(self, drawn: Sequence[Any]) -> Tensor:
        """Makes the views [n, C, H, W] of the results of `draw`."""
        # In a loader's worker the result of default_collate lies in shared memory from the start.
        batch: Tensor = default_collate([*drawn])
        return batch

    def to_floats(self, views: Tensor) -> Tensor:
        """Makes the views [n, C, H, W] of a batch float32, on the device on which they lie."""
        return views.float()


class FunctionTransform(PictureTransform):
    """A function as a transform, such as open_clip's."""

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        self.function = function

    def __call__(self, picture: Any) -> Tensor:
        return self.function(picture)


def as_transform(transform: Callable[[Any], Any] | None) -> PictureTransform:
    """Returns a transform as it is, and wraps a function; for None pictures stay unchanged."""
    if isinstance(transform, PictureTransform):
        return transform
    return FunctionTransform(transform) if transform else PictureTransform()
