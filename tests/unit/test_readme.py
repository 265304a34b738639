"""README.md and the pages of docs say what is so: tree, commands, options, messages, links."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mclclip import config, figures
from mclclip.cli import entry, process
from mclclip.config.explaining import explain
from mclclip.eval.protocols import KINDS, evaluator
from mclclip.export import targets
from mclclip.objectives.base import kinds
from mclclip.train import symptoms
from mclclip.verbs import demo
from tests.unit.test_cli import parsers

ROOT = Path(__file__).resolve().parents[2]
SITE = "docs/pages"
README = "README.md"
OBJECTIVES, RECIPES = f"{SITE}/reference/objectives.md", f"{SITE}/reference/recipes.md"
VERBS, BENCHMARKS = f"{SITE}/reference/verbs.md", f"{SITE}/reference/benchmarks.md"
FAILS = f"{SITE}/when-it-fails.md"
OPEN_CLIP = f"{SITE}/start/coming-from-open-clip.md"
SITE_PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / SITE).rglob("*.md"))
PAGES = [README, "launch/README.md", "launch/SCALE.md", "slurm/README.md",
         "eval/README.md", *SITE_PAGES]  # fmt: skip
LINKED = [*PAGES, "tests/README.md", "tests/benchmarks/README.md"]
LINKED += ["tests/gpu/README.md", "CONTRIBUTING.md", "NOTICE.md", "AGENTS.md"]


@cache
def reference() -> Any:
    """The module docs/reference.py, which generates parts of pages."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TEXT = {page: (ROOT / page).read_text() for page in LINKED}
# What a command of the pages may start with, and the words that it puts before what it is given.
PROGRAMS: dict[str, list[str]] = {
    "mclclip": [],
    "launch/local.sh": [],
    "launch/multinode.sh": [],
    "slurm/mclclip.sbatch": [],
    "slurm/eval_array.sbatch": ["eval"],
}

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
    beside = {"docs/", "eval/", "launch/", "slurm/", "tests/"}
    assert listed_paths(TEXT[README]) == files | rooms | beside


def test_the_page_for_tools_is_short_and_its_paths_are_there() -> None:
    text = TEXT["AGENTS.md"]
    assert len(text.splitlines()) <= 60
    paths = re.findall(r"`((?:mclclip|eval|tests|launch|docs)/[\w./]+)`", text)
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


# --- verbs, exit codes, recipes, options, protocols --------------------------------------------


def column(page: str, title: str) -> list[str]:
    """The first cells of the tables of a page whose first column has this title."""
    text = reference().generate(TEXT[page]) if title == "kind" else TEXT[page]
    tables = re.findall(rf"^\| {title} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = "".join(tables).replace(r"\|", "/").splitlines()
    return [line.split("|")[1].strip() for line in lines]


def test_the_reference_has_every_verb_with_every_flag() -> None:
    text = reference().generate(TEXT[VERBS])
    for name, parser in parsers().items():
        section = text.split(f"### {name}\n")[1].split("\n### ")[0]
        own = {flag for flag in parser._option_string_actions if flag.startswith("--")}
        named = set(re.findall(r"`(--[\w-]+)`", section))
        assert own - {"--help", "--debug", "--verbose"} <= named, name


def test_the_reference_has_every_option_with_its_meaning() -> None:
    text = reference().generate("<!-- generated: options --><!-- generated: objectives -->")
    rows = re.findall(r"^\| `([\w.]+)` \| `.*` \| .* \| (.*) \|$", text, re.MULTILINE)
    named = {name for name, _ in rows}
    assert {"run_dir", "data.sources.NAME.shards", "train.lora.rank", "temperature"} <= named
    assert len(named) > 150
    silent = {name for name, meaning in rows if not meaning.strip()}
    assert not silent, "these have no docstring"


def test_every_recipe_has_a_row() -> None:
    named = re.findall(r"`([^`]+)`", " ".join(column(RECIPES, "recipe")))
    named.remove("paper_on_8_gpus/*.sh")
    assert sorted(named) == sorted(
        path.name for path in (ROOT / "launch" / "recipes").glob("*.[ys]*")
    )
    quoted = set(re.findall(r"`(\w+\.(?:yaml|sweep))`", " ".join(TEXT[p] for p in PAGES)))
    assert quoted - {"config.yaml", "mine.yaml", "settings.yaml"} == set(named)


def complaint(option: str) -> str:
    """What is said of an option that is given the empty value."""
    try:
        config.load("mlcd_laion_vitl14", [f"{option}=null"])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("page", "title", "known"),
    [
        (OBJECTIVES, "kind", kinds()),
        (f"{SITE}/how-to/look-inside.md", "figure", figures.figures()),
        (f"{SITE}/how-to/transformers-and-llava.md", "`--to`", targets.names()),
        (FAILS, "warning", [f.name for f in (*symptoms.FAILURES, symptoms.FAR_FROM_BASE)]),
    ],
)
def test_each_of_them_has_a_row_in_its_page(page: str, title: str, known: Iterable[str]) -> None:
    assert set(re.findall(r"`(\w+)`", " ".join(column(page, title)))) == set(known), page
    codes = {code for name, code in vars(process).items() if name.startswith("EXIT_")}
    assert len(codes) == 5 and set(map(int, column(VERBS, "exit code"))) == codes


def test_every_option_in_the_tables_is_there() -> None:
    rows = " ".join(cell for page in SITE_PAGES for cell in column(page, "option"))
    named = [name for name in re.findall(r"`([a-z_.]+)[=`]", rows) if "." in name]
    assert len(named) >= 20
    unknown = [name for name in named if "unknown option" in complaint(name)]
    assert not unknown, f"pages name options that are not there: {unknown}"
    assert "unknown option" in complaint("train.engine.zero")


def test_open_clips_users_find_each_of_its_flags_once() -> None:
    """Those of the version that is installed; later ones may have rows too."""
    spec = importlib.util.find_spec("open_clip_train.params")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    flags = set(re.findall(r"""add_argument\(\s*["'](--[\w-]+)""", source))
    named = re.findall(r"`(--[\w-]+)`", " ".join(column(OPEN_CLIP, "open_clip")))
    assert len(flags) >= 90 and not flags - set(named)
    assert len(named) == len(set(named))


def test_open_clips_users_are_told_of_options_and_flags_that_are_there() -> None:
    """Where a value is stated, a configuration takes it."""
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\| `--.*? \| ", "", code.sub("", TEXT[OPEN_CLIP]), flags=re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", text)
    known = {field.name for field in dataclasses.fields(config.Config)}
    options = [s for s in spans if re.split(r"[.=]", s)[0] in known]
    assert len(options) >= 60
    for option in options:
        name, _, value = option.replace("NAME", "cc12m").partition("=")
        try:
            config.load("cc12m_vitb32", [f"{name}={value or 'null'}"])
        except ValueError as error:
            assert not value and "unknown option" not in str(error), option
    flags = {flag for parser in parsers().values() for flag in parser._option_string_actions}
    theirs = set(re.findall(r"`(--[\w-]+)`", " ".join(column(OPEN_CLIP, "open_clip"))))
    assert {word for span in spans for word in re.findall(r"--[\w-]+", span)} <= flags | theirs
    assert {k for s in spans for k in re.findall(r"kind: (\w+)", s)} <= {*kinds(), *KINDS}


def test_every_protocol_has_a_row_with_its_options() -> None:
    found = {}
    for line in re.findall(r"^\| `\w+` \| .*$", TEXT[BENCHMARKS], re.MULTILINE):
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
            if given[-1] == "--help":
                continue
            yield given, out


def test_every_command_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the pages; a file is there once a command has written it, and the
    configuration of a run once it has been started. Pages may name those of other pages."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    monkeypatch.chdir(tmp_path)
    load = cache(lambda path, *overrides: config.load(path, overrides))  # no file changes
    for path in ("mine.yaml", "runs/mine/config.yaml"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(config.dump(config.load("cc12m_vitb32", ["run_dir=runs/mine"])))
    seen = []
    for given, out in (command for page in PAGES for command in commands(page)):
        args = entry.parse_words(given)
        seen.append(args.verb)
        if args.verb == "demo":
            demo.settings(Path(args.out or "runs/demo"), 3, args.overrides)
        elif getattr(args, "explain", None) is not None:
            explain(args.explain)
        elif {"config", "overrides"} <= {*vars(args)} and getattr(args, "to", None) is None:
            options = load(args.config, *args.overrides)
            if args.verb == "run":
                out = f"{options.run_dir}/config.yaml"
            if out and not Path(out).exists():
                Path(out).parent.mkdir(parents=True, exist_ok=True)
                Path(out).write_text(config.dump(options))
    assert {"pack", "index", "run", "train", "eval", "demo", "doctor", "config"} <= set(seen)
    lines = [line for page in PAGES for line in TEXT[page].splitlines()]
    written = [line for line in lines if re.match(r"(mclclip|torchrun|sbatch) ", line)]
    written = [line for line in written if "--help" not in line]
    assert len(seen) >= len(written) >= 100


def test_verbs_in_sentences_are_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"`mclclip ([a-z][\w-]*)", TEXT[page])}
    assert named <= parsers().keys()


def python_blocks() -> list[tuple[str, str]]:
    """Page and text of each example in Python."""
    return [
        (page, block)
        for page in PAGES
        for block in re.findall(r"```python\n(.*?)```", TEXT[page], re.DOTALL)
    ]


def test_python_examples_name_what_is_there() -> None:
    """They parse, the modules of ours that they import have these names, and so has mclclip."""
    assert len(python_blocks()) >= 10
    for page, block in python_blocks():
        for node in ast.walk(ast.parse(block)):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mclclip"):
                module, names = str(node.module), [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mclclip":
                module, names = "mclclip", [node.attr]
            absent = [name for name in names if not hasattr(importlib.import_module(module), name)]
            assert not absent, f"{page}: {module} has no {absent}"


# --- links -------------------------------------------------------------------------------------


@cache
def anchors(page: str) -> set[str]:
    """What headings of a page are called in an address: words in small letters, joined by hyphens;
    several hyphens in a row are one in the site."""
    path = ROOT / page
    text = path.read_text() if path.suffix == ".md" else ""
    in_site = page.startswith(SITE)
    if in_site:
        text = reference().generate(text)
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    words = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return {re.sub("-+", "-", word) for word in words} if in_site else words


def broken_links(page: str, text: str) -> list[str]:
    """Links of a page to files or headings that are not there, and addresses of no site."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            if not re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w./#?=&%~+-]*)?", link):
                broken.append(link)
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path if path else ROOT / page).resolve()
        if not target.exists() or (
            anchor and anchor not in anchors(str(target.relative_to(ROOT.resolve())))
        ):
            broken.append(link)
    return broken


def test_links_lead_somewhere() -> None:
    broken = {page: broken_links(page, TEXT[page]) for page in LINKED}
    assert not {page: links for page, links in broken.items() if links}


def test_the_tests_that_hold_promises_are_there() -> None:
    """CONTRIBUTING.md and tests/README.md name them, by file or by function."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    text = "".join(file.read_text() for file in files)
    functions = set(re.findall(r"def (test_\w+)", text))
    named = re.findall(
        r"[`/:](test_\w+(?:\.py)?)", TEXT["CONTRIBUTING.md"] + TEXT["tests/README.md"]
    )
    assert len(named) >= 60
    assert not set(named) - functions - {file.name for file in files} - {"test_NAME.py"}


# --- the site ----------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation() -> None:
    """And nothing of the site comes from elsewhere: its fonts and scripts are the package's."""
    text = (ROOT / "docs" / "mkdocs.yml").read_text()
    named = set(re.findall(r"([\w-]+(?:/[\w-]+)*\.md)$", text, re.MULTILINE))
    pages = {page.removeprefix(f"{SITE}/") for page in SITE_PAGES}
    assert named == pages | {place for place in reference().BORROWED.values() if ".md" in place}
    assert re.search(r"^  font: false$", text, re.MULTILINE)
    assert "repo_url" not in text and "://" not in text


def test_tables_of_what_helps_are_those_of_their_files() -> None:
    """A page that has other figures is not as the script would leave it."""
    script = runpy.run_path(str(ROOT / "docs" / "what_helps.py"))
    page = script["PAGE"].read_text()
    assert script["filled"](page) == page
    changed = re.sub(r"(<!-- table \S+ -->\n\n)", r"\1other figures", page)
    assert changed != page and script["filled"](changed) == page
    files = {path.stem for path in script["RESULTS"].glob("*.json")}
    assert files <= set(re.findall(r"<!-- table (\S+) -->", page))


@cache
def strings_of_the_program() -> str:
    """Every piece of text that stands in the program, one after the other."""
    pieces = []
    for path in (*(ROOT / "mclclip").rglob("*.py"), *(ROOT / "eval").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.append(node.value)
    return "\n".join(pieces)


def test_messages_that_the_page_of_failures_quotes_are_those_of_the_program() -> None:
    """Headings quote messages; an ellipsis stands for what changes."""
    headings = re.findall(r"^### (.*)$", TEXT[FAILS], re.MULTILINE)
    assert len(headings) >= 30
    quoted = [part for title in headings for part in re.findall(r'"([^"]+)"', title)]
    assert len(quoted) >= 15
    pieces = [piece.strip() for message in quoted for piece in message.split("…")]
    lost = [piece for piece in pieces if piece not in strings_of_the_program()]
    assert not lost, "the program says none of these"


def test_the_step_of_a_training_is_where_the_page_says() -> None:
    section = (
        TEXT[f"{SITE}/design.md"].partition("## One step of a training")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| `(\S+\.py)` \| `(?:(\w+)\.)?(\w+)` \|", section, re.M)
    assert len(rows) > 10
    for path, owner, name in rows:
        tree: Any = ast.parse((ROOT / "mclclip" / path).read_text())
        body = (
            next(c for c in tree.body if getattr(c, "name", "") == owner).body
            if owner
            else tree.body
        )
        assert name in {getattr(each, "name", "") for each in body}, (path, owner, name)
