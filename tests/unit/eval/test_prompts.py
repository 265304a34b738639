"""Names of classes and prompt templates: choices, files, how they meet labels, what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
from timm.data import ImageNetInfo

from mclclip import config as configuration
from mclclip.eval import prompts
from tests import tiny

CLASSES = {"n02510455": "giant panda", "n01440764": "tench", "n07873807": "pizza"}


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """Three of ImageNet's class folders, as ImageNet calls them."""
    for label in CLASSES:
        (tmp_path / "imagenet" / label).mkdir(parents=True)
    return tmp_path / "imagenet"


def one_line(error: pytest.ExceptionInfo[Any]) -> None:
    assert "\n" not in str(error.value)


# --- ImageNet ----------------------------------------------------------------------------------


def test_names_of_imagenet_are_joined_by_wordnet_id(imagenet: Path) -> None:
    assert prompts.labels_of(imagenet) == sorted(CLASSES)
    assert prompts.find_names([*CLASSES], "imagenet1k", imagenet) == CLASSES
    (imagenet / "own.json").write_text(json.dumps([f"thing {number}" for number in range(1000)]))
    found = prompts.find_names(["n02510455", "n01440764"], "own.json", imagenet)
    assert found == {"n02510455": "thing 388", "n01440764": "thing 0"}


def test_all_names_of_imagenet_stand_at_their_ids() -> None:
    """CLIP's names against WordNet's own words for the ids; a shift by one leaves 179 of 1,000."""

    def words(text: str) -> set[str]:
        return set(re.findall(r"[a-z]{3,}", text.lower()))

    info = ImageNetInfo("imagenet-1k")
    names = prompts.find_names(info.label_names(), "imagenet1k", Path())
    described = {label: info.label_name_to_description(label, detailed=True) for label in names}
    assert len(names) == 1000
    assert sum(bool(words(names[label]) & words(described[label])) for label in names) >= 975


@pytest.mark.parametrize(
    "classes, message",
    [
        (None, "3 of 3 classes hold WordNet ids or nothing, such as that of 'n01440764': set clas"),
        ("empty.txt", "1 of 3 classes hold WordNet ids or nothing, such as that of 'n02510455'"),
        ("ten.json", "has 10 names, and 'n01440764' is a WordNet id: wanted the 1000 names"),
    ],
)
def test_wordnet_ids_without_names_are_refused(
    imagenet: Path, classes: str | None, message: str
) -> None:
    (imagenet / "empty.txt").write_text("n02510455\t\nn01440764\ttench\nn07873807\tpizza\n")
    (imagenet / "ten.json").write_text(json.dumps([f"thing {number}" for number in range(10)]))
    with pytest.raises(ValueError, match=message) as error:
        prompts.check(imagenet, classes=classes)
    one_line(error)


def test_wordnet_ids_of_folders_and_tables_are_refused(imagenet: Path, tmp_path: Path) -> None:
    (imagenet / "n02084071").mkdir()  # "dog" is in ImageNet-21k alone
    with pytest.raises(ValueError, match="no name for 1 of 4 classes, such as 'n02084071'"):
        prompts.check(imagenet, classes="imagenet1k")
    (tmp_path / "dogs" / "n02085620-Chihuahua").mkdir(parents=True)  # as in Stanford Dogs
    with pytest.raises(ValueError, match="1 of 1 classes hold WordNet ids"):
        prompts.check(tmp_path / "dogs")
    (tmp_path / "labels.csv").write_text("filepath,label\na.jpg,n01440764\nb.jpg,n07873807\n")
    with pytest.raises(FileNotFoundError, match="2 of the 2 images .* such as a.jpg, b.jpg"):
        prompts.check(tmp_path, labels="labels.csv", classes="imagenet1k")
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="2 of 2 classes hold WordNet ids"):
        prompts.check(tmp_path, labels="labels.csv")
    prompts.check(tmp_path, labels="labels.csv", classes="imagenet1k")


# --- lists and mappings ------------------------------------------------------------------------


def test_a_list_is_joined_to_numbers(tmp_path: Path) -> None:
    """By their value: sorted as text they are 0, 1, 10, 2."""
    (tmp_path / "names.json").write_text(json.dumps([f"thing {number}" for number in range(11)]))
    labels = sorted(map(str, range(11)))
    found = prompts.find_names(labels, "names.json", tmp_path)
    assert found == {label: f"thing {label}" for label in labels}
    padded = prompts.find_names([f"{n:05d}" for n in range(11)], "names.json", tmp_path)
    assert padded["00010"] == "thing 10"


@pytest.mark.parametrize("numbers", [range(1, 12), range(10)])
def test_numbers_of_another_list_are_refused(tmp_path: Path, numbers: range) -> None:
    (tmp_path / "names.json").write_text(json.dumps([f"thing {number}" for number in range(11)]))
    message = f"the numbers 0 to 10: the {len(numbers)} classes run from {min(numbers)} to"
    with pytest.raises(ValueError, match=message) as error:
        prompts.find_names([str(number) for number in numbers], "names.json", tmp_path)
    one_line(error)


def test_a_list_is_joined_to_labels_of_the_same_words(tmp_path: Path) -> None:
    labels = ["red_fox", "dog"]
    named = {"red_fox": "red fox", "dog": "dog"}
    assert prompts.find_names(labels, None, Path()) == named  # labels are names
    (tmp_path / "names.json").write_text('["Red Fox", "dog", "T-shirt"]')
    found = prompts.find_names(["t_shirt", "red-fox"], "names.json", tmp_path)
    assert found == {"t_shirt": "T-shirt", "red-fox": "Red Fox"}
    (tmp_path / "names.json").write_text('["c++", "c#", "c", "Objective C"]')  # equal words
    found = prompts.find_names(["c", "c#", "c++", "objective_c"], "names.json", tmp_path)
    assert found == {"c": "c", "c#": "c#", "c++": "c++", "objective_c": "Objective C"}


def test_a_list_is_not_joined_by_position(tmp_path: Path) -> None:
    """As many names as folders prove nothing: these would be those of another data set."""
    (tmp_path / "names.json").write_text('["airplane", "bird"]')
    with pytest.raises(ValueError, match="no name for 2 of 2 classes, such as 'forest'") as error:
        prompts.find_names(["forest", "river"], "names.json", tmp_path)
    one_line(error)


def test_a_mapping_says_which_classes_there_are(tmp_path: Path) -> None:
    names = {"n07873807": "pizza", "n01440764": "a fish"}
    (tmp_path / "names.json").write_text(json.dumps(names))
    assert prompts.find_names(["n01440764"], "names.json", tmp_path) == names
    (tmp_path / "names.txt").write_text("n07873807\tpizza\n\nn01440764\ta fish\n")
    assert prompts.find_names(["n01440764"], "names.txt", tmp_path) == names
    with pytest.raises(ValueError, match="no name for 1 of 2 classes, such as 'n02510455'"):
        prompts.find_names(["n01440764", "n02510455"], "names.txt", tmp_path)


@pytest.mark.parametrize("text", ["3", '{"0": ["n01440764", "tench"]}', '["a", 3]'])
def test_files_that_hold_no_names(tmp_path: Path, text: str) -> None:
    (tmp_path / "names.json").write_text(text)
    with pytest.raises(ValueError, match="must hold an object of label: name, or a list") as error:
        prompts.find_names(["a"], "names.json", tmp_path)
    one_line(error)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file of classes at .*imagenet100: give"):
        prompts.find_names(["a"], "imagenet100", tmp_path)
    (tmp_path / "names.txt").write_text("a\nb\na\tc\n")
    with pytest.raises(ValueError, match="names the class 'a' twice"):
        prompts.find_names(["a"], "names.txt", tmp_path)
    (tmp_path / "names.json").write_text('{"a": "x", "b": "y", "a": "z"}')
    with pytest.raises(ValueError, match="names.json has the key 'a' twice"):
        prompts.find_names(["a"], "names.json", tmp_path)


# --- templates ---------------------------------------------------------------------------------


def test_templates(tmp_path: Path) -> None:
    def found(templates: str | list[str]) -> list[str]:
        return prompts.find_templates(templates, tmp_path)

    assert found("simple") == ["a photo of a {}."]
    assert found("bare") == ["{}"]
    assert found("clip_7")[0] == "itap of a {}." and len(set(found("clip_7"))) == 7
    assert found("clip_80")[0] == "a bad photo of a {}." and len(set(found("clip_80"))) == 80
    assert set(found("clip_7")) < set(found("clip_80"))
    assert all(found(name) for name in prompts.TEMPLATES)
    assert found(["a {}", "the {}"]) == ["a {}", "the {}"]
    (tmp_path / "templates.txt").write_text("one {}\n\n two {}\n")
    assert found("templates.txt") == found(str(tmp_path / "templates.txt")) == ["one {}", "two {}"]
    (tmp_path / "templates.json").write_text('["one {}", "two {}"]')
    assert found("templates.json") == ["one {}", "two {}"]


@pytest.mark.parametrize(
    "templates, message",
    [
        ("openai_80", "unknown templates 'openai_80': use simple, bare, clip_7, clip_80, clip_b"),
        (["a photo"], "'a photo': wanted some with one {} .* such as 'a photo of a {}.'"),
        ([], "has no template:"),
        ("wrong.json", "must hold a list"),
    ],
)
def test_wrong_templates(tmp_path: Path, templates: Any, message: str) -> None:
    (tmp_path / "wrong.json").write_text('{"a": "{}"}')
    with pytest.raises(ValueError, match=message) as error:
        prompts.find_templates(templates, tmp_path)
    one_line(error)


# --- clip-benchmark ----------------------------------------------------------------------------


def test_names_and_templates_of_clip_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("clip_benchmark", reason="needs the package clip-benchmark (extra 'eval')")
    assert prompts.find_names([*CLASSES], "clip_benchmark:imagenet1k", tmp_path) == CLASSES
    pets = prompts.find_names(["american_bulldog", "Abyssinian"], "clip_benchmark:pets", tmp_path)
    assert pets == {"american_bulldog": "American Bulldog", "Abyssinian": "Abyssinian"}
    signs = [f"{number:05d}" for number in range(43)]
    assert prompts.find_names(signs, "clip_benchmark:gtsrb", tmp_path)["00014"] == "stop"
    with pytest.raises(ValueError, match="43 names, which belong to the numbers 0 to 42: the 10"):
        prompts.find_names(signs[:10], "clip_benchmark:gtsrb", tmp_path)
    with pytest.raises(ValueError, match="no class names for 'cifar10': it has caltech101, "):
        prompts.find_names(signs, "clip_benchmark:cifar10", tmp_path)
    templates = prompts.find_templates("clip_benchmark:imagenet1k", tmp_path)
    assert templates == prompts.find_templates("clip_80", tmp_path)
    assert len(prompts.find_templates("clip_benchmark:cifar10", tmp_path)) == 18
    with pytest.raises(ValueError, match="no templates for 'nothing'"):
        prompts.find_templates("clip_benchmark:nothing", tmp_path)


def test_without_clip_benchmark_the_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "clip_benchmark", None)  # as if it were not installed
    message = (
        r"clip_benchmark:pets needs the package clip_benchmark, .*: pip install 'mclclip\[eval\]'"
    )
    with pytest.raises(ValueError, match=message):
        prompts.find_templates("clip_benchmark:pets", tmp_path)
    with pytest.raises(ValueError, match=message):
        prompts.find_names(["Abyssinian"], "clip_benchmark:pets", tmp_path)


# --- before hours are spent --------------------------------------------------------------------


def test_names_and_templates_are_checked_together(imagenet: Path) -> None:
    with pytest.raises(ValueError, match="names of 3 of 3 classes hold WordNet ids"):
        prompts.check(imagenet)
    prompts.check(imagenet, classes="imagenet1k", templates="clip_80")
    with pytest.raises(ValueError, match="unknown templates 'clip_81'"):
        prompts.check(imagenet, classes="imagenet1k", templates="clip_81")
    with pytest.raises(FileNotFoundError, match="no file of classes"):
        prompts.check(imagenet, classes="names.txt")
    with pytest.raises(ValueError, match="labels=FILE"):
        prompts.check(imagenet, classes="imagenet1k", metric="map_11_point")


def test_templates_of_clip_benchmark_are_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a photo of a {c}.\n")
    assert prompts.find_templates("a.txt", tmp_path) == ["a photo of a {}."]


def test_the_recipe_for_locked_image_tuning_names_imagenets_classes(
    imagenet: Path, tmp_path: Path
) -> None:
    recipe = tiny.ROOT / "launch" / "recipes" / "lit.yaml"
    (benchmark,) = configuration.load(recipe, [f"eval.suite.imagenet.path={imagenet}"]
        ).eval.suite.values()  # fmt: skip
    prompts.check(imagenet, **benchmark.options)
    assert prompts.find_names(sorted(CLASSES), benchmark.options["classes"], imagenet) == CLASSES
    assert len(prompts.find_templates(benchmark.options["templates"], imagenet)) == 80
