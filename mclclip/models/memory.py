"""Measures how much memory and how many operations a model's training takes, without running it.

A model is built on torch's "meta" device, where tensors have shapes and no values. It is run
forward and backward on fake tensors (`torch._subclasses.fake_tensor`), which follow every rule of
views, autocast, recomputation and saved tensors. A dispatch mode sees when each storage is made and
freed, and sums the bytes that torch's allocator would be asked for. So no kind of tower needs a
formula of its own, and ViT-H-14 takes seconds.

Fragmentation, and memory that kernels take for themselves (workspaces of cuDNN), are not counted.
Operations are counted in the same run, by torch's own formulas (`torch.utils.flop_counter`).
"""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

from mclclip.models import weights
from mclclip.models.loading import load_towers
from mclclip.models.model import Model

# Raised where a computation depends on values, which fake tensors do not have.
NeedsValues = DataDependentOutputException
_ATEN: Any = torch.ops.aten
Module = TypeVar("Module", bound=nn.Module)


def load_shapes(name: str | Path | Mapping[str, Any], **arguments: Any) -> Model:
    """Calls `load_towers` on the "meta" device: weights are not read, fetched, drawn or allocated.

    Raises the errors of `load_towers`, and ValueError for a model on the hub, whose configuration
    would have to be fetched.
    """
    weights.refuse_joined(name)
    if isinstance(name, str) and name.startswith("hf-hub:"):
        raise ValueError(
            f"model.name is {name!r}, whose configuration lies on the hub: give local-dir:PATH of "
            "a copy to plan without fetching it"
        )
    with on_meta():
        return load_towers(name, **arguments, load_weights=False)


@contextmanager
def on_meta() -> Iterator[None]:
    """Within the block, new tensors have shapes and no values, and stay on the "meta" device."""
    with torch.device("meta"), _StayOnMeta():
        yield


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the sum of the tensors' bytes; memory that several share is counted several times."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def faked(module: Module, *, gpu_autocast: bool = False) -> Iterator[Module]:
    """Within the block, `module` (from `load_shapes`) and new tensors are fakes on the CPU.

    With `gpu_autocast` its layer norms save the same tensors as on a GPU under autocast. The module
    cannot be used for anything else afterwards.
    """
    for child in module.modules() if gpu_autocast else ():
        if isinstance(child, nn.LayerNorm):
            child.__class__ = _GpuLayerNorm
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        # ``copy.deepcopy`` of a fake, such as a momentum copy's, looks at its address.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield module.to_empty(device="cpu")


class StepMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the memory and the operations of what runs inside its `with` block.

    Tensors on `device` are counted, real and fake ones; fakes of `faked` lie on the CPU. A
    multiplication and an addition count as two operations. Backward passes and repeated forward
    passes count. Operations on single elements (norms, activations) do not, as is usual, and
    attention counts as its two products, as if it had no mask.

    live        bytes that are held now, without the tensors `present` from the beginning
    peak        the most bytes that were held at a time since the block was entered
    operations  floating-point operations of matrix products and convolutions
    """

    def __init__(self, present: Iterable[Tensor] = (), device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self._before = self.operations = 0
        self.device = torch.device(device)
        self._counted: set[int] = set()
        self._fused = torch.backends.mha.get_fastpath_enabled()
        for tensor in present:
            self._note(tensor.untyped_storage(), 0)

    def __enter__(self) -> Self:
        self.peak = self._before = self.live
        torch.backends.mha.set_fastpath_enabled(False)  # one kernel for a layer, without a formula
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.backends.mha.set_fastpath_enabled(self._fused)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def added(self) -> int:
        """Returns the peak minus the bytes that were held when the block was entered."""
        return self.peak - self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.sparse_sampled_addmm.default and args[0].is_meta:
            result = args[0].clone()  # torch cannot run this one on the "meta" device
        else:
            result = func(*args, **kwargs)
        if (formula := _FORMULAS.get(func.overloadpacket)) is not None:
            self.operations += int(formula(*args, **kwargs, out_val=result))
        for value in tree_leaves(result):
            for part in _parts(value) if isinstance(value, Tensor) else ():
                if part.device == self.device:
                    storage = part.untyped_storage()
                    self._note(storage, storage.nbytes())
        return result

    def _note(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        if key in self._counted:
            return
        self._counted.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._counted.discard(key)
        self.live -= num_bytes


class _StayOnMeta(TorchFunctionMode):
    """Makes `Tensor.to` leave a tensor on the "meta" device there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[0].is_meta:
            args = [a if not isinstance(a, torch.device | str) else args[0].device for a in args]
        return func(*args, **(kwargs or {}))


class _GpuLayerNorm(nn.LayerNorm):
    """Computes in fp32 and returns its input's type, as a layer norm does under CUDA's autocast.

    It keeps an fp32 copy of the input. The CPU's autocast would compute in half precision.
    """

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float()).to(input.dtype)


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """Returns the tensors that hold a tensor's memory: itself, or three of a sparse matrix."""
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,)


def _count_convolution_backward(
    out_gradient: Tensor, inputs: Tensor, weight: Tensor, *others: Any, out_val: Any
) -> int:
    """Counts the operations of a convolution's backward pass: those of the forward pass for each of
    the gradients of input and weight that is computed.

    torch's own formula wrongly multiplies those of the weight by the number of groups.
    """
    transposed, needed = others[4], others[7]
    count: Any = conv_flop_count
    forward = int(count(inputs.shape, weight.shape, out_gradient.shape, transposed))
    return forward * (int(needed[0]) + int(needed[1]))


def _count_attention(query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> int:
    count: Any = sdpa_flop_count
    return int(count(query.shape, key.shape, value.shape))


def _count_attention_backward(_: Tensor, *inputs: Any, **more: Any) -> int:
    """Returns twice the forward pass; the products that the kernel repeats are not counted."""
    return 2 * _count_attention(*inputs)


_FORMULAS = flop_registry | {
    _ATEN.addmm_: flop_registry[_ATEN.addmm],
    _ATEN.convolution_backward: _count_convolution_backward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _count_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _count_attention_backward,
}
