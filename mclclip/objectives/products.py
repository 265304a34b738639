"""Matrix products of a loss, in the dtype of its numbers or in bf16 with sums in fp32.

A GPU multiplies bf16 about 15 times as fast as fp32. Rounding a number to bf16 changes it by at
most 1/256 of its size. Products of rounded numbers are exact in fp32, in which they are added up.

On a CPU the rounded numbers are multiplied in fp32 (``as_fp32``), which gives the same products, so
that tests bound the error; it is no faster there, and nothing but tests asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

ProductPrecision = Literal["auto", "fp32"]


@dataclass(frozen=True)
class Products:
    """Multiplies matrices; with ``bf16`` their numbers are rounded to bf16 first.

    ``as_fp32`` multiplies the rounded numbers as fp32, which a CPU does faster.
    """

    bf16: bool = False
    as_fp32: bool = False

    def factor(self, matrix: Tensor) -> Tensor:
        """Returns a matrix as ``multiply`` takes it; round one that serves often once."""
        if not self.bf16:
            return matrix
        rounded = matrix.bfloat16()
        return rounded.float() if self.as_fp32 else rounded

    def multiply(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the product of two factors, float32 (float64 for float64 factors without bf16),
        in ``out`` if it is given."""
        product = torch.mm
        if left.dtype == torch.bfloat16:
            product = partial(torch.mm, out_dtype=torch.float32)
        return product(left, right, out=out)


EXACT = Products()
"""Products of the numbers as they are."""


def choose_products(option: ProductPrecision, precision: str, device: torch.device) -> Products:
    """Returns products in bf16 on a GPU for a training whose ``precision`` is bf16 or fp16, unless
    the option is ``fp32``; else exact products of the numbers' own dtype."""
    half = precision in ("bf16", "fp16") and device.type == "cuda"
    return Products(bf16=half and option == "auto")
