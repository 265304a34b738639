"""The supervised contrastive loss: the paper's Eq. 2 written out, and its identities."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.objectives.base import Reads
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.supcon import Options, SupervisedContrast
from mclclip.objectives.temperature import Temperature
from tests import contrast_loops as loops


def supcon(num_views: int = 2, tile: int = 5) -> SupervisedContrast:
    return SupervisedContrast(Temperature(0.5), num_views, tile=tile)


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(2, 7),
    groups=st.integers(1, 3),
    classes=st.integers(1, 4),
    repeated=st.booleans(),
    tile=st.integers(1, 20),
    num_views=st.integers(1, 2),
)
def test_loss_and_gradient_are_the_definition(
    seed: int, rows: int, groups: int, classes: int, repeated: bool, tile: int, num_views: int
) -> None:
    batch = loops.draw(seed, rows, groups, classes, repeated)
    met = loops.rows_of(batch, "views", num_views)[0]
    left_out = sum(row.positive is None and not row.same_class for row in met)
    if left_out == rows:
        batch.classes[:] = 0  # somebody has a positive
        batch.labels[:] = 0
        batch.sample_id = torch.arange(rows)
        left_out = 0
    parts = loops.agree(
        batch,
        supcon(num_views, tile),
        "views",
        loops.supervised,
        temperature=0.5,
        num_views=num_views,
    )
    assert parts["rows_without_positives"] == left_out


def test_classes_of_one_sample_each_make_it_nt_xent() -> None:
    batch = loops.draw(1, 8, groups=2)
    batch.classes = torch.arange(8)
    twin = batch.rows(slice(None))
    found = batch.run(supcon())["loss"]
    loops.close(found, twin.run(InfoNCE(5, Temperature(0.5), "views"))["loss"])
    for mine, theirs in zip(batch.gradients(), twin.gradients(), strict=True):
        loops.close(mine, theirs)


def test_classes_may_be_renamed_and_samples_permuted() -> None:
    batch = loops.draw(2, 8, groups=2, classes=3)
    loss = batch.run(supcon())["loss"]
    other = batch.rows([3, 1, 7, 0, 5, 6, 2, 4])
    other.classes = torch.tensor([900_000, 17, 5])[other.classes]
    loops.close(other.run(supcon())["loss"], loss)


def test_one_view_without_any_positive_has_no_loss_and_no_gradient() -> None:
    batch = loops.draw(3, 5)
    batch.classes = torch.arange(5)
    parts = batch.run(supcon(num_views=1))
    assert (parts["loss"].item(), int(parts["rows_without_positives"])) == (0.0, 5)
    for gradient in batch.gradients():
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_it_says_what_it_reads() -> None:
    shape = Options(attribute="shape", num_views=1)
    assert shape.reads == Reads(groups=True, attribute="shape")
    assert (shape.num_views, Options().num_views) == (1, 2)
    assert Options().reads == Reads(groups=True, clusters=1)
    alone = Options(groups=False)  # the clusters that are the classes make no groups
    assert alone.reads == Reads(clusters=1) and alone.controls == ()
    assert Options().controls == ("ungrouped", "random_groups")


def test_missing_classes_are_told_in_one_line() -> None:
    image, labels, ids = torch.eye(3), torch.zeros(3, 1, dtype=torch.int64), torch.arange(3)
    with pytest.raises(ValueError, match="the loss reads classes, and was given image_features, "):
        supcon(1)(image_features=image, labels=labels, sample_id=ids, classes=None)
    with pytest.raises(ValueError, match="num_views"):
        Options(num_views=3)  # type: ignore[arg-type]
