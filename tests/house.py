"""How much there is to take in: counts of mclclip/ and eval/, each with its ceiling.

    python -m tests.house

``make lint`` runs it, and it fails where a count is above its ceiling. A change that makes a count
smaller lowers the ceiling with it; one that needs more says in its commit message for what.

Lines are those that hold code: no blank line, comment or docstring. A function's body is counted
without its docstring. Options are the fields of checked dataclasses. An arrow goes from a room to
another whose modules it imports (the table of rooms in ``tests/unit/test_architecture.py``).
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.unit.test_architecture import edges

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = {
    "files": 289,
    "lines": 35_491,
    "functions": 3_215,
    "functions of two lines or fewer": 982,
    "classes": 421,
    "dataclasses": 214,
    "options": 263,
    "arrows between rooms": 227,
    "lines of tests": 50_316,
}
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
SILENT |= {tokenize.ENCODING, tokenize.ENDMARKER}
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
        if isinstance(node, Function):
            body = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
            yield "functions", 1
            yield "functions of two lines or fewer", int(len(lines.intersection(body)) <= 2)
        elif isinstance(node, ast.ClassDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            yield "classes", 1
            yield "dataclasses", int("dataclass" in decorators)
            if "checked_dataclass" in decorators:
                yield "options", sum(isinstance(line, ast.AnnAssign) for line in node.body)


def main() -> int:
    """Prints every count beside its ceiling; exit code 1 where one is above."""
    counts = Counter({"arrows between rooms": len(edges())})
    for path in [*ROOT.glob("mclclip/**/*.py"), *ROOT.glob("eval/**/*.py")]:
        for name, number in count(path):
            counts[name] += number
    for path in ROOT.glob("tests/**/*.py"):
        text = path.read_text()
        counts["lines of tests"] += len(lines_of_code(text, ast.parse(text)))
    for name, ceiling in CEILINGS.items():
        note = " <- too many" if counts[name] > ceiling else ""
        print(f"{counts[name]:7,} {name} (at most {ceiling:,}){note}")
    return int(any(counts[name] > ceiling for name, ceiling in CEILINGS.items()))


if __name__ == "__main__":
    sys.exit(main())
