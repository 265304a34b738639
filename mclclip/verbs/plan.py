"""Verb: what a configuration will do on N nodes, and whether it fits, without doing any of it.

Reads the run directory where there is one and writes nothing. Steps are counted from the index and
the pseudo labels, or from a number of samples (``steps``); memory and operations are measured on
tensors without values (``memory``); hours and files follow from these (``costs``);
``table`` prints.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

from mclclip.config import Config, rules
from mclclip.plan import costs, memory, steps, table
from mclclip.plan.machine import Machine, Speed
from mclclip.ranks.process_group import pick_device
from mclclip.util.files import printable_lines

__all__ = ["Machine", "Speed", "make", "run"]

log = logging.getLogger("mclclip")


def run(
    config: Config,
    machine: Machine,
    *,
    samples: int | None,
    as_json: bool,
    speed: Speed | None = None,
) -> None:
    """Prints the plan of ``config``; see ``make`` for ``samples`` and ``speed``.

    Raises ValueError, one line, for what cannot run: options that exclude each other before
    anything is printed, too little memory or disk after the plan. For a machine elsewhere too
    little disk here is logged as a warning.
    """
    plan = make(config, machine, samples, speed)
    if config.device == "auto" and not machine.elsewhere and pick_device("auto").type == "cpu":
        log.warning(
            "plan: this machine has no GPU, and the plan is for one: describe it with "
            "--gpus-per-node, --gpu-memory-gib and --peak-tflops, or plan for a CPU with device=cpu"
        )
    print(json.dumps(plan, indent=2) if as_json else printable_lines(table.text(plan)))
    for name, measured in plan["memory"].items():
        memory.check(measured, name, machine)
    lacking = costs.missing_disk(plan["disk"], config, machine)
    if lacking is not None and not machine.elsewhere:
        raise ValueError(lacking)
    if lacking is not None:
        log.warning("%s", lacking)


def make(
    config: Config, machine: Machine, samples: int | None = None, speed: Speed | None = None
) -> dict[str, Any]:
    """The plan as plain nested mappings; sizes in bytes.

    ``samples``: of the index, for a run directory that has none (None: unknown). ``speed``: what
    hours are counted by.
    """
    options = config.trainings
    if not options:
        raise ValueError("num_stages is 0 and base is null: there is no training to plan")
    rules.check(config, num_ranks=machine.ranks)
    counted = steps.count(config, samples)
    measured = {name: memory.measure(config, name, options[name], machine) for name in options}
    return {
        "run_dir": config.run_dir,
        **asdict(machine),
        "ranks": machine.ranks,
        "on_cpu": config.device == "cpu",
        **counted,
        "memory": measured,
        "hours": costs.hours(config, counted, measured, machine, speed or Speed()),
        "disk": costs.disk(config, counted, measured),
    }
