"""The verb soup: what is kept, what is written, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from mclclip.eval import results
from mclclip.eval.protocols import BenchmarkConfig
from mclclip.eval.results import Result
from mclclip.models import weights
from mclclip.models.encoder import Encoder, load_model, save_concat
from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.run import artifacts
from mclclip.util.remake import Remake
from mclclip.verbs import eval as evaluation
from mclclip.verbs import soup
from tests.tiny import ROOT
from tests.unit.models.conftest import tiny_config
from tests.unit.models.stages import save_stages, vary

TINY = ROOT / "tests" / "configs" / "tiny_vit.json"
AT = "visual.proj"


@dataclass
class Planted:
    """A judge whose figures are functions of the weights: how near they are to a goal, and how far
    from the base, which is what ImageNet loses."""

    goal: Tensor
    base: Tensor
    unit: str = "percent"
    names: tuple[str, ...] = ("held_out", "imagenet")
    seen: list[str] = field(default_factory=list)
    context: Context = SINGLE

    @property
    def benchmarks(self) -> Mapping[str, BenchmarkConfig]:
        return {name: BenchmarkConfig("retrieval", ".") for name in self.names}

    @property
    def read_texts(self) -> list[str]:
        return [*self.names[:1]]

    def measure(self, encoder: Encoder, path: Path, model_name: str) -> list[Result]:
        assert isinstance(encoder, Encoder) and self.names, "there is nothing to measure"
        self.seen.append(model_name)
        own = encoder.stages[0].exported.state_dict()[AT]
        near = 100 - float((own - self.goal).norm())
        near = 100 - near if self.unit == "nats" else near
        values = {"held_out": near, "imagenet": 90 - float((own - self.base).norm())}
        rows = []
        for name, value in values.items():
            protocol = {"level": "headline", "unit": self.unit if name == "held_out" else "percent"}
            row = Result(model_name, name, "R@1", value, 5, value, value, protocol)
            results.write(path, [row])
            rows.append(row)
        return rows


NOTHING = Planted(torch.zeros(1), torch.zeros(1), names=())
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Exports of a base and of three variations; tests only read them."""
    return save_stages(load_towers(TINY, seed=1), tmp_path_factory.mktemp("stages"), 4)


@pytest.fixture
def make(stages: list[Path], tmp_path: Path) -> Make:
    """Writes a soup of stages, given by number, or of models, given by path."""

    def run(method: Any, *models: int | Path, judge: Any = None, to: str = "soup", **options: Any):
        paths = [str(stages[each] if isinstance(each, int) else each) for each in models]
        return soup.run(method, paths, tmp_path / to, judge=judge or NOTHING, **options)

    return run


def tensors(path: Path) -> dict[str, Tensor]:
    return weights.read_tensors(path / weights.WEIGHTS)


def counts(path: Path) -> dict[str, Any]:
    return artifacts.read_manifest(path, "soup").counts


def towards(stages: list[Path], shares: Mapping[int, float], **options: Any) -> Planted:
    """A judge whose goal is this mixture of stages."""
    goal = torch.stack([share * tensors(stages[n])[AT] for n, share in shares.items()]).sum(dim=0)
    return Planted(goal, tensors(stages[0])[AT], **options)


def same(first: Path, second: Path) -> bool:
    a, b = tensors(first), tensors(second)
    return a.keys() == b.keys() and all(weights.same_bits(a[n], b[n]) for n in a)


def same_file(first: Path, second: Path) -> bool:
    return (first / weights.WEIGHTS).read_bytes() == (second / weights.WEIGHTS).read_bytes()


# --- uniform ---------------------------------------------------------------------------------


def test_a_uniform_soup_is_that_of_the_run(stages: list[Path], tmp_path: Path, make: Make) -> None:
    out = make("uniform", 0, 1, 2)
    soup.soup.save_uniform_soup(stages[:3], tmp_path / "other")
    assert same_file(out, tmp_path / "other")
    assert weights.read_config(out) == weights.read_config(tmp_path / "other")
    assert counts(out)["shares"] == {"stage_0": 1.0, "stage_1": 1.0, "stage_2": 1.0}
    with pytest.raises(ValueError, match="was made with other settings"):
        make("uniform", 0, 1, 3)


# --- greedy ----------------------------------------------------------------------------------


def test_greedy_keeps_what_does_not_lower_the_score(
    stages: list[Path], tmp_path: Path, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """The goal lies beyond the middle of stages 1 and 3, away from 2 and 0, and nearer to 3."""
    out = make("greedy", 0, 1, 2, 3, judge=towards(stages, {1: 0.95, 2: -1.0, 3: 1.05}))
    record = counts(out)
    trace = record["trace"]
    alone = [row["alone"] for row in trace]
    assert trace[0]["model"] == "stage_3" and alone == sorted(alone, reverse=True)
    best, kept = alone[0], ["stage_3"]
    for row in trace[1:]:
        assert row["kept"] == (row["soup"] >= best)
        if row["kept"]:
            best, kept = row["soup"], [*kept, row["model"]]
    assert kept == ["stage_3", "stage_1"]
    assert record["shares"] == {"stage_0": 0.0, "stage_1": 1.0, "stage_2": 0.0, "stage_3": 1.0}
    assert record["score"] == best > max(alone)
    soup.soup.save_uniform_soup([stages[1], stages[3]], tmp_path / "other")
    assert same(out, tmp_path / "other")
    printed = capsys.readouterr().out
    assert "score: mean of held_out/R@1" in printed
    assert printed.count("kept") == 2 and printed.count("left out") == 2
    written = json.loads((out / "scores" / "trace.json").read_text())
    assert written == {"metrics": ["held_out/R@1"], "trace": trace}
    rows = results.read(out / "scores" / "results.jsonl")
    assert {row.model for row in rows} == {f"stage_{n}" for n in range(4)} | {
        f"soup_{n}" for n in (2, 3, 4)
    }


def test_a_model_and_its_copy_stay_bit_identical(stages: list[Path], make: Make) -> None:
    """Their average is the model itself, which so has the same score; a good model beside it that
    lowers the score leaves every bit of it."""
    out = make("greedy", 1, 1, 2, judge=towards(stages, {1: 1.0}))
    first, copy, _ = counts(out)["trace"]
    assert first["soup"] == copy["soup"] and copy["kept"]
    assert counts(out)["shares"] == {"stage_1": 1.0, "stage_1#2": 1.0, "stage_2": 0.0}
    assert same_file(out, stages[1])
    assert weights.read_config(out) == weights.read_config(stages[1])
    line = make("wise", 1, 1, judge=towards(stages, {2: 1.0}), alphas=[0, 0.3, 1], to="line")
    assert same_file(line, stages[1])


# --- wise ------------------------------------------------------------------------------------


def test_the_best_alpha_is_written_with_its_price(
    stages: list[Path], tmp_path: Path, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = towards(stages, {0: 0.6, 3: 0.4})
    out = make("wise", 0, 3, judge=judge)
    assert judge.seen == [f"alpha_{number / 10:g}" for number in range(11)]
    curve = json.loads((out / "scores" / "curve.json").read_text())
    assert (curve["alpha"], curve["decided_by"]) == (0.4, ["held_out/R@1"])
    assert (curve["alphas"], curve["models"]) == ([*soup.ALPHAS], ["stage_0", "stage_3"])
    ends = {"held_out/R@1": [], "imagenet/R@1": []}
    for path in (stages[0], stages[3]):
        for row in judge.measure(load_model(path), tmp_path / "results.jsonl", "end"):
            ends[f"{row.benchmark}/{row.metric}"].append(row.value)
    for name, values in curve["values"].items():
        assert [values[0], values[-1]] == ends[name]  # the ends are measured as the models are
    price = counts(out)["price"]
    assert price["held_out/R@1"] > 0 > price["imagenet/R@1"]
    assert f"imagenet/R@1 {price['imagenet/R@1']:+.2f}" in capsys.readouterr().out
    line = 0.6 * tensors(stages[0])[AT].double() + 0.4 * tensors(stages[3])[AT].double()
    torch.testing.assert_close(tensors(out)[AT], line.float(), atol=1e-7, rtol=1e-6)
    with Image.open(out / "scores" / "curve.png") as picture:
        assert picture.size[0] > 300


def test_a_given_alpha_is_written_and_measured(stages: list[Path], make: Make) -> None:
    for alpha, number in ((0.0, 0), (1.0, 3)):  # the ends of the line are the models
        out = make("wise", 0, 3, alpha=alpha, to=str(number))
        assert same_file(out, stages[number])
        assert weights.read_config(out) == weights.read_config(stages[number])
    out = make("wise", 0, 3, judge=towards(stages, {0: 1.0}), alpha=0.35, alphas=[1, 0])
    curve = json.loads((out / "scores" / "curve.json").read_text())
    assert (curve["alphas"], curve["alpha"]) == ([0, 0.35, 1], 0.35)
    assert counts(out)["shares"] == {"stage_0": 0.65, "stage_3": 0.35}


def test_any_metric_may_decide_and_a_loss_is_made_small(stages: list[Path], make: Make) -> None:
    judge = towards(stages, {3: 1.0})
    options: dict[str, Any] = {"judge": judge, "alphas": [0, 1]}
    assert same(make("wise", 0, 3, metrics=["imagenet/R@1"], **options), stages[0])
    with pytest.raises(ValueError, match=r"imagenet/acc: there are held_out/R@1, imagenet/R@1"):
        make("wise", 0, 3, metrics=["imagenet/acc"], to="b", **options)
    loss = towards(stages, {0: 0.2, 3: 0.8}, unit="nats")
    assert counts(make("wise", 0, 3, judge=loss, alphas=[0, 0.8, 1], to="c"))["alpha"] == 0.8


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "numbers", "options", "message"),
    [
        ("uniform", [1], {}, "two models or more, got 1"),
        ("wise", [0, 1, 2], {"alpha": 0.5}, "the line between two models, got 3"),
        ("greedy", [0, 1], {}, "give --held-out FOLDER"),
        ("wise", [0, 1], {}, "or --alpha alone"),
        ("wise", [0, 1], {"alpha": 0.5, "alphas": [0.0, 1.0]}, "or --alpha alone"),
        ("wise", [0, 1], {"alpha": 1.5}, "alpha is 1.5: wanted 0"),
        ("uniform", [0, 1], {"alpha": 0.5}, "uniform has no alpha"),
        ("uniform", [0, 1], {"metrics": ["held_out/R@1"]}, "nothing to measure held_out/R@1 on"),
        ("greedy", [0, 1], {"metrics": ["coco/R@1"]}, "wanted BENCHMARK/METRIC of held_out, imag"),
    ],
)
def test_options_that_do_not_fit(
    stages: list[Path], tmp_path: Path, make: Make, method: str, numbers: list[int],
    options: Any, message: str,
) -> None:  # fmt: skip
    judge = towards(stages, {0: 1.0}) if message.startswith("wanted") else None
    with pytest.raises(ValueError, match=message) as error:
        make(method, *numbers, judge=judge, **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "soup").exists() and not (judge and judge.seen)


def test_models_that_have_no_average(stages: list[Path], tmp_path: Path, make: Make) -> None:
    save_concat(stages[:2], "raw", tmp_path / "concat")
    load_towers(tiny_config(quick_gelu=True)).save(tmp_path / "other")
    unrelated = load_towers(TINY, seed=2)
    vary(unrelated, 1)
    unrelated.save(tmp_path / "unrelated")
    cases = {
        "concat": (ValueError, "is a joined encoder, .*: give one of its stages"),
        "other": (ValueError, "model_cfg.quick_gelu is .* only models of one architecture"),
        "unrelated": (ValueError, "one base only; where you know .* give --any-base"),
        "absent": (FileNotFoundError, "no model directory at"),
    }
    for name, (kind, message) in cases.items():
        with pytest.raises(kind, match=message) as error:
            make("uniform", 0, tmp_path / name)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "soup").exists()
    out = make("uniform", 0, tmp_path / "unrelated", any_base=True, to="any")
    assert "base_digest" not in weights.read_config(out)


def test_texts_are_asked_for_where_there_is_no_text_tower(tmp_path: Path, make: Make) -> None:
    paths = [tmp_path / "1", tmp_path / "2"]
    for seed, path in enumerate(paths):
        load_towers(TINY, seed=seed, text=False).save(path, "0" * 64)
    (tmp_path / "classes" / "cat").mkdir(parents=True)
    suite = tmp_path / "suite.yaml"
    suite.write_text(f"benchmarks: {{zs: {{kind: zeroshot, path: {tmp_path}/classes}}}}\n")
    with pytest.raises(ValueError, match="is an image encoder without a text tower, and zs"):
        evaluation.open_judge(suite=str(suite), models=[str(path) for path in paths])
    assert (make("uniform", *paths) / weights.IMAGE_WEIGHTS).is_file()


# --- batch norms -----------------------------------------------------------------------------


def test_batch_norms_are_estimated_on_the_given_images(tmp_path: Path, make: Make) -> None:
    model = load_towers(ROOT / "tests" / "configs" / "tiny_resnet.json", seed=1)
    paths = save_stages(model, tmp_path / "stages", 3, image_blocks=5)
    model.train()
    draw = torch.Generator().manual_seed(0)
    for path in paths[1:]:
        model.encode_image(torch.randn(8, 3, 32, 32, generator=draw))
        model.save(path, weights.base_digest(paths[0]))
    with pytest.raises(ValueError, match="give --images FOLDER with training images") as error:
        make("uniform", *paths)
    assert "\n" not in str(error.value) and not (tmp_path / "soup").exists()
    pictures = tmp_path / "pictures"
    (pictures / "more").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has neither shards"):
        make("uniform", *paths, images=pictures)
    for number in range(5):
        Image.new("RGB", (40, 40), (50 * number, 90, 10)).save(pictures / f"more/{number}.png")
    (pictures / "broken.png").write_bytes(b"no picture")
    again = make("uniform", *paths, images=pictures)
    assert counts(again)["statistics_samples"] == 5
    averaged, _ = soup.soup.combine(paths)
    written = tensors(again)
    changed = {name for name in written if not weights.same_bits(written[name], averaged[name])}
    assert changed and all("running" in n or n.endswith("batches_tracked") for n in changed)
    assert same(make("wise", *paths[:2], alpha=1, images=pictures, to="w"), paths[1])


def test_folders_of_others_and_the_models_are_left_alone(
    stages: list[Path], tmp_path: Path, make: Make
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/README.md").write_text("my notes")
    with pytest.raises(ValueError, match="--out .*mine holds files that mclclip did not write"):
        make("uniform", 0, 1, to="mine")
    own = tmp_path / "own"
    shutil.copytree(stages[0], own)
    artifacts.Artifact(own, kind="export", config={}, inputs={}).compare(write=True).finish({})
    with pytest.raises(ValueError, match="is one of the models: give a new folder"):
        make("uniform", own, 1, to="own", force=Remake.ALL)
    assert same_file(own, stages[0])


def test_options_of_a_judge_that_would_do_nothing_or_find_nothing(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        ({"only": ["mmvp"]}, "--set and --only are of --suite"),
        ({"captions": "json:text", "suite": "mcl"}, "--captions is of --held-out"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            evaluation.open_judge(**options)
    with pytest.raises(FileNotFoundError, match=f"there is no shard in {tmp_path}: held-out pairs"):
        evaluation.open_judge(held_out=tmp_path)
