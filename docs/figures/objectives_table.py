"""Write the table of objectives into docs/objectives.md: python docs/figures/objectives_table.py.

Its rows are the fields ``:Formula:``, ``:Aggregation:``, ``:Reference:`` and ``:Use:`` of the docstrings of the classes
in ``OBJECTIVES``. A test fails where the page is not what this script writes.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from torchrl_asyncgrpo.objectives import OBJECTIVES

PAGE = Path(__file__).parent.parent / "objectives.md"
BEGIN, END = "<!-- objectives_table.py: begin -->", "<!-- objectives_table.py: end -->"
COLUMNS = {
    "Formula": "term of a token",
    "Aggregation": "aggregation",
    "Reference": "reference",
    "Use": "when to use it",
}


def fields(objective: type) -> dict[str, str]:
    """The fields of a class that the table shows.

    Raises:
        ValueError: if the docstring lacks one, or has it twice.
    """
    docstring = inspect.cleandoc(vars(objective).get("__doc__") or "")
    found = re.findall(rf"^:({'|'.join(COLUMNS)}): (.+(?:\n    .+)*)$", docstring, re.MULTILINE)
    if sorted(name for name, _ in found) != sorted(COLUMNS):
        raise ValueError(
            f"the docstring of {objective.__name__} has the fields {[name for name, _ in found]}; the table of "
            f"objectives needs each of {', '.join(COLUMNS)} once."
        )
    return {name: re.sub(r"\s+", " ", text) for name, text in found}


def markdown(text: str) -> str:
    """Text of a docstring as a cell of a table: code as code, papers as links."""
    text = text.replace("``", "`").replace("|", "\\|")
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def table() -> str:
    """The table, one row for each objective."""
    lines = [f"| `loss.name`, class | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, objective in OBJECTIVES.items():
        of_class = fields(objective)
        cells = [f"`{name}`, `{objective.__name__}`", *(markdown(of_class[column]) for column in COLUMNS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The text of the page with the table as it is now.

    Raises:
        ValueError: if the page has no place for it.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}; put both lines where the table goes.")
    return f"{before}{begin}\n\n{table()}\n\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
