"""Every verb that writes an artifact keeps one contract: finished work is skipped, other settings
stop with exit code 2, --force moves the old aside, what was begun is resumed, and a missing input
is one line."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mclclip.cli import process
from mclclip.config import Config
from mclclip.data.datasets.patterns import build as build_patterns
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.export import convert
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import INTENT, KINDS, MANIFEST, Artifact, Manifest, is_finished
from mclclip.run.steps import Step
from mclclip.util.remake import Remake
from mclclip.verbs import (
    blindspots,
    cluster,
    embed,
    export,
    index,
    make_dataset,
    make_pairs,
    pack,
    relocate,
    soup,
    texts,
    train,
)
from mclclip.verbs import filter as filtering
from tests import damage, tiny
from tests.contracts import identity_cases as identity
from tests.unit.test_architecture import MODULES, PACKAGE, module_of

Call = Callable[..., object]


@dataclass(frozen=True)
class Verb:
    """One verb on the run directory of a configuration, or on a folder.

    ``change`` is another setting, of which an error says ``differs``; without ``missing``, a file
    or folder below the run's, it stops with one line that says ``advice``.
    """

    call: Call
    artifact: str
    change: dict[str, Any] | str
    differs: str
    missing: str
    advice: str


def of_run(function: Call, *overrides: str, **flags: Any) -> Call:
    """Returns a verb that reads a configuration; the change is an override, or flags of its own."""

    def call(folder: Path, change: Any = (), force: Remake = Remake.NOTHING) -> object:
        words = [*overrides, *([change] if change and isinstance(change, str) else [])]
        given = flags | (change if isinstance(change, dict) else {})
        config = damage.options(folder / "run", (folder / "data").resolve(), *words)
        return function(config, SINGLE, **given, force=force)

    return call


def call_pack(folder: Path, change: Any = (), force: Remake = Remake.NOTHING) -> object:
    table, images = folder / "run" / "table.csv", (folder / "data" / "pictures").resolve()
    options = {"captions": table, "samples_per_shard": 2} | dict(change)
    return pack.pack(images, folder / "run" / "packed", **options, force=force)


def call_make_dataset(folder: Path, change: Any = (), force: Remake = Remake.NOTHING) -> object:
    options: dict[str, Any] = {"seed": 1, "num_samples": 6, "num_pairs": 1} | dict(change)
    return make_dataset.run("patterns", folder / "run" / "made", **options, force=force)


def call_make_pairs(folder: Path, change: Any = (), force: Remake = Remake.NOTHING) -> object:
    shards = folder / "data" / "captioned"
    if not shards.exists():
        picture = (folder / "data" / "pictures" / "1.png").read_bytes()
        write_shards(
            [PackedSample(str(n), picture, "png", ["Two dogs sit on a red mat"]) for n in range(4)],
            shards, 10,
        )  # fmt: skip
    options: dict[str, Any] = {"per_rule": 2} | dict(change)
    return make_pairs.run(shards, folder / "run" / "pairs", **options, force=force)


def call_texts(folder: Path, change: Any = (), force: Remake = Remake.NOTHING) -> object:
    path = folder / "data" / f"rows{len(dict(change))}.parquet"
    if not path.exists():
        rows = [[1.0, 2.0], [3.0, float(len(dict(change)))]]
        pq.write_table(pa.table({"text": ["a dog", "a cat"], "embedding": rows}), path)
    words = [f"model.text_rows=[{path.resolve()}]", "data.max_bad_fraction=1", "eval.suite={}"]
    return of_run(texts.run, *words)(folder, (), force)


INDEX = ("index/manifest.json", "run 'mclclip index' first")
TEACHER = "tiny_clip@random"
EMBEDDED = ("stage_0/embeddings/manifest.json", "run 'mclclip embed")
VERBS = {  # in the order in which a run needs them
    "index": Verb(of_run(index.run), "index", "", "", "", ""),
    "texts": Verb(call_texts, "text_rows", {"other": True}, "other data: files", "", ""),
    "embed": Verb(
        of_run(embed.run, stage=0), "stage_0/embeddings", "embed.dtype=float16",
        "dtype was 'float32', now 'float16'", *INDEX,
    ),
    "embed texts": Verb(of_run(embed.run, stage=0), "stage_0/text_embeddings", "", "", *INDEX),
    "embed teacher": Verb(
        of_run(embed.run, encoder=TEACHER), f"teachers/{TEACHER}/embeddings",
        "embed.dtype=float16", "dtype was 'float32', now 'float16'", *INDEX,
    ),
    "teacher": Verb(
        of_run(embed.run, encoder=TEACHER), f"teachers/{TEACHER}/export", "", "", *INDEX,
    ),
    "cluster": Verb(
        of_run(cluster.run, stage=0), "stage_0/clusters", "cluster.num_clusters=4",
        "num_clusters was 3, now 4", *EMBEDDED,
    ),
    "labels": Verb(of_run(cluster.run, stage=0), "stage_1/pseudo_labels", "", "", "", ""),
    "relocate": Verb(
        of_run(relocate.run, stage=1), "stage_1/relocated", "relocate.samples_per_shard=40",
        "samples_per_shard was [0-9_]+, now 40",
        "stage_1/pseudo_labels/manifest.json", "run 'mclclip cluster' first",
    ),
    "train": Verb(
        of_run(train.run, stage=1), "stage_1/train", "train.lr=0.5",
        r"train\.lr was 0\.001, now 0\.5", *INDEX,
    ),
    "export": Verb(
        of_run(export.stage, stage=1), "stage_1/export", "", "",
        "stage_1/train/manifest.json", "run 'mclclip train' first",
    ),
    "embed stage 1": Verb(
        of_run(embed.run, stage=1), "stage_1/embeddings", "", "",
        "stage_1/export/manifest.json", "run 'mclclip export",
    ),
    "join": Verb(
        of_run(export.join, "export.soup=true"), "exports/soup_uniform", "", "",
        "stage_1/export/manifest.json", "run 'mclclip export",
    ),
    "concat": Verb(
        of_run(export.join, "export.concat=[raw]"), "exports/concat_raw", "", "",
        "stage_1/export/manifest.json", "run 'mclclip export",
    ),
    "filter": Verb(
        of_run(filtering.run, near_duplicates=0.9), "filters/filter", {"near_duplicates": 0.8},
        "near_duplicates.* was 0.9, now 0.8", *EMBEDDED,
    ),
    "pack": Verb(
        call_pack, "packed", {"samples_per_shard": 3},
        "samples_per_shard was 2, now 3", "table.csv", "table.csv",
    ),
    "make-dataset": Verb(
        call_make_dataset, "made", {"seed": 2}, "seed was 1, now 2", "", "",
    ),
    "make-pairs": Verb(
        call_make_pairs, "pairs", {"per_rule": 3}, "per_rule was 2, now 3", "", "",
    ),
}  # fmt: skip
ELSEWHERE = {  # kind -> what holds its contract
    "blindspots": "unit/curate/test_blindspots.py",
    "converted": "unit/export/test_targets.py",
    "finetune": "unit/test_api.py",
    "image_rows": "unit/test_image_rows.py",
}

CHANGED = [name for name, verb in VERBS.items() if verb.change]
READERS = [name for name, verb in VERBS.items() if verb.missing]


@pytest.fixture(scope="module")
def made(prepared_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data and of a run in which every verb has finished; tests copy it."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(prepared_run.parent / "data", folder / "data")
    shutil.copytree(prepared_run, folder / "run")
    (folder / "data" / "pictures").mkdir()
    for number in range(4):
        picture = Image.new("RGB", (8, 8), (60 * number, 0, 0))
        picture.save(folder / "data" / "pictures" / f"{number}.png")
    rows = "".join(f"{number}.png,picture {number}\n" for number in range(4))
    (folder / "run" / "table.csv").write_text("filepath,title\n" + rows)
    shutil.rmtree(folder / "run" / "index")  # of the data where they were
    for verb in VERBS.values():
        verb.call(folder)
    return folder


def kinds_of_steps() -> set[str]:
    """The kinds of artifacts that the steps in mclclip/ make."""
    for path in MODULES:
        if "(Step[" in (PACKAGE / path).read_text():
            import_module(module_of(path))
    steps = [Step]
    for step in steps:
        steps += step.__subclasses__()
    return {s.kind for s in steps if s.__module__.startswith("mclclip.") and hasattr(s, "kind")}


def test_every_kind_of_artifact_has_a_case(made: Path) -> None:
    found = {json.loads(path.read_text())["kind"] for path in made.rglob(MANIFEST)}
    assert kinds_of_steps() - found == ELSEWHERE.keys(), "add it to VERBS in this file"
    assert kinds_of_steps() == KINDS.keys(), "add it to KINDS of mclclip/run/artifacts.py"


@pytest.fixture(params=VERBS)
def verb(request: pytest.FixtureRequest) -> Verb:
    return VERBS[request.param]


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy, in which a test changes what it likes; the data are read where they are."""
    shutil.copytree(made / "run", tmp_path / "run")
    (tmp_path / "data").symlink_to(made / "data")
    return tmp_path


def refused(folder: Path, verb: Verb, change: Any = ()) -> str:
    """The one line of a verb that stops with exit code 2."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        verb.call(folder, change)
    assert process.exit_code(caught.value) == process.EXIT_USER == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def state(path: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of every file."""
    digests = tiny.digests(path, "**/*")
    return {name: (digest, (path / name).stat().st_mtime_ns) for name, digest in digests.items()}


@pytest.mark.parametrize("verb", CHANGED, indirect=True)
def test_other_settings_stop_with_the_field_and_both_values_or_move_it_aside(
    folder: Path, verb: Verb
) -> None:
    path = folder / "run" / verb.artifact
    before = state(path)
    line = refused(folder, verb, verb.change)
    assert re.search(verb.differs, line) and "--force" in line, line
    assert str(path) in line and state(path) == before
    verb.call(folder, verb.change, force=Remake.UNFIT)
    assert is_finished(path) and state(path.with_name(f"{path.name}.old-1")) == before


def test_what_is_finished_is_skipped_and_what_was_begun_is_resumed(
    folder: Path, verb: Verb
) -> None:
    path = folder / "run" / verb.artifact
    before, fields = state(path), json.loads((path / MANIFEST).read_text())
    verb.call(folder)
    assert state(path) == before
    (path / MANIFEST).rename(path / INTENT)
    (path / ".half.7.tmp").write_text("of a killed writer")
    verb.call(folder)
    again = json.loads((path / MANIFEST).read_text())
    assert (again["digest"], again["counts"]) == (fields["digest"], fields["counts"])
    assert not (path / INTENT).exists() and not (path / ".half.7.tmp").exists()
    assert not path.with_name(f"{path.name}.old-1").exists()


@pytest.mark.parametrize("verb", READERS, indirect=True)
def test_a_missing_input_is_one_line_and_nothing_is_written(folder: Path, verb: Verb) -> None:
    (folder / "run" / verb.missing).unlink()
    # Of a trained stage nothing is copied, so it would not be missed.
    (folder / "run/stage_1/train/manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "run" / verb.artifact)
    assert verb.advice in refused(folder, verb)
    assert not is_finished(folder / "run" / verb.artifact)


# --- the identity of an artifact ---------------------------------------------------------------

Identities = dict[str, Any]


class Noted:
    """Stands for what opens artifacts: notes the identity of each, and calls it finished."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
        self.run, self.by_folder = run.resolve(), Identities()
        monkeypatch.setattr(Artifact, "compare", lambda artifact, **_: self.note(artifact))

    def note(self, artifact: Artifact) -> Artifact:
        identity = artifact.kind, artifact.config, artifact.inputs
        plain = json.loads(json.dumps(identity, default=str))
        self.by_folder[str(artifact.directory.resolve())] = plain
        artifact.manifest = Manifest(*identity, {}, "digest")
        return artifact

    def of(self, call: Callable[[], object]) -> Identities:
        """The identities that a call notes, by folder below the run where it lies there."""
        self.by_folder = {}
        call()
        return {k.removeprefix(f"{self.run}/"): v for k, v in self.by_folder.items()}


@pytest.fixture
def noted(made: Path, monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(monkeypatch, made / "run")


def options_of(config: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all options, but of an objective or a mapping as one."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and field.name != "objective":
            yield from options_of(value, f"{name}.")
        else:
            yield name


def test_every_option_has_a_row_that_says_whether_it_counts(made: Path) -> None:
    config = damage.options(made / "run", made / "data")
    assert {*options_of(config)} == identity.CONFIG.keys() | identity.ELSEWHERE.keys()
    assert not identity.CONFIG.keys() & identity.ELSEWHERE.keys()


def all_verbs(config: Config) -> None:
    export.stage(config, SINGLE, stage=0)
    embed.run(config, SINGLE, stage=0, text=True)
    cluster.run(config, SINGLE, stage=0)
    relocate.run(config, SINGLE, stage=1)
    train.run(config, SINGLE, stage=1)
    export.stage(config, SINGLE, stage=1)
    export.join(config, SINGLE)


def test_a_change_of_an_option_is_refused_where_it_changes_the_result(
    made: Path, noted: Noted, tmp_path: Path
) -> None:
    (tmp_path / "excluded").write_text("patterns/000000000\n")
    places = {"folder": tmp_path, "excluded": tmp_path / "excluded", "judged": identity.JUDGED}

    def refusing(overrides: str) -> set[str]:
        words = overrides.format(**places).split()
        config = damage.options(made / "run", made / "data", "export.soup=true", *words)
        now = noted.of(lambda: all_verbs(config))
        return {name for name in before.keys() & now.keys() if now[name] != before[name]}

    before = noted.of(
        lambda: all_verbs(damage.options(made / "run", made / "data", "export.soup=true"))
    )
    assert len(before) == 9
    wrong = {
        option: refused
        for option, (overrides, expected) in identity.CONFIG.items()
        if (refused := refusing(overrides)) != expected
    }
    assert not wrong


def call_soup(folder: Path, change: Any = (), force: Remake = Remake.NOTHING) -> object:
    judge: Any = SimpleNamespace(benchmarks={}, read_texts=[])
    options: dict[str, Any] = {"method": "uniform", "judge": judge} | dict(change)
    models = [str(folder / "run" / f"stage_{stage}" / "export") for stage in (0, 1)]
    return soup.run(models=models, out=folder / "run" / "soup", **options, force=force)


def call_convert(folder: Path, change: Any = (), force: Remake = Remake.NOTHING) -> object:
    options: dict[str, Any] = {"to": "hf"} | dict(change)
    model, out = folder / "run" / "stage_1" / "export", folder / "run" / "converted"
    return convert.run(options.pop("to"), model, out, **options, force=force)


FLAGS: dict[str, tuple[Call, list[Callable[..., object]], set[str]]] = {
    "pack": (call_pack, [pack.pack], {"source", "out"}),
    "make-dataset": (
        call_make_dataset, [make_dataset.Splits, build_patterns], {"name", "sources", "options"},
    ),
    "make-pairs": (call_make_pairs, [make_pairs.run], {"shards", "out"}),
    "filter": (
        VERBS["filter"].call, [filtering.run, filtering.Options], {"config", "context", "filters"},
    ),
    "blindspots": (of_run(blindspots.run, other="1"), [blindspots.run], {"config", "context"}),
    "soup": (call_soup, [soup.run], {"models", "out"}),
    "convert": (call_convert, [convert.run], {"model", "out"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_a_change_of_a_flag_is_refused_where_it_changes_the_result(
    made: Path, noted: Noted, tmp_path: Path, name: str
) -> None:
    call, functions, places = FLAGS[name]
    parameters = {p for function in functions for p in inspect.signature(function).parameters}
    assert parameters - places - {"force"} == identity.FLAGS[name].keys()
    table = tmp_path / "table.csv"
    table.write_text("filepath,title\n0.png,another\n")
    paths = {
        "table": table, "folder": tmp_path, "pictures": made / "data" / "pictures",
        "embeddings": made / "run" / "stage_1" / "embeddings",
        "own": made / "run" / "stage_0" / "embeddings",
    }  # fmt: skip
    before = noted.of(lambda: call(made))
    assert len(before) == 1
    for option, (value, refused) in identity.FLAGS[name].items():
        several = isinstance(value, dict) and option in value
        change = value if several else {option: filled(value, paths)}
        now = noted.of(lambda change=change: call(made, change))  # type: ignore[misc]
        assert (now != before) == refused, option


def filled(value: Any, paths: dict[str, Path]) -> Any:
    """A value of a row with the paths that it names."""
    if isinstance(value, list):
        return [filled(item, paths) for item in value]
    if not isinstance(value, str) or "{" not in value:
        return value
    text = value.format(**paths)
    return Path(text) if value.startswith("{") else text
