"""The command line: help without torch, exit codes, one line per mistake."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from mclclip import __version__, config
from mclclip.cli import entry, process
from mclclip.ranks import failures, signals
from mclclip.util import shipped
from mclclip.verbs import demo
from tests import tiny
from tests.forks import python

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def quiet_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package's log as it was: main() sets it up for a terminal."""
    monkeypatch.delenv("RANK", raising=False)
    log = logging.getLogger("mclclip")
    handlers, propagate, level = log.handlers[:], log.propagate, log.level
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """main(*words) in this process -> its exit code, stdout and stderr."""
    # The handlers of signals stay the tests'.
    monkeypatch.setattr(process, "start", lambda: None)
    monkeypatch.setattr(signals, "ignore", lambda: None)
    monkeypatch.setattr(signals, "set_action", lambda _: None)

    def call(*words: str) -> SimpleNamespace:
        code = entry.main(words)
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


# --- help and version --------------------------------------------------------------------------


def test_flags_are_the_arguments_of_the_function() -> None:
    """Nothing else checks them: they are passed on by name."""
    for words, function in {
        "index": "index.run", "embed --stage 1": "embed.run", "cluster --stage 1": "cluster.run",
        "train --stage 1": "train.run", "export --stage 1": "export.stage", "eval": "eval.run",
        "analyse --figures tsne,recall": "analyse.run", "pack a --captions b --out c": "pack.pack",
        "make-dataset patterns --out x": "make_dataset.run",
        "report runs/mine --out page.html": "report.run", "demo --short a=1": "demo.run",
    }.items():  # fmt: skip
        args = entry.parse_words(words.split())
        module, _, name = f"mclclip.verbs.{function}".rpartition(".")
        called = inspect.signature(getattr(importlib.import_module(module), name))
        called.bind(*(() if args.standalone else (None, None)), **entry.flags_of(args))


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb of the command line."""
    (action,) = entry.build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    return dict(action.choices)  # type: ignore[call-overload]


def test_every_flag_is_explained_with_its_default(main: Any) -> None:
    for verb, parser in parsers().items():
        lines = parser.format_help().splitlines()
        assert lines[0].startswith(f"usage: mclclip {verb}") and max(map(len, lines)) <= 80
        assert lines[-1].startswith(f"example: mclclip {verb} ")
        for action in parser._actions:
            assert action.help, action
            if action.option_strings and action.nargs != 0:
                shown = parser.formatter_class("")._get_help_string(action)
                assert "default" in shown or shown.endswith("(required)"), action
    assert main("--version").out.strip() == f"mclclip {__version__}"
    shown = main("index", "--help")
    assert shown.code == 0 and shown.out == parsers()["index"].format_help()


def test_every_verb_is_in_the_help_with_an_example_that_is_parsed() -> None:
    lines = entry.build_parser().format_help().splitlines()
    assert max(map(len, lines)) <= 80
    for verb in parsers():
        (at,) = (number for number, line in enumerate(lines) if line.startswith(f"  {verb:14}"))
        example = next(line for line in lines[at:] if line.strip().startswith("$ "))
        words = example.split(">")[0].split()
        assert words[:3] == ["$", "mclclip", verb] and entry.parse_words(words[2:]).verb == verb


@pytest.mark.parametrize("blank", [["--out", ""], ["--out="], ["--out", "x", ""]])
def test_a_blank_word_is_refused(main: Any, blank: list[str], tmp_path: Path) -> None:
    shown = main("pack", str(tmp_path), *blank)
    assert shown.code == 2 and "is blank" in shown.err and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "without_effect"),
    [
        ("export --to hf --model . --out x --stage 7", "--stage"),
        ("export --to hf --model . --out x export.precision=fp16", "export.precision=fp16"),
        ("config --explain train.lr train.lr=1", "train.lr=1"),
    ],
)
def test_what_has_no_effect_is_refused(main: Any, words: str, without_effect: str) -> None:
    shown = main(*words.split())
    assert shown.code == 2 and f"leave out {without_effect}" in shown.err


def test_wrong_paths_and_names_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    wrong = [
        ("pack {}/a --out x", "SOURCE {}/a: there is no such file or folder"),
        ("compare {}/a", "RUN_DIR {}/a: there is no such file or folder"),
        ("report run_dir={}/a", "RUN_DIR {}/a: there is no such file or folder"),
        ("soup uniform --model a={}/x --out y", "--model a={}/x: there is no such file or folder"),
        ("export --to hf --model {}/x --out y", "--model {}/x: there is no such file or folder"),
        ("eval --config ucm --model {}/x", "--model {}/x: there is no such file or folder"),
        ("filter --config ucm --against a={}/x", "--against a={}/x: there is no such file or"),
        ("train --stage 1 --config {}/x.yaml", "no configuration file at {}/x.yaml: give a YAML"),
        ("finetune {}/a --base RN50@openai --out x", "IMAGES {}/a: there is no such file or"),
        ("finetune . --captions {}/a --base RN50@openai --out x", "--captions {}/a: there is no"),
        ("finetune . --base {}/a --out x", "--base {}/a: there is no such file or folder"),
        ("doctor --data {}/x.yaml", "no configuration file at {}/x.yaml: give a YAML"),
        ("config --config ucn", "the name of a shipped recipe (nearest: ucm, "),
        ("race --config ucm --remedies imf", "no remedy 'imf' (nearest: ifm, "),
        ("race --config ucm --remedies {}/a.sweep", "--remedies {}/a.sweep: there is no such file"),
        ("race --config ucm --remedies mcl d.e=f --seeds 1 x g.h=i", "--seeds got 1 x: wanted"),
        ("demo --seeds 1 2 1", "--seeds got 1 2 1: wanted numbers from 0 on, each of them once"),
    ]
    code = (
        "import sys; from mclclip.cli import entry\n"
        "for words in sys.argv[1:]: print(entry.main(words.split()), 'torch' not in sys.modules)"
    )
    shown = python(code, *(words.format(*[tmp_path] * 2) for words, _ in wrong), check=True)
    assert shown.stdout == "2 True\n" * len(wrong)
    for line, (_, said) in zip(shown.stderr.splitlines(), wrong, strict=True):
        assert line.startswith("mclclip: ") and said.format(tmp_path) in line


def test_recipes_are_listed_and_copied_with_the_scripts(main: Any, tmp_path: Path) -> None:
    listed = main("recipes").out.splitlines()
    assert max(map(len, listed)) <= 80
    assert {line.split()[0] for line in listed if line[0] != " "} == set(shipped.recipe_names())
    assert main("recipes", "--copy", str(tmp_path)).code == 0
    copied = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    # Tables of the papers are added to a page, for which a checkout is needed.
    patterns = ("launch/*.sh", "launch/recipes/*.*", "slurm/*.sba*")
    wanted = [path for pattern in patterns for path in ROOT.glob(pattern)]
    assert copied == {str(path.relative_to(ROOT)) for path in wanted}
    assert os.access(tmp_path / "launch" / "local.sh", os.X_OK)
    (tmp_path / "launch" / "common.sh").unlink()
    assert main("recipes", "--copy", str(tmp_path)).code == 0  # as after a full disk
    (tmp_path / "launch" / "common.sh").write_text("my own")
    again = main("recipes", "--copy", str(tmp_path))
    assert again.code == 2 and "exists: nothing is copied" in again.err


def test_bash_completes_verbs_flags_values_and_recipes(main: Any, tmp_path: Path) -> None:
    script = tmp_path / "mclclip.bash"
    script.write_text(main("completion", "bash").out)
    for words, found in {
        "tr": "train",
        "train --sta": "--stage",
        "train --variant ungr": "ungrouped",
        "run --config stl10": "stl10",
        "make-dataset cifar_m": "cifar_mnist",
    }.items():
        code = (
            f"source {script}; COMP_WORDS=(mclclip {words}); COMP_CWORD={len(words.split())}; "
            '_shtab_mclclip; echo "${COMPREPLY[@]}"'
        )
        shown = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        assert shown.stdout.split() == [found], shown.stderr
    assert "#compdef mclclip" in main("completion", "zsh").out


MODELS = ("open_clip", "timm", "torchvision", "transformers")
COMPILERS = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor")


@pytest.mark.parametrize(
    "commands",
    [
        [
            ("--help", ["torch", "numpy", "pandas", "pydantic", "pyarrow", "yaml", *MODELS]),
            ("finetune nothing --out x", ["torch", "numpy", "pandas", *MODELS]),
            ("compare nothing more", ["torch", "pandas", *MODELS]),
            ("pack nothing --out x", ["torch", *MODELS]),
        ],
        [
            ("config run_dir=x", [*MODELS, *COMPILERS, "pandas", "pyarrow"]),
            ("index --config cc12m_vitb32 run_dir=x", [*MODELS, *COMPILERS]),
        ],
    ],
    ids=["pack", "config"],
)
def test_a_first_line_needs_nothing_heavy(
    commands: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    """Nor does that of a command before it in the same process."""
    code = (
        "import json, sys; from mclclip.cli import entry\n"
        "for words, heavy in json.loads(sys.argv[1]):\n"
        "    code = entry.main(words.split()); print(code, sorted(set(heavy) & set(sys.modules)))"
    )
    shown = python(code, json.dumps(commands), check=True, cwd=tmp_path)
    told = [line for line in shown.stdout.splitlines() if line.endswith("]") and line[0] in "02"]
    wanted = [0 if words.startswith(("config", "--help")) else 2 for words, _ in commands]
    assert told == [f"{code} []" for code in wanted], shown.stderr


# --- exit codes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("trian --stage 1", "nearest: train, "),
        ("make-dataset patterns --out x --samples 1", "--samples ("),
        ("plan", "nearest: config --plan"),
        ("train --stage 1 --batch-size 64", "config --explain batch_size"),
        ("finetune photos --base x --out y --caption c.csv", "--caption (nearest: --captions, "),
        ("make-dataset cifar-10 --out x", "nearest: cifar10, "),
    ],
)
def test_a_misspelled_word_is_named_with_the_nearest(main: Any, words: str, near: str) -> None:
    shown = main(*words.split())
    assert shown.code == process.EXIT_USER and near in shown.err


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(config, "load", fail)


ROWS = "labels have 3 rows,\n  the index has 4"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError(ROWS), 2, "labels have 3 rows, the index has 4"),
        (PermissionError(ROWS), 2, "labels have 3 rows, the index has 4"),
        (KeyboardInterrupt(), 130, "interrupted: the same command goes on from what is saved"),
    ],
)
def test_what_a_user_can_mend_or_asked_for_is_one_line(
    main: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    fail_with(monkeypatch, error)
    shown = main("config", "run_dir=x")
    assert (shown.code, shown.err) == (code, f"mclclip: {line}\n")


def test_a_printed_configuration_shows_no_secret_of_a_url(main: Any) -> None:
    shown = main("config", "run_dir=x", "data.sources.a.shards=https://h/x.tar?sig=SECRET")
    assert shown.code == 0 and "https://h/x.tar?" in shown.out and "SECRET" not in shown.out


def test_our_runtime_error_is_2(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {}
    code = "def fail(*_):\n    raise RuntimeError('labels have 3 rows')"
    exec(compile(code, entry.__file__, "exec"), namespace)
    monkeypatch.setattr(config, "load", namespace["fail"])
    shown = main("config", "run_dir=x")
    assert (shown.code, shown.err) == (2, "mclclip: labels have 3 rows\n")
    shown = main("config", "--debug", "run_dir=x")
    assert shown.code == 2 and shown.err.startswith("Traceback (most recent call last)")
    assert shown.err.endswith("mclclip: labels have 3 rows\n")


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("mat1 and mat2")])
def test_our_own_error_is_1_with_its_traceback(
    main: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """So is a RuntimeError of a library: torch raises it for shapes, which no user can mend."""
    fail_with(monkeypatch, error)
    shown = main("config", "run_dir=x")
    assert shown.code == 1 and "Traceback (most recent call last)" in shown.err
    last = shown.err.splitlines()[-1]
    assert last.startswith("mclclip: ") and len(last) > len("mclclip: ")


# --- runs --------------------------------------------------------------------------------------


def test_a_failed_run_frees_its_directory_and_leaves_nothing_half_written(
    main: Any, tmp_path: Path
) -> None:
    shown = main("index", f"run_dir={tmp_path / 'run'}", "device=cpu")
    assert shown.code == 2 and "data.sources is empty" in shown.err
    left = {path.name for path in (tmp_path / "run").rglob("*")}
    assert left == {"run_state.json"}
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert (state["state"], state["exit_code"], state["requeue"]) == ("failed", 2, False)
    assert "data.sources is empty" in state["reason"]


def test_the_first_rank_speaks_first(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks fail together; the others wait, so that the line is not printed many times."""
    waited: list[float] = []
    monkeypatch.setattr("mclclip.ranks.failures.time.sleep", waited.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main("config", "run_dir=x", "a=1").code == 2
    assert waited == [failures.LATER_RANKS_WAIT_S]


def test_a_group_stays_open_for_the_next_call_and_is_closed_at_the_end(tmp_path: Path) -> None:
    code = """
import atexit, sys
import torch.distributed as dist
from mclclip.cli import entry
atexit.register(lambda: print(dist.is_initialized()))
for _ in range(2):
    print(entry.main(sys.argv[1:]), dist.is_initialized())
"""
    store = socket.create_server(("127.0.0.1", 0))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
    store.close()
    words = ["index", f"run_dir={tmp_path}/run", f"data.sources.a.shards={tmp_path}/no.tar"]
    environment = tiny.environment() | place | {"RANK": "0", "WORLD_SIZE": "1"}
    done = python(code, *words, "device=cpu", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 True", "2 True", "False"], done.stderr


def test_a_loader_workers_own_words_are_recorded(
    main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch puts the worker's whole traceback into the message."""
    raised = RuntimeError(
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent "
        'call last):\n  File "x.py", line 1, in y\nRuntimeError: clusters hold a label 5\n'
    )
    monkeypatch.setenv("MCLCLIP_STATE_FILE", str(tmp_path / "state.json"))
    fail_with(monkeypatch, raised)
    main("config", "run_dir=x")
    assert json.loads((tmp_path / "state.json").read_text())["reason"] == "clusters hold a label 5"


def test_an_unknown_option_is_recorded_for_the_launcher(
    main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a mistake, which SLURM must not try again; torchrun's own code is always 1."""
    monkeypatch.setenv("MCLCLIP_STATE_FILE", str(tmp_path / "state.json"))
    assert main("train", "--config=c.yaml", "--stage=1", "--bogus").code == 2
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["exit_code"] == 2 and "--bogus (" in state["reason"]


def test_demo_takes_overrides_after_its_seeds(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Any] = {}
    monkeypatch.setattr(demo, "run", lambda out, **options: called.update(options, out=str(out)))
    assert main("demo", "--seeds", "0", "2", "train.steps=5").code == 0
    overrides = ["train.steps=5"]
    wanted = {"out": "None", "seeds": [0, 2], "overrides": overrides, "short": False}
    assert called == wanted
    assert main("demo", "--short").code == 0
    assert called["short"]
    assert main("demo", "--short", "--out", "x").code == 0 and called["out"] == "x"
    shown = main("demo", "--seeds", "x")
    assert shown.code == 2 and "wanted numbers from 0 on" in shown.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("finetune https://a.b/x.csv --base tiny_clip@random --out r", "https://a.b/x.csv"),
        ("pack . --out gs://a/b", "--out gs://a/b"),
        ("index run_dir=s3://a/b", "run_dir s3://a/b"),
    ],
)
def test_a_url_in_the_place_of_a_path_is_one_line(main: Any, words: str, named: str) -> None:
    shown = main(*words.split())
    assert shown.code == 2 and named in shown.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--seed", "-1"], "--seed: got '-1', wanted a whole number of 0"),
        (["--delimiter", "ab"], "--delimiter: got 'ab', wanted one character"),
        (["--gpu-gib", "nan"], "--gpu-gib: got 'nan'"),
    ],
)
def test_a_flag_of_finetune_that_cannot_be_is_named(
    main: Any, tmp_path: Path, given: list[str], named: str
) -> None:
    asked = ("--base", "RN50@random", "--out", str(tmp_path / "r"), "--samples", "2000")
    shown = main("finetune", str(tmp_path), *asked, "--dry-run", *given)
    assert shown.code == 2 and named in shown.err.splitlines()[-1]


def test_captions_are_embedded_by_stage_0_alone(main: Any, tmp_path: Path) -> None:
    shown = main("embed", "--stage", "2", "--text", f"run_dir={tmp_path}", "device=cpu")
    assert shown.code == 2 and "--text with --stage 2" in shown.err
