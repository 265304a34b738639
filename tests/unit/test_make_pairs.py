"""Minimal pairs of one's own captions: what is written, struck out, evaluated and refused."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mclclip.config import from_tree
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.eval.features import Extractor
from mclclip.eval.identity import data_digest, fields_of_rows
from mclclip.eval.items import read_items
from mclclip.eval.protocols import BenchmarkConfig, compositional
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import INTENT, Artifact
from mclclip.util.caption_rules import RULES
from mclclip.util.files import records_of
from mclclip.verbs import index, make_pairs
from mclclip.verbs.eval import load_suite
from tests.planted import planted

CAPTIONS = [
    ["Two dogs sit on a red mat number 1", "a mat with dogs on it"],
    ["A large dog is running in front of a wooden fence", "the fence is made of METAL"],
    ["Three men in black shirts & blue jeans stand on a bench", "<b>two</b> black jeans"],
    ["nothing that a rule fits"],
]


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(file, format="PNG")
    return file.getvalue()


def shards(folder: Path, captions: list[list[str]], image: Any = png) -> Path:
    samples = (
        PackedSample(f"s{number}", image(number), "png", texts)
        for number, texts in enumerate(captions)
    )
    write_shards(samples, folder, 2)
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    source = shards(tmp_path / "shards", CAPTIONS)
    make_pairs.run(source, tmp_path / "pairs", captions="json:captions", seed=3)
    return tmp_path / "pairs"


def written(folder: Path) -> dict[str, dict[str, dict[str, str]]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("data/*.json")}


def test_an_item_is_a_picture_its_caption_and_an_edit(made: Path) -> None:
    items = written(made)
    numbers = {rule: [*own] for rule, own in items.items()}
    assert numbers == {
        "colour": ["0", "2"], "number": ["0", "2"], "size": ["1"], "material": ["1"],
        "spatial": ["1"], "action": ["0", "1", "2"], "negation": ["1"],
    }  # fmt: skip
    for rule, own in items.items():
        for number, item in own.items():
            assert item["caption"] in CAPTIONS[int(number)]
            assert item["negative_caption"] not in CAPTIONS[int(number)]
            assert (made / "images" / item["filename"]).read_bytes() == png(int(number))
            assert item["key"].strip("/") == f"s{number}" and rule in RULES
    assert "fence is" not in json.dumps(items), "no rule fits the other captions"
    assert "a metal fence" not in json.dumps(items), "the other caption says that it is metal"
    assert {item["negative_caption"] for item in items["number"].values()} & {
        "Three dogs sit on a red mat number 1", "Four dogs sit on a red mat number 1",
        "Five dogs sit on a red mat number 1",
    }  # fmt: skip


def test_equal_seeds_give_equal_items_and_a_rule_has_so_many(made: Path, tmp_path: Path) -> None:
    source = tmp_path / "shards"
    make_pairs.run(source, tmp_path / "again", captions="json:captions", seed=3)
    assert written(tmp_path / "again") == written(made)
    chosen: Any = {"rules": ["number", "colour"], "per_rule": 1}
    found = []
    for seed in range(6):
        out = tmp_path / f"seed{seed}"
        make_pairs.run(source, out, captions="json:captions", seed=seed, **chosen)
        found.append(written(out))
    assert all({rule: len(own) for rule, own in each.items()} == {"number": 1, "colour": 1}
               for each in found)  # fmt: skip
    assert len({json.dumps(each) for each in found}) > 2


def test_figures_of_data_that_changed_in_place_are_measured_again(
    made: Path, tmp_path: Path
) -> None:
    """A table of the same size, shards of another size, pictures in a linked folder, and what a
    verb packed anew."""
    data = BenchmarkConfig("retrieval", str(tmp_path / "data"), {"captions": "captions.csv"})

    def digest() -> str:
        return str(fields_of_rows(data, data_digest(data), "a model", "fp32")["evaluation"])

    digests = [digest()]  # of no folder
    (tmp_path / "data" / "images").mkdir(parents=True)
    for name, text in (("captions.csv", "a,b"), ("captions.csv", "b,a"), ("0.tar", "x"),
                       ("0.tar", "xy"), ("manifest.json", "{}")):  # fmt: skip
        (tmp_path / "data" / name).write_text(text)
        digests.append(digest())
    (tmp_path / "data" / "above").symlink_to(tmp_path / "data")
    assert digest() == digests[-1]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data" / "pictures").symlink_to(tmp_path / "elsewhere")
    for text in ("x", "xy"):
        (tmp_path / "elsewhere" / "0.jpg").write_text(text)
        digests.append(digest())
    assert len({*digests}) == len(digests)
    assert digest() == digests[-1]
    shutil.copy(made / "manifest.json", tmp_path / "data")
    packed = digest()
    assert packed not in digests
    manifest = json.loads((made / "manifest.json").read_text())
    for changes, again in (({"finished": "later"}, packed), ({"inputs": {"table": "new"}}, None)):
        (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest | changes))
        assert (digest() == packed) == (again == packed)


def test_struck_items_are_left_out_and_counted(made: Path, tmp_path: Path) -> None:
    every = read_items(made, "pairs")
    first, second, *_ = [item.name for item in every.items]
    (made / "struck.txt").write_text(f"# bad ones\n{first}  # still true\n\n{second}\n")
    kept = read_items(made, "pairs")
    assert [i.name for i in kept.items] == [i.name for i in every.items][2:]
    assert (kept.struck, kept.left_out) == (2, 0)
    benchmark = load_suite(str(made / "suite.yaml"))[0]["pairs"]
    digest = data_digest(benchmark)
    (made / "struck.txt").write_text("\n".join(i.name for i in every.items if i.part == "size"))
    assert data_digest(benchmark) != digest, "it would not be made again"
    assert {i.part for i in read_items(made, "pairs").items} == {*written(made)} - {"size"}
    (made / "struck.txt").write_text("\n".join(i.name for i in every.items))
    with pytest.raises(ValueError, match="struck.txt names all items of pairs: take some out"):
        read_items(made, "pairs")
    for name in (f"{first.partition('/')[0]}/999", "color/0", "colour", "swap/0"):
        (made / "struck.txt").write_text(f"{name}\n")
        with pytest.raises(ValueError, match=f"struck.txt line 1: there is no item '{name}'; want"):
            read_items(made, "pairs")
    (made / "struck.txt").write_text("size/1\ncolour/0\n")
    for captions in (None, "data/colour.json"):
        found = read_items(made, "pairs", parts=["colour"], captions=captions)
        assert [item.name for item in found.items] == ["colour/2"], "size is there and is not read"


def test_they_are_evaluated_by_rule(made: Path) -> None:
    suite, _ = load_suite(str(made / "suite.yaml"))
    assert [*suite] == ["pairs"] and Path(suite["pairs"].path) == made.absolute()
    moved = made.rename(made.with_name("moved"))
    suite, _ = load_suite(str(moved / "suite.yaml"))
    assert Path(suite["pairs"].path) == moved.absolute()
    moved.rename(made)
    names = written(made)
    for own in names.values():  # texts end in the number that their picture spells, or another
        for number, item in own.items():
            item["caption"] += f" {number}"
            item["negative_caption"] += " 9"
    for rule, own in names.items():
        (made / "data" / f"{rule}.json").write_text(json.dumps(own))
    for path in (made / "images").iterdir():
        Image.new("RGB", (4, 4), (0, int(path.stem), 0)).save(path, format="PNG")
    figures = compositional.evaluate(
        Extractor(planted("perfect", 10), batch_size=4), made, layout="pairs"
    )
    found = {figure.metric: figure for figure in figures}
    assert {*found} == {*names, "average", "pooled"}
    headlines = [f.metric for f in figures if f.protocol.get("level") == "headline"]
    assert headlines == ["pooled"] and figures[0].metric == "pooled"
    assert found["pooled"].count == sum(map(len, names.values()))
    assert {figure.value for figure in figures} == {100.0}
    told = found["average"].protocol
    assert told["chance"] == 50 and told["struck_items"] == 0
    (made / INTENT).write_text("{}")
    with pytest.raises(ValueError, match="is not finished: call 'mclclip make-pairs' again"):
        read_items(made, "pairs")


def test_the_gallery_escapes_what_strangers_wrote(made: Path) -> None:
    page = (made / "gallery.html").read_text()
    assert "<b>two" not in page and "&amp;" in page
    assert len(re.findall(r'<input type="checkbox"', page)) == sum(map(len, written(made).values()))
    assert page.count("<script>") == 1 and "script-src &#39;sha256-" in page


def test_wrong_input_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source = shards(tmp_path / "shards", [["x y z"], ["nothing"]])
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="no rule of colour, swap fits any of the 2 captions"):
        make_pairs.run(source, out, rules=["colour", "swap"])
    with pytest.raises(ValueError, match=r"no rule 'color' for captions \(nearest: colour"):
        make_pairs.run(source, out, rules=["color"])
    with pytest.raises(FileNotFoundError, match="no shard in"):
        make_pairs.run(tmp_path, out)
    with pytest.raises(ValueError, match="no_caption"):
        make_pairs.run(source, out, captions="json:titles")
    assert not out.exists()
    with pytest.raises(ValueError, match="--out .*shards holds files that mclclip did not write"):
        make_pairs.run(source, source)


# --- pictures that an encoder confuses ---


def spots(source: Path, run_dir: Path, *pairs: tuple[int, int]) -> Path:
    """Blind spots of a run on these shards, as ``mclclip blindspots`` writes them."""
    sources = {"own": {"shards": f"{source}/*.tar", "captions": "json:captions"}}
    data = {"sources": sources, "index_workers": 1}
    config = from_tree({"run_dir": str(run_dir), "device": "cpu", "data": data})
    samples = index.run(config, SINGLE)
    folder = run_dir / "blindspots" / "stage_0-stage_1"
    inputs = {"index": samples.digest}
    artifact = Artifact(folder, kind="blindspots", config={}, inputs=inputs).compare(write=True)
    lines = [json.dumps({"sample_ids": pair}) for pair in pairs]
    (folder / "pairs.jsonl").write_text("".join(f"{line}\n" for line in lines))
    artifact.finish({"samples": len(samples)}, records=records_of(folder, "pairs.jsonl"))
    return folder


def test_confused_pictures_have_each_other_s_caption(tmp_path: Path) -> None:
    """Each picture is in one item, the first of its pairs; captions that say the same make none."""
    source = shards(tmp_path / "shards", [["a"], ["b", "c"], ["d"], ["E."], ["e"], ["f"]])
    found = spots(source, tmp_path / "run", (0, 2), (0, 1), (3, 4))
    options: dict[str, Any] = {"captions": "json:captions"}
    make_pairs.run(source, tmp_path / "out", confused=found, **options)
    items = written(tmp_path / "out")
    assert [*items] == ["confused"]
    texts = {
        n: (item["caption"], item["negative_caption"]) for n, item in items["confused"].items()
    }
    assert texts == {"0": ("a", "d"), "2": ("d", "a")}
    read = read_items(tmp_path / "out", "pairs").items
    assert {item.part for item in read} == {"confused"} and len({item.unit for item in read}) == 1
    many = spots(source, tmp_path / "other", (0, 1), (2, 3))
    make_pairs.run(source, tmp_path / "few", confused=many, per_rule=3, **options)
    assert [*written(tmp_path / "few")["confused"]] == ["0", "1"]


def test_blind_spots_of_other_pictures_are_refused(tmp_path: Path) -> None:
    source, out = shards(tmp_path / "shards", CAPTIONS), tmp_path / "out"
    other = shards(tmp_path / "other", CAPTIONS, lambda number: png(number) + b" " * number)
    of_other = spots(other, tmp_path / "run", (0, 1))
    own = spots(source, tmp_path / "own", (0, 1))
    (own / "pairs.jsonl").write_text("{}\n")
    cases: list[tuple[Path, type[Exception], str]] = [
        (of_other, ValueError, r"4 pictures of .*run, and not of the 4 in --shards"),
        (tmp_path, ValueError, r"is no folder that 'mclclip blindspots' has written"),
        (own, RuntimeError, r"pairs.jsonl"),
    ]
    for confused, kind, message in cases:
        with pytest.raises(kind, match=message):
            make_pairs.run(source, out, captions="json:captions", confused=confused)
    assert not out.exists()


def test_a_picture_that_cannot_be_decoded_is_no_item(tmp_path: Path) -> None:
    source = shards(
        tmp_path / "shards", [["a red mat"], ["a blue mat"]],
        lambda n: png(n) if n else png(n)[:40],
    )  # fmt: skip
    make_pairs.run(source, tmp_path / "out", rules=["colour"])
    assert [*written(tmp_path / "out")["colour"]] == ["1"]
