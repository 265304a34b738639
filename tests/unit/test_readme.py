"""README.md and the pages of launch and eval say what is so: tree, commands, options, links."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from mclclip import cli, config, demo, process
from mclclip.eval.protocols import KINDS, evaluator
from mclclip.objectives.base import kinds, options_class

ROOT = Path(__file__).resolve().parents[2]
README, LAUNCH, EVAL = "README.md", "launch/README.md", "eval/README.md"
PAGES = [README, LAUNCH, "launch/SCALE.md", EVAL]
LINKED = [*PAGES, "slurm/README.md", "tests/README.md", "tests/benchmarks/README.md"]
LINKED += ["CONTRIBUTING.md", "NOTICE.md"]
TEXT = {page: (ROOT / page).read_text() for page in LINKED}
# What a command of the pages may start with, and the words that it puts before what it is given.
PROGRAMS: dict[str, list[str]] = {
    "mclclip": [],
    "launch/local.sh": [],
    "launch/multinode.sh": [],
    "slurm/mclclip.sbatch": [],
    "slurm/eval_array.sbatch": ["eval"],
}

every_page = pytest.mark.parametrize("page", PAGES)
every_linked_page = pytest.mark.parametrize("page", LINKED)


# --- the ledger --------------------------------------------------------------------------------

# The last table and figure of each paper; of IFM the main text, beside which there is Figure 13.
LAST = {"MCL": (11, 7), "MLCD": (10, 6), "SimLAP": (5, 15), "IFM": (2, 8)}


def items_of_the_ledger() -> set[tuple[str, str, int]]:
    """Paper, Table or Fig, and number of all items that stand in the first column."""
    found = set()
    section = TEXT[LAUNCH].split("## Ledger")[1].split("\n## ")[0]
    for row in re.findall(r"^\| (?!paper and|---)([^|]*) \|", section, re.MULTILINE):
        paper = kind = ""
        for name, what, first, last in re.findall(
            r"\b(MCL|MLCD|SimLAP|IFM)\b|(Table|Fig)|(?<![.\w])(\d+)(?: to (\d+))?",
            re.sub(r"\([^)]*\)", "", row),
        ):
            paper, kind = name or paper, what or kind
            if first:
                numbers = range(int(first), int(last or first) + 1)
                found |= {(paper, kind, number) for number in numbers}
    return found


def test_the_ledger_has_every_table_and_figure() -> None:
    wanted = {("IFM", "Fig", 13)}
    for paper, (tables, figures) in LAST.items():
        wanted |= {(paper, "Table", number) for number in range(1, tables + 1)}
        wanted |= {(paper, "Fig", number) for number in range(1, figures + 1)}
    assert items_of_the_ledger() == wanted
    assert "75 / 138 / 82 ms" in TEXT[LAUNCH]


# --- the tree ----------------------------------------------------------------------------------


def listed_paths(text: str) -> set[str]:
    """Every path of the first tree in a text, relative to the checkout; folders end with a slash.

    A line has names, two spaces, and what they are; what is indented below a folder is in it.
    """
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    block = next(block for language, block in blocks if not language)
    folders: list[tuple[int, str]] = []
    paths = set()
    for line in filter(str.strip, block.splitlines()):
        depth = len(line) - len(line.lstrip())
        folders = [(d, f) for d, f in folders if d < depth]
        above = "".join(f for _, f in folders)
        names = re.split(r" {2,}", line.strip())[0].split()
        paths |= {above + name for name in names}
        if names[0].endswith("/"):
            folders.append((depth, names[0]))
    return paths


def test_the_tree_lists_every_room_and_every_file_beside_them() -> None:
    """Links within mclclip are left out: what they lead to is listed by its own name."""
    package = ROOT / "mclclip"
    files = {f"mclclip/{path.name}" for path in package.glob("*.py") if path.stem != "__init__"}
    rooms = {
        f"{folder.relative_to(ROOT)}/"
        for folder in (package, *package.rglob("*/"))
        if any(folder.glob("*.py")) and not folder.is_symlink()
    }
    assert {"mclclip/data/", "mclclip/data/datasets/"} <= rooms
    assert listed_paths(TEXT[README]) == files | rooms | {"eval/", "launch/", "slurm/", "tests/"}


def test_a_tree_is_read_as_it_is_written() -> None:
    text = "```\nmclclip/\n  a.py b.py  two files\n  c/         a room\n    d.py  one\ne/  f\n```"
    assert listed_paths(text) == {
        "mclclip/", "mclclip/a.py", "mclclip/b.py", "mclclip/c/", "mclclip/c/d.py", "e/",
    }  # fmt: skip


# --- sizes and figures -------------------------------------------------------------------------


def rows_of(text: str) -> list[list[str]]:
    """The tables of a text, each as its lines without the two of the header."""
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [table.splitlines()[2:] for table in tables]


def test_the_readme_is_short() -> None:
    assert TEXT[README].count("\n") <= 150
    assert all(len(table) <= 8 for table in rows_of(TEXT[README]))


def test_its_figures_are_those_of_the_full_table() -> None:
    (table,) = rows_of(TEXT[README])
    assert len(table) == 8
    full = next(rows for rows in rows_of(TEXT[LAUNCH]) if table[0] in rows)
    assert set(table) <= set(full) and len(full) > len(table)


# --- verbs, exit codes, recipes, options, protocols --------------------------------------------


def column(page: str, title: str) -> list[str]:
    """The first cells of the tables of a page whose first column has this title."""
    tables = re.findall(rf"^\| {title} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT[page], re.MULTILINE)
    lines = "".join(tables).replace(r"\|", "/").splitlines()
    return [line.split("|")[1].strip() for line in lines]


def verbs() -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb of the command line."""
    (action,) = cli.build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    return dict(action.choices)  # type: ignore[arg-type]


def test_every_verb_has_a_row() -> None:
    named = re.findall(r"`([\w-]+)", " ".join(column(LAUNCH, "verb")))
    assert sorted(named) == sorted(verbs())


def test_every_exit_code_has_a_row() -> None:
    codes = {code for name, code in vars(process).items() if name.startswith("EXIT_")}
    assert len(codes) == 5 and set(map(int, column(LAUNCH, "exit code"))) == codes


def test_every_recipe_has_a_row() -> None:
    named = re.findall(r"`([^`]+)`", " ".join(column(LAUNCH, "recipe")))
    assert sorted(named) == sorted(path.name for path in (ROOT / "launch" / "recipes").iterdir())
    quoted = set(re.findall(r"`([\w./]+\.(?:yaml|sweep))`", " ".join(TEXT[p] for p in PAGES)))
    assert quoted == set(named)


def complaint(option: str) -> str:
    """What is said of an option that is given the empty value."""
    try:
        config.load("mlcd_laion_vitl14", [f"{option}=null"])
    except ValueError as error:
        return str(error)
    return ""


def test_every_field_of_an_objective_is_there() -> None:
    rows = column(LAUNCH, "field")
    assert len(rows) >= 5
    for row in rows:
        named, kinds = (re.findall(r"`(\w+)`", part) for part in row.split("("))
        assert named and kinds
        for kind in kinds:
            known = {field.name for field in dataclasses.fields(options_class(kind))}
            assert set(named) <= known, f"{kind} has no {set(named) - known}"


def test_every_objective_has_a_row() -> None:
    named = set(re.findall(r"`(\w+)`", " ".join(column(LAUNCH, "kind"))))
    assert named == set(kinds())


def test_every_option_in_the_tables_is_there() -> None:
    named = re.findall(r"`([a-z_.]+)[=`]", " ".join(column(LAUNCH, "option")))
    assert len(named) >= 30
    unknown = [name for name in named if "unknown option" in complaint(name)]
    assert not unknown, f"launch/README.md names options that are not there: {unknown}"
    assert "unknown option" in complaint("train.engine.zero")


def test_every_protocol_has_a_row_with_its_options() -> None:
    found = {}
    for line in re.findall(r"^\| `\w+` \| .*$", TEXT[EVAL], re.MULTILINE):
        cells = line.split("|")
        if len(cells) == 6:  # the tables of class names have fewer
            found[cells[1].strip(" `")] = sorted(re.findall(r"`(\w+)`", cells[4]))
    assert found == {
        kind: sorted(
            name
            for name, parameter in inspect.signature(evaluator(kind).evaluate).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        )
        for kind in KINDS
    }


# --- commands ----------------------------------------------------------------------------------


def commands(page: str) -> Iterator[tuple[list[str], str]]:
    """The words that mclclip is given by each command of a page, and the file it is written to."""
    for block in re.findall(r"```bash\n(.*?)```", TEXT[page], re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(line, comments=True) if word != "..."]
            start = next((n for n, word in enumerate(words) if word in PROGRAMS), None)
            if start is None:
                continue
            given, out = PROGRAMS[words[start]] + words[start + 1 :], ""
            if given[-2:-1] == [">"]:
                given, out = given[:-2], given[-1]
            if words[start] == "slurm/eval_array.sbatch":
                given[1] = f"--config={given[1]}/config.yaml"
            yield given, out


def test_every_command_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the pages; a file is there once a command has written it, and the
    configuration of a run once it has been started."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    monkeypatch.chdir(tmp_path)
    seen = []
    for given, out in (command for page in PAGES for command in commands(page)):
        args = cli._parse(given)
        seen.append(args.verb)
        if args.verb == "demo":
            words = [word for word in [*args.seeds, *args.overrides] if "=" in word]
            demo.settings(Path(args.out), 3, words)
        elif hasattr(args, "overrides") and getattr(args, "to", None) is None:
            options = config.load(args.config, args.overrides)
            if args.verb == "run":
                out = f"{options.run_dir}/config.yaml"
            if out:
                Path(out).parent.mkdir(parents=True, exist_ok=True)
                Path(out).write_text(config.dump(options))
    assert {"pack", "index", "run", "train", "eval", "demo", "doctor", "config"} <= set(seen)
    lines = [line for page in PAGES for line in TEXT[page].splitlines()]
    written = [line for line in lines if re.match(r"(mclclip|torchrun|sbatch) ", line)]
    assert len(seen) >= len(written) >= 20


@every_page
def test_verbs_in_its_sentences_are_there(page: str) -> None:
    named = set(re.findall(r"`mclclip ([a-z][\w-]*)", TEXT[page]))
    assert named <= verbs().keys()


def test_the_launchers_it_names_are_there() -> None:
    assert all((ROOT / program).is_file() for program in PROGRAMS if "/" in program)


# --- links -------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """What headings are called in an address: words in small letters, joined by hyphens."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: str, text: str) -> list[str]:
    """Links of a page to files or headings that are not there; those to other sites are skipped."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or anchor and anchor not in anchors(target.read_text()):
            broken.append(link)
    return broken


@every_linked_page
def test_links_lead_somewhere(page: str) -> None:
    assert not broken_links(page, TEXT[page])


@every_page
def test_each_page_links_to_others(page: str) -> None:
    assert re.search(r"\]\([\w./]+\.md", TEXT[page])


@pytest.mark.parametrize("link", ["launch/README.txt", "launch/README.md#no-such", "#none"])
def test_broken_links_are_found(link: str) -> None:
    assert broken_links(README, f"[a]({link}) [b](launch/README.md#the-demo)") == [link]
