"""`palsgd data`: the files that workloads read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palsgd.lab.cli.common_options import Data, Quiet

if TYPE_CHECKING:
    from palsgd.lab.data.sources import Source

Name = Annotated[
    str,
    typer.Argument(help="Data, or a workload that needs them. `palsgd data list` shows both."),
]


def data_list(data: Data = None) -> None:
    """List the data that workloads need: where they are looked for, and what is there.

    Example: palsgd data list --data data
    """
    from rich.table import Table

    from palsgd.lab.cli.output import print_parts
    from palsgd.lab.data.sources import SOURCES
    from palsgd.lab.report import formats

    table = Table("data", "workloads", "looked for in", "found", "size", "licence", box=None)
    for name, source in SOURCES.items():
        there = not _missing(source, data)
        size = formats.size(source.size(data)) if there else formats.NONE
        where = str(source.place(data))
        users = ", ".join(_workloads_of(source))
        table.add_row(name, users, where, "yes" if there else "no", size, source.licence)
    print_parts([table])


def fetch(name: Name, data: Data = None, quiet: Quiet = False) -> None:
    """Download data. Data that are there already stay as they are.

    Example: palsgd data fetch cifar10 --data data
    """
    from palsgd.progress import file_progress

    source = _source(name)
    if not _missing(source, data):
        here = source.place(data)
        typer.echo(f"{source.name} is in {here} already; palsgd data check verifies it")
        return
    source.download(data, file_progress(quiet))
    typer.echo(f"{source.name}: {source.place(data)}")


def check(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Data, or a workload that needs them.", show_default="all that are there"
        ),
    ] = None,
    data: Data = None,
) -> None:
    """Verify data without training: counts, shapes, and checksums where they are known.

    Example: palsgd data check cifar10 --data data
    """
    from palsgd.lab.data.sources import SOURCES

    wrong = []
    for source in SOURCES.values() if name is None else [_source(name)]:
        if name is None and _missing(source, data):
            typer.echo(f"{source.name}: not in {source.place(data)}")
            continue
        try:
            facts = source.check(data)
        except ValueError as error:
            wrong.append(str(error))
            continue
        typer.echo(f"{source.name}, {source.place(data)}: right")
        for fact in facts:
            typer.echo(f"  {fact}")
    if wrong:
        raise ValueError("; ".join(wrong))


def prepare(
    source: Annotated[Path, typer.Argument(help="Folder with the texts, .txt or .txt.xz.")],
    destination: Annotated[Path, typer.Argument(help="Folder for the tokens.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with GPT-2's vocab.json and merges.txt.", show_default="SOURCE"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Turn TinyStories text into tokens that training maps into memory.

    Example: palsgd data prepare texts tokens --tokenizer gpt2-tokenizer
    """
    from palsgd.lab.data import tokens
    from palsgd.progress import file_progress

    tokens.prepare(source, destination, tokenizer or source, file_progress(quiet))
    typer.echo(f"tokens: {destination}")


def _missing(source: "Source", data: str | None) -> bool:
    try:
        source.require(data)
    except ValueError:
        return True
    return False


def _workloads_of(source: "Source") -> list[str]:
    from palsgd.lab import workloads

    return [name for name in workloads.names() if _reads(name) == source.name]


def _reads(workload: str) -> str | None:
    """The name of the data that a workload needs."""
    from palsgd.lab import workloads

    source = workloads.kind(workload).source
    return None if source is None else source.name


def _source(name: str) -> "Source":
    """By its own name, or by that of a workload, also of a user's own."""
    from palsgd.lab import workloads
    from palsgd.lab.data.sources import SOURCES

    if name in SOURCES:
        return SOURCES[name]
    found = workloads.kind(name).source if _is_workload(name) else None
    if found is not None:
        return found
    what = "needs no files" if _is_workload(name) else "is unknown"
    raise ValueError(f"{name!r} {what}; use one of {', '.join(SOURCES)}, or a workload of theirs")


def _is_workload(name: str) -> bool:
    from palsgd import references
    from palsgd.lab import workloads

    ours = (*workloads.names(), *references.installed(workloads.GROUP))
    return name in ours or references.is_reference(name)
