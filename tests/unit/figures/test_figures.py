"""Figures of a run: what they hold, what they need, and one clear line where that is missing."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mclclip import checkpoint, cli, embed, figures, pipeline
from mclclip.config import Config, from_tree
from mclclip.data.sample_index import SampleIndex
from mclclip.eval import results
from mclclip.figures import (
    adversarial_sets,
    clam,
    gate_pairs,
    modified,
    nearest,
    nearest_labels,
    tsne,
)
from mclclip.figures.inputs import Inputs
from mclclip.ranks.process_group import SINGLE
from tests import views

STEPS = 4
SIMLAP = {"kind": "simlap", "label_dim": 8, "hidden_dim": 8}
FIGURES = figures.figures()
NAMED = {name for name, figure in FIGURES.items() if figure.encoder}
# Fewer pictures on a sheet, and fewer points on a plane, which take most of the time.
LAID_OUT = 20
FEWER: dict[ModuleType, dict[str, Any]] = {
    nearest: {"ANCHORS": 1, "NEIGHBOURS": 2},
    modified: {"ANCHORS": 1},
    tsne: {"MAX_LAID_OUT": LAID_OUT},
    nearest_labels: {"SAMPLES": 1, "EXAMPLES": 2},
    gate_pairs: {"PAIRS": 1},
    clam: {"PAIRS": 1, "VIEWS": 3},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run whose stage 0 has gates of shapes, and stage 1 of clusters."""
    root = tmp_path_factory.mktemp("figures")
    pictures = views.make_data(root / "pictures")
    tree = views.tree(root / "run", pictures, SIMLAP | {"attribute": "shape"}, STEPS)
    tree["train"] |= {"objective": SIMLAP | {"pairs": "distinct"}, "ema_decay": 0.9}
    tree["cluster"] |= {"num_clusters": 3, "labels_per_sample": 2}
    tree["export"] |= {"concat": []}
    made = from_tree(tree)
    pipeline.run(made, SINGLE)
    embed.run(made, SINGLE, stage=1)
    return made


@pytest.fixture(scope="module")
def drawn(config: Config) -> Iterator[Path]:
    """The folder with all its figures."""
    with pytest.MonkeyPatch.context() as patch:
        for module, numbers in FEWER.items():
            for name, number in numbers.items():
                patch.setattr(module, name, number)
        figures.run(config, SINGLE)
        yield figures.run(config, SINGLE, figures=", ".join(sorted(NAMED)))


def data(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def test_every_figure_is_data_and_a_picture(drawn: Path) -> None:
    lacking = {"pseudo_labels"}  # simlap without groups has none
    for suffix in (".json", ".png"):
        assert {p.stem for p in drawn.glob(f"*{suffix}")} == FIGURES.keys() - lacking
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.glob("*.png"))


def test_a_sample_that_is_not_modified_is_its_own_neighbour(drawn: Path) -> None:
    found = data(drawn, "modified")
    assert found["eps"][0] == 0.0
    kinds = [entry["kind"] for entry in found["stages"]["stage_0"]]
    assert set(kinds) == {"positive", "negative"}
    for entry in found["stages"]["stage_0"]:
        assert entry["cosines"][0] == pytest.approx(1.0, abs=1e-5)
        assert entry["anchor"] != entry["sample"]


def test_heat_maps_lie_over_the_anchor(drawn: Path) -> None:
    for stage, spaces in data(drawn, "clam").items():
        assert stage in ("stage_0", "stage_1") and len(spaces) == 2
        for entry in spaces:
            for space in ("all", "gates of y1", "gates of y2"):
                heat = np.array(entry[space]["heat"])
                assert heat.shape == (16, 16) and heat.min() >= 0.0
                assert -1.0 <= entry[space]["similarity"] <= 1.0


def test_readouts_of_robust_and_non_robust_features(drawn: Path) -> None:
    found = data(drawn, "adversarial_sets")
    assert found.keys() == {"shape", "colour"}
    for stage in found["shape"].values():
        assert stage["moved"] + stage["tested"] == 64 and 0 <= stage["reached"] <= 1
        assert stage["accuracy_percent"].keys() == {"D", "D_R", "D_NR"}


def test_gates_are_those_of_the_last_checkpoint(config: Config, drawn: Path) -> None:
    found, run = data(drawn, "gates"), Path(config.run_dir)
    assert found["stage_0"]["classes"] == ["0", "1", "2"]
    assert found["stage_1"]["classes"] == ["cluster 0", "cluster 1", "cluster 2"]
    for stage, averaged in ((0, False), (1, True)):
        state = checkpoint.load_model_state(run / f"stage_{stage}/train/checkpoints", STEPS)
        if averaged:
            path = run / f"stage_{stage}/train/checkpoints"
            state |= checkpoint.load_model_state(path, STEPS, part="ema")
        own = {n.removeprefix("objective.filter."): t for n, t in state.items()}
        hidden = own["labels.weight"]
        for norm, linear in (("0", "2"), ("3", "5")):
            mean, var = (own[f"layers.{norm}.running_{what}"] for what in ("mean", "var"))
            hidden = (hidden - mean) / (var + 1e-5).sqrt()
            hidden = hidden * own[f"layers.{norm}.weight"] + own[f"layers.{norm}.bias"]
            hidden = hidden.relu() @ own[f"layers.{linear}.weight"].T + own[f"layers.{linear}.bias"]
        gates = np.array(found[f"stage_{stage}"]["gates"])
        np.testing.assert_allclose(gates, hidden.sigmoid().numpy(), atol=1e-6)
        np.testing.assert_allclose(found[f"stage_{stage}"]["sizes"], gates.sum(axis=1), rtol=1e-6)


def test_pairs_of_gates_select_dimensions(config: Config, drawn: Path) -> None:
    gates, pairs = data(drawn, "gates"), data(drawn, "gate_pairs")
    names = gates["stage_0"]["classes"]
    own = np.array(gates["stage_0"]["gates"])
    learned = Inputs(config).gates["stage_0"]
    unit = own / np.linalg.norm(own, axis=1, keepdims=True)
    alike = {(i, j): float(unit[i] @ unit[j]) for i in range(3) for j in range(i)}
    assert len(set(alike.values())) == 3
    extremes = []  # the least and the most similar of three
    for pair in pairs["stage_0"]:
        codes = [names.index(name) for name in pair["classes"]]
        extremes.append(alike[max(codes), min(codes)])
        mean = own[codes].mean(axis=0)
        np.testing.assert_allclose(pair["mean_of_gates"], mean, rtol=1e-5)
        assert pair["dimensions"] == np.argsort(-mean, kind="stable")[:10].tolist()
        of_pair = learned.of_pairs(np.array([codes]))[0]
        assert not np.allclose(of_pair, mean)
        np.testing.assert_allclose(pair["gates_of_pair"], of_pair, rtol=1e-5)
    assert extremes == [min(alike.values()), max(alike.values())]
    likeness = data(drawn, "class_likeness")["stage_0"]
    assert {"open in both", "features", "label embeddings"} < likeness.keys()
    assert all(np.shape(likeness[name]) == (3, 3) for name in likeness if name != "classes")


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
    figures.run(config, SINGLE, figures="tsne")
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


def test_losses_are_those_of_metrics_and_errors_of_results(config: Config, drawn: Path) -> None:
    found, run = data(drawn, "loss_readout"), Path(config.run_dir)
    assert found["models"] == ["stage_0", "stage_1"] and found["correlations"] is None
    lines = (run / "stage_1/train/metrics.jsonl").read_text().splitlines()
    assert found["loss"][1] == json.loads(lines[-1])["loss"]
    rows = {(r.model, r.metric): r.value for r in results.read(run / "results.jsonl")}
    assert found["error_percent"]["features, shape"][0] == 100.0 - rows["stage_0", "shape"]


def test_heat_maps_through_gates_are_of_the_class_that_they_name(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[torch.Tensor | None] = []
    made = clam.clam

    def spy(encoder: Any, layer: Any, anchor: Any, positive: Any, views: Any, gate: Any) -> Any:
        used.append(gate)
        return made(encoder, layer, anchor, positive, views, gate)

    monkeypatch.setattr(clam, "clam", spy)
    monkeypatch.setattr(clam, "VIEWS", 2)
    inputs = Inputs(config)
    gates, pair = inputs.gates["stage_0"], [2, 0]
    encoder = inputs.encoder(inputs.stages[0], gates)
    assert encoder is not None
    anchor, positive = encoder.pixels(inputs.run.images([0, 1]))
    found = clam.heat_maps(encoder, anchor, positive, gates, pair, seed=0)
    assert list(found) == ["all", "gates of y1", "gates of y2"]
    wanted = [None, *torch.from_numpy(gates.of_classes())[pair]]
    for gate, own in zip(used, wanted, strict=True):
        assert gate is own is None or torch.equal(gate, own)


def test_robust_sets_carry_the_true_labels_and_non_robust_ones_the_targets(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[np.ndarray[Any, Any]] = []

    def moved_on(labels: torch.Tensor, num_classes: int, seed: int) -> torch.Tensor:
        return (labels + 1) % num_classes

    def all_reached(
        encoder: Any, weight: Any, bias: Any, images: Any, targets: Any, **_: Any
    ) -> Any:
        steps = torch.ones_like(targets)
        return images, steps, steps.bool()

    def keep_labels(features: Any, labels: Any, asked: Any, truth: Any) -> float:
        trained.append(labels)
        return float(len(trained))

    monkeypatch.setattr(adversarial_sets, "draw_targets", moved_on)
    monkeypatch.setattr(adversarial_sets, "move_to_targets", all_reached)
    monkeypatch.setattr(adversarial_sets, "_accuracy", keep_labels)
    inputs = Inputs(config)
    encoder = inputs.encoder(inputs.stages[0])
    assert encoder is not None
    found = adversarial_sets.readouts(inputs, encoder, "shape")
    assert found is not None
    assert (found["accuracy_percent"]["D_R"], found["accuracy_percent"]["D_NR"]) == (1.0, 2.0)
    rows = np.random.default_rng([inputs.config.seed, 11]).permutation(len(inputs.ids))
    codes = inputs.run.index.attribute("shape")[0][inputs.ids][rows[: found["moved"]]]
    np.testing.assert_array_equal(trained[0], codes)
    np.testing.assert_array_equal(trained[1], (codes + 1) % 3)


def test_subspaces_are_seen_behind_the_projector(config: Config, drawn: Path) -> None:
    found = data(drawn, "subspaces")["stage_0"]
    assert len(found["panels"]) == 3 and found["panels"].keys() > {"all dimensions"}
    inputs = Inputs(config)
    learned = inputs.gates["stage_0"]
    encoder = inputs.encoder(inputs.stages[0], learned)
    assert encoder is not None
    features = encoder.of_all(encoder.pixels(inputs.run.images([0, 1])), 2)
    assert features.shape == (2, 6)  # the projector's width
    projector = encoder.model.get_submodule("projector").state_dict()
    for name, tensor in projector.items():
        assert torch.equal(tensor, learned.projector[name])
    # A layer norm that has hardly been trained leaves rows of mean 0 and length sqrt(D).
    assert np.allclose(features.mean(axis=1), 0.0, atol=0.1)
    assert np.allclose(np.linalg.norm(features, axis=1), 6**0.5, atol=0.2)


def test_help_names_a_figure_for_which_an_encoder_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(["analyse", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    named = re.search(r"some figures, such as (\w+); default", shown)
    assert named and named[1] in NAMED


def test_a_figure_is_found_by_its_module(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides it a new figure has a test and a row in its page."""
    (tmp_path / "toy_figure.py").write_text(
        "from mclclip.figures.inputs import Figure\n"
        "def draw(inputs, path):\n"
        "    path.write_bytes(b'')\n"
        "    return {'samples': len(inputs.run.index)}\n"
        "FIGURE = Figure(draw, 'nothing')\n"
    )
    monkeypatch.setattr(figures, "__path__", [*figures.__path__, str(tmp_path)])
    folder = figures.run(config, SINGLE, figures="toy_figure")
    assert data(folder, "toy_figure") == {"samples": 64}
    for suffix in (".json", ".png"):
        (folder / f"toy_figure{suffix}").unlink()


@pytest.mark.parametrize("name", ["gate", "", "gates;tsne"])
def test_an_unknown_figure_is_one_line(config: Config, name: str) -> None:
    with pytest.raises(ValueError, match=f"no figure {name!r}: take accuracy, .*tsne") as error:
        figures.run(config, SINGLE, figures=f"tsne,{name}")
    assert "\n" not in str(error.value)


def test_what_a_run_lacks_is_one_line_where_it_is_named(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run without gates, embeddings and exports; without a name the figure is left out."""
    run = tmp_path / "run"
    shutil.copytree(Path(config.run_dir) / "index", run / "index")
    tree = views.tree(run, tmp_path, {"kind": "nt_xent"}, STEPS)
    bare = from_tree(tree)
    for name, needs in (
        ("gates", "objective learns gates, such as simlap"),
        ("subspaces", "objective learns gates, such as simlap"),
        ("tsne", "run 'mclclip embed --stage 0'"),
        ("clam", "run 'mclclip export --stage 0'"),
        ("nearest_labels", "run 'mclclip cluster --stage 0'"),
    ):
        with pytest.raises(ValueError, match=f"{run} has nothing for .* {name} needs") as error:
            figures.run(bare, SINGLE, figures=name)
        assert needs in str(error.value) and "\n" not in str(error.value)
    with caplog.at_level(logging.INFO, "mclclip"):
        folder = figures.run(bare, SINGLE)
    assert not [*folder.glob("*.png")]
    assert "nothing for gates" in caplog.text


@pytest.fixture
def copied(config: Config, tmp_path: Path) -> Config:
    """A copy of the run that a test may damage."""
    return replace(config, run_dir=str(shutil.copytree(config.run_dir, tmp_path / "run")))


def without_attributes(config: Config) -> Config:
    source = replace(config.data.sources["p"], attributes=[])
    return replace(config, data=replace(config.data, sources={"p": source}))


def with_a_broken_row(config: Config) -> Config:
    with open(Path(config.run_dir) / "stage_1/train/metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    return config


def of_another_index(artifact: str) -> Callable[[Config], Config]:
    def edited(config: Config) -> Config:
        path = Path(config.run_dir) / artifact / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["inputs"]["index"] = "0" * 64
        path.write_text(json.dumps(manifest))
        return config

    return edited


@pytest.mark.parametrize(
    ("changed", "figure", "line"),
    [
        (without_attributes, "recall", "recall needs attributes: set data.sources"),
        (without_attributes, "overlap", "overlap needs attributes: set data.sources"),
        (with_a_broken_row, "loss_readout", "metrics.jsonl line 5 is not a row with a loss"),
        (of_another_index("stage_0/embeddings"), "singular_values", "run 'mclclip embed --force'"),
        (of_another_index("stage_0/clusters"), "agreement", "run 'mclclip cluster --force'"),
        (of_another_index("stage_0/train"), "gates", "trained with other classes"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    copied: Config, changed: Callable[[Config], Config], figure: str, line: str
) -> None:
    """Figures of another index than the run's are never drawn."""
    with pytest.raises((ValueError, RuntimeError), match=line) as error:
        figures.run(changed(copied), SINGLE, figures=figure)
    assert "\n" not in str(error.value)


def test_too_few_samples_are_said_to_be_too_few(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "NEIGHBOURS", 10_000)
    with pytest.raises(ValueError, match=r"nearest needs 10001 samples or more: \d+ can be used"):
        figures.run(config, SINGLE, figures="nearest")


def test_gates_whose_checkpoints_are_gone_are_left_out(
    copied: Config, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(Path(copied.run_dir) / "stage_0/train/checkpoints")
    first = replace(copied, num_stages=0)
    with caplog.at_level(logging.INFO, "mclclip"), pytest.raises(ValueError, match="nothing for"):
        figures.run(first, SINGLE, figures="gates")
    assert "stage_0 is left out of figures of gates" in caplog.text


def test_an_attribute_without_pairs_leaves_the_other_figures(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = np.zeros(64, np.int32)
    for codes, figure in ((one, "overlap"), (one - 1, "recall")):
        monkeypatch.setattr(SampleIndex, "attribute", lambda self, name, own=codes: (own, ["0"]))
        with pytest.raises(ValueError, match=f"nothing for {figure}"):
            figures.run(config, SINGLE, figures=figure)
