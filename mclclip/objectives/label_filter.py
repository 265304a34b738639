"""SimLAP's label filter: two classes -> the gates that open the dimensions they share.

Source: SimLAP (Wu et al., 2024), Eq. 3 to 5 and Table 5c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Penalty = Literal["paper", "neg_glog", "bernoulli"]


class LabelFilter(nn.Module):
    """Label embedding, mean of the two labels, and a perceptron whose sigmoids are the gates.

    The layers are those of Table 5c: batch norm, ReLU, linear, batch norm, ReLU, linear, sigmoid
    (the text says three layers, the table has two linear ones). Engines take the statistics of its
    batch norms over the global batch.

    num_classes   classes that have an embedding
    dim           D, number of gates
    label_dim     width of the label embedding; the paper's is 512
    hidden_dim    width of the hidden layer; the paper's is 1,024
    seed          of the initial weights, which are alike on all ranks
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        label_dim: int = 512,
        hidden_dim: int = 1024,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.labels = nn.Embedding(num_classes, label_dim, dtype=dtype)
            self.layers = nn.Sequential(
                nn.BatchNorm1d(label_dim, dtype=dtype),
                nn.ReLU(),
                nn.Linear(label_dim, hidden_dim, dtype=dtype),
                nn.BatchNorm1d(hidden_dim, dtype=dtype),
                nn.ReLU(),
                nn.Linear(hidden_dim, dim, dtype=dtype),
            )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Classes [n] and [n], int64 -> gates [n, D] in (0, 1); symmetric in the two."""
        mean = (self.labels(first) + self.labels(second)) / 2
        return torch.sigmoid(self.layers(mean))

    def of_classes(self) -> Tensor:
        """[K, D]: the gates of every class by itself, by the running statistics of the batch norms.

        Figures show them after training, and the penalty is of them.
        """
        classes = torch.arange(self.labels.num_embeddings, device=self.labels.weight.device)
        training = self.training
        self.eval()
        try:
            gates: Tensor = self(classes, classes)
        finally:
            self.train(training)
        return gates


class OpenGates(nn.Module):
    """In place of a label filter: every gate is 1, so that all classes meet in all dimensions.

    num_classes   classes that samples may have
    dim           D, number of gates
    """

    def __init__(self, num_classes: int, dim: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.num_classes, self.dim, self.dtype = num_classes, dim, dtype

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Classes [n] and [n], int64 -> ones [n, D]."""
        return torch.ones(len(first), self.dim, dtype=self.dtype, device=first.device)


def normed(features: Tensor, norm: nn.Module | None) -> Tensor:
    """Features [n, D] as gates are applied to them: after the layer norm, if there is one.

    They are brought to length sqrt(D) first, so that the norm's epsilon does not count.
    """
    if norm is None:
        return features
    result: Tensor = norm(functional.normalize(features) * math.sqrt(features.shape[1]))
    return result


@dataclass(frozen=True)
class Subspaces:
    """A trained label filter, and the layer norm of the features that it gates.

    They are made for figures, on the CPU, in evaluation mode and without gradients.
    """

    filter: LabelFilter
    norm: nn.Module | None

    @property
    def num_classes(self) -> int:
        """Classes that have gates."""
        return self.filter.num_classes

    def gates(self, first: Tensor, second: Tensor) -> Tensor:
        """Classes [n] and [n], int64 -> the gates [n, D] of these pairs of classes."""
        with torch.no_grad():
            result: Tensor = self.filter(first, second)
        return result


def gate_penalty(gates: Tensor, kind: Penalty) -> Tensor:
    """The mean over gates [K, D] of

    paper       g log g, Eq. 5 as printed: in [-1/e, 0]; making it small draws gates to 1/e
    neg_glog    -g log g: making it small draws gates to 0 or 1, as the text of Eq. 5 wants
    bernoulli   -g log g - (1 - g) log(1 - g): the same, alike for open and for closed gates
    """
    terms: Tensor = torch.special.entr(gates)  # -g log g, 0 at 0
    if kind == "bernoulli":
        terms = terms + torch.special.entr(1.0 - gates)
    return -terms.mean() if kind == "paper" else terms.mean()
