"""Makes the engine of a training, and chooses what torch compiles."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from mclclip.engines import EngineConfig
from mclclip.engines.engine import Engine, FsdpEngine, MakeOptimizer
from mclclip.engines.zero import DeepspeedEngine
from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")

_WORTH_COMPILING = 1e17  # floating-point operations


def choose_compile(
    how: EngineConfig,
    device: torch.device,
    blocks: Sequence[nn.Module],
    operations: float,
    compiler: bool | None = None,
) -> Literal["none", "model", "step"]:
    """Chooses what torch compiles: ``how.compile``, and for ``auto`` each of a model's ``blocks``
    on a GPU, if all are transformers' and Triton can compile (``compiler``; None: what is
    installed).

    Blocks with convolutions gain little, and batch norms of several ranks wait for each other
    inside. DeepSpeed's hooks at ZeRO stage 3 would be compiled again for every block. A training of
    fewer than 1e17 ``operations`` of this rank, five minutes of an H100, would not win back the
    time that compiling takes. Of an embedding pass all ranks' operations count, so that
    its rows are the same for any number of ranks.
    """
    if how.compile != "auto":
        return how.compile
    sharded = how.name == "deepspeed" and how.zero_stage == 3
    if device.type != "cuda" or sharded or not blocks or operations < _WORTH_COMPILING:
        return "none"
    if any(isinstance(m, _BatchNorm | _ConvNd) for block in blocks for m in block.modules()):
        return "none"
    if can_compile() if compiler is None else compiler:
        return "model"
    log.warning(
        "compile=auto compiles nothing, which takes about a fifth longer: Triton needs a "
        "C compiler (gcc, clang or CC) and Python's headers (python3-dev)"
    )
    return "none"


def can_compile(triton: bool | None = None) -> bool:
    """Returns True if Triton is there (``triton``; None: what is installed) and finds what it
    builds its launchers with: a C compiler and Python's headers."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    scheme = sysconfig.get_default_scheme()  # Debian's own has other folders than its packages
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    headers = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if triton is None:
        triton = importlib.util.find_spec("triton") is not None
    return triton and headers.exists() and any(shutil.which(name) for name in names)


def build_engine(
    how: EngineConfig,
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    context: Context,
    *,
    blocks: Sequence[nn.Module] = (),
    **options: Any,
) -> Engine:
    """The engine ``ddp``, ``fsdp`` (shards ``blocks`` one by one) or ``deepspeed`` for ``module``.

    A single process gets the plain ``Engine`` whatever the name. ``options`` are arguments of
    ``Engine``. Raises ValueError for a missing package.
    """
    needed, options = (module, make_optimizer, context), options | {"micro_batch": how.micro_batch}
    if how.name == "ddp" or context.world_size == 1:
        return Engine(*needed, **options)
    if how.name == "fsdp":
        return FsdpEngine(*needed, blocks=blocks, shard_ranks=how.shard_ranks, **options)
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("engine.name=deepspeed needs deepspeed: pip install 'mclclip[deepspeed]'")
    return DeepspeedEngine(*needed, zero_stage=how.zero_stage, **options)
