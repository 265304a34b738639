"""What a check is, where it runs, and what all checks share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mclclip.ranks.process_group import pick_device


@dataclass(frozen=True)
class Where:
    """The device of a check, and a folder of its own for files."""

    device: torch.device
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def size(self, on_gpu: int, on_cpu: int) -> int:
        """A size that takes seconds on each."""
        return on_gpu if self.on_gpu else on_cpu

    def several(self, on_gpu: list[int]) -> list[int]:
        """Sizes that take too long on a CPU."""
        return on_gpu if self.on_gpu else []


Work = Callable[[Where], Any]


@dataclass(frozen=True)
class Check:
    """``work`` raises where something is wrong; what it returns is shown beside the verdict."""

    work: Work
    limit_s: float


CHECKS: dict[str, Check] = {}
"""Every check by its name, in the order in which they are made."""


def check(name: str, *arguments: Any, limit_s: float = 90.0) -> Callable[[Any], Any]:
    """Makes a check of a function of (Where, *arguments); one function may make several."""

    def register(function: Any) -> Any:
        assert name not in CHECKS, name
        CHECKS[name] = Check(lambda where: function(where, *arguments), limit_s)
        return function

    return register


def entries() -> dict[str, Check]:
    """Every check by its name."""
    from tests.gpu import clusters, heads, runs, training

    assert clusters and heads and runs and training  # importing them has registered theirs
    return CHECKS


def run(name: str, device: str, folder: Path) -> Any:
    """Makes one check on ``device`` (cuda or cpu)."""
    return entries()[name].work(Where(pick_device(device), folder))


def no_faiss(where: Where) -> str | None:
    """Why faiss cannot run on the device here, or None."""
    if not where.on_gpu:
        return "needs a GPU"
    if find_spec("faiss") is None:
        return "faiss is not installed"
    import faiss

    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        return "this faiss has no GPU"
    return None


# --- comparisons ---


def close(what: str, got: Tensor, wanted: Tensor, tolerance: float) -> float:
    """Raises AssertionError where |got - wanted| is above tolerance * |wanted| (norms of the whole
    tensors), and for NaN; returns the relative error.
    """
    got, wanted = got.detach().double().cpu(), wanted.detach().double().cpu()
    assert got.shape == wanted.shape, f"{what}: shape {list(got.shape)}, not {list(wanted.shape)}"
    error = float((got - wanted).norm() / wanted.norm().clamp_min(1e-30)) if got.numel() else 0.0
    assert error <= tolerance, f"{what}: off by {error:.2g} of its norm, more than {tolerance:g}"
    return error


def same_bits(what: str, got: Tensor, wanted: Tensor) -> None:
    """Raises AssertionError where two tensors differ in any bit."""
    got, wanted = got.detach().cpu(), wanted.detach().cpu()
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, f"{what}: shape or type"
    if not torch.equal(got, wanted):
        off = (got != wanted).double().mean()
        raise AssertionError(f"{what}: {100 * float(off):.3g} % of the values differ")


def random(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values on the CPU: the same for every device."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(*size: int, seed: int = 0) -> Tensor:
    """Rows of length 1, on the CPU."""
    return torch.nn.functional.normalize(random(*size, seed=seed), dim=-1)


def make_repeatable() -> None:
    """Torch's deterministic algorithms, for the rest of the process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
