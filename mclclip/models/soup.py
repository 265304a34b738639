"""The uniform soup: the average of the weights of several fine-tuned models of one base.

Reference: Wortsman et al., "Model soups", 2022. Sums run in float64 and are cast back. Tensors that
are equal in all models are copied, so frozen towers keep every bit.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from mclclip.models import weights


def save_uniform_soup(ingredients: Sequence[Path], directory: Path, force: bool = False) -> int:
    """Averages exported models into another; returns how many tensors were not just copied.

    Models of different bases are refused unless `force`: their average is meaningless. The logit
    scale is averaged in its logarithm, like every weight. Raises ValueError where configs, tensor
    names or shapes differ, or integer buffers do (the batch counts of batch norms, whose running
    statistics an average does not fit either).
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
    weights.write_config(directory, config)
    weights.write_tensors(Path(directory) / weights.WEIGHTS, tensors)
    return num_averaged


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
    if not first.is_floating_point():
        raise ValueError(
            f"the integer tensor {name} differs among the models and has no average: freeze the "
            "batch norms (image_norm=false), or use one model"
        )
    total = torch.zeros(first.shape, dtype=torch.float64)
    for tensor in tensors:
        total += tensor.double()
    return (total / len(tensors)).to(first.dtype)
