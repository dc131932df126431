"""The directive `command-line`: every command of `palsgd`, from what its `--help` is made of."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
from docutils.nodes import Node
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from palsgd.lab.cli import app as commands


def leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The commands that do something, with their names in full."""
    if hasattr(command, "commands"):
        for part, child in command.commands.items():
            yield from leaves(child, f"{name} {part}")
    else:
        yield name, command


def indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.splitlines())


def described(name: str, command: Any) -> str:
    """A section about a command, as reStructuredText."""
    context = typer.Context(command, info_name=name)
    about, _, example = inspect.cleandoc(command.help).partition("Example: ")
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"{name}\n{'-' * len(name)}", about, f".. program:: {name}"]
    parts.append(f".. code-block:: text\n\n{indented(usage)}")
    if example:
        parts.append(f"Example:\n\n.. code-block:: console\n\n{indented('$ ' + example)}")
    for parameter in command.params:  # without --help
        if record := parameter.get_help_record(context):
            words, meaning = record
            meaning = re.sub(r"(?<!\S)--[\w-]+", r"``\g<0>``", meaning)
            parts.append(f".. option:: {words}\n\n{indented(meaning)}")
    return "\n\n".join(parts)


class CommandLine(SphinxDirective):
    def run(self) -> list[Node]:
        root = typer.main.get_command(commands)
        text = "\n\n".join(described(name, command) for name, command in leaves(root, "palsgd"))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
