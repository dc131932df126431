"""The results on the terminal."""

from collections.abc import Iterator

from rich import box
from rich import table as rich_table
from rich.text import Text

from palsgd.lab.theory_report.tables import Table, tables
from palsgd.theory.results import Results


def parts(results: Results) -> Iterator[rich_table.Table | Text]:
    """Tables, then what there is to say about them."""
    yield from map(_rich, tables(results))
    for study in results.studies:
        for exponent in study.exponents:
            if exponent.verdict != "as claimed":
                yield Text(f"{exponent.claim}: {exponent.verdict}; {exponent.why}.")
        for note in study.notes:
            yield Text(f"{study.title}: {note}")
    for reason in results.outside:
        yield Text(f"Outside the theorem: {reason}. Run all the same.")


def _rich(table: Table) -> rich_table.Table:
    found = rich_table.Table(
        title=table.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for number, name in enumerate(table.head):
        found.add_column(name, justify="left" if number == 0 else "right")
    for row in table.rows:
        found.add_row(*map(Text, row))
    return found
