"""The laws of the house, as far as the source text can show them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mclclip"
# Ground: what every room may import. It imports nothing of ours but itself.
GROUND = {"util"}
# Room -> the rooms that it may import, beside ground and itself.
ROOMS: dict[str, set[str]] = {
    "ranks": set(),
    "run": {"ranks"},
    "engines": {"ranks"},
    "objectives": {"ranks"},
    "data": {"ranks", "run"},
    "models": {"run", "data"},  # an encoder reads pictures as data does
    "clustering": {"ranks", "data"},
    "checkpoint": {"ranks", "run"},
    "eval": {"ranks", "run", "data", "models"},
    "train/loop": {"ranks", "run", "data", "models", "objectives", "engines", "checkpoint"},
    "train/symptoms": {"ranks", "run", "models", "objectives", "engines"},
    "train/near_copies": {"data", "objectives"},
    "train/options": {"data", "models", "objectives", "engines", "checkpoint"},
    "config": {
        "engines",
        "ranks",
        "run",
        "data",
        "models",
        "objectives",
        "clustering",
        "eval",
        "train/options",
    },
    # A training with the whole configuration, of which loop and symptoms know only their options.
    "train/inputs": {"ranks", "run", "data", "models", "config", "train/loop", "train/options"},
    # A run directory, opened for whoever reads one: above the rooms whose files lie there.
    "run/opened": {"ranks", "run", "data", "models", "eval", "config"},
    "figures": {"ranks", "run", "data", "eval", "config", "run/opened"},
}
ROOMS["train/loop"] |= {"train/options", "train/symptoms"}
# What stands around the method; only verbs and what is above them import it.
LEAVES = {"train/build", "plan", "export", "report", "curate"}
ROOMS |= {leaf: {*ROOMS} for leaf in LEAVES}
# A verb reads options and does its work with any room, and imports no other verb.
VERBS = {
    f"verbs/{path.stem}" for path in (PACKAGE / "verbs").glob("*.py") if path.stem != "__init__"
}
ROOMS |= {verb: {*ROOMS} for verb in VERBS}
# A part of a verb.
ROOMS["verbs/embed"] |= {"verbs/embed_passes"}
# A report says what compare says, and renders it: its functions of rows, which print nothing.
ROOMS["report"] |= {"verbs/compare"}
ROOMS["verbs/report"] |= {"verbs/compare"}
# The method calls verbs, and these call the method.
ROOMS["method"] = {*ROOMS}
ROOMS["verbs/demo"] = {*ROOMS}
ROOMS["verbs/race"] = {*ROOMS}
# What looks at a sample of the data indexes it.
ROOMS["verbs/data_check"] |= {"verbs/doctor", "verbs/index"}
ROOMS["verbs/run_check"] |= {"verbs/doctor"}
# The command line and the public functions.
ROOMS["cli/process"] = {"ranks", "run", "config"}
ROOMS["cli/flag_parser"] = {"cli/process"}
ROOMS["cli/flags"] = {"data", "cli/flag_parser"}
ROOMS["api"] = {*ROOMS}
ROOMS["cli/entry"] = {*ROOMS}
ROOMS["verbs"] = ROOMS["cli"] = ROOMS["train"] = set()
ROOMS["__main__"] = {"cli/entry", "ranks"}
NO_CONFIG = {*GROUND, "ranks", "run", "engines", "objectives", "data"}
NO_CONFIG |= {
    "models",
    "clustering",
    "checkpoint",
    "train/loop",
    "train/options",
    "train/symptoms",
    "eval",
}
MODULES = sorted(
    path.relative_to(PACKAGE)
    for top in (PACKAGE, PACKAGE / "eval")
    for path in top.rglob("*.py")
    if path.name != "__init__.py" or path.parent != PACKAGE
)


def module_of(path: Path) -> str:
    return ".".join(("mclclip", *path.with_suffix("").parts)).removesuffix(".__init__")


NAMES = {module_of(path) for path in MODULES}


def room_of(module: str) -> str:
    """``mclclip.data.decode`` -> ``data``: the longest entry of the table that the name begins
    with. A file that has none lacks a room."""
    parts = module.removeprefix("mclclip").strip(".").split(".")
    for length in range(len(parts), 0, -1):
        if (name := "/".join(parts[:length])) in ROOMS or name in GROUND:
            return name
    return ""


@cache
def tree_of(path: Path) -> ast.AST:
    """A file's syntax tree; read once for all laws."""
    return ast.parse((PACKAGE / path).read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@cache
def imports(path: Path) -> list[str]:
    """Every module that a file imports, at any depth of the code, type checks excepted."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:  # a module of a package, or a name in a module
                inner = f"{node.module}.{alias.name}"
                found.append(inner if inner in NAMES else node.module)
    return found


@cache
def edges() -> dict[tuple[str, str], set[str]]:
    """(room, room that it imports) -> the files that do."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in MODULES:
        own = room_of(module_of(path))
        for module in imports(path):
            if module.startswith("mclclip.") and module != "mclclip.__version__":
                other = room_of(module)
                if other not in (own, ""):
                    found.setdefault((own, other), set()).add(f"{path} imports {module}")
    return found


def test_every_file_has_a_room() -> None:
    lost = [str(path) for path in MODULES if not room_of(module_of(path))]
    assert not lost, f"give it a room in the table: {lost}"


def test_direction() -> None:
    """cli -> method -> verbs -> rooms -> util, by the table."""
    wrong = {
        edge: sorted(files)
        for edge, files in edges().items()
        if edge[1] not in GROUND and edge[1] not in ROOMS.get(edge[0], set())
    }
    assert not wrong


def test_no_circle_of_rooms() -> None:
    below: dict[str, set[str]] = {}
    for own, other in edges():
        below.setdefault(own, set()).add(other)
    TopologicalSorter(below).prepare()  # raises CycleError with the circle


def test_no_circle_of_files() -> None:
    below = {module_of(path): {m for m in imports(path) if m in NAMES} for path in MODULES}
    for own, others in below.items():  # a package's __init__ may gather its own files
        others.discard(own)
    TopologicalSorter(below).prepare()


def test_rooms_do_not_know_the_whole_configuration() -> None:
    seeing = [
        f"{path} imports {module}"
        for path in MODULES
        for module in imports(path)
        if room_of(module_of(path)) in NO_CONFIG and module.startswith("mclclip.config")
    ]
    assert not seeing


def test_only_ranks_engines_and_checkpoint_talk_to_torch_distributed() -> None:
    allowed = {"ranks": "torch.distributed", "engines": "torch.distributed"}
    allowed["checkpoint"] = "torch.distributed.checkpoint"
    talking = [
        f"{path} imports {module}"
        for path in MODULES
        for module in imports(path)
        if module.startswith("torch.distributed")
        and not module.startswith(allowed.get(path.parts[0], "nothing"))
    ]
    assert not talking


def test_only_the_runner_opens_artifacts() -> None:
    """A verb makes a `Step`: no other file skips, refuses or moves aside."""
    others = {
        str(path)
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Artifact"
    }
    assert others == {"run/steps.py"}


def test_nobody_asks_for_the_type_of_an_objective() -> None:
    """What a method needs is declared by its options; a kind is only shown."""
    asking = []
    for path in MODULES:
        if room_of(module_of(path)) in ("objectives", "config"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "isinstance" and "bjective" in ast.unparse(node):
                    asking.append(f"{path}:{node.lineno}")
            elif isinstance(node, ast.Compare) and "objective.kind" in ast.unparse(node):
                asking.append(f"{path}:{node.lineno}")
    assert not asking


def test_only_one_file_imports_open_clip() -> None:
    importers = {str(p) for p in MODULES if any(m.startswith("open_clip") for m in imports(p))}
    assert importers <= {"models/clip.py", "verbs/doctor.py"}


def test_a_class_has_a_name_of_its_own() -> None:
    """But for the options of plugins, and what users know as a run."""
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and node.name not in ("Options", "Run"):
                places.setdefault(node.name, []).append(path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


FILE_LINES, FUNCTION_LINES = 500, 60


def test_sizes() -> None:
    """No file and no function over its limit: what outgrows this has two jobs."""
    too_long = []
    for path in MODULES:
        if (length := (PACKAGE / path).read_text().count("\n")) > FILE_LINES:
            too_long.append(f"{path} has {length} lines")
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION_LINES:
                    too_long.append(f"{path}:{node.lineno} {node.name} is {length} lines")
    assert not too_long


def test_forbidden() -> None:
    """No swallowed errors, no yaml.load, no pickled weights."""
    for path in MODULES:
        text = (PACKAGE / path).read_text()
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                assert not all(isinstance(line, ast.Pass) for line in node.body), f"{path}: pass"
        assert "yaml.load(" not in text, path
        assert "torch.load(" not in text or "weights_only=True" in text, path


# --- what others wrote is read in few places ---

_PARSERS = re.compile(r"\bjson\.loads?\(|\byaml\.\w*[lL]oad|\btarfile\b")
# Files that parse JSON, YAML or tars by themselves. This list may only become shorter.
PARSES = {
    "util/files.py",  # all JSON, bounded
    "config/plain_yaml.py",  # all YAML, bounded
    "data/tar_members.py",  # every shard; it names tarfile in its prose alone
    "data/datasets/cifar10.py",  # compressed archives of published data sets
    "run/runlog.py",  # rows of our own runs, here and below
}


def test_documents_and_tars_of_others_are_read_by_what_bounds_them() -> None:
    found = {str(path) for path in MODULES if _PARSERS.search((PACKAGE / path).read_text())}
    assert found == PARSES


# --- what depends on device or processor is chosen in functions named choose_* ---

QUESTIONS = {"is_cuda", "is_available", "get_capabilities", "get_device_capability"}
QUESTIONS |= {"is_bf16_supported", "device_type"}
# Files that still ask such questions elsewhere. This list may only become shorter.
STILL_ASKING = {
    "verbs/doctor.py",
    "verbs/embed_passes.py",
    "eval/features.py",
    "models/lora.py",
    "objectives/class_centers.py",
    "ranks/collectives.py",
    "engines/zero.py",
    "engines/engine.py",
    "engines/gradient_cache.py",
    "ranks/process_group.py",
    "run/recorder.py",
    "train/loop.py",
}


def device_questions(tree: ast.AST) -> Iterator[int]:
    """Lines that ask for a device's type or abilities, outside of functions named choose_*."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("choose_"):
            continue
        if isinstance(node, ast.Attribute) and node.attr in {*QUESTIONS, "type"}:
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
        str(path): lines for path in MODULES if (lines := list(device_questions(tree_of(path))))
    }
    new = {path: lines for path, lines in asking.items() if path not in STILL_ASKING}
    assert not new, f"choose in a function named choose_*, and pass the choice on: {new}"
    settled = STILL_ASKING - asking.keys()
    assert not settled, f"take these off STILL_ASKING: {sorted(settled)}"
