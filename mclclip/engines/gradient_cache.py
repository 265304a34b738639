"""The exact gradient of a contrastive loss in micro-batches, for batches larger than memory.

A contrastive loss couples all samples of the global batch, so gradients cannot simply be added up
over micro-batches. Gradient caching (Gao et al., "Scaling Deep Contrastive Learning Batch Size
under Memory Limited Setup", 2021) cuts the graph at the features, which are small: a first pass
without graph gives all features; the loss of the whole batch gives the gradient of each; a second
pass, with the random state of the first, pulls them back micro-batch by micro-batch. Only one
micro-batch's activations exist at a time.

The module that is run so (``train.loop.Trainee``) has an ``objective`` and can be called in three
ways. ``module(batch)`` returns ``{"loss": ..., parts}``. ``module(batch, only_features=True)``
returns the features by name: tensors [b, ...] have one row per sample, 0-dimensional ones belong to
the whole batch. ``module(batch, pullback=P)`` returns ``{"loss": s}``, where s is the sum of the
products of all features and parameters in ``P`` and their gradients there. ``module.loss(features,
batch)`` maps features of the whole local batch to ``{"loss": ..., parts}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass
class Pullback:
    """Gradients of the loss with respect to features, by name, and the objective's parameters."""

    features: dict[str, Tensor]
    parameters: list[Tensor | None]


def check(module: nn.Module) -> None:
    """Raises ValueError where micro-batches would change the result."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and any(p.requires_grad for p in child.parameters()):
            raise ValueError(
                "engine.micro_batch with trained batch norms would not be exact, since their "
                "statistics are those of a forward: leave it out, or set lock.image_norm=false"
            )


def backward(engine: Any, batch: Any, micro_batch: int) -> dict[str, Tensor]:
    """Adds the gradient of the global batch's loss to ``engine``'s; returns the loss and parts."""
    module, device = engine.module, engine.context.device
    starts = range(0, len(batch), micro_batch)
    pieces = [batch.rows(start, start + micro_batch) for start in starts]
    states, passes = [], []
    with torch.no_grad():
        for piece in pieces:
            on_gpu = device.type != "cpu"
            state = torch.get_device_module(device).get_rng_state(device) if on_gpu else None
            states.append((torch.get_rng_state(), state))
            passes.append(engine.run(piece, only_features=True))
        features = {
            name: torch.cat([each[name] for each in passes]) if value.ndim else value.clone()
            for name, value in passes[0].items()
        }
    engine.phase_ended("forward")
    leaves = {n: f.requires_grad_() for n, f in features.items() if f.is_floating_point()}
    own = [p for p in module.objective.parameters() if p.requires_grad]
    parts: dict[str, Tensor] = module.loss(features, batch)
    wanted = [*leaves.values(), *own]
    gradients = torch.autograd.grad(parts["loss"], wanted, allow_unused=True)
    of_features = {n: g for n, g in zip(leaves, gradients, strict=False) if g is not None}
    for number, start in enumerate(starts):
        last = number == len(starts) - 1
        pullback = Pullback(
            {n: g[start : start + micro_batch] for n, g in of_features.items() if g.ndim}, []
        )
        if last:  # features of the whole batch and parameters are pulled back only once
            pullback.features |= {n: g for n, g in of_features.items() if not g.ndim}
            pullback.parameters = list(gradients[len(leaves) :])
        with _replay(*states[number], device), engine.reducing(last):
            engine.backward(engine.run(pieces[number], pullback=pullback)["loss"])
    return parts


@contextmanager
def _replay(state: Tensor, on_gpu: Tensor | None, device: torch.device) -> Iterator[None]:
    """Runs the block with the random generators in these states; restores them afterwards."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.set_rng_state(state)
        if on_gpu is not None:
            torch.get_device_module(device).set_rng_state(on_gpu, device)
        yield
