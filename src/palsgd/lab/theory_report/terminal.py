"""The results on the terminal."""

from palsgd.lab.theory_report.tables import Table, tables
from palsgd.theory.results import Results


def show(results: Results) -> None:
    from rich import box
    from rich import table as rich_table
    from rich.console import Console
    from rich.text import Text

    console = Console()
    wide = console if console.is_terminal else Console(width=160)
    for each in tables(results):
        wide.print(_rich(each, rich_table.Table, box.SIMPLE_HEAD, Text))
    for study in results.studies:
        for exponent in study.exponents:
            if exponent.verdict != "as claimed":
                wide.print(Text(f"{exponent.claim}: {exponent.verdict}; {exponent.why}."))
        for note in study.notes:
            wide.print(Text(f"{study.title}: {note}"))
    for reason in results.outside:
        wide.print(Text(f"Outside the theorem: {reason}. Run all the same."))


def _rich(table: Table, kind, style, text):  # type: ignore[no-untyped-def]
    found = kind(title=table.title, title_justify="left", box=style, padding=(0, 1, 0, 0))
    for number, name in enumerate(table.head):
        found.add_column(name, justify="left" if number == 0 else "right")
    for row in table.rows:
        found.add_row(*map(text, row))
    return found
