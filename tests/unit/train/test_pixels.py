"""Training on fast pixels: the batches, where they are normalised, and what a run records of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from mclclip.config import Config
from mclclip.data import decode
from mclclip.data.batches import Batch
from mclclip.data.groups import group_samples
from mclclip.data.sample_index import SampleIndex
from mclclip.models.loading import load_towers
from mclclip.models.transforms import fast_transform
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Artifact, RunPaths, read_manifest
from mclclip.train.inputs import StageTraining
from mclclip.train.loop import ModelWithObjective
from mclclip.verbs import index, train
from tests import tiny
from tests.batches import training_batches


def trained(run_dir: Path, data: Path, pixels: str, *overrides: str) -> Path:
    """The directory of a training of stage 0 in four steps of 24 samples."""
    options = ["base.steps=4", "base.log_every=1", f"data.pixels={pixels}"]
    options += ["base.checkpoint.every=4"]
    settled = tiny.make_config(run_dir, data, *options, *overrides)
    index.run(settled, SINGLE)
    return train.run(settled, SINGLE, stage=0)


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in tiny.rows(directory / "metrics.jsonl")]


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A training for either way to make pixels."""
    root = tmp_path_factory.mktemp("done")
    return {pixels: trained(root / pixels, data, pixels) for pixels in ("exact", "fast")}


def batches_of(config: Config, pixels: decode.Pixels, model: Any, **options: Any) -> Any:
    samples = SampleIndex.open(Path(config.run_dir) / "index")
    train = model.preprocess_train
    given: dict[str, Any] = dict(
        index=samples,
        grouped=group_samples(torch.zeros(len(samples), dtype=torch.int64).numpy(), ()),
        transform=fast_transform(train) if pixels == "fast" else train,
        num_views=2,
        tokenizer=model.tokenizer,
        global_batch=24,
        policy="backoff",
        order="proportional",
        seed=5,
        stage=1,
    )
    return training_batches(**(given | options))


def prepared(batch: Batch, config: Config, model: Any) -> Batch:
    assert config.base is not None
    return ModelWithObjective(model, nn.Identity(), config.base.precision).on_device(
        batch, SINGLE.device
    )


def test_batches_are_open_clips_within_two_of_255(data: Path, tmp_path: Path) -> None:
    """The same samples, captions and crops, in every view."""
    config = tiny.make_config(tmp_path, data)
    index.run(config, SINGLE)
    model = load_towers(tiny.MODEL, augmentation={"scale": (0.3, 1.0)})
    exact, fast = (batches_of(config, pixels, model) for pixels in ("exact", "fast"))
    step = 2 * torch.tensor(1 / 255) / model.normalization[1]
    for number in (0, 5):
        one, other = exact[number], fast[number]
        assert all(v.dtype == torch.uint8 and v.is_contiguous() for v in other.views)
        assert torch.equal(one.sample_id, other.sample_id) and torch.equal(one.text, other.text)
        other = prepared(other, config, model)
        for view, wanted in zip(other.views, prepared(one, config, model).views, strict=True):
            assert view.dtype == torch.float32 and ((view - wanted).abs() <= step + 1e-5).all()
        assert not torch.equal(*other.views)


def test_neither_workers_nor_ranks_change_a_batch(data: Path, tmp_path: Path) -> None:
    config = tiny.make_config(tmp_path, data)
    index.run(config, SINGLE)
    model = load_towers(tiny.MODEL)
    here = batches_of(config, "fast", model)
    loader = DataLoader(here, batch_size=None, sampler=range(1, 4), num_workers=2)
    for batch in loader:
        wanted = here[batch.step]
        assert all(map(torch.equal, batch.views, wanted.views))
        assert all(view.is_shared() for view in batch.views)
        for rank in range(3):
            of_rank = batches_of(config, "fast", model, rank=rank, world_size=3)[batch.step]
            rows = wanted.slice(8 * rank, 8 * rank + 8)
            assert all(map(torch.equal, of_rank.views, rows.views))


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("float64", torch.float64)]
)
def test_batches_that_are_normalised_are_left_alone(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    config = tiny.make_config(tmp_path, tmp_path, f"base.precision={precision}")
    model = load_towers(tiny.MODEL)
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    views = [pixels.float(), pixels]
    ids = torch.arange(2)
    batch = Batch(views=views, group_ids=ids[:, None], sample_id=ids, step=0, group_size=2)
    found = prepared(batch, config, model)
    mean, deviation = model.normalization
    wanted = pixels.float().div(255).sub(mean).div(deviation)
    assert torch.equal(found.views[0], pixels.to(dtype))
    assert torch.equal(found.views[1], wanted.to(dtype))


def test_training_learns_nearly_the_same(done: dict[str, Path]) -> None:
    exact, fast = losses(done["exact"]), losses(done["fast"])
    assert len(fast) == 4 and fast != exact
    assert fast == pytest.approx(exact, rel=2e-2)


def test_the_manifest_holds_the_option_and_refuses_another(
    done: dict[str, Path], data: Path
) -> None:
    manifests = {name: read_manifest(path, "train") for name, path in done.items()}
    for name in ("exact", "fast"):
        assert manifests[name].config["data"] == {"pixels": name}
    for name, other in (("exact", "fast"), ("fast", "exact"), ("exact", "auto")):
        with pytest.raises(ValueError, match="was made with other settings: data.pixels"):
            trained(done[name].parents[1], data, other)


def test_what_auto_chose_is_what_was_chosen(
    done: dict[str, Path], data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "mclclip"):
        assert trained(done["fast"].parents[1], data, "auto") == done["fast"]
    assert "is finished: skipped" in caplog.text


@pytest.mark.parametrize("pixels", ["exact", "fast"])
def test_a_control_takes_what_its_original_took(data: Path, tmp_path: Path, pixels: str) -> None:
    folder = RunPaths(tmp_path).train(1)
    artifact = Artifact.open(folder, kind="train", config={"data": {"pixels": pixels}}, inputs={})
    index.run(tiny.make_config(tmp_path, data), SINGLE)
    for asked, wanted in (("auto", pixels), ("exact", "exact"), ("fast", "fast")):
        config = tiny.make_config(tmp_path, data, f"data.pixels={asked}")
        layout = RunPaths(tmp_path, "ungrouped")
        samples = SampleIndex.open(layout.index)
        assert StageTraining(config, config.train, SINGLE, layout, 1, samples).pixels == wanted
    assert not artifact.manifest


@pytest.mark.parametrize(
    ("augmentation", "message"),
    [
        ("{gray_scale_prob: 0.2}", "asks for gray_scale_prob: set data.pixels=exact"),
        ("{kind: simclr}", "asks for kind: set data.pixels=exact"),
    ],
)
def test_what_does_more_than_crop_is_refused_with_the_options(
    tmp_path: Path, augmentation: str, message: str
) -> None:
    more = f"model.augmentation={augmentation}"
    with pytest.raises(ValueError, match=message) as raised:
        tiny.make_config(tmp_path, tmp_path, "data.pixels=fast", more)
    assert "\n" not in str(raised.value)
    settled = tiny.make_config(tmp_path, tmp_path, more)
    assert settled.pixels_of("base") == settled.pixels_of("train") == "exact"
