"""The protocols by which encoders are measured, and the options of a run's benchmarks.

A benchmark's ``kind`` is the name of a module here. To add a protocol, add a module that declares
``EVALUATOR``. This file imports no torch.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, create_model
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveInt

from mclclip.util import shipped
from mclclip.util.options import STRICT

if TYPE_CHECKING:
    from mclclip.eval.results import Measurement

KINDS = shipped.plugins("eval/protocols")
"""The kinds of benchmarks: the names of the modules in this folder."""


@dataclass(frozen=True)
class Evaluator:
    """How one kind of benchmark is measured.

    evaluate     ``evaluate(extractor, root, *, options...)`` returns figures. Its keyword
                 parameters, with their types and defaults, are the options of a benchmark
    needs        what the benchmark's folder must hold, for messages; or a function that returns
                 this for the options
    reads_text   True if images are compared with texts, so that it needs a text tower
    is_loss      True if smaller figures are better
    files        the options whose values are paths in the benchmark's folder
    check        ``check(root, **options)`` raises, before a run, those errors that show without
                 reading every sample
    judged       the sub-folder of the images that are measured; empty: all images are
    """

    evaluate: Callable[..., list[Measurement]]
    needs: str | Callable[..., str]
    reads_text: bool
    is_loss: bool = False
    files: Sequence[str] = ("captions", "images", "labels")
    check: Callable[..., object] | None = None
    judged: str = ""

    @cached_property
    def options(self) -> type[BaseModel]:
        """A pydantic model that checks the options of ``evaluate`` by their types."""
        hints = typing.get_type_hints(self.evaluate, include_extras=True)
        fields: dict[str, Any] = {
            name: (hints[name], ... if parameter.default is parameter.empty else parameter.default)
            for name, parameter in inspect.signature(self.evaluate).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        # A model that is made has no source with docstrings, for which pydantic would search long.
        config = STRICT | ConfigDict(use_attribute_docstrings=False)
        return create_model("Options", __config__=config, **fields)


def evaluator(kind: str) -> Evaluator:
    """The protocol of a kind of benchmarks."""
    declared: Evaluator = import_module(f"{__name__}.{kind}").EVALUATOR
    return declared


def reading_texts(benchmarks: Mapping[str, BenchmarkConfig]) -> list[str]:
    """The names of the benchmarks that compare images with texts."""
    return [name for name, each in benchmarks.items() if evaluator(each.kind).reads_text]


# --- options ----------------------------------------------------------------------------------


def _check_kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"wanted one of {', '.join(KINDS)}")
    return kind


@checked_dataclass(frozen=True, config=STRICT)
class BenchmarkConfig:
    """One benchmark of the suite that runs between stages and at the end."""

    kind: Annotated[str, AfterValidator(_check_kind)]
    """The evaluator: a module of eval/protocols."""
    path: str
    """Folder of the benchmark, in the layout of its kind (the page "Benchmarks")."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the evaluator, by its own names."""
    source: str = ""
    """Content of the folder and where to get it, for the message where it is missing."""

    @property
    def typed_options(self) -> dict[str, Any]:
        """The options in the types that the evaluator declares: YAML reads 1e-3 as a text."""
        typed = evaluator(self.kind).options.model_validate(self.options)
        return {name: getattr(typed, name) for name in self.options}


@checked_dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """The benchmarks on which the encoders are measured."""

    suite: dict[str, BenchmarkConfig] = field(default_factory=dict)
    """Benchmarks by name."""
    encoders: list[str] | None = None
    """Encoders that a run measures in addition to stage_0, such as concat_raw (null: all that it
    makes). Those of its controls with these names are measured too. ``mclclip eval`` can measure
    others later."""
    text_rows: list[str] = field(default_factory=list)
    """Further files like those of ``model.text_rows``, with the texts of benchmarks: trainings do
    not read them, so that benchmarks may be added after a training."""
    batch_size: PositiveInt = 256
    """Images or texts per forward."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the encoder during evaluation."""

    def is_loss(self, metric: str) -> bool:
        """Returns True if smaller figures of ``metric``, a BENCHMARK/METRIC, are better."""
        return evaluator(self.suite[metric.partition("/")[0]].kind).is_loss
