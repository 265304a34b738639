"""What a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """``nodes`` of ``gpus_per_node`` GPUs of ``memory_gib`` each (None: not to be checked)."""

    nodes: int = 1
    gpus_per_node: int = 1
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("gpus-per-node", self.gpus_per_node)):
            if value < 1:
                raise ValueError(f"--{name} is {value}: wanted at least 1")
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise ValueError(f"--gpu-memory-gib is {self.memory_gib}: wanted more than 0")

    @property
    def ranks(self) -> int:
        """One process per GPU."""
        return self.nodes * self.gpus_per_node
