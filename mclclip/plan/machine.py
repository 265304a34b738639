"""The machine that a plan is made for, and how fast it is taken to be."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30
# An A100 in bf16 by its data sheet, and the share of it that the best of OpenCLIP's published rates
# of a ViT-L-14 reaches (178 samples per second and GPU, 526 GFLOP each). Most reach half of it.
PEAK_TFLOPS, SHARE = 312.0, 0.3
# The smallest and the largest share that was measured or published (docs/pages/evidence/cost.md).
SHARES = 0.06, 0.42
_MOST = 100_000  # nodes, and GPUs of one
# Peak of other formats, as a share of that of bf16: an A100's, without TF32.
PEAK_OF = {"bf16": 1.0, "fp16": 1.0, "fp32": 1 / 16, "float64": 1 / 32}


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
            if not 1 <= value <= _MOST:
                raise ValueError(f"--{name} is {value}: wanted 1 to {_MOST:,}")
        if self.memory_gib is not None and not 0 < self.memory_gib < float("inf"):
            raise ValueError(f"--gpu-memory-gib is {self.memory_gib}: wanted more than 0")

    @property
    def ranks(self) -> int:
        """One process per GPU."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Speed:
    """How fast one GPU is taken to be, where nobody has measured it.

    ``peak_tflops``: its largest rate of products in bf16, dense, by its data sheet (None:
    ``PEAK_TFLOPS``, and unknown on a CPU). ``share``: what of it a pass reaches (None: ``SHARE``).
    Measured rates of one GPU decide instead where they are given: ``samples_per_s`` of a training,
    ``images_per_s`` of an embedding pass.
    """

    peak_tflops: float | None = None
    share: float | None = None
    samples_per_s: float | None = None
    images_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} is {value}: wanted more than 0")
        if self.share is not None and self.share > 1:
            raise ValueError(f"--share is {self.share}: wanted a share of the peak, at most 1")

    def settled(self, on_cpu: bool) -> Speed:
        """With defaults in the place of None; of a CPU no peak is assumed."""
        peak = PEAK_TFLOPS if self.peak_tflops is None and not on_cpu else self.peak_tflops
        return replace(self, peak_tflops=peak, share=SHARE if self.share is None else self.share)

    def seconds(self, operations: float, precision: str) -> float:
        """Time for operations in this number format at peak x share; settled, with a peak."""
        assert self.peak_tflops is not None and self.share is not None
        return operations / (1e12 * self.peak_tflops * self.share * PEAK_OF[precision])
