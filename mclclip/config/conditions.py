"""Defines rules between options: a line for a configuration that breaks it, or conditions that
exclude each other; `rules` has the table."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from mclclip.config.options import Config
from mclclip.models.options import ModelConfig
from mclclip.train.options import TrainConfig

Needs = Literal["options", "ranks", "run"]
"""What a rule reads: the options alone; also the number of ranks; or, before a whole run, also
the architectures of its models and the folders that it reads, which takes seconds."""
TRAINING = "TRAINING"  # in the name of an option, stands for `base` and for `train`
_COMPARE = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}
_CONDITION = re.compile(r"([\w.]+)(?:(!=|=|<|>)(.*))?")


@dataclass(frozen=True)
class Subject:
    """The input of a rule: a configuration, one of its trainings, the number of ranks."""

    config: Config
    training: str = "train"
    num_ranks: int = 1

    @property
    def options(self) -> TrainConfig:
        """The options of the training."""
        options = self.config.base if self.training == "base" else self.config.train
        assert options is not None, "base is null"
        return options

    @property
    def model(self) -> ModelConfig:
        """The options of the model that the training starts from."""
        return self.config.model_of(self.training)

    @property
    def objective(self) -> str:
        """The training's objective as messages name it: "train.objective.kind=info_nce"."""
        return self.options.reader(self.training)


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    option  the option that the rule is about; one with TRAINING in it is checked for every training
    line    returns one line that says what is wrong and what to do, or something false if the
            options keep the rule
    needs   what the rule reads
    """

    option: str
    line: Callable[[Subject], object]
    needs: Needs = "options"


def excludes(*conditions: str, because: str, needs: Needs = "options") -> Rule:
    """Returns a rule that refuses options which meet all ``conditions``; ``because`` says why.

    A condition is ``OPTION`` (it is set and not empty), ``OPTION=VALUE`` (for a list or set: VALUE
    is in it), ``OPTION!=VALUE``, ``OPTION<NUMBER`` or ``OPTION>NUMBER``. An option that is null
    meets no condition.
    """

    def line(at: Subject) -> str:
        parts = [_meets(at, condition) for condition in conditions]
        return f"{' and '.join(parts)}: {because}" if all(parts) else ""

    return Rule(_CONDITION.match(conditions[0])[1], line, needs)  # type: ignore[index]


def _meets(at: Subject, condition: str) -> str:
    """Returns an option and its value, for example "train.precision=fp16", if it meets a condition.

    If it does not, returns "".
    """
    name, sign, text = re.fullmatch(_CONDITION, condition).groups()  # type: ignore[union-attr]
    name = name.replace(TRAINING, at.training)
    value: Any = at if name == "num_ranks" else at.config
    for part in name.split("."):
        value = None if value is None else getattr(value, part)
    if value is None:
        return ""
    plain = str(value).lower() if isinstance(value, bool) else value
    if not sign:
        meets = bool(value)
    elif sign in "<>":
        number = value if not isinstance(value, list) else min(value) if sign == "<" else max(value)
        meets = _COMPARE[sign](number, float(text))
    elif isinstance(value, frozenset | list):
        meets = (text in value) == (sign == "=")
    else:
        meets = _COMPARE[sign](str(plain), text)
    if not meets:
        return ""
    if ".objective." in name:  # a property, which follows from the kind
        name = f"{name.partition('.')[0]}.objective.kind"
        plain = attrgetter(name)(at.config)
    return f"{name}={plain}" if isinstance(plain, str | int | float | list) else name
