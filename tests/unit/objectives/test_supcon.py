"""The supervised contrastive loss: the paper's Eq. 2 written out, and its identities."""

import pytest
import torch

from mclclip.objectives.base import Reads
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.supcon import Options, SupervisedContrast
from mclclip.objectives.temperature import Temperature
from tests import contrast_loops as loops


def supcon(num_views: int = 2, tile: int = 5) -> SupervisedContrast:
    return SupervisedContrast(Temperature(0.5), num_views, tile=tile)


def test_classes_of_one_sample_each_make_it_nt_xent() -> None:
    batch = loops.draw(1, 8, groups=2)
    batch.classes = torch.arange(8)
    twin = batch.rows(slice(None))
    found = batch.run(supcon())["loss"]
    loops.close(found, twin.run(InfoNCE("views", Temperature(0.5), tile=5))["loss"])
    for mine, theirs in zip(batch.gradients(), twin.gradients(), strict=True):
        loops.close(mine, theirs)


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
