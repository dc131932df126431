"""A table of a page."""

from collections.abc import Sequence

Row = Sequence[str]


def markdown(columns: Row, rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])
