"""Between two rows of metrics, no step of a training waits for a GPU but where a table says so.

The steps are the loop's own, of every objective, on one and two ranks. ``tests.device_waits`` finds
on a CPU where a GPU would be waited for. Each entry of ``ALLOWED`` is a wait that there is, with
its reason and the cases that show it; a new one fails here, and so does one that is gone. FSDP and
ZeRO are not among the engines: they refuse parameters on a CPU that has an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mclclip.checkpoint import CheckpointConfig
from mclclip.checkpoint.checkpoints import Checkpoints
from mclclip.data.batches import Batch
from mclclip.engines.engine import Engine
from mclclip.models import transforms
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.models.preparing import prepare_model
from mclclip.objectives import base
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.ranks.step_boundary import StepBoundary
from mclclip.run.recorder import Recorder, StepProfiler
from mclclip.train.loop import ModelWithObjective, Trainer
from mclclip.train.symptoms import Symptoms
from tests import device_waits, tiny
from tests.contracts import objective_cases
from tests.device_waits import DEVICE, DeviceWaits, following
from tests.engines import build_engine
from tests.matrix import kept

Ranks = Callable[..., list[Any]]
GLOBAL_BATCH, NUM_CLASSES, WARM_UP, STEPS = 8, 12, 1, 2

# The first case of every kind that is shipped, and others that do something else on the device.
OBJECTIVES: dict[str, Any] = {
    each.kind: each.settings
    for each in reversed(objective_cases.CASES.values())
    if each.kind in (*base.kinds(), "sum")
}
OBJECTIVES |= {
    "trained temperature": {"kind": "info_nce", "temperature": {"learnable": True}},
    "supcon, one view": {"kind": "supcon", "attribute": "class", "num_views": 1},
    "moco v2, modified": {"kind": "moco", "queue_size": 16, "epsilon": 0.1},
    "moco v3": {"kind": "moco", "version": "v3"},
    "simlap, closest": {
        "kind": "simlap",
        "attribute": "class",
        "pairs": "n_closest",
        "closest_by": "label_embeddings",
    },
    "preserve, exact": {"kind": "preserve", "exact": True, "what": "features", "end_factor": 0.5},
    "near copies, threshold": {"kind": "info_nce", "near_copies": {"threshold": 0.9}},
    "near copies, margin": {"kind": "info_nce", "near_copies": {"margin": 0.05}},
    "distill, exact": {"kind": "distill", "exact": True, "end_factor": 0.5},
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip, average": {"clip_grad_norm": 1.0, "ema_decay": 0.9},
    "cached": {"micro_batch": 2, "clip_grad_norm": 1.0},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "clip_grad_norm": 1.0},
    "fp16, lion": {"precision": "fp16", "optimizer": "lion"},
    "lion": {"optimizer": "lion"},
    "lars": {"optimizer": "lars"},
    "sgd": {"optimizer": "timm:sgd"},
}

# The wait, its reason, and the cases (objective, engine) that show it.
ALLOWED: list[tuple[str, str, set[tuple[str, str]]]] = [
    (
        "cpu in objectives.simlap._pairs",
        "which class a sample is paired with is drawn by integers of 64 bits without a sign, keyed "
        "by the sample, and torch has them on no device; the classes that the label filter takes "
        "for close are those of its weights at the step",
        {("simlap", "plain"), ("simlap, closest", "plain")},
    ),
    (
        "_local_scalar_dense in engines.engine.update",
        "under fp16 a step that overflows is left out, by parameters outside of the engine too, "
        "whose optimizers are plain code",
        {("mlcd", "fp16"), ("mlcd", "fp16, lion")},
    ),
    (
        "_local_scalar_dense in engines.engine.step",
        "GradScaler asks whether to leave out a step of an optimizer that cannot do so itself; "
        "AdamW and SGD of torch can, fused",
        {("info_nce", "fp16, lion"), ("mlcd", "fp16, lion")},
    ),
]


def trainer_of(
    options: dict[str, Any], how: dict[str, Any], folder: Path, batches: Iterable[Batch]
) -> Trainer:
    """The loop of a tiny model with this objective, on the device."""
    context = Context(collectives.rank(), collectives.world_size(), device=DEVICE)
    parsed, how = base.parse(options), dict(how)
    precision, optimizer = how.get("precision", "fp32"), how.pop("optimizer", "adamw")
    compiled = how.pop("compile", "none")
    model = load_towers(tiny.of_few_ids(tiny.ONE_BLOCK), seed=1)
    lock = {
        "image_blocks": "all",
        "image_norm": True,
        "image_projection": True,
        "text": parsed.reads.captions,
        "logit_scale": parsed.reads.logit_scale,
    }
    prepare_model(
        model, lock=lock, lora=None, seed=0, precision=precision, grad_checkpointing=False
    )
    model.to(DEVICE)
    classes = SimpleNamespace(num_classes=NUM_CLASSES, centroids=lambda: np.zeros((NUM_CLASSES, 8)))
    setting = base.ObjectiveInputs(
        model,
        context,
        seed=3,
        precision=precision,
        classes=cast(Any, classes),
        teacher=objective_cases.teacher_of,
    )
    trainee = ModelWithObjective(model, parsed.build(setting), precision).to(DEVICE)
    if compiled == "model":
        model.compile_blocks(backend="aot_eager")
    if compiled == "step":
        trainee.compile(backend="aot_eager")
    engine = build_engine(
        how.pop("name", "ddp"),
        trainee,
        partial(build_optimizer, name=optimizer, weight_decay=0.1, lr=1e-3),
        context,
        blocks=model.blocks(),
        outside=trainee.objective.outside(),
        **how,
    )
    recorder = Recorder(
        folder, context, name="", global_batch=GLOBAL_BATCH, start=0, total=100,
        steps_per_epoch=100, log_every=50, share_bad=len, track=[], config={},
    )  # fmt: skip
    return Trainer(
        module=trainee,
        engine=engine,
        checkpoints=Checkpoints(folder / "checkpoints", CheckpointConfig(keep=1)),
        recorder=recorder,
        symptoms=Symptoms(trainee, engine, recorder),
        boundary=StepBoundary(context, folder, poll_s=1.0),
        learning_rate=lambda step: 1e-3,
        seed_words=(0,),
        checkpoint_every=100,
        batches=batches,
        profiler=StepProfiler(folder, [], 100, DEVICE, context.rank),
    )


def batch_of(step: int, parsed: base.ObjectiveOptions) -> Batch:
    """This rank's columns of a step's batch, in main memory, as the loader gives them."""
    random, reads = torch.Generator().manual_seed(step), parsed.reads
    local = GLOBAL_BATCH // collectives.world_size()
    columns = reads.num_classes_per_sample
    classes = torch.stack([torch.randperm(NUM_CLASSES, generator=random) for _ in range(8)])
    images = torch.randint(0, 256, (GLOBAL_BATCH, 3, 32, 32), generator=random, dtype=torch.uint8)
    batch = Batch(
        views=[images for _ in range(reads.num_views)],
        text=torch.randint(1, 400, (GLOBAL_BATCH, 20), generator=random),
        group_ids=torch.arange(GLOBAL_BATCH)[:, None] % 2,
        classes=classes[:, :columns] if columns else None,
        sample_id=torch.arange(GLOBAL_BATCH),
        step=step,
        group_size=GLOBAL_BATCH // 2,
        extras={
            name: torch.randn(
                GLOBAL_BATCH, objective_cases.teacher_of(encoder).width, generator=random
            )
            for name, (encoder, _) in reads.stored.items()
        }
        | {name: torch.arange(GLOBAL_BATCH) // 2 for name in reads.digests},
    )
    if not reads.captions:
        batch.text = None
    return batch.slice(collectives.rank() * local, (collectives.rank() + 1) * local)


def waits_of(options: dict[str, Any], how: dict[str, Any], folder: Path) -> dict[str, str]:
    """Waits of two steps after the first one, with the lines that led there."""
    torch.set_num_threads(1)
    transforms.planes_on.cache_clear()  # those of another case are unknown to these waits
    parsed = base.parse(options)
    with following() as waits:

        def batches() -> Iterator[Batch]:
            for step in range(WARM_UP + STEPS):
                yield batch_of(step, parsed)
                claim(waits, trainer)
                waits.recording = step + 1 >= WARM_UP
            waits.recording = False

        trainer = trainer_of(options, how, folder, batches())
        trainer.run()
    return waits.found


def claim(waits: DeviceWaits, trainer: Trainer) -> None:
    """GradScaler has no index for its device, which has one here."""
    scaler = trainer.engine.scaler
    if scaler.is_enabled():
        waits.claim(scaler._scale, scaler._growth_tracker)


PAIRS = [(name, "plain") for name in OBJECTIVES] + [
    (name, engine) for name in ("info_nce", "mlcd") for engine in ENGINES if engine != "plain"
]
CASES = [(world_size, *pair) for world_size in (1, 2) for pair in PAIRS]
QUICK = [(2, "simlap, closest", "plain")]


@pytest.mark.parametrize(
    ("world_size", "name", "engine"), kept(CASES, *map(CASES.index, QUICK)), ids=str
)
def test_steps_wait_for_the_device_only_where_the_table_says_so(
    ranks: Ranks, world_size: int, name: str, engine: str, tmp_path: Path
) -> None:
    expected = {wait for wait, _, cases in ALLOWED if (name, engine) in cases}
    for found in ranks(world_size, waits_of, OBJECTIVES[name], ENGINES[engine], tmp_path):
        new = "\n".join(f"{wait}\n{found[wait]}" for wait in found.keys() - expected)
        assert not new, new
        assert not expected - found.keys(), "take these off ALLOWED"


# --- compiled ---

READS = (
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::masked_select",
    "aten::equal", "aten::_unique2", "aten::bincount",
)  # fmt: skip
"""Events of torch's profiler that make the host wait where their tensor lies on a GPU."""


def readings_of(options: dict[str, Any], how: dict[str, Any], folder: Path) -> tuple[int, int]:
    """READS of two steps after the first one, and how many graphs torch has compiled. The profiler
    counts tensors of main memory too: nothing tells them apart on a CPU."""
    from torch import _dynamo  # seconds to import

    torch.set_num_threads(1)
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    parsed, profiler = base.parse(options), profile(activities=[ProfilerActivity.CPU])

    def batches() -> Iterator[Batch]:
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                profiler.start()
            yield batch_of(step, parsed)
        profiler.stop()

    trainer_of(options, how, folder, batches()).run()
    reads = sum(event.count for event in profiler.key_averages() if event.key in READS)
    return reads, _dynamo.utils.counters["stats"]["unique_graphs"]


COMPILED = [(name, what) for name in OBJECTIVES for what in ("model", "step")]


@pytest.mark.parametrize(
    ("name", "what"), kept(COMPILED, *map(COMPILED.index, [("info_nce", "model")])), ids=str
)
def test_compiled_steps_read_no_more_than_others(
    ranks: Ranks, name: str, what: str, tmp_path: Path
) -> None:
    """Torch does not compile where waits are followed, so that here they are counted."""
    plain, compiled = (
        ranks(1, readings_of, OBJECTIVES[name], {"compile": how}, tmp_path / how)[0]
        for how in ("none", what)
    )
    assert compiled[1] > plain[1] == 0
    assert compiled[0] <= plain[0]


def test_planted_readings_are_counted(ranks: Ranks, tmp_path: Path) -> None:
    """One reading a step, of the loss."""
    plain, planted = (
        ranks(1, function, OBJECTIVES["info_nce"], {}, tmp_path / function.__name__)[0][0]
        for function in (readings_of, readings_with_one_more)
    )
    assert planted == plain + STEPS


def readings_with_one_more(*arguments: Any) -> tuple[int, int]:
    """``readings_of`` a loop that looks at every loss."""
    engine_update = Engine.update

    def update(self: Engine, *given: Any, **options: Any) -> dict[str, torch.Tensor]:
        parts = engine_update(self, *given, **options)
        parts["loss"].item()
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "update", update)
        return readings_of(*arguments)


# --- what the others rest on ---


def planted(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Waits by name, on a tensor of the device."""
    x = torch.arange(6.0).to(device, non_blocking=True)
    here = torch.arange(6.0)
    index = torch.arange(6)
    return {
        "item": lambda: x.sum().item(),
        "bool": lambda: bool((x > 1).any()),
        "float of a view": lambda: float(x[2:].detach()[0]),
        "nonzero": lambda: (x > 1).nonzero(),
        "where": lambda: torch.where(x > 1),
        "mask": lambda: x[x > 1],
        "write by a mask": lambda: x.__setitem__(x > 1, 0.0),
        "unique": lambda: x.unique(),
        "masked_select": lambda: x.masked_select(x > 1),
        "bincount": lambda: x.long().bincount(),
        "equal": lambda: torch.equal(x, x + 1),
        "tolist": lambda: x.tolist(),
        "cpu": lambda: x.cpu(),
        "numpy": lambda: x.numpy(),
        "tensor": lambda: torch.tensor([1.0], device=device),
        "new_tensor": lambda: x.new_tensor(1.0),
        "blocking copy": lambda: here.to(device),
        "blocking copy into it": lambda: x.copy_(here),
        "index of main memory": lambda: x[index],
        "sum of both": lambda: x + here,
        "after a factory": lambda: torch.zeros(3, device=device).sum().item(),
        "after a gradient": lambda: torch.autograd.grad(
            (2 * x.requires_grad_()).sum(), x
        )[0].sum().item(),
    }  # fmt: skip


def test_planted_waits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_waits, "PACKAGE", Path(__file__).parent)  # these tests wait here
    for name in planted(torch.device("cpu")):
        with following() as waits:
            work = planted(DEVICE)[name]
            waits.recording = True
            work()
        assert len(waits.found) == 1, name


def test_tensors_are_as_before_once_the_block_is_left() -> None:
    names = ("to", "cpu", "numpy", "tolist", "new_tensor", "device")
    before = {name: name in vars(torch.Tensor) for name in names}
    with following():
        assert (torch.zeros(1).to(DEVICE) + 1).device == DEVICE
    assert {name: name in vars(torch.Tensor) for name in names} == before
    assert torch.zeros(1).device == torch.device("cpu")
