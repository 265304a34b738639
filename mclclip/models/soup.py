"""Makes soups: weighted averages of the weights of several fine-tuned models of one base.

References: Wortsman et al., "Model soups", 2022 (uniform and greedy soups); Wortsman et al.,
"Robust fine-tuning of zero-shot models", 2022 (WiSE-FT, the line between two models). Sums run in
float64 and are cast back. Tensors that are equal in all models are copied, so frozen towers keep
every bit, and a soup that one model alone has a share in is that model, bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.models import state_dicts, weights
from mclclip.models.loading import common_config, load_towers
from mclclip.models.model import Model

_REWRITE = "by 'mclclip export --to open_clip --model FOLDER --out NEW'"
_BATCH_COUNT = "num_batches_tracked"
STATISTICS_IMAGES = 4096
"""The most images on which the statistics of batch norms are estimated."""
_STATISTICS = (_BATCH_COUNT, "running_mean", "running_var")


def save_uniform_soup(ingredients: Sequence[Path], directory: Path, force: bool = False) -> int:
    """Averages exported models into a new one; returns the number of tensors that were averaged.

    Models of different bases are refused unless `force` is set, since their average is meaningless.
    Logit scales are stored as logarithms, and these are averaged. Averaged running statistics of
    batch norms do not fit the averaged weights: call ``estimate_statistics`` afterwards for those
    that ``differing_norms`` names. Raises the errors of ``check_ingredients`` and ``combine``.
    """
    config = check_ingredients(ingredients, any_base=force)
    tensors, num_averaged = combine(ingredients)
    weights.copy_tokenizer(ingredients[0], directory)
    weights.write_model(directory, config, tensors)
    return num_averaged


def check_ingredients(
    ingredients: Sequence[Path], *, any_base: bool = False, advice: str = ""
) -> dict[str, Any]:
    """Returns the configuration of a soup of these models, which may come from strangers.

    Raises ValueError for models that cannot be averaged: a concat, weights that are no safetensors
    (pickles are not opened), another architecture or preprocessing, and, unless ``any_base``,
    models of different bases (``advice`` then ends the message). Raises FileNotFoundError if there
    is no model.
    """
    for path in ingredients:
        _find_safetensors(path)
    config = common_config(ingredients)
    bases = [weights.base_digest(path) for path in ingredients]
    if len(set(bases)) > 1 and not any_base:
        other = next(i for i, base in enumerate(bases) if base != bases[0])
        raise ValueError(
            f"{ingredients[other]} descends from another base ({bases[other][:12]}) than "
            f"{ingredients[0]} ({bases[0][:12]}): a soup averages models of one base only{advice}"
        )
    return config


def _find_safetensors(directory: Path) -> Path:
    """Returns the weights file of an ingredient. Raises ValueError for a concat and for weights
    that are no safetensors, and FileNotFoundError if there is no model."""
    weights.read_config(directory)
    file = weights.find_weights(directory)
    if file.suffix != ".safetensors":
        raise ValueError(
            f"{directory} holds its weights in {file.name}, a pickle, which a soup does not open: "
            f"write them as safetensors first, {_REWRITE}"
        )
    return file


def differing_norms(ingredients: Sequence[Path]) -> set[str]:
    """Returns the names of the models' batch norms whose running statistics differ.

    Equal statistics come from frozen norms. Of different ones no average fits averaged weights.
    """
    with _open_weights(ingredients) as sources:
        return {
            name.rpartition(".")[0]
            for name in sources[0].keys()
            if name.endswith(_STATISTICS)
            and not weights.same_bits(*(source.get_tensor(name) for source in sources))
        }


def load_soup(
    ingredients: Sequence[Path],
    shares: Sequence[float],
    images: Callable[[Model], Iterable[Tensor]] | None = None,
    model: Model | None = None,
) -> tuple[Model, dict[str, Tensor], int]:
    """Makes a soup in memory; returns the model, its tensors, and a number of images.

    That is the number on which the statistics of its batch norms were estimated; 0 if that was not
    needed. ``images(model)`` yields batches for it. ``model`` is a model of this architecture that
    is filled, on its device, instead of building another one. Raises ValueError if images are
    needed and ``images`` is None, and the errors of ``combine``.
    """
    used = [path for path, share in zip(ingredients, shares, strict=True) if share]
    tensors, _ = combine(ingredients, shares)
    model = load_towers(used[0], load_weights=False) if model is None else model
    state_dicts.fill(model.exported, tensors, f"of the soup of {len(used)} models")
    if not (norms := differing_norms(used)):
        return model, tensors, 0
    if images is None:
        raise ValueError(
            "the models have batch norms with different running statistics, and no average of them "
            "fits the averaged weights: give training images, on which they are estimated again"
        )
    device = next(model.parameters()).device
    count = estimate_statistics(model, norms, (batch.to(device) for batch in images(model)))
    estimated = model.exported.state_dict()
    for name in (f"{norm}.{each}" for norm in norms for each in _STATISTICS):
        tensors[name] = estimated[name].to("cpu", tensors[name].dtype, copy=True)
    return model, tensors, count


@torch.no_grad()
def estimate_statistics(model: Model, names: Iterable[str], batches: Iterable[Tensor]) -> int:
    """Sets the running statistics of batch norms to those of images; returns the images' number.

    ``names`` are those of modules of the exported model; all others stay as they are. ``batches``,
    at least one, are images [B, 3, H, W]; every batch counts the same (torch's cumulative average).
    Reference: Izmailov et al., "Averaging Weights Leads to Wider Optima", 2018, section 3.2.
    """
    norms = [cast(_BatchNorm, model.exported.get_submodule(name)) for name in names]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # torch then takes the cumulative average
        norm.train()
    count = 0
    for images in batches:
        model.encode_image(images)
        count += len(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    assert count, "there is no image to estimate the statistics of batch norms on"
    return count


@contextmanager
def _open_weights(ingredients: Sequence[Path]) -> Iterator[list[Any]]:
    """Opens the safetensors files of several models. Raises ValueError if one cannot be read."""
    with ExitStack() as stack:
        paths = map(_find_safetensors, ingredients)
        yield [stack.enter_context(weights.open_tensors(path)) for path in paths]


def combine(
    ingredients: Sequence[Path], shares: Sequence[float] | None = None
) -> tuple[dict[str, Tensor], int]:
    """Averages the weights of exported models; returns the tensors, and how many of them differed.

    ``shares`` are not negative, one at least is above 0, and they need not sum to 1 (default: equal
    shares); a model of share 0 does not take part. One tensor is averaged after the other, so that
    one model's worth of memory is enough. Raises ValueError if names, shapes or dtypes of tensors
    differ, or integer buffers other than the batch counts of batch norms.
    """
    shares = [1.0] * len(ingredients) if shares is None else shares
    used = [(path, share) for path, share in zip(ingredients, shares, strict=True) if share]
    num_averaged, tensors = 0, {}
    with _open_weights([path for path, _ in used]) as sources:
        opened = zip(used, sources, strict=True)
        names = weights.common_names({path: source.keys() for (path, _), source in opened})
        for name in names:
            values = [source.get_tensor(name) for source in sources]
            tensors[name] = mean_tensor(name, values, [share for _, share in used])
            num_averaged += not weights.same_bits(*values)
    return tensors, num_averaged


def mean_tensor(
    name: str, tensors: Sequence[Tensor], shares: Sequence[float] | None = None
) -> Tensor:
    """Averages tensors of one shape in float64 and casts back; if all are equal, returns the first.

    ``shares`` are their weights (default: equal ones). Raises ValueError, with the tensor's
    ``name``, if shapes or dtypes differ, or integers do.
    """
    first = tensors[0]
    if weights.same_bits(*tensors):
        return first
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(kinds) > 1:
        raise ValueError(
            f"the tensor {name} has different shapes or dtypes: {sorted(map(str, kinds))}: write "
            f"each model in fp32 first, {_REWRITE}"
        )
    if name.endswith(_BATCH_COUNT):
        return first  # `estimate_statistics` counts batches again
    if not first.is_floating_point():
        raise ValueError(
            f"the integer tensor {name} differs among the models and has no average: "
            "join these models by concatenation instead"
        )
    total = torch.zeros(first.shape, dtype=torch.float64)
    shares = [1.0] * len(tensors) if shares is None else shares
    for tensor, share in zip(tensors, shares, strict=True):
        total += share * tensor.double()
    return (total / sum(shares)).to(first.dtype)
