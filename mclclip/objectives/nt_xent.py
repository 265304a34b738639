"""NT-Xent: InfoNCE between two views of every image, with the group mask of MCL's Eq. 3.

Source: SimCLR (Chen et al., 2020), Eq. 1: the other view of an image among both views of all other
images, in both directions. The mask keeps those of the row's group.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass as checked_dataclass

from mclclip.objectives.contrast import Between, Contrast, ContrastOptions
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.temperature import AnyTemperature, Temperature
from mclclip.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """SimCLR's loss with MCL's mask; captions are not read."""

    kind: Literal["nt_xent"] = "nt_xent"
    """Which objective."""
    temperature: AnyTemperature = 0.5
    """As for other contrastive losses."""

    between: ClassVar[Between] = "views"

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        return InfoNCE("views", temperature)
