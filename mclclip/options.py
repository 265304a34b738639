"""The pydantic configuration of strict option dataclasses, and number ranges of options."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Cosine = Annotated[float, Field(ge=-1.0, le=1.0)]
