"""How much there is to take in: counts of mclclip/ and eval/, each with its ceiling.

    python -m tests.house                 all of it, each count beside its ceiling
    python -m tests.house mclclip/data    one room, counts alone
    python -m tests.house --modules       every module with what its docstring begins with

``make lint`` runs the first, and it fails where a count is more than a hundredth above its ceiling.
A change that makes a count smaller lowers the ceiling with it; one that needs more raises it and
says in its commit message for what. Plugins (`PLUGINS` of ``mclclip/util/shipped.py``) are no part
of these counts, so that a new one needs no room; of them the average number of lines has a ceiling,
and words are counted.

Lines are those that hold code: no blank line, comment or docstring. A function's body is counted
without its docstring. Options are the fields of checked dataclasses. An arrow goes from a room to
another whose modules it imports (the table of rooms in ``tests/unit/test_architecture.py``). Names
are empty that do not say of what (`EMPTY`); a docstring is a riddle that begins in the middle of a
sentence (`RIDDLES`).
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from mclclip.util.shipped import PLUGINS, plugins
from tests.unit.test_architecture import PACKAGE, edges

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = {
    "files": 214,
    "lines": 32_157,
    "functions": 2_681,
    "functions of two lines or fewer": 759,
    "classes": 329,
    "dataclasses": 178,
    "options": 192,
    "arrows between rooms": 326,
    "empty names": 3,
    "riddling docstrings": 0,
    "lines of the average plugin": 95,
    "lines of tests": 45_363,
}
ROOM = 1.01
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
SILENT |= {tokenize.ENCODING, tokenize.ENDMARKER}
EMPTY = set(
    "own found one wanted kept told given known made begun asked existing named chosen written "
    "fetched".split()
)
RIDDLES = ("What", "That", "Has", "Whether")
WORDS = ("empty names", "riddling docstrings")  # counted in plugins too
Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(text: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):  # a docstring, or a string that does nothing
                found.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return found


def count(path: Path) -> Iterator[tuple[str, int]]:
    """What one file adds to each count."""
    text = path.read_text()
    tree = ast.parse(text)
    lines = lines_of_code(text, tree)
    yield from (("files", 1), ("lines", len(lines)))
    for node in ast.walk(tree):
        yield "raise statements", int(isinstance(node, ast.Raise))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield "empty names", int(node.id in EMPTY)
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            words = (ast.get_docstring(node) or "").split()
            yield "riddling docstrings", int(bool(words) and words[0] in RIDDLES)
        if isinstance(node, Function):
            body = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            yield "functions", 1
            yield "functions of nine or more parameters", int(len(arguments) >= 9)
            inner = (each for each in ast.walk(node) if isinstance(each, Function))
            yield "nested functions", sum(1 for _ in inner) - 1
            yield "functions of two lines or fewer", int(len(lines.intersection(body)) <= 2)
        elif isinstance(node, ast.ClassDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            yield "classes", 1
            yield "dataclasses", int("dataclass" in decorators)
            if "checked_dataclass" in decorators:
                yield "options", sum(isinstance(line, ast.AnnAssign) for line in node.body)


def count_all(paths: Iterable[Path]) -> Counter[str]:
    """The counts of some files together."""
    counts: Counter[str] = Counter()
    for path in paths:
        for name, number in count(path):
            counts[name] += number
    return counts


def files_in(*places: str) -> list[Path]:
    """The Python files at or below some places of the checkout, sorted."""
    found = [(ROOT / place, (ROOT / place).glob("**/*.py")) for place in places]
    return sorted({path for top, below in found for path in (top, *below) if path.suffix == ".py"})


def num_arrows(apart: set[Path]) -> int:
    """The number of arrows between rooms, without those that only the files ``apart`` make."""
    importers = ({line.partition(" ")[0] for line in lines} for lines in edges().values())
    return sum(any((PACKAGE / path).resolve() not in apart for path in each) for each in importers)


def print_modules() -> None:
    """Prints every module below its folder, with the first paragraph of its docstring."""
    folder = None
    for path in files_in("mclclip", "eval"):
        text = ast.get_docstring(ast.parse(path.read_text()))
        if text is None:  # an empty __init__
            continue
        if path.parent != folder:
            folder = path.parent
            print(f"{folder.relative_to(ROOT)}/")
        print(f"  {path.name:26} {' '.join(text.partition(chr(10) * 2)[0].split())}")


def main() -> int:
    """Prints every count beside its ceiling; exit code 1 where one is above."""
    match sys.argv[1:]:
        case ["--modules"]:
            print_modules()
            return 0
        case [_, *_] as places:
            for name, number in count_all(files_in(*places)).items():
                print(f"{number:7,} {name}")
            return 0
    every = files_in("mclclip", "eval")
    apart = {(PACKAGE / at / f"{name}.py").resolve() for at in PLUGINS for name in plugins(at)}
    counts = count_all(path for path in every if path.resolve() not in apart)
    counts["arrows between rooms"] = num_arrows(apart)
    of_plugins = count_all(apart)
    counts.update({name: of_plugins[name] for name in WORDS})
    counts["lines of the average plugin"] = of_plugins["lines"] // len(apart)
    counts["lines of tests"] = count_all(files_in("tests"))["lines"]
    for name, ceiling in CEILINGS.items():
        note = " <- too many" if counts[name] > ceiling * ROOM else ""
        print(f"{counts[name]:7,} {name} (ceiling {ceiling:,}){note}")
    if above := [name for name, ceiling in CEILINGS.items() if counts[name] > ceiling * ROOM]:
        print(f"too many: {', '.join(above)}. See first what can go; where nothing can,")
        print("raise CEILINGS in tests/house.py, and say in the commit message for what.")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
