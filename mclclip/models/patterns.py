"""The option `train.parameters`: properties of parameters by patterns of their names.

The list is in the manner of big_vision's configurations (`schedule` and `lr_mults`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat

from mclclip.util.options import STRICT, PositiveShare, nearest


@checked_dataclass(frozen=True, config=STRICT)
class ParameterConfig:
    """The learning rate and weight decay of all parameters whose names match a pattern."""

    match: str
    """Names of parameters, with ``*`` for any characters and ``|`` between alternatives. Names are
    those of the tensors in an export; ``image.*`` and ``text.*`` are all those of a tower,
    ``projector.*`` and ``objective.*`` those that are not exported."""
    lr_scale: NonNegativeFloat | None = None
    """Factor of the learning rate. 0 freezes the parameters: no gradient is computed."""
    layer_decay: PositiveShare | None = None
    """Each layer of a tower has this factor times the learning rate of the layer after it."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay in the place of ``weight_decay``; norms and biases still have none."""

    def __post_init__(self) -> None:
        if self.lr_scale is self.layer_decay is self.weight_decay is None:
            raise ValueError(
                f"match={self.match!r} stands alone: set lr_scale, layer_decay or weight_decay"
            )

    def matches(self, names: Iterable[str]) -> bool:
        """Returns True if the pattern matches one of a parameter's ``names``."""
        patterns = self.match.split("|")
        return any(fnmatchcase(name, pattern.strip()) for name in names for pattern in patterns)


def find_value(
    parameters: Sequence[ParameterConfig],
    names: Sequence[str],
    option: Literal["lr_scale", "layer_decay", "weight_decay"],
    default: float,
) -> float:
    """Returns the option of the first entry that states it and matches one of a parameter's names;
    without one, ``default``."""
    for entry in parameters:
        value: float | None = getattr(entry, option)
        if value is not None and entry.matches(names):
            return value
    return default


def refuse_unmatched(
    parameters: Sequence[ParameterConfig], all_names: Iterable[Sequence[str]]
) -> None:
    """Raises ValueError, with the nearest names, for an entry that matches no parameter.

    ``all_names`` has the names of every parameter.
    """
    every = [*all_names]
    for entry in parameters:
        if not any(map(entry.matches, every)):
            flat = {name for names in every for name in names}
            choices = flat | {f"{name.partition('.')[0]}.*" for name in flat if "." in name}
            near = ", ".join(nearest(entry.match, choices))
            raise ValueError(
                f"parameters.match={entry.match!r} matches no parameter"
                f"{f' (nearest: {near})' if near else ''}: mend it, or leave it out"
            )
