"""The public face: what `dir(helpers)` shows, that all of it can be imported, and that `help` opens with an example."""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import helpers
from helpers import sass, show

ROOT = Path(__file__).parents[2]
FUNCTIONS = {name: f for name in dir(helpers) if inspect.isroutine(f := getattr(helpers, name))}
FUNCTIONS |= {"Kernel": helpers.Kernel, "Rung": helpers.Rung, "bench.measure": helpers.bench.measure}
FUNCTIONS |= {"op.operator": helpers.op.operator}
FUNCTIONS |= {f"show.{name}": getattr(show, name) for name in ("region", "regions", "source", "diff", "changed")}
FUNCTIONS |= {
    f"sass.{name}": getattr(sass, name)
    for name in ("cubin", "resources", "histogram", "opcodes", "compare", "table", "disassembly")
}


def test_dir_shows_what_a_reader_uses():
    assert {"load", "check", "xray", "show", "sass", "bench", "plot", "record", "rung", "rungs", "doctor"} <= {
        *dir(helpers)
    }
    assert {"reference", "Kernel", "Rung", "Case", "CompileError", "KernelError", "CallError"} <= {*dir(helpers)}
    assert not [name for name in dir(helpers) if name.startswith(("draw", "_"))]


@pytest.mark.parametrize("name", [*helpers._PUBLIC, *helpers._LESSONS])
def test_every_name_is_there(name):
    found = getattr(helpers, name)
    assert isinstance(found, ModuleType) or callable(found)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'laod'; it has CallError, "):
        _ = helpers.laod


def test_importing_it_imports_neither_torch_nor_pandas():
    code = (
        "import sys, helpers; from helpers import load, rung, show; print(sorted({'torch', 'pandas'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_opens_with_an_example(name):
    """A sentence, and then indented code that uses it by its name."""
    summary, example, *_ = inspect.getdoc(FUNCTIONS[name]).split("\n\n")
    assert summary.endswith(".") or summary.endswith("`.")
    assert all(line.startswith("    ") for line in example.splitlines()), example
    ast.parse(textwrap.dedent(example))
    used = name.lower() if name[0].isupper() else name
    assert re.search(rf"\b{re.escape(used)}\(", example), example
