"""Describes the machine that a plan is for, and how fast it is assumed to be."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30
# An A100 in bf16 by its data sheet, and the share of it that OpenCLIP's best published training of
# a ViT-L-14 reaches (178 samples per second and GPU, 526 GFLOP each). Most reach half of it.
PEAK_TFLOPS, SHARE = 312.0, 0.3
# The smallest and the largest share that was measured or published (docs/pages/evidence/cost.md).
SHARES = 0.06, 0.42
# Peak of each number format, as a share of that of bf16: those of an A100, without TF32.
PEAK_OF = {"bf16": 1.0, "fp16": 1.0, "fp32": 1 / 16, "float64": 1 / 32}


@dataclass(frozen=True)
class Machine:
    """``nodes`` with ``gpus_per_node`` GPUs, each with ``memory_gib`` (None: not to be checked).

    ``elsewhere``: the plan is for another machine than this one, whose disk then does not matter.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    memory_gib: float | None = None
    elsewhere: bool = False

    @classmethod
    def described(
        cls, nodes: int | None, gpus_per_node: int | None, memory_gib: float | None
    ) -> Machine:
        """Returns the machine that a user's options describe; None stands for one node, one GPU.

        If the number of nodes or of GPUs is given, the plan is for a machine elsewhere.
        """
        elsewhere = nodes is not None or gpus_per_node is not None
        nodes, gpus_per_node = (1 if n is None else n for n in (nodes, gpus_per_node))
        return cls(nodes, gpus_per_node, memory_gib, elsewhere)

    @property
    def ranks(self) -> int:
        """Number of processes, one for each GPU."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Speed:
    """How fast one GPU is assumed to be.

    peak_tflops    rate of dense bf16 products by its data sheet (None: ``PEAK_TFLOPS``, and unknown
                   on a CPU)
    share          the share of it that a training or an embedding pass reaches (None: ``SHARE``)
    samples_per_s  measured rate of a training on one GPU, in place of an estimate
    images_per_s   measured rate of an embedding pass on one GPU, in place of an estimate
    """

    peak_tflops: float | None = None
    share: float | None = None
    samples_per_s: float | None = None
    images_per_s: float | None = None

    def fill_defaults(self, on_cpu: bool) -> Speed:
        """Replaces None by defaults; the peak of a CPU stays unknown."""
        peak = PEAK_TFLOPS if self.peak_tflops is None and not on_cpu else self.peak_tflops
        return replace(self, peak_tflops=peak, share=SHARE if self.share is None else self.share)

    def seconds(self, operations: float, precision: str) -> float:
        """Returns the seconds for ``operations`` in a number format such as "bf16".

        Call `fill_defaults` first; the peak must be known.
        """
        assert self.peak_tflops is not None and self.share is not None
        return operations / (1e12 * self.peak_tflops * self.share * PEAK_OF[precision])
