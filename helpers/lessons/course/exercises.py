"""The exercises of a notebook: which cells they have, their solutions, and the notebook without or with them.

An exercise is a heading `### Exercise 4.1 · …`, a cell to change that opens with `# Exercise 4.1`, a cell that ends in
`exercise.verify("4.1", …)`, and a folded solution. A task, `### Task 04.1 · …`, has a `%%region` cell, which judges itself; its solution
is the rung's own text.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass

import nbformat

from ...ladder.rung import rung as find
from ..regions import body, head

HEADING = re.compile(r"^### (Exercise|Task) (\d+\.\d+)[^\n]*", re.MULTILINE)
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
FOLDED = re.compile(r"[ \t]*<details>\s*<summary>Solution.*?</summary>(.*?)</details>[ \t]*\n?", re.DOTALL)
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
QUESTION = re.compile(r"<details>\s*<summary>(.*?)</summary>.*?</details>[ \t]*\n?", re.DOTALL)


@dataclass
class Exercise:
    """number: "4.1", and of a task "task 04.1". Indices of cells in the notebook: text (where its heading stands), start and, of an
    exercise, check, of a task, form (`blank`) and hints. folded: the text of the folded solution. Of what is missing: None, and ""."""

    number: str
    text: int
    start: int | None = None
    check: int | None = None
    form: int | None = None
    hints: int | None = None
    folded: str = ""

    def solution(self, notebook: nbformat.NotebookNode) -> str:
        """The source of the start cell with the exercise solved: the folded code or, of a region task, the rung's own text."""
        if self.start is None:
            return ""
        source = notebook.cells[self.start].source
        code = "\n".join(FENCED.findall(self.folded)).rstrip("\n")
        if (magic := head(source, cell=True)) is None or code.startswith("%%region"):
            return code
        bodies = {region: body(find(magic.rung), region) for region in magic.regions}
        if len(bodies) == 1:
            return magic.line + bodies[magic.regions[0]]
        return magic.line + "\n".join(f"// [region: {name}]\n{text}\n// [end: {name}]" for name, text in bodies.items())


def exercises(notebook: nbformat.NotebookNode) -> dict[str, Exercise]:
    """The exercises of a notebook by number."""
    found: dict[str, Exercise] = {}
    number = ""
    for n, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            before, *parts = HEADING.split(cell.source)
            names = [f"task {n}" if kind == "Task" else n for kind, n in zip(parts[::3], parts[1::3])]
            for heading, text in [(number, before), *zip(names, parts[2::3])]:
                number = heading
                if number:
                    each = found.setdefault(number, Exercise(number, n))
                    each.folded += "".join(FOLDED.findall(text))
            if SECTION.search(cell.source) and not parts:
                number = ""
        elif number:
            each = found[number]
            opening = "\n".join(cell.source.splitlines()[:3])
            if re.search(rf'exercise\.verify\(\s*"{re.escape(number)}"', cell.source):
                each.check = n
            elif cell.source.startswith("blank("):
                each.form = n
            elif cell.source.startswith(f'hint("{number.removeprefix("task ")}")'):
                each.hints = n
            elif each.start is None and (
                re.search(rf"^(#|//) Exercise {re.escape(number)}\b", opening, re.MULTILINE)
                or head(cell.source, cell=True)
            ):
                each.start = n
    return found


def unsolved(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy without solutions, without the answers of the self-check, of which the questions stay, and without outputs."""
    made, section = _silent(notebook), ""
    for cell in made.cells:
        if cell.cell_type == "markdown":
            parts = SECTION.split(cell.source)
            for i in range(0, len(parts), 2):
                section = parts[i - 1] if i else section
                parts[i] = FOLDED.sub("", parts[i])
                if section == "Self-check":
                    parts[i] = QUESTION.sub(r"\1\n\n", parts[i]).replace("before you unfold", "in a sentence or two")
            texts = [f"## {part}" if i % 2 else part for i, part in enumerate(parts)]
            cell.source = re.sub(r"\n{3,}", "\n\n", "".join(texts)).strip("\n")
    made.cells = [cell for cell in made.cells if cell.source.strip()]
    return made


def solved(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy in which each exercise's start cell is its solution; the folded ones stay, and there are no outputs."""
    made = _silent(notebook)
    for each in exercises(notebook).values():
        if each.start is not None and (text := each.solution(notebook)):
            source = made.cells[each.start].source
            mark = f"# Exercise {each.number}\n" if source.startswith("#") and "Exercise" not in text else ""
            made.cells[each.start].source = mark + text
    return made


def _silent(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    made = copy.deepcopy(notebook)
    made.metadata.pop("records", None)
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return made
