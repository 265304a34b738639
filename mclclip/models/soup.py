"""The uniform soup: the average of the weights of several fine-tuned models of one base.

Reference: Wortsman et al., "Model soups", 2022. Sums run in float64 and are cast back. Tensors that
are equal in all models are copied, so frozen towers keep every bit.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.models import weights

_BATCH_COUNT = "num_batches_tracked"


def save_uniform_soup(ingredients: Sequence[Path], directory: Path, force: bool = False) -> int:
    """Averages exported models into a new one; returns the number of tensors that were averaged.

    Models of different bases are refused unless `force`, since their average is meaningless. Of the
    logit scale the stored logarithm is averaged. Averaged running statistics of batch norms do not
    fit the averaged weights: call ``estimate_statistics`` afterwards if ``needs_statistics`` is
    true. Raises ValueError where configs, tensor names, shapes or dtypes differ, and where integer
    buffers differ other than the batch counts of batch norms.
    """
    if not ingredients:
        raise ValueError("there is no ingredient: give at least one exported model")
    config = weights.common_config(ingredients)
    bases = [weights.base_digest(path) for path in ingredients]
    if len(set(bases)) > 1 and not force:
        other = next(i for i, base in enumerate(bases) if base != bases[0])
        raise ValueError(
            f"{ingredients[other]} descends from another base ({bases[other][:12]}) than "
            f"{ingredients[0]} ({bases[0][:12]}): a soup averages models of one base only"
        )
    tensors, num_averaged = _average([weights.find_weights(path) for path in ingredients])
    weights.copy_tokenizer(ingredients[0], directory)
    weights.write_model(directory, config, tensors)
    return num_averaged


def needs_statistics(ingredients: Sequence[Path]) -> bool:
    """True where the models have batch norms with different batch counts."""
    with ExitStack() as stack:
        opened = [
            stack.enter_context(safe_open(weights.find_weights(path), framework="pt"))
            for path in ingredients
        ]
        counts = [name for name in opened[0].keys() if name.endswith(_BATCH_COUNT)]
        return any(
            not weights.same_bits(*(source.get_tensor(name) for source in opened))
            for name in counts
        )


@torch.no_grad()
def estimate_statistics(model: nn.Module, batches: Iterable[Tensor]) -> int:
    """Sets the running statistics of all batch norms to those of the images.

    ``batches`` are images [B, 3, H, W]; every batch has the same weight (the cumulative average).
    Returns the number of images. Raises ValueError where there is none. Reference: Izmailov et
    al., "Averaging Weights Leads to Wider Optima", 2018, section 3.2.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # None means the cumulative average in torch
        norm.train()
    count = 0
    for images in batches:
        model.encode_image(images)  # type: ignore[operator]
        count += len(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    if not count:
        raise ValueError("there is no image to estimate the statistics of batch norms on")
    return count


def _average(files: Sequence[Path]) -> tuple[dict[str, Tensor], int]:
    """Tensor by tensor, so that one model's worth of memory is enough."""
    num_averaged, tensors = 0, {}
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        names = sorted(opened[0].keys())
        for file, source in zip(files, opened, strict=True):
            if sorted(source.keys()) != names:
                strange = sorted(set(names) ^ set(source.keys()))[:3]
                raise ValueError(f"{file} and {files[0]} hold different tensors: {strange}")
        for name in names:
            found = [source.get_tensor(name) for source in opened]
            tensors[name] = mean_tensor(name, found)
            num_averaged += not weights.same_bits(*found)
    return tensors, num_averaged


def mean_tensor(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Mean of equal-shaped tensors in float64, cast back; the first where all have equal bits.

    Raises ValueError, naming the tensor, where shapes or dtypes differ, or integers do.
    """
    first = tensors[0]
    if weights.same_bits(*tensors):
        return first
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(kinds) > 1:
        raise ValueError(
            f"the tensor {name} has different shapes or dtypes: {sorted(map(str, kinds))}"
        )
    if name.endswith(_BATCH_COUNT):
        return first  # counted anew when the statistics are
    if not first.is_floating_point():
        raise ValueError(
            f"the integer tensor {name} differs among the models and has no average: "
            "join these models by concatenation instead"
        )
    total = torch.zeros(first.shape, dtype=torch.float64)
    for tensor in tensors:
        total += tensor.double()
    return (total / len(tensors)).to(first.dtype)
