"""How a training step runs on this hardware, behind one small interface.

The training loop hands over a module that maps a batch to ``{"loss": ..., parts}`` and calls
``update``; which engine runs it is not its business. DDP is the engine of this version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mclclip.parallel.batch_norm import synchronize_batch_norms
from mclclip.parallel.process_group import Context


class Engine:
    """Data-parallel training of ``module`` (DDP over ranks, the plain module for one)."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        context: Context,
        *,
        precision: str = "fp32",
        clip_grad_norm: float | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.context = context
        self.precision = precision
        self.clip_grad_norm = clip_grad_norm
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self._run: Callable[..., Any] = module
        if context.world_size > 1:
            synchronize_batch_norms(module)
            on_gpu = context.device.type == "cuda"
            self._run = DistributedDataParallel(
                module, device_ids=[context.local_rank] if on_gpu else None
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """bf16 autocast where the precision says so."""
        if self.precision == "bf16":
            return torch.autocast(self.context.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def settle(self, batch: Any) -> None:
        """Fixes the order of DDP's sums before the first step, and after every resume.

        DDP rebuilds its buckets after the first backward, which changes the order in which
        gradients of three or more ranks are summed; two discarded backwards of a zero loss settle
        it, so that a resumed run repeats the undisturbed one bit for bit. Buffers and the state of
        random generators (dropout draws from them) are restored.
        """
        if self.context.world_size == 1:
            return
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        devices = [self.context.device] if self.context.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            for _ in range(2):
                with self.autocast():
                    loss: Tensor = self._run(batch)["loss"]
                (loss * 0.0).backward()  # type: ignore[no-untyped-call]
                self.optimizer.zero_grad(set_to_none=True)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[name])

    def update(self, batch: Any, lr: float) -> dict[str, Tensor]:
        """One forward, one backward, one optimizer step at learning rate ``lr``.

        Returns the module's dictionary, detached, with ``grad_norm`` (before clipping) added.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            parts: dict[str, Tensor] = self._run(batch)
        parts["loss"].backward()  # type: ignore[no-untyped-call]
        limit = float("inf") if self.clip_grad_norm is None else self.clip_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        self.optimizer.step()
        return {name: value.detach() for name, value in parts.items()} | {"grad_norm": norm}
