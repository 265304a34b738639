"""``python docs/gpu_choices.py BASE ...``: the rows of the table in docs/pages/how-to/small-gpu.md.

A row says what ``mclclip finetune ... --dry-run --gpu-gib M --samples 100000`` chooses. Memory is
measured once for all sizes of GPU: some minutes for a base.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import yaml

from mclclip.plan import choices, memory
from mclclip.plan.choices import Situation
from mclclip.plan.machine import Machine

SIZES = 8, 16, 24, 80
SAMPLES = 100_000
TRAINED_ON = round(SAMPLES * 0.8)  # without both shares that are held out


def row(base: str, gib: int) -> str:
    """The row of a base on a GPU of so many GiB."""
    machine = Machine(memory_gib=gib, elsewhere=True)
    at = Situation(base, TRAINED_ON, Path("data"), Path("run"), machine, cores=2)
    _, text = choices.choose(at)
    train = yaml.safe_load(text)["train"]
    engine = train["engine"]
    ways = [f"{engine['micro_batch']} at a time"] if engine.get("micro_batch") else []
    ways += ["activations twice"] if engine.get("grad_checkpointing") else []
    ways += [f"LoRA, rank {train['lora']['rank']}"] if train.get("lora") else []
    need = re.findall(r"([\d.]+) of [\d.]+ GiB$", text, re.MULTILINE)[-1]
    fits = ", ".join(ways) or "the whole batch at once"
    cells = f"`{base}`", gib, f"{train['global_batch']:,}", fits, need, f"{train['lr']:.1e}"
    return f"| {' | '.join(map(str, cells))} |"


def main(bases: list[str]) -> None:
    """Prints the rows of all sizes for the bases; see the module."""
    measure = memory.measure

    @cache
    def of_training(key: str, name: str) -> dict[str, float]:
        return measure(*asked[key])

    asked = {}

    def once(config, name, training, machine):  # type: ignore[no-untyped-def]
        key = repr((config.model, training))
        asked[key] = config, name, training, machine
        return of_training(key, name)

    memory.measure = once
    for base in bases:
        for gib in SIZES:
            print(row(base, gib), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
