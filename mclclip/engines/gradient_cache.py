"""The exact gradient of a contrastive loss in micro-batches, for batches larger than memory.

A contrastive loss couples all samples of the global batch, so gradients cannot simply be added up
over micro-batches. Gradient caching (Gao et al., "Scaling Deep Contrastive Learning Batch Size
under Memory Limited Setup", 2021) cuts the graph at the features, which are small: a first pass
without graph gives all features; the loss of the whole batch gives the gradient of each; a second
pass, with the random state of the first, pulls them back micro-batch by micro-batch. Only one
micro-batch's activations exist at a time.

The module that is run so (``train.loop.ModelWithObjective``) has an ``objective``.
``module(batch, finish)`` computes the features by name and returns ``finish(features)``: tensors
[b, ...] have one row per sample, 0-dimensional ones belong to the whole batch.
``module.forward(batch, features=features)`` returns ``{"loss": ..., parts}`` of those of the whole
local batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def check(module: nn.Module) -> None:
    """Raises ValueError where micro-batches would change the result."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and any(p.requires_grad for p in child.parameters()):
            raise ValueError(
                "engine.micro_batch with trained batch norms would not be exact, since their "
                "statistics are those of a forward: leave it out, or set lock.image_norm=false"
            )


def all_features(
    engine: Any, batch: Any, micro_batch: int
) -> tuple[dict[str, Tensor], list[Any], list[tuple[Tensor, Any]]]:
    """The features of the whole local batch by name, without a graph; its micro-batches; and the
    states of the random generators of the CPU and of the GPU, if any, before each."""
    device = engine.context.device
    on_gpu = None if device.type == "cpu" else torch.get_device_module(device)
    pieces = [batch.slice(at, at + micro_batch) for at in range(0, len(batch), micro_batch)]
    states, passes = [], []
    with torch.no_grad():
        for piece in pieces:
            states.append((torch.get_rng_state(), on_gpu and on_gpu.get_rng_state(device)))
            passes.append(engine.wrapped(piece, lambda features: features))
        features = {
            name: torch.cat([each[name] for each in passes]) if value.ndim else value.clone()
            for name, value in passes[0].items()
        }
    return features, pieces, states


def backward(engine: Any, batch: Any, micro_batch: int) -> dict[str, Tensor]:
    """Adds the gradient of the global batch's loss to ``engine``'s; returns the loss and parts."""
    module, device = engine.module, engine.context.device
    on_gpu = None if device.type == "cpu" else torch.get_device_module(device)
    features, pieces, states = all_features(engine, batch, micro_batch)
    leaves = {n: f.requires_grad_() for n, f in features.items() if f.is_floating_point()}
    parts: dict[str, Tensor] = module.forward(batch, features=features)
    inputs = [*leaves.values(), *_trained(module.objective)]
    gradients = torch.autograd.grad(parts["loss"], inputs, allow_unused=True)
    of_features = {n: g for n, g in zip(leaves, gradients, strict=False) if g is not None}
    for number, start in enumerate(range(0, len(batch), micro_batch)):
        last = number == len(pieces) - 1
        of_piece = {n: g[start : start + micro_batch] for n, g in of_features.items() if g.ndim}
        of_parameters: tuple[Tensor | None, ...] = ()
        if last:  # features of the whole batch and parameters are pulled back only once
            of_piece |= {n: g for n, g in of_features.items() if not g.ndim}
            of_parameters = gradients[len(leaves) :]
        pull_back = partial(_pulled_back, module.objective, of_piece, of_parameters)
        with torch.random.fork_rng(devices=[] if on_gpu is None else [device]):
            of_cpu, of_gpu = states[number]
            torch.set_rng_state(of_cpu)
            if on_gpu is not None:
                on_gpu.set_rng_state(of_gpu, device)
            with engine.reducing(last):
                engine.backward(engine.wrapped(pieces[number], pull_back)["loss"])
    return parts


def _pulled_back(
    objective: nn.Module,
    of_features: dict[str, Tensor],
    of_parameters: Sequence[Tensor | None],
    features: dict[str, Tensor],
) -> dict[str, Tensor]:
    """A sum whose backward pass gives the stored gradients to the features and to the objective's
    parameters: the sum of each of these times its gradient."""
    products = [(features[name] * gradient).sum() for name, gradient in of_features.items()]
    pairs = zip(_trained(objective), of_parameters, strict=False)
    products += [(p * gradient).sum() for p, gradient in pairs if gradient is not None]
    return {"loss": torch.stack(products).sum()}


def _trained(objective: nn.Module) -> list[nn.Parameter]:
    """The objective's own parameters; under FSDP other tensors while its module runs."""
    return [parameter for parameter in objective.parameters() if parameter.requires_grad]
