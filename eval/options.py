"""Options of the benchmarks that encoders are measured on."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveInt

from mclclip.eval.protocols import KINDS
from mclclip.options import STRICT


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"wanted one of {', '.join(KINDS)}")
    return kind


@checked_dataclass(frozen=True, config=STRICT)
class BenchmarkConfig:
    """One benchmark of the suite that runs between stages and at the end."""

    kind: Annotated[str, AfterValidator(_known)]
    """Which evaluator: a module of eval/protocols."""
    path: str
    """Folder of the benchmark, in the layout that eval/README.md gives for its kind."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the evaluator, by its own names."""
    source: str = ""
    """What the folder holds and where to get it, for the message where it is missing."""


@checked_dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """Benchmarks that the encoders are measured on."""

    suite: dict[str, BenchmarkConfig] = field(default_factory=dict)
    """Benchmarks by name."""
    batch_size: PositiveInt = 256
    """Images or texts per forward."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the encoder during evaluation."""
