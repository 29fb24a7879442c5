"""Executes the series on this machine (`python -m helpers notebooks`); executed copies and HTML go to build/notebooks/."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from ..ladder.paths import NOTEBOOKS, ROOT
from . import watch

CELL_TIMEOUT = 600  # seconds
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


def execute(path: Path) -> tuple[nbformat.NotebookNode, list[str]]:
    """Runs every cell of a notebook in a fresh kernel, in the notebook's folder, and gives back the executed copy and the files of
    the checkout that it read. The copy's metadata say which records those were, with the digests they had.

    Raises nbclient's CellExecutionError if a cell raises, with what the notebook held by then in `error.notebook`.
    """
    notebook = nbformat.read(path, as_version=4)
    watch.begin(notebook)
    notebook.metadata.setdefault("kernelspec", KERNEL)  # without one JupyterLab asks for it, or marks the file changed
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        force_raise_errors=True,  # also in cells that may raise where there is no nvcc
        extra_arguments=["--log-level=ERROR"],  # ipykernel's warning on how it talks to us
    )
    # The kernel imports helpers and finds the tools of this very Python, whatever environment is active.
    client.create_kernel_manager()
    client.km.kernel_cmd = []
    client.km.kernel_spec.argv[0] = sys.executable
    try:
        paths = str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")
        client.execute(env={**os.environ, "PYTHONPATH": paths, "FA_PROGRESS": ""})  # nobody solves anything here
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        watch.end(notebook)
        error.notebook = notebook
        raise
    reads = watch.end(notebook)
    notebook.metadata["records"] = watch.records(reads)
    return settle(notebook), reads


def settle(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Outputs as a screen shows them in the end: without what a carriage return has overwritten, and without displays that were
    taken back (progress)."""
    for cell in notebook.cells:
        kept: list[nbformat.NotebookNode] = []
        for output in cell.get("outputs", []):
            if kept and output.output_type == kept[-1].output_type == "stream" and output.name == kept[-1].name:
                kept[-1].text += output.text
            else:
                kept.append(output)
        for output in kept:
            if output.output_type == "stream" and "\r" in output.text:
                output.text = "".join(line.rsplit("\r", 1)[-1] for line in output.text.splitlines(keepends=True))
        if "outputs" in cell:
            cell.outputs = [o for o in kept if (o.text.strip() if o.output_type == "stream" else o.get("data", True))]
    return notebook


def save(notebook: nbformat.NotebookNode, name: str, folder: Path) -> None:
    """Writes the executed copy and its HTML into `folder`."""
    from nbconvert import HTMLExporter

    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / f"{name}.ipynb")
    (folder / f"{name}.html").write_text(HTMLExporter().from_notebook_node(notebook)[0])


def execute_all(stems: Sequence[str] = (), inplace: bool = False) -> bool:
    """Executes these notebooks, or all of them, and reports on each; True if none failed.

    inplace: keeps the outputs in notebooks/ as well. ValueError names the notebooks there are if one is unknown.
    """
    paths = chosen(stems)
    rows = []
    for i, path in enumerate(paths, 1):
        print(f"[{i}/{len(paths)}] {path.stem} …", end=" ", flush=True)
        start, result = time.perf_counter(), "passed"
        try:
            notebook, _ = execute(path)
            if inplace:
                nbformat.write(notebook, path)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            notebook, result = error.notebook, "failed"
            print(f"\n{error}")
        save(notebook, path.stem, ROOT / "build" / "notebooks")
        rows.append((path.stem, time.perf_counter() - start, result))
        print(f"{rows[-1][1]:.0f} s, {result}", flush=True)
    _report(rows)
    return all(result == "passed" for *_, result in rows)


def chosen(stems: Sequence[str]) -> list[Path]:
    """These notebooks, each by its stem, how that begins, or its file; all of them if none is named. ValueError for one that is not
    there, or could be several."""
    paths = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    names = {stem: Path(stem).name.removesuffix(".ipynb") for stem in stems}
    fits = {stem: [path for path in paths if path.stem.startswith(name)] for stem, name in names.items()}
    known = ", ".join(path.stem for path in paths)
    if unknown := sorted(stem for stem in stems if not fits[stem]):
        raise ValueError(f"no notebook {', '.join(unknown)}; there are {known}")
    for stem, several in fits.items():
        if len(several) > 1:
            raise ValueError(f"{stem!r} fits {', '.join(path.stem for path in several)}: name one of them")
    return sorted({path for (path,) in fits.values()}) if stems else paths


def _report(rows: list[tuple[str, float, str]]) -> None:
    import torch

    back_end = torch.cuda.get_device_name() if torch.cuda.is_available() else "emulator"
    width = max(len(back_end), len("back end"))
    print(f"\n{'notebook':<28}{'seconds':>8}  {'back end':<{width}}  result")
    for stem, seconds, result in rows:
        print(f"{stem:<28}{seconds:>8.0f}  {back_end:<{width}}  {result}")
