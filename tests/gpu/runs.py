"""Verbs on the device: reading, embedding, evaluation, killed and resumed trainings, the demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mclclip import method
from mclclip.checkpoint import step_files
from mclclip.config import Config, dump
from mclclip.data.batches import Batch, TrainingBatches
from mclclip.data.groups import group_samples
from mclclip.data.loader import run_ahead
from mclclip.data.sample_index import SampleIndex
from mclclip.eval import results
from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import Context, start_loader_worker
from mclclip.run.artifacts import RunPaths
from mclclip.verbs import cluster, demo, doctor, embed, export, index
from mclclip.verbs import eval as evaluation
from tests import tiny
from tests.batches import training_batches
from tests.gpu import Skip
from tests.gpu.checks import Where, check, close, same_bits

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def _config(where: Where, name: str, device: torch.device, *overrides: str) -> Config:
    data = where.folder / "data"
    if not data.exists():
        tiny.make_data(data)
    return tiny.make_config(where.folder / name, data, f"device={device.type}", *overrides)


# --- reading ---


def _batches(where: Where) -> TrainingBatches:
    config = _config(where, "reading", CPU)
    index.run(config, Context())
    samples = SampleIndex.open(RunPaths.of(config).index)
    labels = np.arange(len(samples)) % 3
    labels[samples.bad_ids()] = -1
    grouped = group_samples(labels, (3,))
    model = load_towers(tiny.MODEL, seed=0)
    return training_batches(
        index=samples,
        grouped=grouped,
        transform=model.preprocess_train,
        tokenizer=model.tokenizer,
        global_batch=24,
        policy="backoff",
        order="proportional",
        seed=0,
        stage=1,
    )


@check("pinned memory: batches arrive as they were read")
def pinned(where: Where) -> str:
    """By forked workers while the device is in use: pinned, equal to what is read without them."""
    if where.on_gpu:
        torch.ones(1, device=where.device).sum().item()  # workers are forked after this
    batches, steps = _batches(where), range(40)
    wanted = [batches[step] for step in steps]
    loader: DataLoader[Batch] = DataLoader(
        batches,
        batch_size=None,
        sampler=steps,
        num_workers=2,
        worker_init_fn=start_loader_worker,
        pin_memory=where.on_gpu,
    )
    for got, want in zip(loader, wanted, strict=True):
        moved = got.to(where.device)
        for tensor, there, read in zip(got.tensors(), moved.tensors(), want.tensors(), strict=True):
            assert tensor.is_pinned() == where.on_gpu, f"{list(tensor.shape)} is not pinned"
            busy = torch.ones(256, 256, device=where.device)
            for _ in range(5):
                busy = busy @ busy * 1e-3
            same_bits(f"batch {got.step}", there, read)
    if not where.on_gpu:
        raise Skip("the CPU has no pinned memory; batches of workers are equal")
    return f"{len(steps)} batches"


# --- embedding and evaluation ---


@check("pinned memory: rows arrive as they were computed")
def rows_reach_the_host(where: Where) -> None:
    """While the device writes over them already."""
    first = torch.rand(4096 if where.on_gpu else 64, 4096, device=where.device)
    product = first @ first.T
    held = torch.empty_like(product)

    def compute(number: int) -> tuple[Tensor, int]:
        for _ in range(5):
            torch.matmul(product, product, out=held)
        return held.fill_(number), number

    if not where.on_gpu:
        raise Skip("a CPU's rows are not copied")
    for rows, number in run_ahead(compute, range(8)):
        assert (rows == number).all(), number


@check("towers: features are those of the CPU", limit_s=150.0)
def towers(where: Where) -> str:
    """Images and texts in fp32 to 1e-4, in bf16 to 5e-2, of a ViT and a ResNet of open_clip."""
    names = ["ViT-B-32", "RN50"] if where.on_gpu else [tiny.MODEL]
    worst = {"fp32": 0.0, "bf16": 0.0}
    for name in names:
        model = load_towers(name, seed=0)  # type: ignore[arg-type]
        size = model.image_size
        assert isinstance(size, int)
        images = torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(0))
        tokens = model.tokenizer([f"a photo of {number} things" for number in range(8)])
        with torch.inference_mode():
            wanted = model.encode_image(images, True), model.encode_text(tokens, True)
            model.to(where.device)
            for precision, tolerance in (("fp32", 1e-4), ("bf16", 5e-2)):
                half = precision == "bf16"
                with torch.autocast(where.device.type, dtype=torch.bfloat16, enabled=half):
                    image = model.encode_image(images.to(where.device), True)
                    text = model.encode_text(tokens.to(where.device), True)
                for what, got, want in zip(("images", "texts"), (image, text), wanted, strict=True):
                    error = close(f"{name}, {precision}, {what}", got, want, tolerance)
                    worst[precision] = max(worst[precision], error)
    return ", ".join(f"{name} off by {error:.1g}" for name, error in worst.items())


@check("embed, cluster, eval: what the CPU gives", limit_s=200.0)
def verbs(where: Where) -> str:
    """Embeddings to 2e-5 (bf16: 2e-2), the same pseudo labels but for 3 %, the same figures up to
    one answer."""
    found: dict[str, dict[str, Any]] = {}
    for name, device, precision in (
        ("cpu", CPU, "fp32"),
        ("fp32", where.device, "fp32"),
        ("bf16", where.device, "bf16"),
    ):
        options = [f"embed.precision={precision}", f"eval.precision={precision}", "base=null"]
        config = _config(where, name, device, *options)
        context = Context(device=device)
        index.run(config, context)
        export.stage(config, context, stage=0)
        layout = RunPaths.of(config)
        embed.run(config, context, stage=0, text=True)
        cluster.run(config, context, stage=0)
        rows = evaluation.run(config, context)
        parts = {
            what: np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])
            for what, folder in (
                ("images", layout.embeddings(0)),
                ("texts", layout.text_embeddings),
            )
        }
        labels = np.load(layout.clusters(0) / "cluster_labels.npy")
        found[name] = parts | {"labels": labels, "rows": {r.metric: r.value for r in rows}}
    worst = {}
    for name, tolerance in (("fp32", 2e-5), ("bf16", 2e-2)):
        worst[name] = max(
            close(
                f"{what}, {name}",
                torch.from_numpy(found[name][what]),
                torch.from_numpy(found["cpu"][what]),
                tolerance,
            )
            for what in ("images", "texts")
        )
    differ = np.mean(found["fp32"]["labels"] != found["cpu"]["labels"])
    assert differ <= 0.03, f"{100 * differ:.1f} % of the pseudo labels differ"
    for metric, value in found["cpu"]["rows"].items():
        got = found["fp32"]["rows"][metric]
        assert abs(got - value) <= 50.0, f"{metric}: {got}, on the CPU {value}"  # one of two pairs
    return ", ".join(f"{name} off by {error:.1g}" for name, error in worst.items())


# --- kill -9 and the same command again ---

_KILLED = """
import sys
from mclclip.cli import entry
from tests.e2e.conftest import KillAfter
if int(sys.argv[1]):
    KillAfter("update", int(sys.argv[1]))()
del sys.argv[1]
entry.command()
"""


@check("kill -9 and resume, fp16, in the background", "fp16", "asynchronous", limit_s=240.0)
@check("kill -9 and resume, bf16", "bf16", limit_s=240.0)
@check("kill -9 and resume, fp32", "fp32", limit_s=240.0)
@check("kill -9 and resume, compiled, bf16", "bf16", "", "model", limit_s=400.0)
@check("kill -9 and resume, compiled, two sizes", "bf16", "", "model", "two", limit_s=400.0)
def killed(
    where: Where, precision: str, saving: str = "", compiled: str = "", sizes: str = ""
) -> str:
    """Weights, moments and losses are those of an undisturbed training, bit for bit."""
    if compiled and not where.on_gpu and "MCLCLIP_SLOW" not in os.environ:
        raise Skip("compiles for a minute on a CPU: set MCLCLIP_SLOW=1")
    options = [
        f"base.engine.compile={compiled or 'none'}",
        f"base.precision={precision}",
        f"base.checkpoint.asynchronous={str(saving == 'asynchronous').lower()}",
        "base.log_every=1",
        "data.num_workers=1",
        "deterministic=true",
    ]
    if sizes:  # the second of which is compiled after the kill alone
        options.append('base.image_size=[{"size": 16, "epochs": 0.5}]')
    config = _config(where, "undisturbed", where.device, *options)
    index.run(config, Context())
    shutil.copytree(where.folder / "undisturbed", where.folder / "killed")
    found = []
    for name, kills in (("undisturbed", [0]), ("killed", [4, 1, 0])):
        path, run_dir = where.folder / f"{name}.yaml", where.folder / name
        path.write_text(dump(_config(where, name, where.device, *options)))
        for count in kills:
            _mclclip(count, "train", "--stage", "0", "--config", str(path))
        found.append(_left(run_dir))
    for name, value in found[0].items():
        assert found[1][name] == value, f"{name} differ"
    return "killed after updates 4 and 5"


def _mclclip(kill_after: int, *arguments: str) -> None:
    """The command line in a process that kills itself after so many updates (0: never)."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(kill_after), *arguments],
        capture_output=True,
        text=True,
        env=tiny.environment(),
        cwd=ROOT,
    )
    print(done.stderr)
    wanted = -9 if kill_after else 0
    assert done.returncode == wanted, f"{arguments[0]}: code {done.returncode}"


def _left(run_dir: Path) -> dict[str, Any]:
    """The last weights and moments of stage 0 by part, and the rows' losses."""
    directory = run_dir / "stage_0" / "train"
    last = step_files.steps(directory / "checkpoints")[-1]
    found: dict[str, Any] = {"steps": last}
    for part in ("model", "optimizer"):
        state = step_files.load_model_state(directory / "checkpoints", last, part)
        found[part] = {name: tensor.numpy().tobytes() for name, tensor in state.items()}
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    found["losses"] = [(row["step"], row["loss"], row["grad_norm"]) for row in rows]
    return found


# --- whole runs ---


@check("a whole run with class centers, profiled", limit_s=200.0)
def class_centers_run(where: Where) -> str:
    """Cluster, train MLCD in bf16, export, evaluate."""
    config = _config(
        where,
        "mlcd",
        where.device,
        "num_stages=1",
        "train.objective.kind=mlcd",
        "train.precision=bf16",
        "train.profile_steps=[2]",
        "train.engine.micro_batch=10",
        "train.objective.labels_per_sample=2",
        "cluster.labels_per_sample=2",
        "cluster.num_clusters=20",
    )
    run_dir = method.run(config, Context(device=where.device))
    directory = RunPaths.of(config).train(1)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(row["loss"]) for row in rows)
    table = next((directory / "profile").glob("*.txt")).read_text()
    if where.on_gpu:
        assert "CUDA" in table, "the profile has no times of the GPU"
        assert rows[-1]["memory_gib"] * 2**30 <= torch.cuda.get_device_properties(0).total_memory
    losses = [f"{row['loss']:.3f}" for row in rows]
    assert results.read(run_dir / "results.jsonl")
    return f"losses {losses[0]} to {losses[-1]}"


@check("demo, short form", limit_s=300.0)
def short_demo(where: Where) -> str:
    """All of the method and its controls on the device."""
    steps = where.size(120, 12)
    trained = [
        f"{kind}.{option}"
        for kind in ("base", "train")
        for option in (f"steps={steps}", f"checkpoint.every={steps // 2}", "log_every=10")
    ]
    options = [f"device={where.device.type}", "data.num_workers=2", *trained]
    if not where.on_gpu:
        options += ["num_stages=1", "controls=[]"]
    table = demo.run(where.folder / "demo", seeds=[0], overrides=options)
    assert "concat_raw" in table
    if where.on_gpu:
        assert torch.cuda.max_memory_allocated() > 0, "the demo did not run on the GPU"
        return f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
    return ""


@check("doctor")
def findings(where: Where) -> str:
    """Names the GPU; nothing fails but what a bare machine lacks."""
    found = [str(finding) for finding in doctor.findings(where.folder)]
    print("\n".join(found))
    if where.on_gpu:
        assert any(line.startswith("ok") and "gpu 0" in line for line in found), "no GPU"
    return ""
