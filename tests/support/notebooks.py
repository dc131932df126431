"""Notebooks that are run without Jupyter: the code cells one after another, each with what it
prints and the figures that it leaves open."""

import base64
import contextlib
import hashlib
import io
import json
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]


def read(path: Path) -> Notebook:
    return json.loads(path.read_text())


def write(path: Path, notebook: Notebook) -> None:
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def code_of(notebook: Notebook) -> list[str]:
    return ["".join(cell["source"]) for cell in _code_cells(notebook)]


def outputs_of(notebook: Notebook) -> list[list[Notebook]]:
    """For each code cell what it has put out."""
    return [cell["outputs"] for cell in _code_cells(notebook)]


def mark_of(notebook: Notebook) -> str:
    """Changes with the code. A notebook that was executed has it in its metadata."""
    return hashlib.sha256("\n".join(code_of(notebook)).encode()).hexdigest()[:16]


def executed(path: Path) -> Notebook:
    """The notebook with the outputs that its cells have now."""
    import matplotlib

    matplotlib.use("Agg")
    notebook = read(path)
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(_code_cells(notebook), start=1):
        cell["execution_count"], cell["outputs"] = number, []
        code = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(code, names)
        if said.getvalue():
            text = said.getvalue().splitlines(keepends=True)
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": text})
        cell["outputs"] += _figures()
    notebook["metadata"]["executed"] = mark_of(notebook)
    return notebook


def _code_cells(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _figures() -> list[Notebook]:
    """Those that are open, as Jupyter would show them. They are closed."""
    from matplotlib import pyplot

    found = []
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, format="png", dpi=72, bbox_inches="tight")
        pyplot.close(number)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    return found
