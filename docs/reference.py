"""Hooks that mkdocs calls while it builds the pages: see ``hooks`` in mkdocs.yml.

``generate`` writes the parts of pages that the program knows best: its verbs with their flags, its
options with their docstrings. They are made at each build and never committed. Pages that stand
elsewhere in the repository (``BORROWED``) are taken into the site as they are.
"""

from __future__ import annotations

import argparse
import ast
import base64
import dataclasses
import inspect
import json
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import mclclip
from mclclip import config
from mclclip.cli import flags
from mclclip.objectives.base import ObjectiveOptions, kinds, options_class

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "pages"
# Path in the repository -> path in the site.
BORROWED = {
    "docs/notebooks/first_run.ipynb": "start/first-run.md",
    "tests/benchmarks/README.md": "evidence/benchmarks.md",
    "tests/gpu/README.md": "evidence/gpu.md",
    "CONTRIBUTING.md": "contributing.md",
    "NOTICE.md": "notice.md",
    "CHANGELOG.md": "changelog.md",
    "launch/report.png": "report.png",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]*)(#[\w-]+)?\)")


# --- verbs --------------------------------------------------------------------------------------


def _cell(text: object) -> str:
    """A text as it may stand in a cell of a table."""
    return " ".join(str(text).split()).replace("|", r"\|")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb of the command line."""
    (action,) = flags.build_parser()._subparsers._group_actions  # type: ignore[union-attr]
    return dict(action.choices)  # type: ignore[arg-type]


def _flag(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """One row of the table of a verb: what is typed, and what it means."""
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = action.metavar or ("\\|".join(map(str, action.choices)) if action.choices else "")
    if not names:
        names = f"`{value or action.dest}`"
    elif action.nargs != 0:
        names += f" `{value or action.dest.upper()}`"
    helper = parser._get_formatter()
    return f"| {names} | {_cell(helper._expand_help(action))} |"


def verbs() -> str:
    """Every verb by the groups of the help, with an example and its flags."""
    parts = []
    known = parsers()
    for title, group in re.findall(r"^(\w.*?):\n((?:  .*\n)+)", flags._VERBS, re.MULTILINE):
        parts += [f"## {title[0].upper()}{title[1:]}", ""]
        for name, text, example in re.findall(
            r"^  ([\w-]+) +(.*?)\n +\$ (.*?)$", group, re.M | re.S
        ):
            parser = known[name]
            rows = [
                _flag(action, parser)
                for action in parser._actions
                if action.dest not in ("help", "debug", "verbose")
                and action.help is not argparse.SUPPRESS
            ]
            parts += [f"### {name}", "", f"{_cell(text)}", ""]
            parts += ["```bash", example, "```", ""]
            parts += ["| flag | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(parts)


# --- options ------------------------------------------------------------------------------------


@cache
def docstrings(owner: type) -> dict[str, str]:
    """The string below each field of a dataclass, those of its bases too."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for line, after in zip(body, body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
                if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                    found[line.target.id] = inspect.cleandoc(after.value.value)  # type: ignore[union-attr]
    return found


def _default(field: dataclasses.Field[Any]) -> str:
    """The default of a field as YAML would have it."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if dataclasses.is_dataclass(value):
        return ""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return f"`{text}`" if text else '`""`'


def _nested(annotation: Any) -> type | None:
    """The dataclass of options within an annotation, such as that of ``LoraConfig | None``."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    return next(filter(None, map(_nested, typing.get_args(annotation))), None)


def fields(owner: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], str]]:
    """Dotted name, field and docstring of every option below a dataclass, in its order."""
    for field in dataclasses.fields(owner):
        name = f"{prefix}{field.name}"
        yield name, field, docstrings(owner).get(field.name, "")
        annotation = owner.__pydantic_fields__[field.name].annotation  # type: ignore[attr-defined]
        inner = _nested(annotation)
        if inner is not None and not issubclass(inner, ObjectiveOptions):
            named = "NAME." if typing.get_origin(annotation) is dict else ""
            yield from fields(inner, f"{name}.{named}")


def _table(rows: Iterator[tuple[str, dataclasses.Field[Any], str]]) -> list[str]:
    lines = ["| option | values | default | meaning |", "|---|---|---|---|"]
    for name, field, text in rows:
        kind = re.sub(r"Literal\[(.*?)\]", r"\1", str(field.type)).replace('"', "")
        if not text and not _default(field):
            continue  # options of a room, which stand below
        lines.append(f"| `{name}` | `{_cell(kind)}` | {_cell(_default(field))} | {_cell(text)} |")
    return lines


def options() -> str:
    """Every option, in a table for each room of the configuration."""
    rooms: dict[str, list[tuple[str, dataclasses.Field[Any], str]]] = {"": []}
    for row in fields(config.Config):
        room = row[0].partition(".")[0]
        nested = _nested(config.Config.__pydantic_fields__[room].annotation)  # type: ignore[attr-defined]
        if nested is not None and room in ("base", "trained_model"):
            if "." in row[0]:
                continue  # the same as those of train and of model
            nested = None
        rooms.setdefault(room if nested else "", []).append(row)
    parts = []
    for room, rows in rooms.items():
        parts += [f"## {room or 'Of the whole run'}", "", *_table(iter(rows)), ""]
    return "\n".join(parts)


def _module_of(kind: str) -> Any:
    """The module of an objective, whose docstring teaches it."""
    return sys.modules[options_class(kind).__module__]


def objective_kinds() -> str:
    """A row for each module of objectives: its kinds, and the first paragraph of its docstring."""
    by_module: dict[Any, list[str]] = {}
    for kind in kinds():
        by_module.setdefault(_module_of(kind), []).append(f"[`{kind}`](#{kind})")
    lines = ["| kind | |", "|---|---|"]
    for module, named in by_module.items():
        lines.append(f"| {', '.join(named)} | {_cell(_prose(module).split(chr(10) * 2)[0])} |")
    return "\n".join([*lines, ""])


def objectives() -> str:
    """Describes every objective in the words of its module, and its options."""
    parts = []
    for kind in kinds():
        module = _module_of(kind)
        name = module.__name__.rpartition(".")[2]
        text = _prose(module) if kind == name else f"See [{name}](#{name})."
        rows = [row for row in fields(options_class(kind)) if row[0] not in ("kind", "weight")]
        parts += [f"### {kind}", "", text, "", *_table(iter(rows)), ""]
    return "\n".join(parts)


# --- Python -------------------------------------------------------------------------------------


def _signature(name: str, function: Any) -> str:
    """A call without the types of its arguments."""
    parameters = inspect.signature(function).parameters.values()
    plain = [each.replace(annotation=each.empty) for each in parameters if each.name != "self"]
    return f"{name}{inspect.Signature(plain)}"


def _prose(owner: object) -> str:
    """A docstring as Markdown."""
    return (inspect.getdoc(owner) or "").replace("``", "`")


def public(name: str) -> str:
    """A public name: its call, its docstring, and of a class what it has beside ``torch.nn``'s."""
    found = getattr(mclclip, name)
    parts = [_prose(found), ""]
    if not inspect.isclass(found):
        return "\n".join(["```text", _signature(name, found), "```", "", *parts])
    parts += ["| of it | is |", "|---|---|"]
    for member in dir(found):
        own = next((base for base in found.__mro__ if member in vars(base)), object)
        if member.startswith("_") or not own.__module__.startswith("mclclip"):
            continue
        value = inspect.getattr_static(own, member)
        call = member if hasattr(value, "__get__") and not callable(value) else None
        if call is None or isinstance(value, classmethod):
            call = _signature(member, getattr(found, member))
        first = _prose(getattr(value, "func", value)).split("\n\n")[0]
        parts.append(f"| `{call}` | {_cell(first)} |")
    return "\n".join([*parts, ""])


# --- the notebook -------------------------------------------------------------------------------


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page: its texts, its code, and what it printed; its pictures by name."""
    parts, pictures = [], dict[str, bytes]()
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        is_text = cell["cell_type"] == "markdown"
        parts += [source, ""] if is_text else ["```python", source, "```", ""]
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts += [f"![What the cell shows]({name})", ""]
            elif "IFrame" not in (text := "".join(data["text/plain"])):
                parts += ["```text", text.rstrip("\n"), "```", ""]
    return "\n".join(parts), pictures


# --- hooks of mkdocs ----------------------------------------------------------------------------

GENERATORS: dict[str, Callable[[], str]] = {
    "verbs": verbs,
    "options": options,
    "objective_kinds": objective_kinds,
    "objectives": objectives,
    **{name.lower(): partial(public, name) for name in mclclip.__all__ if not name.startswith("_")},
}


def generate(text: str) -> str:
    """A page with ``<!-- generated: NAME -->`` replaced by what the generator NAME writes."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: GENERATORS[found[1]](), text)


def relink(text: str, source: Path, page: str) -> str:
    """A page whose links are those of the site: to a page that stands elsewhere in the repository
    by its place in the site, and to a file that the site does not have by its name alone.

    source  the file in the repository, from which its links start
    page    its path in the site
    """

    def link(found: re.Match[str]) -> str:
        title, path, anchor = found[1], found[2], found[3] or ""
        if not path:
            return found[0]
        target = Path(os.path.normpath(source.parent / path))
        inside = target.is_relative_to(PAGES)
        place = str(target.relative_to(PAGES if inside else ROOT))
        if not inside and place not in BORROWED:
            return title
        place = os.path.relpath(place if inside else BORROWED[place], Path(page).parent)
        return f"[{title}]({place}{anchor})"

    return _LINK.sub(link, text)


def on_files(files: Any, *, config: Any) -> Any:
    """Takes the pages that stand elsewhere in the repository into the site."""
    from mkdocs.structure.files import File

    for source, place in BORROWED.items():
        path = ROOT / source
        if path.suffix == ".md":
            text = relink(path.read_text(), path, place)
            files.append(File.generated(config, place, content=text))
        elif path.suffix == ".ipynb":
            text, pictures = notebook(path)
            files.append(File.generated(config, place, content=text))
            for name, picture in pictures.items():
                beside = str(Path(place).with_name(name))
                files.append(File.generated(config, beside, content=picture))
        else:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Generates what is generated, and mends links of the pages that lie in docs/pages."""
    if page.file.src_uri in BORROWED.values():
        return markdown
    return relink(generate(markdown), PAGES / page.file.src_uri, page.file.src_uri)
