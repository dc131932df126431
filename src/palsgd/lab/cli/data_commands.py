"""`palsgd data`: the files that workloads read."""

from pathlib import Path
from typing import Annotated

import typer

from palsgd.lab.cli.common_options import Quiet
from palsgd.lab.cli.output import progress_reporter


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

    tokens.prepare(source, destination, tokenizer or source, progress_reporter(quiet))
    typer.echo(f"tokens: {destination}")
