"""The results on the terminal."""

from collections.abc import Iterator

from rich import box
from rich import table as rich_table
from rich.text import Text

from palsgd.lab.theory_report.tables import Table, tables
from palsgd.theory.conclusion import conclusion
from palsgd.theory.results import Results
from palsgd.theory.studies import RATES


def parts(results: Results) -> Iterator[rich_table.Table | Text]:
    """Tables, notes on them, and the conclusion, which is what is left on the screen."""
    yield from map(_rich, tables(results))
    for study in results.studies:
        for exponent in study.exponents:
            verdict = exponent.verdict(results.family)
            if verdict.word != RATES.within:
                yield Text(f"{exponent.claim}: {verdict}; {exponent.why}.")
        for note in study.notes:
            yield Text(f"{study.title}: {note}")
    for reason in results.outside:
        yield Text(f"Outside the theorem: {reason}. Run all the same.")
    yield Text("\nConclusion", style="bold")
    for sentence in conclusion(results):
        yield Text(f"- {sentence}")


def _rich(table: Table) -> rich_table.Table:
    found = rich_table.Table(
        title=table.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for number, name in enumerate(table.head):
        found.add_column(name, justify="left" if number == 0 else "right")
    for row in table.rows:
        found.add_row(*map(Text, row))
    return found
