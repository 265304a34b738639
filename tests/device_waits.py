"""Finds where Python code waits for a device, on a machine that has none.

Tensors on ``DEVICE``, which is the CPU under an index of its own, are taken to lie on a GPU: those
that were moved or made there, and all that is computed from them. Where the host reads a value of
one (``item``, ``nonzero``, a mask as an index, ``cpu``), copies to it in a blocking way, or mixes
it with a tensor of main memory, a GPU would have made the host wait, or refused. Each such place is
recorded with the functions of mclclip that led there.

What it cannot see: waits within a kernel or library call, such as those of a collective, and values
that C++ reads by itself, such as DDP's.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mclclip

DEVICE = torch.device("cpu", 0)
"""Tensors moved to this device count as a GPU's; those of torch.device("cpu") do not."""

PACKAGE = Path(mclclip.__file__).parent.resolve()
"""Only waits of its functions are recorded."""

_aten = torch.ops.aten
# Each returns values, or a shape that depends on values.
_READS = {
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
    _aten.histc,
    _aten.equal,
    _aten.is_nonzero,
    _aten.repeat_interleave,
    _aten._linalg_svd,
    _aten._linalg_eigh,
    _aten.linalg_cholesky_ex,
    _aten.linalg_inv_ex,
}
_INDEXES = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_COPIES = {_aten.copy_, _aten._to_copy}


class Readings(TorchDispatchMode):
    """Counts the numbers that are read of a tensor, each of which makes the host wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class DeviceWaits(TorchDispatchMode):
    """Within the block, ``found`` holds "operation in module.function" where ``recording`` is set.

    Device tensors are followed from the moment the block is entered, so what lies on the device is
    to be built or moved there within it; ``claim`` adds others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording = False
        self.found: dict[str, str] = {}
        self._storages: set[StorageWeakRef] = set()
        self._methods = _methods(self)

    def claim(self, *tensors: Tensor) -> None:
        """Takes these tensors to lie on the device."""
        self._storages.update(ref for tensor in tensors for ref in _storages_of(tensor))

    def on_device(self, value: Any) -> bool:
        """Whether a value is a tensor that is taken to lie on the device."""
        if not isinstance(value, Tensor):
            return False
        return any(ref in self._storages for ref in _storages_of(value))

    def note(self, what: str) -> None:
        """Records a wait, with the functions of mclclip that are being run, the innermost first."""
        if not self.recording:
            return
        frames = [
            frame
            for frame in traceback.extract_stack()
            if Path(frame.filename).resolve().is_relative_to(PACKAGE)
        ]
        if frames:
            path = Path(frames[-1].filename).resolve().relative_to(PACKAGE)
            module = ".".join(path.with_suffix("").parts)
            stack = "".join(traceback.format_list(frames))
            self.found.setdefault(f"{what} in {module}.{frames[-1].name}", stack)

    def __enter__(self) -> DeviceWaits:
        for name, (_, method) in self._methods.items():
            setattr(*_place(name), method)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, (own, _) in self._methods.items():
            if name.startswith("torch."):
                setattr(*_place(name), own)
            else:
                delattr(torch.Tensor, name)  # that of its base shows again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in given if self.on_device(tensor)]
        if there:
            self._judge(func, args, given)
        result = func(*args, **kwargs)
        if there or kwargs.get("device") == DEVICE:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            is_collective = func.namespace == "c10d"
            changed = given if is_collective or func._schema.is_mutable else []
            self.claim(*made, *(t for t in changed if is_collective or t.ndim))
        return result

    def _judge(self, func: Any, args: tuple[Any, ...], given: list[Tensor]) -> None:
        packet = func.overloadpacket
        name = func._schema.name.removeprefix("aten::")
        if packet in _READS:
            self.note(name)
        elif packet in _INDEXES:
            indices = [i for i in args[1] if isinstance(i, Tensor)]
            if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
                self.note(f"{name} by a mask")
        here = [t for t in given if t.ndim and t.numel() and not self.on_device(t)]
        if here and packet not in _COPIES and func.namespace != "c10d":
            self.note(f"{name} of main memory and device")
        elif here and packet is _aten.copy_ and not (len(args) > 2 and args[2]):
            self.note("copy_ between main memory and device")


@contextmanager
def following() -> Iterator[DeviceWaits]:
    """A block in which tensors on ``DEVICE`` are followed; set ``recording`` where to look."""
    with DeviceWaits() as waits:
        yield waits


def _storages_of(tensor: Tensor) -> list[StorageWeakRef]:
    if tensor.layout is torch.sparse_csr:
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        return [ref for part in parts for ref in _storages_of(part)]
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return [StorageWeakRef(local.untyped_storage())]


def _place(name: str) -> tuple[Any, str]:
    owner = torch if name.startswith("torch.") else torch.Tensor
    return owner, name.removeprefix("torch.")


def _methods(waits: DeviceWaits) -> dict[str, tuple[Any, Any]]:
    """Functions that do nothing, or pass by the dispatcher, where everything is on the CPU."""

    def reading(name: str) -> Callable[..., Any]:
        own = getattr(torch.Tensor, name)

        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not waits.on_device(self):
                return own(self, *args, **kwargs)
            waits.note(name)
            with torch.utils._python_dispatch._disable_current_modes():
                return own(self.detach().clone(), *args, **kwargs)

        return method

    own_to = torch.Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = kwargs.get("device", args[0] if args else None)
        moves = target == DEVICE and not waits.on_device(self)
        if moves and not kwargs.get("non_blocking") and self.numel():
            waits.note("to without non_blocking")
        if moves:
            result = own_to(self, *args, **{**kwargs, "copy": True})
            waits.claim(result)
            return result
        return own_to(self, *args, **kwargs)

    def making(owner: Any, name: str) -> Callable[..., Any]:
        own = getattr(owner, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            of_device = name == "new_tensor" and waits.on_device(args[0])
            given = name == "as_tensor" and waits.on_device(args[0])
            if (of_device or kwargs.get("device") == DEVICE) and not given:
                waits.note(name)
                waits.claim(result)
            return result

        return function

    own_device: Any = torch.Tensor.__dict__.get("device") or torch._C.TensorBase.device
    where = property(lambda self: DEVICE if waits.on_device(self) else own_device.__get__(self))
    names = ["cpu", "numpy", "tolist"]
    found: dict[str, tuple[Any, Any]] = {n: (getattr(torch.Tensor, n), reading(n)) for n in names}
    found["to"] = own_to, to
    found["new_tensor"] = torch.Tensor.new_tensor, making(torch.Tensor, "new_tensor")
    for name in ("tensor", "as_tensor"):
        found[f"torch.{name}"] = getattr(torch, name), making(torch, name)
    found["device"] = own_device, where
    return found
