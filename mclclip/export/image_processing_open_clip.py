"""An image processor for transformers that returns the pixels of open_clip's transform.

They are exactly open_clip's for pictures that are upright 8-bit RGB, as mclclip decodes them. Other
pictures are first turned upright by their EXIF orientation and converted to RGB, as in mclclip;
open_clip does neither, so its pixels of rotated, palette, transparent and 16-bit pictures differ.

transformers' own processor rounds the place of the centre crop down; open_clip (torchvision) rounds
halves to the even number. Where the longer side of the resized picture leaves 3, 7, 11, ... pixels
to cut, the two crops lie one pixel apart, and at sharp edges that is nearly any shade. No setting
of the stock processor changes it, hence this class.

This file lies beside the weights in exports too, where `trust_remote_code=True` runs it. It needs
numpy, Pillow and transformers (4.37 or newer), and nothing of mclclip.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageOps
from transformers.image_processing_utils import BatchFeature, ImageProcessingMixin


class OpenClipImageProcessor(ImageProcessingMixin):  # type: ignore[misc]
    """Turns pictures into `pixel_values` float32 [B, 3, H, W].

    size         {"shortest_edge": S} resizes without distortion, {"height": H, "width": W}
                 distorts the picture to this size
    crop_size    {"height": H, "width": W} of the middle that is then cut out
    resample     Pillow's number of the interpolation: 3 bicubic, 2 bilinear, 0 nearest
    image_mean, image_std    of the channels, for values between 0 and 1

    Other arguments of transformers' CLIPImageProcessor are stored and not read.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(
        self,
        size: dict[str, int] | None = None,
        crop_size: dict[str, int] | None = None,
        resample: int = 3,
        image_mean: list[float] | None = None,
        image_std: list[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.size = dict(size or {"shortest_edge": 224})
        self.crop_size = dict(crop_size or {"height": 224, "width": 224})
        self.resample = int(resample)
        self.image_mean = list(image_mean or [0.5, 0.5, 0.5])
        self.image_std = list(image_std or [0.5, 0.5, 0.5])

    def __call__(self, images: Any, return_tensors: Any = None, **kwargs: Any) -> Any:
        """Turns one picture or a list of them into `pixel_values`. `kwargs` are not read."""
        return self.preprocess(images, return_tensors=return_tensors, **kwargs)

    def preprocess(self, images: Any, return_tensors: Any = None, **kwargs: Any) -> Any:
        """Does what calling the object does; some code of transformers calls this method."""
        while isinstance(images, list | tuple) and images and isinstance(images[0], list | tuple):
            images = [image for inner in images for image in inner]
        several = images if isinstance(images, list | tuple) else [images]
        pixels = [self._pixels(image) for image in several]
        return BatchFeature({"pixel_values": pixels}, tensor_type=return_tensors)

    def _pixels(self, image: Any) -> np.ndarray[Any, Any]:
        """One picture (Pillow's, or uint8 [H, W, 3]) -> float32 [3, H, W]."""
        if not isinstance(image, Image.Image):
            image = Image.fromarray(np.asarray(image))
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits, of which Pillow would keep the low ones
            upright = Image.fromarray((np.asarray(upright).clip(0, 65535) // 256).astype(np.uint8))
        if upright.has_transparency_data:
            below = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(below, upright.convert("RGBA"))
        image = self._crop(self._resize(upright.convert("RGB")))
        values = np.asarray(image).astype(np.float32).transpose(2, 0, 1) / np.float32(255)
        colours = self.image_mean, self.image_std
        mean, std = (np.asarray(v, np.float32)[:, None, None] for v in colours)
        return np.ascontiguousarray((values - mean) / std)

    def _resize(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        if "shortest_edge" in self.size:
            short, edge = min(width, height), self.size["shortest_edge"]
            sides = (int(edge * width / short), int(edge * height / short))
        else:
            sides = (self.size["width"], self.size["height"])
        if sides == image.size:
            return image
        return image.resize(sides, Image.Resampling(self.resample))

    def _crop(self, image: Image.Image) -> Image.Image:
        width, height = self.crop_size["width"], self.crop_size["height"]
        if image.size == (width, height):
            return image
        # round() takes halves to the even number, as torchvision's centre crop does.
        left = round((image.size[0] - width) / 2.0)
        top = round((image.size[1] - height) / 2.0)
        return image.crop((left, top, left + width, top + height))


OpenClipImageProcessor.register_for_auto_class("AutoImageProcessor")
