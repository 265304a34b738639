"""The fused kernels: their values in Triton's interpreter, and that they compile for two GPUs.

Triton is switched to its interpreter when it is imported, so both happen in processes of their own.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers import kernels as class_kernels
from mclclip.ranks.parent_death import die_with_parent
from tests.matrix import kept

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="no Triton: pip install triton to run these tests"
)
Call = Callable[..., Any]
Pairs = tuple[Tensor, Tensor]
HALVES = [torch.bfloat16, torch.float16]
KINDS = [None, *HALVES]
NO_PAIRS = torch.zeros(2, 0, dtype=torch.int64)


# --- processes ---


def _process(start: Callable[..., None], *args: Any) -> Iterator[Call]:
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=start, initargs=args) as pool:
        yield lambda *call: pickle.loads(pool.submit(_call, pickle.dumps(call)).result())


def _call(call: bytes) -> bytes:
    """Pickled here: a queue would send tensors as handles that end with their process."""
    function, *args = pickle.loads(call)
    return pickle.dumps(function(*args))


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Call]:
    """``interpreter(function, *args)``: its result under Triton's interpreter."""
    yield from _process(_interpret)


def _interpret() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton
    from triton import language
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        _mend_bounds_of_loops(interpreter)

    plain = InterpreterBuilder.create_dot

    def value(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != language.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    # The interpreter keeps bfloat16 as its bits, and multiplies them as integers.
    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *more: Any) -> TensorHandle:
        return plain(self, value(a), value(b), *more)

    InterpreterBuilder.create_dot = create_dot


def _mend_bounds_of_loops(interpreter: Any) -> None:
    """Lets the interpreter of Triton up to 3.6 run a loop beside numpy 2.4.

    A bound that is no constant is an array of one element there, and becomes a Python int by
    ``int(array)``, which numpy refuses from 2.4 on: "only 0-dimensional arrays can be converted to
    Python scalars". Triton 3.7 takes the element. Only the interpreter does this: a compiled loop
    is not concerned.
    """
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)  # which notes what to put back after the launch
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_and_mend


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """``compiler(function, *args)``: its result where Triton compiles."""
    yield from _process(_compile_in, tmp_path_factory.mktemp("triton"))


def _compile_in(folder: Path) -> None:
    die_with_parent()
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    os.environ.pop("TRITON_INTERPRET", None)


# --- what is computed, plainly in float64 ---


class Case:
    """A batch of these sizes and the pairs that do not count."""

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        dim: int,
        pairs: Tensor = NO_PAIRS,
        half: torch.dtype | None = None,
        scale: float = 16.0,
        shift: float = 0.0,
    ) -> None:
        random = torch.Generator().manual_seed(num_rows + dim)
        draw = lambda *size: torch.randn(size, generator=random)  # noqa: E731
        self.features = functional.normalize(draw(num_rows, dim), dim=1)
        self.centers = functional.normalize(draw(num_columns, dim), dim=1)
        self.weights, self.grad = draw(num_rows) / num_rows, draw(num_rows, dim)
        self.scaled, self.shift, self.half = self.features * scale, shift, half
        self.pairs: Pairs = (pairs[0], pairs[1])
        self.elsewhere = 0.0  # the other ranks' part of log_n

    def exact(self, x: Tensor) -> Tensor:
        return x.to(self.half or x.dtype).double()

    def scores(self) -> Tensor:
        scores = self.exact(self.scaled) @ self.exact(self.centers).T
        scores[self.pairs] = -torch.inf
        return scores

    def log_n(self) -> Tensor:
        """With an inf for every fifth row, and for rows without a negative."""
        found = self.scores().logsumexp(dim=1).float() + self.elsewhere
        found[::5] = torch.inf
        return found.nan_to_num(torch.inf, torch.inf, torch.inf)

    def pulled(self) -> tuple[Tensor, Tensor]:
        shares = (self.scores() - self.log_n()[:, None]).exp() * self.weights.double()[:, None]
        of_rows = self.grad + shares @ self.exact(self.centers)
        return of_rows, shares.T @ self.exact(self.features)


def fused_sums(case: Case) -> tuple[Tensor, Tensor]:
    return class_kernels.negative_sums(
        case.scaled, case.centers, case.pairs, case.shift, half=case.half
    )


def fused_pull(case: Case) -> tuple[Tensor, Tensor]:
    grad = case.grad.clone()
    tensors = case.features, case.scaled, case.centers, case.log_n(), case.weights
    of_centers = class_kernels.pull(*tensors, case.pairs, grad, half=case.half)
    return grad, of_centers


def fused(case: Case) -> tuple[Tensor, ...]:
    return *fused_sums(case), *fused_pull(case)


def check(call: Call, case: Case) -> None:
    sums, largest, of_rows, of_centers = call(fused, case)
    wanted = (case.scores() - case.shift).exp().sum(dim=1)
    # Sums in fp32 of products that are exact in it; shares are rounded before they multiply.
    torch.testing.assert_close(sums.double(), wanted, rtol=2e-5, atol=0)
    most = case.scores().max() if case.centers.numel() else torch.tensor(-torch.inf)
    assert float(largest) == pytest.approx(float(most), abs=2e-5)
    step = torch.finfo(case.half).eps if case.half else 2e-5
    for got, want, before in zip(
        (of_rows, of_centers), case.pulled(), (case.grad, 0.0), strict=True
    ):
        size = float((want - before).abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=step * size)


def some_pairs(num_rows: int, num_columns: int, count: int) -> Tensor:
    random = torch.Generator().manual_seed(count)
    drawn = torch.randperm(num_rows * num_columns, generator=random)[:count]
    return torch.stack([drawn // num_columns, drawn % num_columns])


# --- values ---


@pytest.mark.parametrize("half", KINDS, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "width"),
    kept([(1, 1, 16), (64, 128, 64), (130, 257, 48), (33, 65, 272), (70, 40, 24), (5, 9, 7)], 2, 5),
)
def test_the_definition(
    interpreter: Call, num_rows: int, num_columns: int, width: int, half: torch.dtype | None
) -> None:
    """Whole tiles, ragged edges on all sides, and widths that are no multiple of a block."""
    pairs = some_pairs(num_rows, num_columns, count=min(num_rows * num_columns // 20, 60))
    check(interpreter, Case(num_rows, num_columns, width, pairs, half))


@pytest.mark.parametrize("half", KINDS, ids=str)
def test_pairs_at_the_edges_of_tiles(interpreter: Call, half: torch.dtype | None) -> None:
    corners = [0, 31, 32, 63, 64, 127, 128, 149]
    pairs = torch.cartesian_prod(torch.tensor(corners), torch.tensor([*corners, 255, 256, 259]))
    check(interpreter, Case(150, 260, 32, pairs.flip(0).T, half))


def test_more_columns_than_a_program_sums(interpreter: Call) -> None:
    count = class_kernels._TILES_PER_PROGRAM * 64
    pairs = torch.tensor([[0, 1, 1, 2], [count - 1, count, count + 64, 2 * count]])
    check(interpreter, Case(3, 2 * count + 1, 16, pairs))


@pytest.mark.parametrize("half", KINDS, ids=str)
def test_a_row_and_a_column_without_any_pair_left(
    interpreter: Call, half: torch.dtype | None
) -> None:
    row, column = 3, 7
    pairs = [(row, j) for j in range(20)] + [(i, column) for i in range(40) if i != row]
    case = Case(40, 20, 32, torch.tensor(pairs).T, half)
    check(interpreter, case)
    sums, _, of_rows, of_centers = interpreter(fused, case)
    assert sums[row] == 0.0
    assert torch.equal(of_rows[row], case.grad[row]) and not of_centers[column].any()


def test_the_shift(interpreter: Call) -> None:
    """Scores whose exp is beyond fp32."""
    case = Case(40, 70, 16, scale=140.0, shift=60.0)
    assert case.scores().max() > 90.0
    check(interpreter, case)


@pytest.mark.parametrize("half", KINDS, ids=str)
def test_without_negatives(interpreter: Call, half: torch.dtype | None) -> None:
    check(interpreter, Case(10, 0, 16, half=half))


@pytest.mark.parametrize("half", KINDS, ids=str)
def test_small_weights(interpreter: Call, half: torch.dtype | None) -> None:
    """A mean over a large batch and many classes: shares below what fp16 can tell from 0."""
    case = Case(40, 300, 16, half=half, scale=4.0)
    case.weights = case.weights.abs() * 1e-7
    case.grad.zero_()
    case.elsewhere = 12.0
    check(interpreter, case)


def test_no_weight_no_pull(interpreter: Call) -> None:
    case = Case(40, 30, 16)
    case.weights.zero_()
    grad, of_centers = interpreter(fused_pull, case)
    assert torch.equal(grad, case.grad) and not of_centers.any()


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_centers_may_be_rounded_before(interpreter: Call, half: torch.dtype) -> None:
    case = Case(40, 30, 16, half=half)
    before = interpreter(fused, case)
    case.centers = case.centers.to(half)
    for one, other in zip(before, interpreter(fused, case), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("half", kept(KINDS, 1), ids=str)
def test_the_same_bits_again(interpreter: Call, half: torch.dtype | None) -> None:
    """Whatever the order in which the pairs come."""
    case = Case(70, 140, 48, some_pairs(70, 140, 300), half)
    first = interpreter(fused, case)
    case.pairs = (case.pairs[0].flip(0), case.pairs[1].flip(0))
    for one, other in zip(first, interpreter(fused, case), strict=True):
        assert torch.equal(one, other)


def test_wrong_types() -> None:
    case = Case(4, 3, 16)
    with pytest.raises(ValueError, match="the kernels got torch.float64: wanted float32"):
        class_kernels.negative_sums(case.scaled.double(), case.centers, case.pairs, 0.0)
    case.grad = case.grad.T
    with pytest.raises(ValueError, match="want contiguous float32"):
        fused_pull(case)


# --- where they run ---


def test_where_they_are_available(interpreter: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert interpreter(class_kernels.available, cpu)
    assert not class_kernels.available(cpu)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not class_kernels.available(cpu)


@pytest.mark.parametrize(("kind", "capability"), kept([("bf16", 80), ("bf16", 90), ("fp32", 80)]))
def test_they_compile(compiler: Call, kind: str, capability: int) -> None:
    """For an A100 and an H100: which needs none. The interpreter takes what the compiler does not.

    99 KiB of shared memory is what the smallest GPU of this generation has.
    """
    for shared, code in compiler(compiled, kind, capability):
        assert shared <= 99 * 1024
        assert ("mma" in code) == (kind != "fp32")


def compiled(kind: str, capability: int) -> list[tuple[int, str]]:
    """(bytes of shared memory, PTX) of every kernel."""
    full = kind == "fp32"
    sums = class_kernels._FULL if full else class_kernels._HALF_SUMS
    pull = class_kernels._FULL if full else class_kernels._HALF_PULL
    sizes = {"ROWS": sums.own, "COLUMNS": sums.other, "DIM": sums.dim, "TILES": 32}
    found = [_compiled(0, kind, capability, sizes, sums.options)]
    for own_are_rows in (True, False):
        sizes = {"OWN": pull.own, "OTHER": pull.other, "DIM": pull.dim, "OUT": pull.out}
        sizes["OWN_ARE_ROWS"] = own_are_rows
        found.append(_compiled(1, kind, capability, sizes, pull.options))
    return found


TYPES = {"num_rows": "i32", "num_columns": "i32", "num_own": "i32", "num_other": "i32"}
TYPES |= {"dim": "i32", "shift": "fp32", "starts": "*i32"}
TYPES |= dict.fromkeys(["pairs_row", "pairs_column", "pairs_own", "pairs_other"], "*i64")
TYPES |= dict.fromkeys(["sums", "largest", "log_n", "weights", "unit", "out"], "*fp32")


def _compiled(
    number: int, kind: str, capability: int, sizes: dict[str, int], options: dict[str, Any]
) -> tuple[int, str]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = class_kernels._kernels()[number]
    names = [param.name for param in kernel.params]
    types = dict.fromkeys(names, f"*{kind}") | dict.fromkeys(sizes, "constexpr")
    types |= {name: TYPES[name] for name in names if name in TYPES}
    aligned = [i for i, name in enumerate(names) if types[name][0] == "*" or name == "dim"]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, types, {(names.index(n),): v for n, v in sizes.items()}, attrs)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return found.metadata.shared, found.asm["ptx"]


# --- through the loss ---


def head_step(kind: str, half: torch.dtype | None, fused: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, feature gradient and center gradient of one step with 70 classes of width 24."""
    from mclclip.objectives.class_centers.rows import ShardedClassCenters, normal_rows
    from mclclip.objectives.mlcd import ClassCenterLoss, NegativeDraw

    random = torch.Generator().manual_seed(0)
    features = torch.randn(40, 24, generator=random).requires_grad_()
    labels = torch.stack([torch.randperm(70, generator=random)[:3] for _ in range(40)])
    centers = ShardedClassCenters(70, 24, normal_rows(24, 1), draw=NegativeDraw(70, 0.6, 2))
    centers.begin(0)
    kernels = class_kernels.Kernels(half) if fused else None
    objective = ClassCenterLoss(centers, kind, scale=20.0, tile=16, kernels=kernels)  # type: ignore[arg-type]
    loss = objective(functional.normalize(features, dim=1), labels)["loss"]
    loss.backward()
    assert features.grad is not None and centers.grad is not None
    return loss.detach(), features.grad, centers.grad


@pytest.mark.parametrize(("half", "tolerance"), [(None, 1e-5), (torch.float16, 1e-2)])
@pytest.mark.parametrize("kind", ["mlcd", "mlc"])
def test_the_loss_is_the_plain_one(
    interpreter: Call, kind: str, half: torch.dtype | None, tolerance: float
) -> None:
    for got, want in zip(
        interpreter(head_step, kind, half, True), head_step(kind, None, False), strict=True
    ):
        assert torch.linalg.vector_norm(got - want) <= tolerance * torch.linalg.vector_norm(want)


@pytest.mark.parametrize("precision", ["fp32", "float64"])
def test_where_kernels_cannot_run_they_are_refused(precision: str) -> None:
    cpu = torch.device("cpu")
    assert class_kernels.kernels_of("plain", cpu, precision) is None
    with pytest.raises(ValueError, match="set kernel=plain"):
        class_kernels.kernels_of("triton", cpu, precision)
