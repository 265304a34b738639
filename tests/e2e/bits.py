"""Runs one small configuration of every kind and records what it wrote, bit by bit.

    python -m tests.e2e.bits OLD.json                     at the commit before a change
    python -m tests.e2e.bits NEW.json --against OLD.json  at the commit after it

A change that only moves code must leave every digest as it was, on the same machine and with the
same versions: those of exports, embeddings, centroids, labels and grouped indices, of the rows of
metrics without what a clock says, and of the rows of results. Every configuration runs on one and
on two ranks, and once more where it is killed in the middle of a training and started again. Only
the command line is used: to record a commit that lacks this file, copy it into a checkout of that
commit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mclclip.checkpoint import step_files
from tests import tiny
from tests.e2e.conftest import Started

# Of a row: what differs in every run.
CLOCK = re.compile(r"(_s|_gib|seconds|time|mfu)$|per_s|wait|peak|gpu")
CENTERS = ("cluster.num_clusters=12", "cluster.labels_per_sample=3", "num_stages=1")
KINDS: dict[str, tuple[str, ...]] = {
    "mcl": ("controls=[ungrouped,random_groups]",),
    "mcl_cached_text": ("train.lock.text=false", "train.plan.policy=wrap", "train.steps=null",
                        "train.epochs=1"),
    "mcl_cached_gradients": ("train.engine.micro_batch=5", "train.ema_decay=0.9"),
    "mcl_fsdp": ("train.engine.name=fsdp", "train.engine.grad_checkpointing=true"),
    "mcl_lora": ("train.lora.rank=2", "train.lock.image_blocks=1", "cluster.feature=mean"),
    "lit": ("num_stages=0", "base.lock.image_blocks=0", "base.lock.image_norm=false",
            "base.lock.image_projection=false"),
    "mlcd": (*CENTERS, "train.objective.kind=mlcd", "train.objective.labels_per_sample=3"),
    "mlcd_sharded": (*CENTERS, "train.objective.kind=mlcd", "train.objective.labels_per_sample=2",
                     "train.objective.sample_rate=0.5", "train.objective.lazy=true",
                     "train.engine.name=fsdp", "cluster.method=two_level"),
    "simclr": ("num_stages=1", *(f"{part}.objective={{kind: nt_xent, temperature: 0.1}}"
                                 for part in ("base", "train"))),
    "moco": ("num_stages=1", *(f"{part}.objective={{kind: moco, version: v3, predictor: [16, 8]}}"
                               for part in ("base", "train"))),
    "moco_queue": ("num_stages=1", "train.objective={kind: moco, queue_size: 48}"),
    "simlap": (*CENTERS, "train.objective={kind: simlap, momentum: 0.9}"),
    "hcl": ("num_stages=1", "train.objective={kind: hcl}", "base.objective={kind: ifm}"),
    "single_label": (*CENTERS, "train.objective.kind=single_label",
                     "train.objective.labels_per_sample=1", "train.objective.margin=cos"),
}  # fmt: skip


def main() -> int:
    """Records all kinds at one and two ranks; exit code 1 where ``--against`` says otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--against", type=Path, help="JSON file of the commit to compare with")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="only these kinds")
    options = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = tiny.make_data(Path(folder) / "data")
        for kind in options.kinds:
            for ranks, killed in itertools.product((1, 2), (False, True)):
                name = f"{kind}_{ranks}" + "_killed" * killed
                found[name] = record(Path(folder) / name, data, KINDS[kind], ranks, killed)
                print(f"{name}: {len(found[name])} digests", flush=True)
    options.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return 0 if options.against is None else compare(json.loads(options.against.read_text()), found)


def record(
    run_dir: Path, data: Path, overrides: tuple[str, ...], ranks: int, killed: bool
) -> dict[str, str]:
    """Runs one configuration and returns the digests of what it wrote, by relative path.

    ``killed``: its processes are killed once a training has saved a checkpoint of the last stage,
    and the same command runs again.
    """
    tree = tiny.tree(run_dir, data)
    path = run_dir.with_suffix(".yaml")
    path.write_text(json.dumps(tree))  # JSON is YAML
    command = tiny.command("run", "--config", str(path), *overrides, ranks=ranks)
    if killed:
        kill_in_training(command, run_dir)
    done = subprocess.run(
        command, capture_output=True, text=True, env=tiny.environment(), timeout=1800
    )
    if done.returncode:
        raise RuntimeError(f"{path.stem} ended with {done.returncode}: {done.stderr[-2000:]}")
    digests = {**tiny.digests(run_dir), **tiny.digests(run_dir, "**/*.npy")}
    for rows in [*run_dir.glob("**/metrics.jsonl"), *run_dir.glob("**/results.jsonl")]:
        kept = [_without_clock(json.loads(line)) for line in rows.read_text().splitlines()]
        text = json.dumps(kept, sort_keys=True).replace(str(run_dir.parent), "HERE")
        digests[str(rows.relative_to(run_dir))] = hashlib.sha256(text.encode()).hexdigest()
    return digests


def kill_in_training(command: list[str], run_dir: Path) -> None:
    """Starts ``command`` and kills it where the training of its last stage has a checkpoint."""
    last = json.loads(run_dir.with_suffix(".yaml").read_text())["num_stages"]
    for word in command:
        last = int(word.partition("=")[2]) if word.startswith("num_stages=") else last
    run = Started(command, run_dir, run_dir.with_suffix(".log"))
    while run.launcher.poll() is None:
        if step_files.steps(run_dir / f"stage_{last}/train/checkpoints"):
            for pid in run.processes():
                os.kill(pid, signal.SIGKILL)
            run.gone_after_s()
            return
        time.sleep(0.005)
    raise RuntimeError(f"{run_dir.name} ended before it was killed: {run.log.read_text()[-2000:]}")


def _without_clock(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what differs in every run; the digest of an evaluation has a folder in it."""
    kept = {key: value for key, value in row.items() if not CLOCK.search(key)}
    if "protocol" in kept:
        kept["protocol"] = {k: v for k, v in kept["protocol"].items() if k != "evaluation"}
    return kept


def compare(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> int:
    """Prints every digest that differs or is on one side alone."""
    wrong = 0
    for name, digests in after.items():
        old = before.get(name, {})
        for path in sorted(set(old) | set(digests)):
            if old.get(path) != digests.get(path):
                wrong += 1
                state = "differs" if path in old and path in digests else "is on one side alone"
                print(f"{name}: {path} {state}")
    total = sum(map(len, after.values()))
    print(f"{wrong} of {total} digests differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
