"""The machine that a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """``nodes`` of ``gpus_per_node`` GPUs of ``memory_gib`` each (None: not to be checked).

    ``elsewhere``: not the machine that makes the plan, whose disk then says nothing.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    memory_gib: float | None = None
    elsewhere: bool = False

    @classmethod
    def described(
        cls, nodes: int | None, gpus_per_node: int | None, memory_gib: float | None
    ) -> Machine:
        """Builds it of options that may be None; with either number the plan is for elsewhere."""
        elsewhere = nodes is not None or gpus_per_node is not None
        nodes, gpus_per_node = (1 if n is None else n for n in (nodes, gpus_per_node))
        return cls(nodes, gpus_per_node, memory_gib, elsewhere)

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
