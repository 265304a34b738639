"""SimLAP's label filter: gates of two labels, and what the penalties draw them to."""

import math

import pytest
import torch

from mclclip.objectives.label_filter import LabelFilter, Penalty, gate_penalty


def made(seed: int = 0) -> LabelFilter:
    return LabelFilter(6, 8, label_dim=5, hidden_dim=7, seed=seed).double()


def test_layers_are_those_of_the_papers_table() -> None:
    shapes = {n: tuple(p.shape) for n, p in LabelFilter(10, 256).named_parameters()}
    assert shapes["labels.weight"] == (10, 512)
    assert [s for n, s in shapes.items() if n.endswith("weight") and len(s) == 2][1:] == [
        (1024, 512),
        (256, 1024),
    ]


@pytest.mark.parametrize("training", [True, False])
def test_gates_are_symmetric_and_one_class_is_a_pair_with_itself(training: bool) -> None:
    label_filter = made().train(training)
    first, second = torch.tensor([0, 1, 2, 3]), torch.tensor([3, 1, 5, 4])
    gates = label_filter(first, second)
    assert torch.equal(label_filter(second, first), gates)
    assert ((gates > 0.0) & (gates < 1.0)).all() and gates.shape == (4, 8)
    label_filter.eval()
    assert torch.equal(label_filter(first, first), label_filter.of_classes()[first])


def test_gates_of_classes_leave_the_filter_as_it_is() -> None:
    label_filter = made().train()
    before = {name: value.clone() for name, value in label_filter.state_dict().items()}
    assert label_filter.of_classes().shape == (6, 8)
    assert label_filter.training
    for name, value in label_filter.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = made().state_dict()
    number = torch.rand(())
    torch.manual_seed(1)
    assert torch.rand(()) == number  # the global generator is left alone
    second, other = made().state_dict(), made(1).state_dict()
    assert all(torch.equal(second[name], value) for name, value in first.items())
    assert not torch.equal(other["labels.weight"], first["labels.weight"])


def drawn_to(kind: Penalty, start: float) -> float:
    """The gate that gradient descent on the penalty ends at."""
    logit = torch.logit(torch.tensor([start], dtype=torch.float64)).requires_grad_()
    optimizer = torch.optim.Adam([logit], lr=0.2)
    for _ in range(150):
        optimizer.zero_grad()
        gate_penalty(torch.sigmoid(logit), kind).backward()
        optimizer.step()
    return float(torch.sigmoid(logit.detach()))


def test_the_printed_penalty_is_not_binary_and_the_others_are() -> None:
    assert drawn_to("paper", 0.9) == pytest.approx(1 / math.e, abs=0.02)
    for kind, edge in (("neg_glog", 1 / math.e), ("bernoulli", 0.5)):
        assert drawn_to(kind, edge - 0.1) < 0.02  # type: ignore[arg-type]
        assert drawn_to(kind, edge + 0.1) > 0.98  # type: ignore[arg-type]


def test_penalties_by_hand() -> None:
    gates = torch.tensor([[0.5, 1.0], [0.25, 0.0]], dtype=torch.float64)
    g_log_g = (0.5 * math.log(0.5) + 0.25 * math.log(0.25)) / 4
    other = (0.5 * math.log(0.5) + 0.75 * math.log(0.75)) / 4
    assert float(gate_penalty(gates, "paper")) == pytest.approx(g_log_g)
    assert float(gate_penalty(gates, "neg_glog")) == pytest.approx(-g_log_g)
    assert float(gate_penalty(gates, "bernoulli")) == pytest.approx(-g_log_g - other)
    random = torch.rand(20, 30)
    assert -1 / math.e <= float(gate_penalty(random, "paper")) <= 0.0
