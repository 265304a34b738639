"""Zero-shot classification on planted encoders; classes, templates, layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import numpy as np
import open_clip
import pytest
import torch

from mclclip.eval.features import Extractor
from mclclip.eval.prompts import find_templates
from mclclip.eval.protocols import zeroshot
from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers
from tests.tars import write_tar

TINY = Path(__file__).parents[2] / "configs" / "tiny_vit.json"
pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture
def folders(tmp_path: Path, draw: Callable[[Path, int], None]) -> Path:
    """Classes class_0 .. class_6 with 1, 2, ... images each, which spell the class."""
    for label in range(7):
        for number in range(label + 1):
            draw(tmp_path / "images" / f"class_{label}" / f"{number}.png", label)
    (tmp_path / "images" / ".cache").mkdir()
    (tmp_path / "images" / "class_0" / "notes.txt").write_text("not an image")
    return tmp_path / "images"


def run(encoder: Any, root: Path, **options: Any) -> dict[str, Any]:
    figures = zeroshot.evaluate(Extractor(encoder, batch_size=5), root, **options)
    return {figure.metric: figure for figure in figures}


def test_mean_per_class_weighs_small_classes_equally(folders: Path, planted: Any) -> None:
    encoder = planted("perfect", 7)
    encoder.image_table[6] = encoder.image_table[0]  # the largest class looks like the smallest
    figures = run(encoder, folders)
    assert figures["top1"].value == pytest.approx(100 * 21 / 28)
    assert figures["mean_per_class"].value == pytest.approx(100 * 6 / 7)
    # the wrong class wins, the six other candidates tie: a tie is no place among five
    assert figures["top5"].value == pytest.approx(100 * 21 / 28)


def test_class_vector_is_the_normalised_mean_of_unit_prompts(planted: Any) -> None:
    encoder = planted("random", 40, dim=8)
    vectors = zeroshot.classifier(Extractor(encoder), ["1", "2"], ["{}", "a 1{}", "b 2{}"])
    for row, name in enumerate((1, 2)):
        prompts = encoder.text_table[[name, 10 + name, 20 + name]].double()
        wanted = torch.nn.functional.normalize(prompts, dim=1).mean(0)
        wanted = wanted / wanted.norm()
        assert np.allclose(vectors[row], wanted.numpy(), atol=1e-6)
    assert vectors.dtype == np.float32


def test_table_with_labels_and_classes(
    tmp_path: Path, draw: Callable[[Path, int], None], planted: Any
) -> None:
    for number in range(3):
        draw(tmp_path / f"{number}.png", number)
    (tmp_path / "labels.csv").write_text("filepath,label\n0.png,zero\n2.png,two\n1.png,one\n")
    (tmp_path / "classes.txt").write_text("zero\tno 0\none\tno 1\ntwo\tno 2\nextra\tno 3\n")
    encoder = planted("perfect", 4)
    options = {"labels": "labels.csv", "classes": "classes.txt", "templates": "clip_7"}
    figures = run(encoder, tmp_path, **options)
    assert figures["top1"].value == 100.0 and figures["top1"].count == 3
    assert len(encoder.seen_texts) == 28 and "itap of a no 3." in encoder.seen_texts
    # As Excel saves it in much of Europe; other formats are named.
    (tmp_path / "excel.csv").write_text("filepath;label\n0.png;zero\n2.png;two\n1.png;one\n")
    again = run(encoder, tmp_path, **options | {"labels": "excel.csv"})
    assert again["top1"].value == 100.0
    (tmp_path / "labels.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="labels.parquet is no table of text"):
        run(encoder, tmp_path, **options | {"labels": "labels.parquet"})
    # Names are texts as others are, and a class without images is a candidate.
    (tmp_path / "latin.txt").write_bytes("zero\tKäse\n".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.txt cannot be read"):
        run(encoder, tmp_path, **options | {"classes": "latin.txt"})
    wanted = {"classes": "classes.txt", "templates": "clip_7", "num_templates": 7, "num_classes": 4}
    assert wanted.items() <= figures["top1"].protocol.items()


def test_classes_that_share_a_name_tie_and_are_told(
    tmp_path: Path,
    draw: Callable[[Path, int], None],
    planted: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number in range(3):
        draw(tmp_path / f"class_{number}" / "x.png", min(number, 1))
    (tmp_path / "names.json").write_text(
        '{"class_0": "thing 0", "class_1": "thing 1", "class_2": "thing 1"}'
    )
    with caplog.at_level("WARNING", logger="mclclip"):
        figures = run(planted("perfect", 2), tmp_path, classes="names.json")
    assert figures["top1"].value == pytest.approx(100 / 3)
    assert figures["mean_per_class"].value == pytest.approx(100 / 3)  # they are still two classes
    assert figures["top1"].protocol["tied_images"] == 2
    assert "1 names stand for several classes, such as 'thing 1'" in caplog.text


def test_class_names_that_are_bare_numbers_are_told_once(
    tmp_path: Path,
    draw: Callable[[Path, int], None],
    planted: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the folders of many downloads are called: a photo of a 0."""
    for number in (0, 1, 7):
        draw(tmp_path / str(number) / "x.png", number)
    draw(tmp_path / "class_8" / "x.png", 8)
    assert run(planted("perfect", 9), tmp_path)["top1"].value == 100.0  # they are used all the same
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("3 of 4 class names are bare numbers (0, 1, 7), which prompts take for")
    assert "set classes=FILE with a line '0<TAB>name' for each" in line and "\n" not in line
    caplog.clear()
    (tmp_path / "names.txt").write_text("0\n1\tno 1\n7\tno 7\nclass_8\tno 8\n")
    run(planted("perfect", 9), tmp_path, classes="names.txt")  # 0 is asked for by the user
    assert not caplog.records


def test_classifier_equals_open_clips() -> None:
    model = load_towers(TINY)
    names, templates = ["tench", "giant panda", "pizza"], find_templates("clip_80", Path())
    ours = zeroshot.classifier(Extractor(Encoder([model])), names, templates)
    theirs = open_clip.build_zero_shot_classifier(
        model.clip, model.tokenizer, names, open_clip.OPENAI_IMAGENET_TEMPLATES
    )
    np.testing.assert_allclose(ours, theirs.T.numpy(), atol=1e-6)


# --- metrics of other data sets -----------------------------------------------------------------


def test_the_metric_says_which_figure_is_the_headline(folders: Path, planted: Any) -> None:
    encoder = planted("perfect", 7)
    encoder.image_table[6] = encoder.image_table[0]
    for metric, headline in {"accuracy": "top1", "mean_per_class": "mean_per_class"}.items():
        figures = run(encoder, folders, metric=metric)
        main = [name for name, f in figures.items() if f.protocol.get("level") == "headline"]
        assert main == [headline]
    found = run(planted("random", 7, seed=3), folders, metric="mean_of_top1_and_top5")
    middle = found["mean_of_top1_and_top5"]
    assert middle.value == pytest.approx((found["top1"].value + found["top5"].value) / 2)
    assert found["top1"].value < middle.value < found["top5"].value
    assert middle.protocol["level"] == "headline" and middle.ci_low < middle.value < middle.ci_high


@pytest.fixture
def voc(tmp_path: Path, draw: Callable[[Path, int], None]) -> Path:
    """PASCAL VOC's layout, and the same in a table: image n shows the classes of its binary digits.
    The first image is too difficult to judge for class 1."""
    rows = ["filepath,label"]
    for number in range(1, 8):
        draw(tmp_path / "JPEGImages" / f"{number:06d}.jpg", number)
    main = tmp_path / "ImageSets" / "Main"
    main.mkdir(parents=True)
    for label in range(3):
        shown = {number: 1 if number >> label & 1 else -1 for number in range(1, 8)}
        rows += [f"JPEGImages/{n:06d}.jpg,no {label}" for n, sign in shown.items() if sign == 1]
        if label == 1:
            shown[1] = 0
        lines = [f"{number:06d} {sign:2d}" for number, sign in shown.items()]
        (main / f"no {label}_test.txt").write_text("\n".join(lines) + "\n")
        (main / f"no {label}_train.txt").write_text("000001  1\n")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    return tmp_path


def digits(encoder: Any) -> Any:
    """The encoder, whose images have their number's binary digits as features."""
    encoder.image_table = torch.tensor(
        [[number >> bit & 1 for bit in range(3)] for number in range(8)], dtype=torch.float32
    )
    encoder.text_table = torch.eye(3)
    return encoder


@pytest.mark.parametrize("labels", ["ImageSets/Main", "labels.csv"])
def test_several_labels_by_hand(voc: Path, planted: Any, labels: str) -> None:
    encoder = digits(planted("perfect", 3))
    (found,) = run(encoder, voc, labels=labels, metric="map_11_point", templates="bare").values()
    assert found.metric == "map_11_point" and found.value == 100.0
    assert found.ci_low < 100.0 == found.ci_high and found.protocol["level"] == "headline"
    assert found.count == (20 if labels == "ImageSets/Main" else 21)  # one is not judged
    encoder.text_table = -torch.eye(3)  # all negatives first: precision n / (all up to the n-th)
    worst = run(encoder, voc, labels=labels, metric="map_11_point", templates="bare")
    judged = 6 if labels == "ImageSets/Main" else 7  # of class 1
    share = 100 * float(np.mean([4 / 7, 4 / judged, 4 / 7]))
    assert worst["map_11_point"].value <= share + 1e-9
    constant = run(planted("constant", 9), voc, labels=labels, metric="map_11_point")
    assert constant["map_11_point"].value == pytest.approx(
        share
    )  # its floor: how frequent they are


@pytest.fixture
def memes(tmp_path: Path, draw: Callable[[Path, int], None]) -> Path:
    rows = ["filepath,label"]
    for number in range(20):
        draw(tmp_path / f"{number}.png", number)
        rows.append(f"{number}.png,{number % 2}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    return tmp_path


def test_metrics_that_do_not_fit_get_one_line(
    folders: Path, voc: Path, memes: Path, planted: Any
) -> None:
    encoder = planted("perfect", 20)
    with pytest.raises(ValueError, match="roc_auc wants 2 classes, got 7"):
        run(encoder, folders, metric="roc_auc")
    with pytest.raises(ValueError, match="wants more than 5 classes, got 2"):
        run(encoder, memes, labels="labels.csv", metric="mean_of_top1_and_top5")
    with pytest.raises(ValueError, match="map_11_point wants labels=FILE, a CSV with a row"):
        run(encoder, folders, metric="map_11_point")
    with pytest.raises(ValueError, match="want metric=map_11_point"):
        run(encoder, voc, labels="ImageSets/Main")
    main = voc / "ImageSets" / "Main"
    options: dict[str, Any] = {"labels": "ImageSets/Main", "metric": "map_11_point"}
    with pytest.raises(ValueError, match="JPEGImages has no files CLASS_test.txt"):
        run(encoder, voc, labels="JPEGImages", metric="map_11_point")
    (main / "no 1_test.txt").write_text("000001 1\n")
    with pytest.raises(ValueError, match="no 1_test.txt"):
        run(encoder, voc, **options)
    (main / "no 1_test.txt").write_text("000001 yes\n")
    with pytest.raises(ValueError, match="no 1_test.txt: '000001' has"):
        run(encoder, voc, **options)
    (memes / "labels.csv").write_text("filepath,label\n0.png,0\n0.png,1\n")
    with pytest.raises(ValueError, match="0.png more than once: several labels"):
        run(encoder, memes, labels="labels.csv")
    (memes / "labels.csv").write_text("filepath,label\n0.png,0\n1.png,0\n")
    with pytest.raises(ValueError, match="images of both classes"):
        run(encoder, memes, labels="labels.csv", metric="roc_auc", classes={"0": "a 0", "1": "a 1"})


def test_shards_of_classes_are_the_folders_of_classes(
    folders: Path, tmp_path: Path, planted: Any
) -> None:
    """Pictures with their ``.cls`` in tars, the names beside them, as the Hub's wds_* sets are."""
    members = []
    for number, path in enumerate(sorted(folders.glob("*/*.png"))):
        label = path.parent.name.removeprefix("class_")
        members += [(f"{number}.png", path.read_bytes()), (f"{number}.cls", label.encode())]
    (tmp_path / "wds" / "test").mkdir(parents=True)
    write_tar(tmp_path / "wds" / "test" / "0.tar", members[:6])
    shard = write_tar(tmp_path / "wds" / "test" / "1.tar", members[6:])
    names = "".join(f"class_{label}\n" for label in range(7))
    (tmp_path / "wds" / "classnames.txt").write_text(names)
    encoder = planted("perfect", 7)
    encoder.image_table[6] = encoder.image_table[0]
    wanted = run(encoder, folders)
    for root in (tmp_path / "wds", tmp_path / "wds" / "test"):
        figures = run(encoder, root)
        assert {name: f.value for name, f in figures.items()} == {
            name: f.value for name, f in wanted.items()
        }
    write_tar(shard, members[6:-1])
    with pytest.raises(ValueError, match="no_label"):
        run(encoder, tmp_path / "wds" / "test")
