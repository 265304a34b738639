"""Small methods, one file each: what another package would write to add an objective.

They are found as entry points: ``install`` writes the metadata of a package that names them.
"""

from __future__ import annotations

from pathlib import Path

KINDS = {
    "toy_momentum": "tests.toys.momentum",
    "toy_adversary": "tests.toys.adversary",
    "toy_prototypes": "tests.toys.prototypes",
}


def install(folder: Path) -> Path:
    """Writes what pip would leave of such a package, and returns the folder for ``sys.path``."""
    info = Path(folder) / "toys" / "mclclip_toys-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mclclip-toys\nVersion: 1.0\n")
    points = "".join(f"{kind} = {module}\n" for kind, module in KINDS.items())
    (info / "entry_points.txt").write_text(f"[mclclip.objectives]\n{points}")
    return info.parent
