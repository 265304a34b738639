"""Compositional benchmarks on planted encoders, and on folders that are not as they should be."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mclclip.eval import outcomes
from mclclip.eval.features import Extractor
from mclclip.eval.images import Region
from mclclip.eval.items import LAYOUTS, read_items
from mclclip.eval.protocols import compositional
from mclclip.eval.results import Measurement
from mclclip.verbs import eval as evaluation
from tests import fuzzing
from tests.compositional_folders import SUGARCREPE, write
from tests.matrix import fuller_in_soak

Draw = Callable[[Path, int], None]
KINDS = {"aro_attribute": 50}  # each pair of attributes needs 25 items


def evaluate(encoder: Any, root: Path, layout: Any, **options: Any) -> dict[str, Measurement]:
    """Figures by metric."""
    figures = compositional.evaluate(
        Extractor(encoder, batch_size=256), root, layout=layout, **options
    )
    assert len({figure.metric for figure in figures}) == len(figures)
    return {figure.metric: figure for figure in figures}


def values(figures: dict[str, Measurement]) -> dict[str, float]:
    return {name: figure.value for name, figure in figures.items()}


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Rewrites a JSON file after ``edit`` has changed its content in place."""
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


# --- planted encoders --------------------------------------------------------------------------


def test_images_and_texts_that_occur_several_times_are_encoded_once(
    tmp_path: Path, draw: Draw, planted: Any
) -> None:
    size = write("sugarcrepe_pp", tmp_path, draw, 3)
    for part in SUGARCREPE[1:5]:
        (tmp_path / "data" / f"{part}.json").write_bytes(
            (tmp_path / "data" / "replace_obj.json").read_bytes()
        )
    encoder = planted("perfect", size)
    figures = evaluate(encoder, tmp_path, "sugarcrepe_pp", prompt="see: ")
    assert sum(encoder.seen_batches) == 3
    assert len(encoder.seen_texts) == len(set(encoder.seen_texts)) == 9
    assert all(text.startswith("see: ") for text in encoder.seen_texts)
    assert figures["ITT/average"].count == 15 and figures["ITT/average"].value == 100.0


# --- rules -------------------------------------------------------------------------------------


def test_items_that_nobody_can_answer_are_counted(tmp_path: Path, draw: Draw, planted: Any) -> None:
    write("aro_order", tmp_path, draw, 4)
    change(tmp_path / "order.json", lambda rows: rows[2].update(caption_options=["an 11"] * 5))
    figures = evaluate(planted("perfect", 21), tmp_path, "aro_order")
    assert figures["accuracy"].value == 75.0
    assert figures["accuracy"].protocol["items_with_equal_texts"] == 1


def test_pairs_of_attributes_need_25_items(tmp_path: Path, draw: Draw, planted: Any) -> None:
    size = write("aro_attribute", tmp_path, draw, 51)  # 26 and 25
    file = tmp_path / "visual_genome_attribution.json"
    change(file, lambda rows: [row.update(attributes=["few", "of"]) for row in rows[:4]])
    with pytest.raises(ValueError, match="no item whose kind counts .*with 25 items"):
        evaluate(planted("perfect", size), tmp_path, "aro_attribute")
    change(file, lambda rows: [row.update(attributes=["red", "small"]) for row in rows[:7]])
    figures = evaluate(planted("perfect", size), tmp_path, "aro_attribute")
    assert [figures[name].count for name in ("average", "pooled")] == [29, 51]


# --- crops -------------------------------------------------------------------------------------


def test_a_crop_is_what_is_encoded(tmp_path: Path, planted: Any) -> None:
    (tmp_path / "images").mkdir()
    pixels = np.zeros((6, 8, 3), np.uint8)
    pixels[:, :4, 1], pixels[:, 4:, 1] = 1, 2  # number 1 on the left, number 2 on the right
    Image.fromarray(pixels).save(tmp_path / "images" / "a.png", format="PNG")
    boxes = [(0, 1), (4, 2), (4, 2)]
    rows = [
        {"image_path": "a.png", "true_caption": f"a {right}", "false_caption": f"no {3 - right}",
         "relation_name": "on", "bbox_x": x, "bbox_y": 1, "bbox_w": 4, "bbox_h": 4}
        for x, right in boxes
    ]  # fmt: skip
    (tmp_path / "visual_genome_relation.json").write_text(json.dumps(rows))
    encoder = planted("perfect", 3)
    assert evaluate(encoder, tmp_path, "aro_relation")["average"].value == 100.0
    assert sum(encoder.seen_batches) == 2  # of one file two parts, of which one occurs twice


def test_parts_of_pictures_are_those_of_pil(tmp_path: Path, planted: Any) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.full((4, 4, 3), 1, np.uint8)).save(path)
    seen: list[np.ndarray] = []
    encoder = planted("constant", 300)

    def preprocess(image: Any) -> torch.Tensor:
        seen.append(np.asarray(image))
        return torch.zeros(3, 4, 4)

    encoder.preprocess_val = preprocess
    Extractor(encoder).images([Region(path, (2, 2, 6, 5))])
    assert seen[0].shape == (3, 4, 3) and seen[0][:2, :2].all() and seen[0].sum() == 12
    with pytest.raises(ValueError, match="more than 100 pixels"):
        Extractor(encoder, max_image_pixels=100).images([Region(path, (0, 0, 11, 10))])


# --- outcomes ----------------------------------------------------------------------------------


def test_encoders_are_compared_by_units(tmp_path: Path, draw: Draw, planted: Any) -> None:
    size = write("sugarcrepe", tmp_path, draw, 6)
    for part in SUGARCREPE:  # two items share each image, one in each half of a part
        path = tmp_path / "data" / f"{part}.json"
        change(path, lambda rows: [rows[str(n + 3)].update(rows[str(n)]) for n in range(3)])
    encoders = planted("perfect", size), planted("random", size)
    figures = [evaluate(encoder, tmp_path, "sugarcrepe") for encoder in encoders]
    a, b = (found["average"].outcomes for found in figures)
    assert a is not None and b is not None and a.units is not None
    assert len(set(a.units)) == 21 and a.units[0] == a.units[3]
    assert not any(str(tmp_path) in name for name in [*a.items, *a.units])
    found = outcomes.difference(a, b)
    assert found.units == 21 and found.value == pytest.approx(a.value() - b.value())


def test_items_that_share_an_image_through_others_are_a_unit(tmp_path: Path, draw: Draw) -> None:
    write("naturalbench", tmp_path, draw, 5)
    metadata = tmp_path / "metadata.json"
    change(metadata, lambda rows: rows[4].update(image_1=rows[2]["image_0"]))
    change(metadata, lambda rows: rows[2].update(image_1=rows[0]["image_1"]))
    items = read_items(tmp_path, "naturalbench").items
    assert [item.unit == items[0].unit for item in items] == [True, False, True, False, True]
    assert len({item.unit for item in items}) == 3
    write("whatsup", tmp_path / "w", draw, 2)
    sets = read_items(tmp_path / "w", "whatsup", parts=["controlled_a"]).items
    assert [item.unit for item in sets[:5]] == ["controlled_a: mug-0 and table"] * 4 + [
        "controlled_a: mug-1 and table"
    ]


# --- missing images ----------------------------------------------------------------------------


def test_missing_images_are_refused_or_left_out_and_counted(
    tmp_path: Path, draw: Draw, planted: Any, caplog: Any
) -> None:
    write("winoground", tmp_path, draw, 4)
    for name in ("ex_1_img_0.png", "ex_1_img_1.png", "ex_3_img_1.png"):
        (tmp_path / "images" / name).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        evaluate(planted("perfect", 9), tmp_path, "winoground")
    line = str(caught.value)
    assert "3 images of winoground are not in" in line and "\n" not in line
    assert "such as ex_1_img_0.png, ex_1_img_1.png, ex_3_img_1.png" in line
    assert "missing: leave_out" in line and "facebook/winoground" in line
    with pytest.raises(FileNotFoundError, match="3 images of winoground are not in"):
        compositional.check(tmp_path, layout="winoground", prompt="see: ")
    compositional.check(tmp_path, layout="winoground", missing="leave_out")
    figures = evaluate(planted("perfect", 9), tmp_path, "winoground", missing="leave_out")
    assert values(figures) == {"text": 100.0, "image": 100.0, "group": 100.0}
    protocol = figures["group"].protocol
    assert not protocol["as_published"]
    assert (protocol["num_items"], protocol["left_out_items"], protocol["missing_images"]) == (
        2, 2, 3,
    )  # fmt: skip
    assert "3 images are missing, and 2 of 4 items are left out" in caplog.text
    assert "winoground has 4 items, the published file has 400" in caplog.text


def test_a_part_without_images_is_refused(tmp_path: Path, draw: Draw) -> None:
    write("whatsup", tmp_path, draw, 2)
    for path in (tmp_path / "vg_images").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="no item of the part 'vg_one' has its images .*parts"):
        read_items(tmp_path, "whatsup", leave_out=True)
    chosen = ["controlled_b", "coco_two"]
    assert read_items(tmp_path, "whatsup", parts=chosen).read == {"controlled_b": 8, "coco_two": 2}


def test_pairs_and_sets_that_are_not_whole_are_left_out(
    tmp_path: Path, draw: Draw, planted: Any, caplog: Any
) -> None:
    size = write("whatsup", tmp_path, draw, 2)
    folder = tmp_path / "controlled_images"
    (folder / "mug-0_on_table.jpeg").unlink()
    options = {"parts": ["controlled_a"], "missing": "leave_out"}
    figures = evaluate(planted("perfect", size), tmp_path, "whatsup", **options)
    assert [figures[f"controlled_a{end}"].count for end in ("", "/pair", "/set")] == [7, 3, 1]
    assert figures["controlled_a/set"].protocol["trials"] == "sets"
    assert figures["controlled_a_official"].protocol["ties"] == "for the model"
    (folder / "mug-1_on_table.jpeg").unlink()
    figures = evaluate(planted("perfect", size), tmp_path, "whatsup", **options)
    assert "controlled_a/set" not in figures and figures["controlled_a/pair"].count == 2
    assert "no set of controlled_a is whole, so that it has no figure" in caplog.text


def test_whether_all_is_as_published(tmp_path: Path, draw: Draw, planted: Any) -> None:
    write("winoground", tmp_path, draw, 1)
    row = json.loads((tmp_path / "examples.jsonl").read_text())
    lines = [json.dumps(row | {"id": number}) for number in range(400)]
    (tmp_path / "examples.jsonl").write_text("\n".join(lines))
    figures = evaluate(planted("perfect", 3), tmp_path, "winoground")
    assert figures["group"].protocol["as_published"] and figures["group"].count == 400
    write("sugarcrepe", tmp_path, draw, 1, apart=True)
    change(
        tmp_path / "data" / "swap_obj.json",
        lambda rows: rows.update({str(number): rows["0"] for number in range(245)}),
    )
    figures = evaluate(planted("perfect", 20), tmp_path, "sugarcrepe", parts=["swap_obj"])
    assert figures["swap_obj"].count == 245
    assert not figures["swap_obj"].protocol["as_published"]  # the other parts are not there


# --- other folders -----------------------------------------------------------------------------


def test_files_and_images_may_lie_elsewhere(tmp_path: Path, draw: Draw, planted: Any) -> None:
    size = write("sugarcrepe", tmp_path / "set", draw, 2)
    (tmp_path / "set" / "data").rename(tmp_path / "captions")
    (tmp_path / "set" / "val2017").rename(tmp_path / "coco")
    options: dict[str, Any] = {"captions": "../captions", "images": str(tmp_path / "coco")}
    found = evaluate(planted("perfect", size), tmp_path / "set", "sugarcrepe", **options)
    assert found["average"].value == 100.0
    one = {"captions": "../captions/swap_obj.json", "parts": ["swap_obj"]}
    items = read_items(tmp_path / "set", "sugarcrepe", images="../coco", **one).items  # type: ignore[arg-type]
    assert [item.name for item in items] == ["swap_obj/0", "swap_obj/1"]


def test_links_are_followed(tmp_path: Path, draw: Draw) -> None:
    write("winoground", tmp_path / "set", draw, 2)
    (tmp_path / "set" / "images").rename(tmp_path / "away")
    (tmp_path / "set" / "images").symlink_to(tmp_path / "away")
    assert len(read_items(tmp_path / "set", "winoground").items) == 2


@pytest.mark.parametrize("name", ["../private.png", "/etc/passwd", "x\0y.png"])
def test_a_name_does_not_lead_out_of_the_folder(tmp_path: Path, draw: Draw, name: str) -> None:
    write("naturalbench", tmp_path, draw, 2)
    change(tmp_path / "metadata.json", lambda rows: rows[1].update(image_0=name))
    with pytest.raises(ValueError, match=r"metadata\.json item '1' names .*no file below"):
        read_items(tmp_path, "naturalbench")


# --- wrong content -----------------------------------------------------------------------------

DELETED = object()
SUGAR = ("sugarcrepe", "data/add_att.json")
PLUS = ("sugarcrepe_pp", "data/swap_obj.json")
NATURAL = ("naturalbench", "metadata.json")
VG = ("aro_relation", "visual_genome_relation.json")
ORDER = ("aro_order", "order.json")
PHOTOS = ("whatsup", "controlled_images_dataset.json")
COCO = ("whatsup", "coco_qa_one_obj.json")
WRONG: list[tuple[tuple[str, str], tuple[Any, ...], Any, str]] = [
    (SUGAR, (), [], "list at its top, wanted an object"),
    (SUGAR, (), {}, r"add_att\.json has no items: SugarCrepe, github"),
    (SUGAR, ("1",), 5, "item '1' has no field .* it is 5"),
    (SUGAR, ("1", "caption"), DELETED, "item '1' has no field 'caption'"),
    (SUGAR, ("1", "caption"), 3, "item '1' has 3 where a file name or a text"),
    (PLUS, (), {"0": {}}, "dict at its top, wanted a list"),
    (PLUS, (1, "id"), 0, "has the id '0' twice: correct or remove"),
    (NATURAL, (0, "caption_1"), DELETED, "has no field 'caption_1', it is .*'index'"),
    (VG, (0, "bbox_w"), 0, r"its box \[.*0, 3\] is not a part"),
    (VG, (0, "bbox_y"), 10**9, r"box \[1, 1000000000, 2, 3\] is not a part"),
    (ORDER, (0, "caption_options"), "ab", "has 'ab' to choose from, wanted a list of at least 2"),
    (ORDER, (1, "caption_options", 4), DELETED, "has 4 texts to choose from, wanted a list of 5"),
    (PHOTOS, (0, "image_path"), "mug.jpeg", "'mug.jpeg', wanted a name such as mug_left_of_table"),
    (PHOTOS, (1, "image_path"), "data/mug-0_left_of_table.jpeg", "'mug-0_left_of_table' twice"),
    (COCO, (0, 2), DELETED, "wanted an object with image_path"),
]


@pytest.mark.parametrize("file, place, value, message", WRONG)
def test_wrong_content_gets_one_clear_line(
    file: tuple[str, str],
    place: tuple[Any, ...],
    value: Any,
    message: str,
    tmp_path: Path,
    draw: Draw,
) -> None:
    layout, name = file
    write(layout, tmp_path, draw, 2)
    content = holder = {"": json.loads((tmp_path / name).read_text())}
    *above, last = ("", *place)
    for key in above:
        holder = holder[key]
    if value is DELETED:
        del holder[last]
    else:
        holder[last] = value
    (tmp_path / name).write_text(json.dumps(content[""]))
    with pytest.raises(ValueError, match=message) as caught:
        read_items(tmp_path, layout)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_keys_given_twice_and_lines_that_do_not_parse(tmp_path: Path, draw: Draw) -> None:
    write("sugarcrepe", tmp_path, draw, 2)
    path = tmp_path / "data" / "replace_obj.json"
    path.write_text(path.read_text().replace('"1":', '"0":'))
    with pytest.raises(ValueError, match="has the key '0' twice"):
        read_items(tmp_path, "sugarcrepe")
    write("winoground", tmp_path, draw, 2)
    (tmp_path / "examples.jsonl").write_text('{"id": 0}\n{"id": \n')
    with pytest.raises(ValueError, match=r"examples\.jsonl line 2 is not valid JSON"):
        read_items(tmp_path, "winoground")


@fuller_in_soak
def test_damaged_files_end_in_one_line_or_in_items(tmp_path: Path, draw: Draw) -> None:
    rng = random.Random(0)
    for layout in LAYOUTS:
        root = tmp_path / layout
        write(layout, root, draw, 2)
        path = next(path for path in root.rglob("*.json*"))
        lines = path.read_text().split("\n")
        tree = json.loads(path.read_text()) if path.suffix == ".json" else [*map(json.loads, lines)]
        for trial in range(fuzzing.count(8, 2000)):
            damaged = fuzzing.damaged_json(tree, rng)
            many = path.suffix == ".jsonl" and isinstance(damaged, list)
            text = "\n".join(map(json.dumps, damaged)) if many else json.dumps(damaged)
            with fuzzing.replaced(path, text.encode()):
                fuzzing.ends_well(
                    lambda: read_items(root, layout, leave_out=True),  # noqa: B023
                    f"{layout} {trial}: {text[:300]}",
                )


# --- options and the suite ---------------------------------------------------------------------


def test_the_shipped_suite_says_what_it_needs_and_names_our_metrics(
    tmp_path: Path, draw: Draw, planted: Any
) -> None:
    suite, references = evaluation.load_suite("compositional", [f"data={tmp_path}"])
    with pytest.raises(FileNotFoundError, match=r"'sugarcrepe': no folder .*RAIVNLab/sugar-crepe"):
        evaluation.check(suite)
    metrics: dict[str, set[str]] = {}
    for name, benchmark in suite.items():
        layout, root = benchmark.options["layout"], Path(benchmark.path)
        size = write(layout, root, draw, KINDS.get(layout, 2))
        if "images" in benchmark.options:
            with pytest.raises(
                FileNotFoundError, match=r"images: there is no .*coco/val2017: it wants Su"
            ):
                evaluation.check({name: benchmark})
            (root / "val2017").rename(root / "moved")
            options = benchmark.options | {"images": "moved"}
        else:
            options = dict(benchmark.options)
            evaluation.check({name: benchmark})
        metrics[name] = {*evaluate(planted("perfect", size), root, **options)}
    evaluation.check_options(suite)
    for reference in references:
        assert reference.metric in metrics[reference.benchmark], reference
    assert {reference.benchmark for reference in references} == metrics.keys() - {"sugarcrepe_pp"}


@pytest.mark.real_data
def test_the_items_of_sugarcrepe_whose_images_are_there(shared_data: Path) -> None:
    root = shared_data / "sugarcrepe"
    found = read_items(root, "sugarcrepe", leave_out=True)
    assert dict(found.read) == LAYOUTS["sugarcrepe"].sizes
    assert (len(found.items), found.left_out) == (204, 7307)
    assert len({item.unit for item in found.items}) == 43
