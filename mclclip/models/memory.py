"""How much memory a model's training takes, found without taking any.

A model is built on torch's "meta" device, where tensors have shapes and no values, and run forward
and backward on fake tensors (`torch._subclasses.fake_tensor`), which follow every rule of views,
autocast, recomputation and saved tensors. A dispatch mode sees each storage come and go; what it
adds up is what torch's allocator would be asked for. So there is no formula to maintain for each
kind of tower, and ViT-H-14 takes seconds.

What kernels take for themselves and do not return (workspaces of cuDNN, fragments) is not seen.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mclclip.models.clip import load_image_encoder
from mclclip.models.image_encoder import ImageEncoder
from mclclip.models.loading import AnyModel, load_any

# Raised where what is computed depends on values that fakes do not have.
NeedsValues = DataDependentOutputException


def load_shapes(
    name: str | Path | Mapping[str, Any], *, text: bool = True, projector: Sequence[int] = ()
) -> AnyModel:
    """`load_any` on the "meta" device: no weights are read, fetched, drawn or allocated.

    Raises ValueError and FileNotFoundError as `load_any`, and ValueError for a model on the hub,
    which would have to be fetched.
    """
    if isinstance(name, str) and name.startswith("hf-hub:"):
        raise ValueError(
            f"model.name is {name!r}, whose configuration lies on the hub: give local-dir:PATH of "
            "a copy to plan without fetching it"
        )
    with torch.device("meta"), _StayOnMeta():
        return load_any(name, text=text, projector=projector, load_weights=False)


def load_image_shapes(name: str | Path | Mapping[str, Any]) -> ImageEncoder:
    """`load_image_encoder` on the "meta" device: the image tower of a model that is not fetched.

    Raises ValueError and FileNotFoundError as `load_image_encoder`.
    """
    with torch.device("meta"), _StayOnMeta():
        return load_image_encoder(name, load_weights=False)


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors that share nothing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def faked(module: nn.Module, *, gpu_autocast: bool = False) -> Iterator[None]:
    """Inside, `module`, built by `load_shapes`, runs as on a CPU, and new tensors are fakes too.

    `gpu_autocast`: its layer norms keep what they would keep on a GPU under autocast; the module
    is of no other use afterwards.
    """
    for child in module.modules() if gpu_autocast else ():
        if isinstance(child, nn.LayerNorm):
            child.__class__ = _GpuLayerNorm
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        yield


def peak_bytes(work: Callable[[], object], existing: Iterable[Tensor] = ()) -> int:
    """The most bytes that `work` holds at a time, beside the `existing` tensors.

    Of real tensors too; fakes (`faked`) cost nothing.
    """
    meter = _Meter(existing)
    with meter:
        work()
    return meter.peak


class _StayOnMeta(TorchFunctionMode):
    """Moving a tensor that has no values leaves it where it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[0].is_meta:
            args = [a if not isinstance(a, torch.device | str) else args[0].device for a in args]
        return func(*args, **(kwargs or {}))


class _GpuLayerNorm(nn.LayerNorm):
    """Computes in fp32 and returns its input's type: open_clip's layer norm under CUDA's autocast,
    which keeps an fp32 copy of the input. The CPU's autocast would compute in half precision."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float()).to(input.dtype)


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operations make, until nothing refers to them any more."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()
        for tensor in existing:
            self._note(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._note(storage, storage.nbytes())
        return result

    def _note(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes
