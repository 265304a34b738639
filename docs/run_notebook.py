"""``python docs/run_notebook.py [--write]``: runs all cells of docs/notebooks/first_run.ipynb.

They run in a temporary folder, as for somebody who has just installed mclclip; a cell that fails
ends the command. With ``--write`` the outputs are written into the notebook, of which ``make docs``
makes a page.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent / "notebooks" / "first_run.ipynb"


def main() -> None:
    """Runs the notebook; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the outputs in the notebook")
    given = parser.parse_args()
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = str(Path(folder) / "ipython")
        client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}})
        client.execute(cwd=folder)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each cell began and ended
        if cell.cell_type == "code":
            # Without progress, whose times differ on every machine, and pictures in two formats.
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
            for output in cell.outputs:
                output.get("data", {}).pop("image/jpeg", None)
    if given.write:
        nbformat.write(notebook, NOTEBOOK)  # type: ignore[no-untyped-call]
    print(notebook.cells[-3].outputs[0]["text"])


if __name__ == "__main__":
    main()
