"""The remedies of a race, its settings, and what it refuses before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from mclclip.ranks.process_group import SINGLE
from mclclip.util import files
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.remedies import REMEDIES, choose_remedies, read_remedies
from mclclip.verbs import race
from mclclip.verbs.race import Race
from tests import damage, tiny

KNOWN = read_remedies(REMEDIES)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of two stages of 6 steps; only its minimal pairs are there."""
    folder = tmp_path_factory.mktemp("race")
    data = tiny.make_data(folder / "data")
    return tiny.write_config(folder / "base.yaml", folder / "race", data)


def test_every_shipped_remedy_is_a_run_of_the_demo_at_equal_cost() -> None:
    own = Race("demo", choose_remedies([*KNOWN]), [3])
    assert [one.name for one in own.remedies] == [*KNOWN]
    for remedy in own.remedies:
        assert remedy.about, f"{remedy.name} does not say what it is"
        settled = own.settings(remedy, 3)
        assert settled.num_stages * settled.train.steps == 1800, remedy.name  # type: ignore[operator]
        assert (settled.train.global_batch, settled.seed) == (64, 3)
        assert settled.run_dir.endswith("/seed_3")
        assert settled.base == own.base.base and settled.cluster == own.base.cluster
    kinds = {one.name: own.settings(one, 3).train.objective.kind for one in own.remedies}
    others = ("sigmoid", "supcon", "preserve")
    assert [kinds[name] for name in ("ifm", "hcl", *others)] == [
        "ifm", "hcl", "sigmoid", "supcon", "info_nce + preserve",
    ]  # fmt: skip
    own_of = {one.name: own.settings(one, 3).train.objective for one in own.remedies}
    assert own_of["hard_captions"].hard_captions == HardCaptions()  # type: ignore[union-attr]
    assert own_of["equal_captions"].near_copies.by_bytes  # type: ignore[union-attr]


def test_remedies_with_the_same_overrides_share_their_trainings() -> None:
    assert [one.name for one in choose_remedies(["ifm", "mcl"])] == ["mcl", "ungrouped", "ifm"]
    own = Race("demo", choose_remedies(["wise", "ifm"]))
    assert [one.name for one in own.remedies] == ["ungrouped", "wise", "ifm"]
    assert [one.name for one in own.trained] == ["ungrouped", "ifm"]
    control, wise, ifm = own.remedies
    assert own.folder(wise, 1) == own.folder(control, 1) != own.folder(ifm, 1)
    assert own.encoder(wise) == "control_ungrouped_soup_uniform"
    assert own.encoder(control) == "control_ungrouped_concat_stage_norm"


def test_a_sweep_file_has_remedies_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.sweep"
    file.write_text(
        "# mine\nifm_in_groups train.objective.kind=ifm # in groups\n"
        "\nlow controls=[ungrouped] train.lr=1e-5 encoder=stage_1\n"
    )
    found = {one.name: one for one in choose_remedies([str(file), "hcl"])}
    assert [*found] == ["ungrouped", "ifm_in_groups", "low", "hcl"]
    assert found["ifm_in_groups"].overrides == ("train.objective.kind=ifm",)
    assert found["ifm_in_groups"].about == "in groups"
    assert found["low"].encoder == "stage_1"
    own = Race("demo", choose_remedies([str(file)]))
    assert own.settings(found["low"], 0).train.lr == 1e-5


def test_two_files_have_no_remedy_of_one_name(tmp_path: Path) -> None:
    one, other = tmp_path / "one.sweep", tmp_path / "other.sweep"
    one.write_text("low train.lr=1e-5\nifm train.lr=1e-6\n")
    other.write_text("low train.lr=1e-6\n")
    found = {each.name: each for each in choose_remedies([str(one), "ifm", str(one)])}
    assert found["ifm"].overrides == ("train.lr=1e-6",), "a file's lines win over shipped names"
    assert found["ifm"].label == f"remedy 'ifm' of {one}" and KNOWN["ifm"].label == "remedy 'ifm'"
    with pytest.raises(ValueError, match="other.sweep: a remedy is named 'low', as one of .*one.s"):
        choose_remedies([str(one), str(other)])
    one.write_text("ungrouped controls=[ungrouped] train.lr=1e-5\n")
    with pytest.raises(ValueError, match="a remedy is named 'ungrouped', which others are"):
        choose_remedies([str(one)])


def refused(recipe: Path, *words: str, remedies: tuple[str, ...] = ("mcl",), **more: object) -> str:
    with pytest.raises(ValueError) as error:
        Race(str(recipe), choose_remedies(remedies), overrides=words, **more).check(SINGLE)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_would_stop_a_race_later_is_refused_at_once(recipe: Path) -> None:
    assert "num_stages is 0" in refused(recipe, "num_stages=0")
    assert "name mcl too" in refused(recipe, remedies=("random_groups",))
    patient = 'train.evaluate={"every": 1, "metric": "pairs/average", "patience": 1}'
    assert "patience" in refused(recipe, patient)
    wise = refused(recipe, "export.soup=false", remedies=("wise",))
    assert "'wise' is judged by soup_uniform, which is not made" in wise


def test_a_remedy_that_the_objective_refuses_is_named(recipe: Path, tmp_path: Path) -> None:
    """The base trains class centers, which have no control."""
    mlcd = ("train.objective.kind=mlcd", "train.objective.labels_per_sample=1",
            "train.objective.sample_rate=1.0")  # fmt: skip
    line = refused(recipe, *mlcd, remedies=("mcl",))
    assert line.startswith("remedy 'ungrouped': controls=['ungrouped'] do not apply")
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (32, 32)).save(tmp_path / split / name / "1.png")
    line = refused(recipe, "model.text=false", "base=null", "eval.suite.pairs=null",
                   f"eval.suite.knn={{kind: knn, path: {tmp_path}, options: {{k: 1}}}}",
                   "train.objective.kind=nt_xent",
                   remedies=("sigmoid",))  # fmt: skip
    assert line.startswith("remedy 'sigmoid': ") and "reads captions" in line


def test_what_is_wrong_in_a_file_names_remedy_and_file(recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.sweep"
    file.write_text("three num_stages=3\n")
    line = refused(recipe, "train.steps=5", remedies=(str(file),))
    assert line.startswith(f"remedy 'three' of {file}: the 10 steps of all remedies cannot be div")
    for option, words in (
        ("train.lrr=1", "unknown option 'train.lrr': did you mean 'train.lr'?"),
        ("train.objective.terms=[{", "is not valid YAML"),
        ("encoder=stage_9", "is judged by stage_9, which is not made"),
    ):
        file.write_text(f"ok train.lr=1e-5\nbad {option}\n")
        line = refused(recipe, remedies=(str(file),))
        assert line.startswith(f"remedy 'bad' of {file}") and words in line


def test_a_run_is_not_mixed_with_a_race(prepared_run: Path, recipe: Path) -> None:
    line = refused(recipe, f"run_dir={prepared_run}")
    assert line.startswith(f"{prepared_run} holds a run, whose files a race would mix")
    assert not (prepared_run / "race.json").exists()


def test_one_remedy_alone_by_name_or_number(recipe: Path) -> None:
    def job(only: str) -> str:
        own = Race(str(recipe), choose_remedies(["mcl", "ifm", "wise"]), only=only)
        return Path(own.job.run_dir).name

    assert [job(only) for only in ("ifm", "1", "3", "base")] == ["ifm", "mcl", "ifm", "base"]
    for only in ("0", "4", "hcl"):
        with pytest.raises(ValueError, match="1 mcl, 2 ungrouped, 3 ifm"):
            job(only)
    assert job("wise") == "ungrouped", "it is judged by another encoder of that run"


def test_a_base_that_differs_from_that_of_the_runs_is_refused(recipe: Path, tmp_path: Path) -> None:
    own = Race(str(recipe), choose_remedies(["mcl"]), overrides=[f"run_dir={tmp_path / 'race'}"])
    files.write_json(own.record_path, own.record)

    def again(*words: str) -> Race:
        return Race(str(recipe), choose_remedies(["mcl"]), overrides=[*own.overrides, *words])

    again("data.num_workers=2", "train.checkpoint.every=5", "seed=3", "num_threads=2").check(SINGLE)
    with pytest.raises(ValueError, match=r"another base configuration: train.lr was 0.001, now"):
        again("train.lr=0.01").check(SINGLE)
    with pytest.raises(ValueError, match=r"base.steps was 6, now 7"):
        again("base.steps=7").check(SINGLE)


def test_epochs_are_counted_without_groups(prepared_run: Path) -> None:
    """As many samples for every remedy, whatever a policy on groups would leave out: 96 samples in
    batches of 24 are 4 steps."""
    words = ["train.steps=null", "train.epochs=2", "train.plan.policy=drop"]
    data = prepared_run.parent / "data"
    one = damage.options(prepared_run, data, *words)
    assert race.steps_of_base(one) == 8
    assert race.steps_of_base(damage.options(prepared_run, data, *words, "num_stages=2")) == 16
    assert race.steps_of_base(damage.options(prepared_run, data, "train.steps=5")) == 5
