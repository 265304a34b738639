"""What ``pip install mclclip`` brings: the wheel and the sdist carry everything, and nothing else.

The suite runs on the checkout, where links lead to eval/, launch/ and slurm/ and nothing can be
missing. Here the distributions are built from a copy of the checkout, and the wheel is installed
into an environment of its own and used from another directory.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from mclclip.eval import results
from tests import tiny
from tests.forks import python
from tests.matrix import SOAK

SOURCES = ("mclclip", "eval", "launch", "slurm", "setup.cfg", "pyproject.toml", "README.md")
SOURCES += ("LICENSE", "NOTICE.md", "constraints.txt")
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def copy_of_the_checkout(folder: Path) -> Path:
    """The sources as a fresh clone has them, with links as links."""
    folder.mkdir()
    for name in SOURCES:
        source = tiny.ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=IGNORED)
        else:
            shutil.copy(source, folder / name)
    return folder


def build(source: Path, kind: str, out: Path) -> Path:
    """The wheel or sdist of a source tree, by the backend that pip calls, without a network."""
    pytest.importorskip("setuptools", minversion="77", reason="the build needs setuptools>=77")
    code = f"import setuptools.build_meta as b, sys; b.build_{kind}(sys.argv[1])"
    done = python(code, out, cwd=source)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def files_of(distribution: Path) -> set[str]:
    """The files of a wheel, or of an sdist below its one folder."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as archive:
            return {name for name in archive.namelist() if not name.endswith("/")}
    with tarfile.open(distribution) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members), "a link leads nowhere"
    return {member.name.partition("/")[2] for member in members if member.isfile()}


def needed() -> set[str]:
    """Every module, recipe, sweep, suite and template, by the path that it has in the package, and
    ``py.typed``, by which mypy reads its types."""
    package = tiny.ROOT / "mclclip"
    found = {f"mclclip/{path.relative_to(package)}" for path in package.rglob("*.py")}
    evaluation = tiny.ROOT / "eval"
    found |= {f"mclclip/eval/{path.relative_to(evaluation)}" for path in evaluation.rglob("*.py")}
    found |= {f"mclclip/eval/suites/{path.name}" for path in evaluation.glob("suites/*")}
    shipped = ("py.typed", "constraints.txt", "util/caption_words.json", "report/page.css")
    found |= {f"mclclip/{name}" for name in shipped}
    assert {"mclclip/cli/entry.py", "mclclip/eval/suites/mcl.yaml"} <= found
    report = tiny.ROOT / "mclclip" / "report"
    found |= {f"mclclip/report/{path.name}" for path in report.glob("*.html")}
    for pattern in ("launch/*.sh", "launch/recipes/*.*", "slurm/*.sbatch"):
        found |= {f"mclclip/{path.relative_to(tiny.ROOT)}" for path in tiny.ROOT.glob(pattern)}
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    return build(copy_of_the_checkout(folder / "checkout"), "wheel", folder)


def test_the_wheel_carries_everything_and_nothing_else(wheel: Path) -> None:
    about = {name for name in files_of(wheel) if name.split("/")[0].endswith(".dist-info")}
    assert files_of(wheel) - about == needed()
    assert {name.split("/", 1)[1] for name in about} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt",
        "licenses/LICENSE", "licenses/NOTICE.md",
    }  # fmt: skip


def test_the_sdist_carries_the_same_and_what_builds_it(tmp_path: Path) -> None:
    sdist = build(copy_of_the_checkout(tmp_path / "checkout"), "sdist", tmp_path)
    about = {name for name in files_of(sdist) if not name.startswith("mclclip/")}
    assert files_of(sdist) - about == needed()
    about = {name for name in about if not name.startswith("mclclip.egg-info/")}
    assert about == {
        "LICENSE", "NOTICE.md", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg",
    }  # fmt: skip


def test_the_metadata_has_urls_and_requires_no_faiss(wheel: Path) -> None:
    """faiss-cpu and faiss-gpu overwrite each other: whoever installs one must not get the other."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(name).decode().splitlines()
    urls = [line for line in lines if line.startswith("Project-URL: ")]
    assert any("https://arxiv.org/abs/2402.11816" in line for line in urls)
    needs = [line for line in lines if line.startswith("Requires-Dist: faiss")]
    assert {re.sub(r">=[\d.]+", "", line.partition(": ")[2]) for line in needs} == {
        'faiss-cpu; extra == "search"', 'faiss-gpu; extra == "search-gpu"',
        'faiss-cpu; extra == "dev"',
    }  # fmt: skip


class Installed:
    """The wheel in an environment of its own, used from ``where``.

    Dependencies are those of the environment that runs the tests. Its folders come after the new
    environment's, and by way of a ``.pth`` file: no ``.pth`` file of theirs is read, so no editable
    install can stand in for the wheel.
    """

    def __init__(self, wheel: Path, root: Path, where: Path) -> None:
        self.root, self.where = root, where
        where.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
        install = ["install", "--quiet", "--no-deps", "--no-index", "--no-cache-dir", wheel]
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", root / "bin" / "python", *install], check=True
        )
        own = sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)})
        Path(own, "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        self.packages = Path(own)

    def __call__(
        self, *arguments: str, command: str = "mclclip"
    ) -> subprocess.CompletedProcess[str]:
        """Ends like ``subprocess.run``; nothing of the checkout is on the path."""
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        variables = {k: v for k, v in tiny.environment().items() if k not in hidden}
        return subprocess.run(
            [self.root / "bin" / command, *arguments],
            cwd=self.where,
            env=variables,
            capture_output=True,
            text=True,
            timeout=1800,
        )

    def succeed(self, *arguments: str) -> str:
        """What the command writes to stdout; it must end with 0."""
        done = self(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, installed once for all tests that use it."""
    folder = tmp_path_factory.mktemp("installed")
    return Installed(wheel, folder / "environment", folder / "elsewhere")


@pytest.mark.slow
def test_recipes_and_scripts_are_found_in_it_and_copied(installed: Installed) -> None:
    code = "import mclclip, mclclip.verbs.eval as run; print(mclclip.__file__); print(run.__file__)"
    done = installed("-c", code, command="python")
    assert done.returncode == 0, done.stderr
    for path in done.stdout.splitlines():
        assert Path(path).is_relative_to(installed.packages)
    names = [path.stem for path in (tiny.ROOT / "launch" / "recipes").glob("*.yaml")]
    for name in names if SOAK else names[::8]:
        first = installed.succeed("config", "--config", name, "run_dir=runs/mine")
        assert first.startswith("run_dir: runs/mine\n")
    listed = installed.succeed("recipes")
    assert all(f"{name} " in listed for name in names)
    installed.succeed("recipes", "--copy", "copied")
    for name in ("launch/local.sh", "launch/recipes/demo.yaml", "slurm/mclclip.sbatch"):
        assert (installed.where / "copied" / name).read_bytes() == (tiny.ROOT / name).read_bytes()
    assert os.access(installed.where / "copied/launch/local.sh", os.X_OK)


@pytest.mark.slow
def test_the_demo_and_then_its_export_and_eval_again(installed: Installed) -> None:
    """Export and eval are verbs of their own: their results are removed and made again. None of
    them needs an extra, such as faiss."""
    assert "torch" in installed.succeed("doctor")
    (installed.packages / "faiss.py").write_text("raise ModuleNotFoundError('not installed')")
    table = installed.succeed("demo", "--short", "--out", "demo", "--seeds", "0")
    assert re.search(r"^\| concat_raw \| \d+\.\d \|", table, re.MULTILINE)
    run = installed.where / "demo" / "seed_0"
    before, rows = tiny.digests(run / "exports"), results.read(run / "results.jsonl")
    assert before and rows
    assert str(Path("demo", "seed_0", "report.html")) in table and (run / "report.html").is_file()
    shutil.rmtree(run / "exports")
    (run / "results.jsonl").unlink()
    options = ("--config", "demo/seed_0/config.yaml")
    installed.succeed("export", *options)
    assert tiny.digests(run / "exports") == before
    installed.succeed("eval", *options, "--model", "concat_raw=demo/seed_0/exports/concat_raw")
    again = results.read(run / "results.jsonl")
    assert again and again == [row for row in rows if row.model == "concat_raw"]
