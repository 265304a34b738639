"""The laws of the house, as far as the source text can show them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mclclip"
GROUND = {"config", "layout", "run_lock", "artifacts", "runlog", "failures"}
GROUND |= {"torchvision_fix", "parallel", "profiling", "randomness"}
NOUNS = {"data", "models", "objectives", "checkpoint", "recorder", "run_state"}
VERBS = {"pack", "make_dataset", "index", "embed", "cluster", "train", "export", "doctor", "eval"}
VERBS |= {"plan"}
LEVELS = {name: level for level, names in enumerate(
    [GROUND, NOUNS, {"trainer"}, VERBS, {"pipeline"}, {"demo"}, {"process"}, {"cli"}, {"__main__"}]
) for name in names}  # fmt: skip
MODULES = sorted(
    path.relative_to(PACKAGE)
    for top in (PACKAGE, PACKAGE / "eval")
    for path in top.rglob("*.py")
    if path.name != "__init__.py" or path.parent != PACKAGE
)


def part_of(module: str) -> str:
    """``mclclip.data.decode`` -> ``data``; the unit whose imports the law speaks of."""
    return module.split(".")[1]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth of the code, type checks excepted."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "mclclip":
                yield from (f"mclclip.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_direction(path: Path) -> None:
    """cli -> pipeline -> verbs -> nouns -> ground; none imports its equal."""
    own = path.parts[0].removesuffix(".py")
    assert own in LEVELS, f"{path}: give it a place in the layer table"
    for module in imports(path):
        if not module.startswith("mclclip.") or module == "mclclip.__version__":
            continue
        other = part_of(module)
        if other == own and len(path.parts) > 1 or module == "mclclip.artifacts.Artifact":
            continue
        assert other in LEVELS, f"{path} imports {module}"
        assert LEVELS[other] < LEVELS[own], f"{path} (level {LEVELS[own]}) imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_only_verbs_see_config(path: Path) -> None:
    own = path.parts[0].removesuffix(".py")
    if LEVELS[own] >= LEVELS["train"] or own == "config":
        return
    assert not any(module.startswith("mclclip.config") for module in imports(path))


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_only_parallel_and_checkpoint_talk_to_torch_distributed(path: Path) -> None:
    distributed = [m for m in imports(path) if m.startswith("torch.distributed")]
    if path.parts[0] == "checkpoint":
        distributed = [m for m in distributed if not m.startswith("torch.distributed.checkpoint")]
    assert path.parts[0] == "parallel" or not distributed


def test_only_one_file_imports_open_clip() -> None:
    importers = {str(p) for p in MODULES if any(m.startswith("open_clip") for m in imports(p))}
    assert importers <= {"models/clip.py", "doctor.py"}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_sizes(path: Path) -> None:
    """No file over 350 lines, no function over 60: what outgrows this has two jobs."""
    text = (PACKAGE / path).read_text()
    assert text.count("\n") <= 350, f"{path} has {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{path}:{node.lineno} {node.name} is {length} lines"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_forbidden(path: Path) -> None:
    """No swallowed errors, no yaml.load, no pickled weights."""
    text = (PACKAGE / path).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            assert not all(isinstance(line, ast.Pass) for line in node.body), f"{path}: pass"
    assert "yaml.load(" not in text
    assert "torch.load(" not in text or "weights_only=True" in text
