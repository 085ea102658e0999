"""Runs a notebook as a person would, cell by cell, and starts the kernel again when it dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
CELL_S = 120
GONE_S = 15.0

Notebook = nbformat.NotebookNode


def read(path: Path) -> Notebook:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Notebook) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def environment(folder: Path) -> dict[str, str]:
    """A kernel's variables: jaxft is this checkout's, and all that it keeps is below `folder`."""
    inherited = {key: value for key, value in os.environ.items() if "JAX" not in key}
    return inherited | {
        "JAXFT_RUN_DIR": str(folder / "r"),
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(folder / "ipython"),
    }


def client_for(notebook: Notebook, folder: Path) -> NotebookClient:
    """Its kernels run in `folder`."""
    return NotebookClient(notebook, timeout=CELL_S, resources={"metadata": {"path": str(folder)}})


def execute(notebook: Notebook, folder: Path) -> list[str]:
    """Executes all cells in `folder`; their outputs are put into the notebook.

    Returns the names of the cells that the kernel died in. The next cell finds a new kernel.
    """
    cells = list(enumerate(notebook.cells))
    died = []
    while cells:
        client = client_for(notebook, folder)
        with client.setup_kernel(env=environment(folder)):
            while cells:
                index, cell = cells.pop(0)
                try:
                    client.execute_cell(cell, index)
                except DeadKernelError:
                    died.append(cell.id)
                    break
    return died


def printed(notebook: Notebook, name: str) -> str:
    """What the cell of this name printed."""
    (cell,) = (cell for cell in notebook.cells if cell.id == name)
    return "".join(one.text for one in cell.outputs if one.output_type == "stream")


def pictures(notebook: Notebook) -> list[str]:
    """The names of the cells that show a picture."""
    return [
        cell.id
        for cell in code_cells(notebook)
        if any("image/png" in one.get("data", {}) for one in cell.outputs)
    ]


def complaints(notebook: Notebook) -> list[str]:
    """All that a notebook that goes well does not show: warnings, and what goes to stderr."""
    streams = (one for cell in code_cells(notebook) for one in cell.outputs if "text" in one)
    return [one.text for one in streams if one.name == "stderr" or "warn" in one.text.lower()]


def processes(folder: Path) -> list[int]:
    """Those that were started with the variables of `environment`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"JAXFT_RUN_DIR={folder / 'r'}".encode() in variables:
            found.append(int(path.name))
    return found


def wait_until_gone(folder: Path) -> None:
    deadline_s = time.monotonic() + GONE_S
    while left := processes(folder):
        assert time.monotonic() < deadline_s, f"still there: {left}"
        time.sleep(0.05)


def kill_all(folder: Path) -> None:
    """Ends what a test that failed has left."""
    for pid in processes(folder):
        os.kill(pid, signal.SIGKILL)
