"""``config --plan``: steps, memory, hours and disk of a configuration on N nodes, without a run.

Reads the run directory if there is one, and writes nothing. ``plan.steps`` counts steps from the
index and the pseudo labels, or from a number of samples. ``plan.memory`` measures memory and
operations on tensors without values. ``plan.costs`` computes hours and disk from these, and
``plan.table`` formats the plan.
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

__all__ = ["Machine", "Speed", "compute", "run"]

log = logging.getLogger("mclclip")


def run(
    config: Config,
    machine: Machine,
    *,
    samples: int | None,
    as_json: bool,
    speed: Speed | None = None,
) -> None:
    """Prints the plan of ``config``; ``compute`` explains ``samples`` and ``speed``.

    Raises ValueError for options that exclude each other, before it prints, and for too little
    memory or disk, after it. If the plan is for another machine, the disk here is only a warning.
    """
    plan = compute(config, machine, samples, speed)
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


def compute(
    config: Config, machine: Machine, samples: int | None = None, speed: Speed | None = None
) -> dict[str, Any]:
    """Returns the plan as nested mappings; sizes are in bytes.

    ``samples``: number of samples, for a run without an index (None: unknown). ``speed``: measured
    or assumed speeds, from which hours are computed.
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
