"""The verb: suites, options, rows of results.jsonl, what is skipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mclclip import config as configuration
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.eval import prompts, results
from mclclip.eval.identity import data_digest, identity_of
from mclclip.eval.protocols import BenchmarkConfig
from mclclip.models.encoder import load_model
from mclclip.models.loading import load_towers
from mclclip.objectives.base import parse
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import MANIFEST, Manifest
from mclclip.run.opened import Run
from mclclip.util.files import write_json
from mclclip.util.remake import Remake
from mclclip.verbs import compare, index
from mclclip.verbs import eval as evaluation
from tests import tiny


@pytest.fixture
def folder(tmp_path: Path, draw: Callable[[Path, int], None]) -> Path:
    """Two pairs in MMVP-VLM's layout, and the same images with a table of captions."""
    rows = ["Question ID,Type,Statement"]
    captions = ["filepath,title"]
    for number in range(1, 5):
        draw(tmp_path / "data" / "MLLM_VLM Images" / "Color" / f"{number}.png", number)
        rows.append(f"{number},Color,thing {number}")
        captions.append(f"MLLM_VLM Images/Color/{number}.png,thing {number}")
    (tmp_path / "data" / "Questions.csv").write_text("\n".join(rows))
    (tmp_path / "data" / "captions.csv").write_text("\n".join(captions))
    return tmp_path / "data"


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (
            "mmvp",
            {"promt": "x"},
            "option promt: there is no such option .* options of mmvp: prompt",
        ),
        ("attributes", {"attributes": []}, "option attributes: .*at least 1 item"),
        ("attributes", {"attributes": ["a", "a"]}, r"option attributes: got \['a', 'a'\]: .* once"),
        ("knn", {"k": 0}, "option k: .*greater than 0"),
        ("knn", {"temperature": float("inf")}, "option temperature: .*finite"),
        ("linear_probe", {"validation_share": 1.0}, "option validation_share: .*less than 1"),
        ("linear_probe", {"strength": float("nan")}, "option strength"),
        ("compositional", {}, "option layout: Field required"),
        ("compositional", {"layout": "sugar"}, "option layout: .*'sugarcrepe'"),
        ("zeroshot", {"templates": 3}, "option templates"),
    ],
)
def test_wrong_options_get_one_clear_line_before_anything_runs(
    folder: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    benchmarks = {"it": BenchmarkConfig(kind, str(folder), options)}
    with pytest.raises(ValueError, match=f"benchmark 'it': .*{message}") as caught:
        evaluation.check(benchmarks)
    assert "\n" not in str(caught.value)


def test_without_faiss_one_line_says_what_to_install_before_anything_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
    message = r"^benchmark 'it': .* needs the package faiss.*pip install 'mclclip\[search\]'"
    with_knn = {"attributes": ["a"], "probe": "knn"}
    for benchmark in (
        BenchmarkConfig("knn", str(folder), {}),
        BenchmarkConfig("attributes", str(folder), with_knn),
    ):
        with pytest.raises(ValueError, match=message):
            evaluation.check({"it": benchmark})
    with pytest.raises(FileNotFoundError, match="no shard"):  # a linear probe does not need it
        evaluation.check({"it": BenchmarkConfig("attributes", str(folder), {"attributes": ["a"]})})


@pytest.mark.parametrize("variables", [["data"], ["data="], ["data=/x", "date=/y"]])
def test_variables_that_a_suite_lacks_and_blank_ones_are_refused(variables: list[str]) -> None:
    with pytest.raises(ValueError, match=variables[-1].partition("=")[0]):
        evaluation.load_suite("mcl", variables)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("linear_probe", {"metric": "roc_auc"}, "roc_auc"),
        ("zeroshot", {"metric": "map_11_point"}, "map_11_point"),
        ("retrieval", {"ks": []}, "ks"),
        ("mmvp", {}, "Questions.csv"),
    ],
)
def test_options_are_checked_before_anything_is_measured(
    tmp_path: Path,
    draw: Callable[[Path, int], None],
    kind: str,
    options: dict[str, Any],
    named: str,
) -> None:
    for number, (part, name) in enumerate(product(("train", "test"), "abc")):
        draw(tmp_path / part / name / f"{number}.png", number)
    root = tmp_path / "test" if kind == "zeroshot" else tmp_path
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        evaluation.check({"it": BenchmarkConfig(kind, str(root), options)})


def test_the_shipped_suite(tmp_path: Path) -> None:
    suite, references = evaluation.load_suite("mcl", [f"data={tmp_path}"])
    assert suite["mmvp"].path == f"{tmp_path}/MMVP_VLM"
    assert {r.benchmark for r in references} == set(suite)
    assert all(r.source and 0 <= r.value <= 100 for r in references)
    assert all(r.model.count("base") == 1 for r in references)  # fine-tuned from what
    averages = {(r.model, r.source): r.value for r in references if r.metric == "average"}
    for key, average in averages.items():  # a published average is the mean of its nine Types
        types = [
            r.value
            for r in references
            if (r.model, r.source) == key and r.benchmark == "mmvp" and r.metric != "average"
        ]
        assert len(types) in (0, 9) and (
            not types or sum(types) / 9 == pytest.approx(average, abs=0.06)
        )
        pairs = average * 135 / 100  # of 135 pairs, and rounded to one decimal
        assert abs(pairs - round(pairs)) <= 0.05 * 135 / 100 + 1e-9, key
    assert {"DIVA", "GenHancer", "un2CLIP", "DCR", "NegCLIP"} <= {m.split()[0] for m, _ in averages}
    ours = [value for (_, source), value in averages.items() if source == "MCL 2024, Table 3"]
    assert sorted(ours) == [19.3, 20.0, 20.7, 21.5, 23.0, 23.7, 24.4, 25.9, 29.6, 32.6]


SHIPPED = sorted(path.stem for path in evaluation.SUITES.glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_options_names_and_templates_of_every_shipped_suite(name: str, tmp_path: Path) -> None:
    suite, references = evaluation.load_suite(name, [f"data={tmp_path}"])
    evaluation.check_options(suite)
    assert {r.benchmark for r in references} <= set(suite)
    assert all(r.source and 0 <= r.value <= 100 for r in references)
    for title, benchmark in suite.items():
        if benchmark.kind != "zeroshot":
            continue
        choices = (benchmark.options.get("classes"), benchmark.options["templates"])
        if any(str(choice).startswith(prompts.CLIP_BENCHMARK) for choice in choices):
            pytest.importorskip("clip_benchmark", reason="needs the extra 'eval'")
        assert prompts.find_templates(choices[1], tmp_path), title
        if str(choices[0]).startswith(prompts.CLIP_BENCHMARK):
            given = prompts.read_names(choices[0], tmp_path)
            numbers = [str(number) for number in range(len(given))]
            assert list(prompts.find_names(numbers, choices[0], tmp_path).values()) == given


def test_the_suite_of_27_has_the_metrics_of_the_paper() -> None:
    suite, references = evaluation.load_suite("zero_shot_27", ["data=/data"])
    metrics = {name: one.options.get("metric") for name, one in suite.items()}
    assert len(metrics) == 27
    assert {name: metric for name, metric in metrics.items() if metric} == {
        "fgvc_aircraft": "mean_per_class", "pets": "mean_per_class",
        "caltech101": "mean_per_class", "flowers102": "mean_per_class",
        "voc2007": "map_11_point", "kinetics700": "mean_of_top1_and_top5",
        "hateful_memes": "roc_auc",
    }  # fmt: skip
    assert len(suite["ucf101"].options["templates"]) == 48
    assert len(suite["kinetics700"].options["templates"]) == 28
    for reference in references:  # a published figure stands under the metric of its data set
        assert reference.metric == (metrics[reference.benchmark] or "top1")


TABLE_10 = """
food101 102 75,750 25,250 accuracy | cifar10 10 50,000 10,000 accuracy
cifar100 100 50,000 10,000 accuracy | birdsnap 500 42,138 2,149 accuracy
sun397 397 19,850 19,850 accuracy | stanford_cars 196 8,144 8,041 accuracy
fgvc_aircraft 100 6,667 3,333 mean_per_class | voc2007 20 5,011 4,952 map_11_point
dtd 47 3,760 1,880 accuracy | pets 37 3,680 3,669 mean_per_class
caltech101 101 3,000 5,677 mean_per_class | flowers102 102 2,040 6,149 mean_per_class
mnist 10 60,000 10,000 accuracy | stl10 10 5,000 8,000 accuracy
eurosat 10 10,000 5,000 accuracy | resisc45 45 3,150 25,200 accuracy
gtsrb 43 26,640 12,630 accuracy | kitti_distance 4 6,770 711 accuracy
country211 211 42,200 21,100 accuracy | pcam 2 294,912 32,768 accuracy
ucf101 101 9,537 1,794 accuracy | kinetics700 700 530,779 33,944 mean_of_top1_and_top5
clevr_counts 8 2,000 500 accuracy | hateful_memes 2 8,500 500 roc_auc
rendered_sst2 2 7,792 1,821 accuracy
"""  # MLCD's, without ImageNet


def test_the_linear_probes_of_the_26_sets_have_their_metrics_and_sizes() -> None:
    suite, references = evaluation.load_suite("linear_probe_26", ["data=/data"])
    published = [row.split() for row in TABLE_10.replace("|", "\n").strip().splitlines()]
    for name, classes, train, test, metric in published:
        benchmark = suite[name]
        size = f"; {classes} classes, {train} images to learn from, {test} to test"
        assert benchmark.source.endswith(size), name
        assert benchmark.options.get("metric", "accuracy") == metric, name
        assert (benchmark.kind, benchmark.options["feature"]) == ("linear_probe", "pooled")
    assert {row[0] for row in published} | {"fer2013"} == suite.keys()
    assert len(suite) == 26 and suite["voc2007"].options["labels"]
    for reference in references:  # a published figure stands under the metric of its data set
        metric = suite[reference.benchmark].options.get("metric", "accuracy")
        assert reference.metric == metric
    assert sum(r.value for r in references) / 26 == pytest.approx(84.6, abs=0.05)


def test_suite_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no suite 'nothing'.* own\.yaml, .* mcl"):
        evaluation.load_suite("nothing")
    with pytest.raises(ValueError, match="variable 'data': set data=VALUE, .* --set data=/"):
        evaluation.load_suite("mcl")
    path = tmp_path / "own.yaml"
    for text, message in {
        "benchmarks: [": "not valid YAML",
        "name: x": "is not a suite",
        "benchmarks: {x: {kind: nothing, path: y}}": "benchmark x.kind",
        "benchmarks: {x: {kind: mmvp, path: y, option: z}}": "benchmark x.option",
        "benchmarks: {x: {kind: mmvp, path: ${data}/y}}": "in quotes",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            evaluation.load_suite(str(path))
        assert "\n" not in str(caught.value)
        assert ("in quotes" in str(caught.value)) == ("$" in text)


@pytest.mark.parametrize("name", ["labels.csv", "labels.CSV", "labels.tab"])
def test_an_edit_of_a_table_changes_the_digest_of_its_data(tmp_path: Path, name: str) -> None:
    benchmark = BenchmarkConfig("zeroshot", str(tmp_path), {"labels": name})
    digests = set()
    for labels in ("1.png,cat\n2.png,dog\n", "1.png,dog\n2.png,cat\n"):
        (tmp_path / name).write_text("filepath,label\n" + labels)
        digests.add(data_digest(benchmark))
    assert len(digests) == 2


@pytest.fixture
def run_dir(tmp_path: Path, folder: Path) -> Path:
    """A run with one export, whose weights are the words 'perfect' or 'constant'."""
    export = tmp_path / "run" / "stage_0" / "export"
    export.mkdir(parents=True)
    (export / "open_clip_config.json").write_text("{}")
    (export / "weights.safetensors").write_text("perfect")
    return tmp_path / "run"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, planted: Any) -> list[str]:
    """The models that were loaded, in order."""
    names: list[str] = []

    def load(where: str, pretrained: str | None = None, device: str = "cpu") -> Any:
        names.append(where if pretrained is None else f"{where}+{pretrained}")
        file = Path(where) / "weights.safetensors"
        return planted(file.read_text() if file.exists() else "random", 5)

    monkeypatch.setattr(evaluation, "load_model", load)
    return names


def make_config(run_dir: Path, folder: Path) -> configuration.Config:
    suite = {"mmvp": {"kind": "mmvp", "path": str(folder)}}
    tree = {"run_dir": str(run_dir), "eval": {"suite": suite}, "data": {"num_workers": 0}}
    return configuration.from_tree(tree)


def test_the_verb_evaluates_every_export_once(
    run_dir: Path, folder: Path, loaded: list[str]
) -> None:
    config = make_config(run_dir, folder)
    rows = evaluation.run(config, SINGLE)
    assert {row.model for row in rows} == {"stage_0"} and rows[0].value == 100.0
    before = (run_dir / "results.jsonl").read_bytes()
    assert evaluation.run(config, SINGLE) == [] and len(loaded) == 1
    assert (run_dir / "results.jsonl").read_bytes() == before
    assert evaluation.run(config, SINGLE, force=Remake.ALL) == rows and len(loaded) == 2
    (run_dir / "stage_0" / "export" / "weights.safetensors").write_text("constant")
    assert evaluation.run(config, SINGLE)[0].value == 0.0  # the files changed
    assert len(results.read(run_dir / "results.jsonl")) == len(rows)


@pytest.mark.parametrize(
    ("changes", "names"), [("option", "prompt .*an image of"), ("data", "mmvp"), ("precision", "")]
)
def test_figures_that_were_measured_otherwise_are_not_compared(
    run_dir: Path, folder: Path, loaded: list[str], changes: str, names: str
) -> None:
    """By other options, or after a file far below the folder has changed; precision may differ."""
    config = make_config(run_dir, folder)
    named = {"models": ["ViT-B-32@openai", "ViT-B-32@laion400m_e32"]}
    evaluation.run(config, SINGLE, **named)
    compare.run([run_dir])
    if changes == "data":
        image = folder / "MLLM_VLM Images" / "Color" / "1.png"
        image.write_bytes(image.read_bytes() + b"0")
    suite = config.eval.suite
    if changes == "option":
        suite = {"mmvp": replace(suite["mmvp"], options={"prompt": "an image of "})}
    precision: Any = "bf16" if changes == "precision" else "fp32"
    config = replace(config, eval=replace(config.eval, suite=suite, precision=precision))
    assert evaluation.run(config, SINGLE, models=named["models"][1:])
    if names:
        with pytest.raises(ValueError, match=names) as caught:
            compare.run([run_dir])
        assert "\n" not in str(caught.value)
        evaluation.run(config, SINGLE, **named)
    assert len(compare.run([run_dir])) == 1


def test_figures_of_an_earlier_export_are_left_out(
    run_dir: Path, folder: Path, loaded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Until the new one is evaluated; those of a model without such an export stay."""
    config, export = make_config(run_dir, folder), run_dir / "stage_0" / "export"
    models = [f"stage_0={export}", "ViT-B-32@openai"]
    for weights in ("perfect", "constant"):
        (export / "weights.safetensors").write_text(weights)
        manifest = Manifest("export", {}, {}, {}, digest=f"digest of {weights}")
        write_json(export / MANIFEST, asdict(manifest))
        if weights == "constant":
            rows = Run(run_dir).result_rows
            assert {row.model for row in rows} == {"ViT-B-32@openai"}
            assert "evaluate stage_0 again" in caplog.text
        evaluation.run(config, SINGLE, models=models)
        caplog.clear()
        rows = Run(run_dir).result_rows
        assert {row.model for row in rows} == {"stage_0", "ViT-B-32@openai"} and not caplog.text


@pytest.mark.parametrize("name", ["m.safetensors", "vocab.txt"])
def test_other_weights_in_a_file_are_another_model(tmp_path: Path, name: str) -> None:
    """Of whatever kind the file is."""
    (tmp_path / name).write_bytes(b"before")
    before = identity_of(tmp_path)
    assert identity_of(tmp_path) == before
    (tmp_path / name).write_bytes(b"behind")
    assert identity_of(tmp_path) != before


def test_named_models_suites_and_benchmarks(
    run_dir: Path, folder: Path, loaded: list[str], tmp_path: Path
) -> None:
    config = make_config(run_dir, folder)
    suite = tmp_path / "own.yaml"
    suite.write_text(
        "benchmarks:\n"
        "  pairs: {kind: retrieval, path: '${root}', options: {captions: captions.csv}}\n"
        "  mmvp: {kind: mmvp, path: '${root}'}\n"
    )
    rows = evaluation.run(
        config,
        SINGLE,
        models=[f"mine={run_dir}/stage_0/export", "ViT-B-32@openai"],
        suite=str(suite),
        variables=[f"root={folder}"],
        only=["pairs"],
    )
    assert loaded == [f"{run_dir}/stage_0/export", "ViT-B-32+openai"]
    assert {(r.model, r.benchmark) for r in rows} == {
        ("mine", "pairs"), ("ViT-B-32@openai", "pairs"),
    }  # fmt: skip
    with pytest.raises(ValueError, match="no benchmark 'nothing': there are mmvp"):
        evaluation.run(config, SINGLE, only=["nothing"])


def test_widths_are_evaluated_beside_the_whole(
    run_dir: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the first numbers of the features; a width that these do not have is left out."""
    config, model = make_config(run_dir, folder), tmp_path / "model"
    load_towers(tiny.MODEL).save(model)
    named = {"models": [f"mine={model}"], "widths": [8, 3, 100]}
    rows = evaluation.run(config, SINGLE, **named)
    assert {row.model for row in rows} == {"mine", "mine:3"}
    assert "mine:3" in capsys.readouterr().out
    whole, cut = (results.read(run_dir / "results.jsonl") for _ in range(2))
    assert whole == cut and len(rows) == len(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "load_model", None)  # nothing is pending: it is not loaded again
        assert not evaluation.run(config, SINGLE, **named)
    again = evaluation.run(config, SINGLE, models=[f"mine={model}"], widths=[3, 5])
    assert {row.model for row in again} == {"mine:5"}
    judge = evaluation.SuiteJudge(config.eval.suite)
    expected = judge.measure(load_model(model).cut(5), tmp_path / "rows.jsonl", "mine:5")
    assert [row.value for row in again] == [row.value for row in expected]


def test_a_run_evaluates_the_widths_that_it_has_trained(run_dir: Path, folder: Path) -> None:
    load_towers(tiny.MODEL).save(run_dir / "stage_0" / "export")
    config = make_config(run_dir, folder)
    objective = parse({"kind": "info_nce", "widths": [2, 4]})
    config = replace(config, train=replace(config.train, objective=objective))
    rows = evaluation.run(config, SINGLE)
    assert {row.model for row in rows} == {"stage_0", "stage_0:2", "stage_0:4"}


def test_rows_and_tables_name_random_weights(
    run_dir: Path, folder: Path, loaded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["ViT-B-32@random", "mine=ViT-B-32@random"]
    rows = evaluation.run(make_config(run_dir, folder), SINGLE, models=names)
    assert loaded == ["ViT-B-32+random"] * 2
    wanted = {"ViT-B-32 (random weights)", "mine (random weights)"}
    assert {row.model for row in rows} == wanted
    table = capsys.readouterr().out
    assert all(name in table for name in wanted)
    with pytest.raises(ValueError, match="ViT-B-32 names no weights: give ViT-B-32@TAG"):
        evaluation.run(make_config(run_dir, folder), SINGLE, models=["stage_0", "mine=ViT-B-32"])
    assert len(loaded) == 2


def test_nothing_to_evaluate(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="has no exports: run 'mclclip export' first, .* --model"
    ):
        evaluation.run(make_config(tmp_path / "empty", folder), SINGLE)
    bare = configuration.from_tree({"run_dir": str(tmp_path)})
    with pytest.raises(ValueError, match=r"set eval\.suite or give a suite, such as --suite mcl"):
        evaluation.run(bare, SINGLE)


def test_missing_files_of_options_are_found_before_a_long_run(tmp_path: Path) -> None:
    benchmark = BenchmarkConfig(
        kind="retrieval", path=str(tmp_path), options={"captions": "held_out.csv"}
    )
    with pytest.raises(FileNotFoundError, match="captions: there is no .*held_out.csv"):
        evaluation.check({"held_out": benchmark})
    (tmp_path / "held_out.csv").write_text("filepath,title\n1.png,one\n")
    benchmarks = {"held_out": benchmark, "loss": replace(benchmark, kind="contrastive_loss")}
    for name, one in benchmarks.items():
        with pytest.raises(FileNotFoundError, match=f"{name}.* 1 of the 1 images .* such as 1.png"):
            evaluation.check({name: one})
    (tmp_path / "1.png").touch()
    evaluation.check(benchmarks)


def test_a_model_without_texts_is_refused_before_any_is_measured(tmp_path: Path) -> None:
    """By a suite that also has benchmarks for it."""
    for name in ("train", "test"):
        (tmp_path / name / "cat").mkdir(parents=True)
    image_encoder = tmp_path / "encoder.json"
    image_encoder.write_text(json.dumps({"embed_dim": 4, "vision_cfg": {"image_size": 8}}))
    zeroshot = BenchmarkConfig(kind="zeroshot", path=str(tmp_path / "test"))
    evaluation.check({"zs": zeroshot}, {"clip": "ViT-B-32@openai"})
    with pytest.raises(ValueError, match="^mine .*without a text tower, and zs "):
        evaluation.check({"zs": zeroshot}, {"mine": f"{image_encoder}@random"})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("contrastive_loss", {"captions": "json:alt"}, r"2 no_caption.* \(json:alt\)"),
        ("retrieval", {"captions": ".", "shard_captions": "json:alt"}, "2 no_caption"),
        ("attributes", {"attributes": ["colour"]}, "no_attribute:colour"),
        ("contrastive_loss", {"captions": "no_title.csv"}, r"missing \['title'\]"),
    ],
)
def test_a_column_that_is_not_there_is_told_before_a_long_run(
    tmp_path: Path, kind: Any, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "no_title.csv").write_text("filepath,name\n1.png,one\n")
    samples = [PackedSample(str(n), b"no picture is read", "png", [f"no {n}"]) for n in range(2)]
    for folder in (".", "train", "test"):
        write_shards(samples, tmp_path / folder, 5)
    with pytest.raises(ValueError, match=f"benchmark 'held_out': .*{message}"):
        evaluation.check({"held_out": BenchmarkConfig(kind, str(tmp_path), options)})


# --- images that the run is trained on -------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path, run_dir: Path, folder: Path, loaded: list[str]) -> configuration.Config:
    """The run with an index of four pictures, and benchmarks on copies of two and three of them."""
    pictures = [(folder / "MLLM_VLM Images/Color" / f"{n}.png").read_bytes() for n in range(1, 5)]
    samples = [
        PackedSample(f"{n}", data, "png", [f"thing {n}"]) for n, data in enumerate(pictures, 1)
    ]
    write_shards(samples, tmp_path / "own", 2)
    renamed = [replace(sample, key=f"copy_{sample.key}") for sample in samples[:3]]
    write_shards(renamed, tmp_path / "held_out", 5)
    for part, numbers in {"train": (1, 2), "test": (3,)}.items():
        for number in numbers:
            path = folder / part / str(number % 2) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pictures[number - 1])
    suite = {
        "held_out": {"kind": "contrastive_loss", "path": str(tmp_path / "held_out")},
        "neighbours": {"kind": "knn", "path": str(folder), "options": {"k": 1}},
    }
    config = configuration.from_tree(
        {
            "run_dir": str(run_dir),
            "eval": {"suite": suite},
            "data": {
                "sources": {"own": {"shards": f"{tmp_path}/own/*.tar"}},
                "num_workers": 0,
                "index_workers": 1,
            },
        }
    )
    index.run(config, SINGLE)
    return config


def test_a_table_warns_of_images_that_are_trained_on(
    trained: configuration.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images that a probe learns from are no benchmark."""
    rows = evaluation.run(trained, SINGLE)
    seen = {r.benchmark: (r.protocol["training_images"], r.protocol["judged_images"]) for r in rows}
    assert seen == {"held_out": (3, 3), "neighbours": (1, 1)}
    table = capsys.readouterr().out
    assert "(the run is trained on 3 of its 3 images: figures are too good)" in table
    with pytest.raises(
        ValueError, match=r"3 of its 3 images, and alpha is chosen by it: .*--force"
    ):
        results.check_unseen(rows, ["held_out"], "alpha")
    results.check_unseen(rows, ["other"], "alpha")


def test_what_is_trained_on_decides_nothing(
    trained: configuration.Config, tmp_path: Path, planted: Any
) -> None:
    export = Path(trained.run_dir) / "stage_0" / "export"
    (Path(trained.run_dir) / "config.yaml").write_text(configuration.dump(trained))
    message = "'held_out': the run is trained on 3 of its 3 images, and alpha is chosen by it: give"
    for models in ([str(export)], [f"base={export}"]):
        judge = evaluation.open_judge(held_out=tmp_path / "held_out", models=models, choice="alpha")
        with pytest.raises(ValueError, match=message):
            judge.measure(planted("perfect", 5), tmp_path / "results.jsonl", "soup")
    assert not (tmp_path / "results.jsonl").exists()
    judge = evaluation.open_judge(held_out=tmp_path / "held_out", models=[str(export)])
    rows = judge.measure(planted("perfect", 5), tmp_path / "results.jsonl", "soup")
    assert {row.protocol["training_images"] for row in rows} == {3}
    other = replace(trained, run_dir=str(tmp_path / "other"))  # which trains nothing
    rows = evaluation.evaluate(other, SINGLE, {"x": export})
    assert {row.protocol.get("training_images") for row in rows} == {3, 1}
    with pytest.raises(ValueError, match="two models have one name"):
        evaluation.run(other, SINGLE, models=[f"x={export}", f"x={export.parent}"])
    with pytest.raises(ValueError, match="images, and the checkpoint is chosen by it"):
        evaluation.evaluate(trained, SINGLE, {"x": export}, choices={"held_out": "the checkpoint"})
