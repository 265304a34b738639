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
        if other == own and len(path.parts) > 1 or module == "mclclip.run.artifacts.Artifact":
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
    """No file over 500 lines, no function over 60: what outgrows this has two jobs."""
    text = (PACKAGE / path).read_text()
    assert text.count("\n") <= 500, f"{path} has {text.count(chr(10))} lines"
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


# --- what depends on device or processor is chosen in functions named choose_* ---

QUESTIONS = {"is_cuda", "is_available", "get_capabilities", "get_device_capability"}
QUESTIONS |= {"is_bf16_supported", "device_type"}
# Files that still ask such questions elsewhere. This list may only become shorter.
STILL_ASKING = {
    "doctor.py",
    "embed.py",
    "eval/features.py",
    "models/lora.py",
    "objectives/info_nce.py",
    "objectives/row_losses.py",
    "objectives/class_centers/rows.py",
    "objectives/class_centers/kernels.py",
    "objectives/class_centers/sums.py",
    "ranks/collectives.py",
    "engines/zero.py",
    "engines/engine.py",
    "engines/fsdp.py",
    "engines/gradient_cache.py",
    "ranks/process_group.py",
    "profiling.py",
    "train/parts.py",
    "trainer.py",
}


def device_questions(tree: ast.AST) -> Iterator[int]:
    """Lines that ask for a device's type or abilities, outside of functions named choose_*."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("choose_"):
            continue
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).split(".")[-1]
            if node.attr == "type" and owner in ("device", "where"):
                yield node.lineno
            elif (
                node.attr in QUESTIONS and owner != "dist"
            ):  # torch.distributed's are of another kind
                yield node.lineno
        elif isinstance(node, ast.Constant) and node.value in QUESTIONS:  # by getattr or hasattr
            yield node.lineno
        yield from device_questions(node)


def test_devices_are_asked_in_functions_named_choose() -> None:
    asking = {
        str(path): lines
        for path in MODULES
        if (lines := list(device_questions(ast.parse((PACKAGE / path).read_text()))))
    }
    new = {path: lines for path, lines in asking.items() if path not in STILL_ASKING}
    assert not new, f"choose in a function named choose_*, and pass the choice on: {new}"
    settled = STILL_ASKING - asking.keys()
    assert not settled, f"take these off STILL_ASKING: {sorted(settled)}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(x):\n    return x.device.type == 'cpu'", 1),
        ("def f(device):\n    kind = device.type", 1),
        ("if x.is_cuda or torch.cuda.is_available():\n    pass", 2),
        ("class A:\n    fast = hasattr(torch.cpu, 'get_capabilities')", 1),
        ("def choose_tile(device):\n    return 1 if device.type == 'cpu' else 2", 0),
        ("def f(error):\n    return error.type, dist.is_available()", 0),
    ],
)
def test_questions_are_found(text: str, found: int) -> None:
    assert len(list(device_questions(ast.parse(text)))) == found
