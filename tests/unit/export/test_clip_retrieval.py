"""Embeddings of a run in clip-retrieval's layout, and the card of an export of a run."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from mclclip import config
from mclclip.data.options import DataConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset
from mclclip.export import card, convert
from mclclip.export.targets import Source, clip_retrieval
from mclclip.models.encoder import load_model, save_concat
from mclclip.models.loading import load_towers
from mclclip.models.options import Variant
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import RunPaths
from mclclip.run.steps import make_artifact
from mclclip.verbs import embed, export, index
from tests import tiny
from tests.unit.export.models import the_certificate
from tests.unit.models.stages import vary


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an embedded stage 0, one sample of which cannot be decoded."""
    root = tmp_path_factory.mktemp("run")
    data = tiny.make_data(root / "data", 96)
    shard = sorted((data / "shards").glob("*.tar"))[1]
    with tarfile.open(shard) as tar:
        member = next(m for m in tar if m.name.endswith((".jpg", ".png")))
    with open(shard, "r+b") as file:
        file.seek(member.offset_data)
        file.write(bytes(member.size))
    options = tiny.make_config(root / "mine", data, "base=null", "data.max_bad_fraction=0.1")
    index.run(options, SINGLE)
    export.stage(options, SINGLE, stage=0)
    embed.run(options, SINGLE, stage=0, text=True)
    (root / "mine" / "config.yaml").write_text(config.dump(options))
    return root / "mine"


def read(out: Path) -> tuple[Any, ...]:
    return tuple(
        np.concatenate([np.load(path) for path in sorted((out / kind).glob("*.npy"))])
        for kind in ("img_emb", "text_emb")
    ) + (pd.concat([pd.read_parquet(p) for p in sorted((out / "metadata").glob("*.parquet"))]),)


def test_rows_are_the_runs_by_key(run: Path, tmp_path: Path) -> None:
    source = run / "stage_0" / "embeddings"
    out = convert.run("clip_retrieval", source, tmp_path / "out")
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*_0.*"))
    assert names == [
        "img_emb/img_emb_0.npy",
        "metadata/metadata_0.parquet",
        "text_emb/text_emb_0.npy",
    ]
    images, texts, table = read(out)
    samples = SampleIndex.open(RunPaths(run).index)
    assert len(images) == len(texts) == len(table) == len(samples) - 1 == 95
    ids = samples.ids_of(list(table["key"]))
    rows = np.concatenate([np.load(path) for path in sorted(source.glob("*.npy"))])
    np.testing.assert_array_equal(images, rows[ids])
    wanted = np.concatenate(
        [np.load(path) for path in sorted(RunPaths(run).text_embeddings.glob("*.npy"))]
    )
    np.testing.assert_array_equal(texts, wanted[samples.caption_start[ids]])
    assert list(table.columns) == ["image_path", "caption", "key"]
    assert all(key.endswith(f"/{path}") for key, path in table[["key", "image_path"]].to_numpy())
    assert table["caption"].str.len().min() > 3 and table["caption"].nunique() > 5
    proof = the_certificate(out)
    assert proof["image_features"] == proof["text_features"] == 0.0 and proof["bound"] == 0.0
    assert proof["notes"] == ["1 of 96 samples have no embedding"]


def test_rows_in_another_order_are_found(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = clip_retrieval.save_npy
    monkeypatch.setattr(clip_retrieval, "save_npy", lambda path, rows: save(path, rows[::-1]))
    with pytest.raises(ValueError, match="is not converted: features in numpy .* differ by"):
        convert.run("clip_retrieval", run / "stage_0" / "embeddings", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_holds_no_such_embeddings_is_one_line(run: Path, tmp_path: Path) -> None:
    """Rows and keys are joined by their place, which is of one index."""
    for source in (run / "stage_1" / "embeddings", run):
        with pytest.raises(FileNotFoundError, match="no finished embeddings at .*mclclip embed"):
            convert.run("clip_retrieval", source, tmp_path / "out")
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "stage_0" / "embeddings" / "manifest.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"inputs": {"index": "other"}}))
    with pytest.raises(RuntimeError, match="and other sample keys.*embed --force"):
        convert.run("clip_retrieval", path.parent, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ([], False),
        (["train.lock.text=false"], True),
        (["train.lock.text=false", "train.start=random", "export.soup=false"], False),
    ],
)
def test_only_stages_with_the_text_tower_of_stage_0_have_its_texts(
    run: Path, tmp_path: Path, changes: list[str], shares: bool
) -> None:
    shutil.copytree(run, tmp_path / "run")
    options = config.load(run / "config.yaml")
    data = Path(options.data.sources["patterns"].shards).parents[1]  # type: ignore[arg-type]
    new = tiny.make_config(tmp_path / "run", data, "base=null", *changes)
    (tmp_path / "run" / "config.yaml").write_text(config.dump(new))
    directory = tmp_path / "run" / "stage_1" / "embeddings"
    shutil.copytree(run / "stage_0" / "embeddings", directory)
    out = convert.run("clip_retrieval", directory, tmp_path / "out")
    assert (out / "text_emb").exists() == shares


def test_a_run_without_a_configuration(run: Path, tmp_path: Path) -> None:
    """As verbs leave it that were called one by one; another program's config.yaml is none."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    source = tmp_path / "run" / "stage_0" / "embeddings"
    out = convert.run("clip_retrieval", source, tmp_path / "out")
    images, texts, _ = read(out)
    assert len(images) == len(texts) == 95
    text = (out / "README.md").read_text()
    assert f"`{SampleIndex.open(RunPaths(run).index).digest}`" in text and "| base |" not in text
    (tmp_path / "config.yaml").write_text("theirs: 1\n")
    assert Source(tmp_path / "elsewhere" / "export").run_dir is None
    for name in ("stage_0/embeddings", "controls/ungrouped/stage_1/export"):
        assert Source(tmp_path / "run" / name).run_dir == tmp_path / "run"


def result_row(model: str, metric: str, value: float, low: float, high: float, **protocol: Any):
    fields = {"model": model, "benchmark": "a|b", "metric": metric, "value": value, "count": 40}
    return json.dumps(fields | {"ci_low": low, "ci_high": high, "protocol": protocol}) + "\n"


def test_the_card_says_where_a_model_comes_from(run: Path, tmp_path: Path) -> None:
    rows = [
        result_row("stage_0", "pairs", 12.54, 5.0, 25.0, x="<script>"),
        result_row("stage_1", "pairs", 99.0, 98.0, 100.0),
        result_row("stage_0", "small", 0.0123456, 0.01, 0.02, unit="nats"),
    ]
    (run / "results.jsonl").write_text("".join(rows))
    pytest.importorskip("transformers")
    out = convert.run("hf", run / "stage_0" / "export", tmp_path / "hf")
    text = (out / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["library_name"] == "transformers"
    assert front["pipeline_tag"] == "zero-shot-image-classification"
    assert "# stage_0\n" in text and "| data | patterns |" in text
    assert f"`{SampleIndex.open(RunPaths(run).index).digest}`" in text
    assert "| a\\|b | pairs | 12.5 | % | 5.0 to 25.0 | 40 |" in text
    assert "| a\\|b | small | 0.0123 | nats | 0.0100 to 0.0200 | 40 |" in text
    assert text.count("| a\\|b |") == 2  # its own rows alone
    assert "<script>" not in text and str(tmp_path) not in text and str(run) not in text


def test_a_card_says_that_weights_were_random(run: Path) -> None:
    options, source = config.load(run / "config.yaml"), Source(run / "stage_0" / "export")
    named = replace(options, model=replace(options.model, name="ViT-B-32", pretrained="openai"))
    own = replace(options.model, name=str(run / "stage_0" / "export"))
    assert card.origin(source, run, named)["base"] == "ViT-B-32, weights openai"
    bare = replace(named, model=replace(named.model, pretrained=None))
    assert card.origin(source, run, bare)["base"] == "ViT-B-32, random weights"
    assert card.origin(source, run, replace(options, model=own))["base"] == "export"


def test_a_folders_name_makes_no_link_in_its_card(tmp_path: Path) -> None:
    folder, out = tmp_path / "[click](javascript:x) ![p](u) <b> *a* `c` a|b \\[d]", tmp_path / "out"
    out.mkdir()
    card.write_card(out, "open_clip", Source(folder), [])
    wanted = r"# \[click\](javascript:x) !\[p\](u) &lt;b> \*a\* 'c' a\|b \\\[d\]"
    assert f"\n{wanted}\n" in (out / "README.md").read_text()


def test_a_card_has_rows_of_its_own_encoder(tmp_path: Path) -> None:
    """A control and MCL have stages of the same names."""
    cases: dict[str, list[float]] = {
        "stage_1/export": [1.0],
        "controls/ungrouped/stage_1/export": [2.0],
        "exports/soup_uniform": [5.0],
        "older/stage_1/export": [],
        "blindspots/stage_1": [],
    }
    for folder in cases:
        (tmp_path / folder).mkdir(parents=True)
    values = {"stage_1": 1.0, "control_ungrouped_stage_1": 2.0, "soup_uniform": 5.0}
    rows = [result_row(name, "pairs", value, 0.0, 9.0) for name, value in values.items()]
    (tmp_path / "results.jsonl").write_text("".join(rows))
    for folder, wanted in cases.items():
        found = card.benchmark_rows(Source(tmp_path / folder), tmp_path)
        assert [row.value for row in found] == wanted, folder


@pytest.fixture(scope="module")
def joined(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with an embedded stage 1 of other weights and joined encoders."""
    root = tmp_path_factory.mktemp("joined") / "mine"
    shutil.copytree(run, root)
    options = config.load(root / "config.yaml", [f"run_dir={root}", "train.lock.text=false"])
    (root / "config.yaml").write_text(config.dump(options))
    layout = RunPaths(root)
    model = load_towers(layout.export(0))
    model.lock(2, image_norm=True, image_projection=True, text=False, logit_scale=False)
    vary(model, 1)

    def write(folder: Path) -> dict[str, Any]:
        model.save(folder)
        return {}

    step = export.StageExport(1, "mcl", ema=None, model=None, seed=None)
    make_artifact(step, layout.export(1), ({}, write))
    embed.run(options, SINGLE, stage=1)
    stages = [layout.export(0), layout.export(1)]
    kinds: list[Variant] = ["stage_norm", "raw"]
    for kind in kinds:
        save_concat(stages, kind, layout.joined(f"concat_{kind}"), ["stage_0", "stage_1"])
    return root


def test_an_index_of_a_joined_encoder_has_its_unit_embeddings(joined: Path, tmp_path: Path) -> None:
    """Which serve queries of all weights (`test_one_index_serves_all_weights` of models)."""
    layout, out = RunPaths(joined), tmp_path / "out"
    source = layout.joined("concat_stage_norm")
    convert.run("clip_retrieval", source, out)
    images, texts, table = read(out)
    assert images.shape == texts.shape == (95, 16)
    encoder, samples = load_model(source), SampleIndex.open(layout.index)
    data = TarDataset(samples, DataConfig(), encoder.preprocess_val)
    drawn = data.__getitems__([int(n) for n in samples.ids_of(list(table["key"][:12]))])
    pixels = torch.stack([sample.views[0] for sample in drawn])  # type: ignore[union-attr]
    np.testing.assert_allclose(images[:12], encoder.encode_image(pixels), atol=2e-6)
    tokens = encoder.tokenizer(list(table["caption"][:12]))
    np.testing.assert_allclose(texts[:12], encoder.encode_text(tokens), atol=2e-6)
    assert convert.run("clip_retrieval", source, out) == out
    notes = the_certificate(out)["notes"]
    assert "rows are [z_s] / sqrt(2) of 2 stages, of 8 numbers each" in notes[-1]
    assert "# concat_stage_norm" in (out / "README.md").read_text()


def test_embeddings_that_a_joined_encoder_cannot_use_are_refused(
    joined: Path, tmp_path: Path
) -> None:
    shutil.copytree(joined, tmp_path / "run")
    layout, out = RunPaths(tmp_path / "run"), tmp_path / "out"

    def refused(kind: type[Exception], message: str, source: Path, to: Path = out) -> None:
        with pytest.raises(kind, match=message):
            convert.run("clip_retrieval", source, to)
        assert not out.exists()

    refused(ValueError, "any length .raw.*give concat_stage_norm", layout.joined("concat_raw"))
    source = layout.joined("concat_stage_norm")
    kept = convert.run("clip_retrieval", source, tmp_path / "kept")
    path = layout.embeddings(1) / "manifest.json"
    before = path.read_text()
    fields = json.loads(before)
    path.write_text(json.dumps(fields | {"digest": "made again"}))
    refused(ValueError, "stage_1.*--force", source, kept)
    path.write_text(json.dumps(fields | {"config": fields["config"] | {"feature": "pooled"}}))
    refused(ValueError, "before the projection.*embed.feature=projected", source)
    path.write_text(before)
    other = load_towers(layout.export(1))
    vary(other, 2)
    other.save(layout.export(1))
    refused(RuntimeError, "are not of the stage_1 that .* embed --stage 1", source)
    shutil.rmtree(layout.embeddings(1))
    refused(FileNotFoundError, "no finished embeddings at .*stage_1", source)
    moved = shutil.copytree(source, tmp_path / "moved")
    refused(FileNotFoundError, "lies in no run directory", moved)
