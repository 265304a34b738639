"""Figures of a run: what they hold, what they need, and one clear line where that is missing."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mclclip import figures, method
from mclclip.config import Config, from_tree
from mclclip.data.sample_index import SampleIndex
from mclclip.figures import drawing, nearest, nearest_labels, tsne
from mclclip.figures.inputs import Inputs
from mclclip.ranks.process_group import SINGLE
from mclclip.util import shipped
from mclclip.verbs import analyse, embed
from tests import views

STEPS = 4
SIMLAP = {"kind": "simlap", "label_dim": 8, "hidden_dim": 8}
FIGURES = figures.figures()
# Fewer pictures on a sheet, and fewer points on a plane, which take most of the time.
LAID_OUT = 20
FEWER: dict[ModuleType, dict[str, Any]] = {
    nearest: {"ANCHORS": 1, "NEIGHBOURS": 2},
    tsne: {"MAX_LAID_OUT": LAID_OUT},
    nearest_labels: {"SAMPLES": 1, "EXAMPLES": 2},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run of two stages."""
    root = tmp_path_factory.mktemp("figures")
    pictures = views.make_data(root / "pictures")
    tree = views.tree(root / "run", pictures, SIMLAP | {"attribute": "shape"}, STEPS)
    tree["train"] |= {"objective": SIMLAP | {"pairs": "distinct"}, "ema_decay": 0.9}
    tree["cluster"] |= {"num_clusters": 3, "labels_per_sample": 2}
    tree["export"] |= {"concat": []}
    made = from_tree(tree)
    method.run(made, SINGLE)
    embed.run(made, SINGLE, stage=1)
    return made


@pytest.fixture(scope="module")
def drawn(config: Config) -> Iterator[Path]:
    """The folder with all its figures."""
    with pytest.MonkeyPatch.context() as patch:
        save = Figure.savefig  # coarsely
        patch.setattr(Figure, "savefig", lambda *args, **how: save(*args, **how, dpi=20))
        for module, numbers in FEWER.items():
            for name, number in numbers.items():
                patch.setattr(module, name, number)
        yield analyse.run(config, SINGLE)


def data(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.slow
def test_every_figure_is_data_and_a_picture(drawn: Path) -> None:
    lacking = {"pseudo_labels"}  # simlap without groups has none
    for suffix in (".json", ".png"):
        assert {p.stem for p in drawn.glob(f"*{suffix}")} == FIGURES.keys() - lacking
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.glob("*.png"))


def test_the_least_alike_values_are_compared_in_their_quietest_dimensions(
    config: Config, drawn: Path
) -> None:
    """SimLAP's Fig. 1, from the embeddings alone: 500 of 2,048 dimensions."""
    inputs = Inputs(config)
    codes, names = inputs.run.index.attribute("shape")
    codes = codes[inputs.ids]
    for stage, rows in inputs.features.items():
        pair = data(drawn, "overlap")["attributes"]["shape"][stage]["pair"]
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        means = {
            (i, j): float(np.mean(unit[codes == i] @ unit[codes == j].T))
            for i in range(3) for j in range(i + 1, 3)
        }  # fmt: skip
        chosen = min(means, key=lambda each: means[each])
        assert [names.index(value) for value in pair["values"]] == [*chosen]
        spread = rows[np.isin(codes, chosen)].astype(np.float64).var(axis=0)
        count = round(rows.shape[1] * 500 / 2048)
        assert set(pair["dimensions"]) == {*np.argsort(spread, kind="stable")[:count].tolist()}
        assert sum(pair["within"]) == pytest.approx(1) == pytest.approx(sum(pair["between"]))


def test_tsne_is_seeded_and_of_every_stage(config: Config, drawn: Path) -> None:
    found = data(drawn, "tsne")
    assert {name: np.shape(p) for name, p in found["places"].items()} == {
        "stage_0": (LAID_OUT, 2),
        "stage_1": (LAID_OUT, 2),
    }
    assert set(found["attributes"]["shape"]["codes"]) == {0, 1, 2}
    analyse.run(config, SINGLE, figures="tsne")
    assert data(drawn, "tsne") == found


def test_nearest_labels_have_examples_of_their_own(config: Config, drawn: Path) -> None:
    clusters = np.load(Path(config.run_dir) / "stage_0/clusters/cluster_labels.npy")
    number = {f"p/{n:09d}": n for n in range(64)}
    for entry in data(drawn, "nearest_labels")["stage_0"]:
        labels = entry["labels"]
        own = clusters[number[entry["sample"]]].tolist()
        assert [label["cluster"] for label in labels] == own and len(own) == 2
        for label in labels:
            examples = [clusters[number[key], 0] for key in label["examples"]]
            assert set(examples) <= {label["cluster"]} and entry["sample"] not in label["examples"]


def test_a_figure_is_found_by_its_module(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides it a new figure has a test and a row in its page."""
    (tmp_path / "toy_figure.py").write_text(
        "def draw(inputs, path):\n"
        "    path.write_bytes(b'')\n"
        "    return {'samples': len(inputs.run.index)}\n"
    )
    monkeypatch.setitem(shipped.PLUGINS, str(tmp_path), shipped.PLUGINS["figures"])
    found = shipped.plugins(str(tmp_path))
    monkeypatch.setattr(shipped, "plugins", lambda _: found)
    monkeypatch.setattr(figures, "__path__", [*figures.__path__, str(tmp_path)])
    folder = analyse.run(config, SINGLE, figures="toy_figure")
    assert data(folder, "toy_figure") == {"samples": 64}
    for suffix in (".json", ".png"):
        (folder / f"toy_figure{suffix}").unlink()


@pytest.mark.parametrize("name", ["", "gates;tsne"])
def test_an_unknown_figure_is_one_line(config: Config, name: str) -> None:
    with pytest.raises(ValueError, match=f"no figure {name!r}: take accuracy, .*tsne") as error:
        analyse.run(config, SINGLE, figures=f"tsne,{name}")
    assert "\n" not in str(error.value)


def test_what_a_run_lacks_is_one_line_where_it_is_named(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run without embeddings and clusters; without a name the figure is left out."""
    run = tmp_path / "run"
    shutil.copytree(Path(config.run_dir) / "index", run / "index")
    tree = views.tree(run, tmp_path, {"kind": "nt_xent"}, STEPS)
    bare = from_tree(tree)
    for name, needs in (
        ("tsne", "run 'mclclip embed --stage 0'"),
        ("nearest_labels", "run 'mclclip cluster --stage 0'"),
    ):
        with pytest.raises(ValueError, match=f"{run} has nothing for .* {name} needs") as error:
            analyse.run(bare, SINGLE, figures=name)
        assert needs in str(error.value) and "\n" not in str(error.value)
    with caplog.at_level(logging.INFO, "mclclip"):
        folder = analyse.run(bare, SINGLE)
    assert not [*folder.glob("*.png")]
    assert "nothing for tsne" in caplog.text


@pytest.fixture
def copied(config: Config, tmp_path: Path) -> Config:
    """A copy of the run that a test may damage."""
    return replace(config, run_dir=str(shutil.copytree(config.run_dir, tmp_path / "run")))


def without_attributes(config: Config) -> Config:
    source = replace(config.data.sources["p"], attributes=[])
    return replace(config, data=replace(config.data, sources={"p": source}))


def of_another_index(config: Config) -> Config:
    path = Path(config.run_dir) / "stage_0/embeddings/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["inputs"]["index"] = "0" * 64
    path.write_text(json.dumps(manifest))
    return config


@pytest.mark.parametrize(
    ("changed", "figure", "line"),
    [
        (without_attributes, "recall", "recall needs attributes: set data.sources"),
        (of_another_index, "singular_values", "run 'mclclip embed --force'"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    copied: Config, changed: Callable[[Config], Config], figure: str, line: str
) -> None:
    """Figures of another index than the run's are never drawn."""
    with pytest.raises((ValueError, RuntimeError), match=line) as error:
        analyse.run(changed(copied), SINGLE, figures=figure)
    assert "\n" not in str(error.value)


def test_too_few_samples_are_said_to_be_too_few(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "NEIGHBOURS", 10_000)
    with pytest.raises(ValueError, match=r"nearest needs 10001 samples or more: \d+ can be used"):
        analyse.run(config, SINGLE, figures="nearest")


def test_an_attribute_without_pairs_leaves_the_other_figures(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = np.zeros(64, np.int32)
    for codes, figure in ((one, "overlap"), (one - 1, "recall")):
        monkeypatch.setattr(SampleIndex, "attribute", lambda self, name, own=codes: (own, ["0"]))
        with pytest.raises(ValueError, match=f"nothing for {figure}"):
            analyse.run(config, SINGLE, figures=figure)


def test_an_attribute_without_a_cluster_leaves_its_field_empty(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = np.full(64, -1, np.int32)
    monkeypatch.setattr(SampleIndex, "attribute", lambda self, name: (none, ["0"]))
    analyse.run(config, SINGLE, figures="agreement")
    found = data(Path(config.run_dir) / "analysis", "agreement")
    of = dict(zip(found["columns"], found["ami"][0], strict=True))
    assert of.pop("stage_0") == pytest.approx(1.0)
    assert {of[name] for name in of if not name.startswith("stage_")} == {None}


def test_every_value_is_in_the_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib leaves out labels that begin with an underscore."""
    shown = list[str]()

    def legend(self: Axes, **_: Any) -> None:
        shown.extend(self.get_legend_handles_labels()[1])

    monkeypatch.setattr(Axes, "legend", legend)
    plane = np.eye(4, 2), np.array([0, 1, 0, 1]), ["_a", "b"]
    drawing.planes(tmp_path / "a.png", "title", [{"a": plane}])
    assert [text.strip() for text in shown] == plane[2]


@pytest.mark.parametrize(("rows", "columns", "name"), [(1, 1, "a/" * 40), (12, 6, "encoder")])
def test_names_and_numbers_of_a_table_have_room(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, rows: int, columns: int, name: str
) -> None:
    values = np.full((rows, columns), 50.0)
    drawing.table(tmp_path / "a.png", "percent", [name] * rows, [name] * columns, values)
    assert not recwarn.list  # matplotlib warns where names leave no room


def test_dollar_signs_are_no_formula(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plane = rng.standard_normal((4, 2)), np.array([0, 1, 0, 1]), ["$5_$10", "$10_$20"]
    drawing.planes(tmp_path / "a.png", "$a_ and $b_", [{"a $b_ $c_": plane}])
    assert (tmp_path / "a.png").is_file()
