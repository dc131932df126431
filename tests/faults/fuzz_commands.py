"""Command lines of which some words are wrong, up to where something would be trained."""

import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import typer.main
from fuzz_values import text_value

from palsgd.lab.cli.main import app
from palsgd.lab.settings import FIELDS
from support.commands import palsgd as command

Case = tuple[str, Callable[[], str | None]]


class Begun(BaseException):
    """Something would be trained, measured or fetched."""


# What takes long, or leaves this machine.
LONG = [
    "palsgd.lab.run_set._simulate",
    "palsgd.lab.run_set._launch",
    "palsgd.lab.demo._work",
    "palsgd.lab.bench_link.bench",
    "palsgd.lab.theory_report.command.examine",
    "palsgd.lab.plan.measure.measure",
    "palsgd.lab.plan.scale.scale_parts",
    "palsgd.lab.plan.paper.paper_parts",
    "urllib.request.urlopen",
    "palsgd.lab.data.cifar10.download",
]
FIRST = {
    "train": ["digits"], "compare": ["digits"], "tune": ["digits"], "sweep": ["digits", "lr=1,2"],
    "explain": ["digits"], "plan": ["--step-ms", "50", "--parameters", "8M"],
}  # fmt: skip


def options() -> dict[str, list[tuple[str, bool]]]:
    """The options of every command, and whether each takes a value."""
    group = typer.main.get_command(app)
    found = {}
    for name, each in group.commands.items():
        for inner, leaf in getattr(each, "commands", {name: each}).items():
            words = name if inner == name else f"{name} {inner}"
            found[words] = [
                (option, not getattr(param, "is_flag", False))
                for param in leaf.params
                for option in param.opts
                if option.startswith("--")
            ]
    return found


OPTIONS = options()


def commands_case(rng: random.Random, folder: Path) -> Case:
    name = rng.choice(list(OPTIONS))
    words = [*name.split(), *FIRST.get(name, [])]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        words += part(rng, name)
    if rng.random() < 0.05:
        words[rng.randrange(len(words))] = text_value(rng)
    if "--out" not in words and any(option == "--out" for option, _ in OPTIONS[name]):
        words += ["--out", str(folder / f"out-{rng.randrange(10**9)}")]
    return f"palsgd {words}", lambda: run(words, folder)


def part(rng: random.Random, name: str) -> list[str]:
    kind = rng.random()
    if kind < 0.1:
        return [text_value(rng)]
    if kind < 0.4:
        return [f"{rng.choice(list(FIELDS))}={some_value(rng)}"]
    known = [each for each in OPTIONS[name] if each[0] != "--help"]
    option, takes = rng.choice([*known, *known, ("--nothing", True)])
    return [option, some_value(rng)] if takes else [option]


def some_value(rng: random.Random) -> str:
    """Half of them are right somewhere."""
    right = ("1", "2", "8", "64", "0.5", "0.1", "ddp", "palsgd,ddp", "digits", "1gbit", "cpu")
    return rng.choice(right) if rng.random() < 0.5 else text_value(rng)


def run(words: list[str], folder: Path) -> str:
    """The command in an empty folder. Its exit code says what it found."""
    here = os.getcwd()
    os.makedirs(folder / "empty", exist_ok=True)
    os.chdir(folder / "empty")
    try:
        with ExitStack() as stack:
            for place in LONG:
                stack.enter_context(mock.patch(place, side_effect=Begun))
            said = command(*words)
    except Begun:
        return "would train"
    finally:
        os.chdir(here)
    lines = said.err.splitlines()
    if said.code == 0:
        return "worked"
    assert said.code in (1, 2), f"exit code {said.code}: {said.err}"
    assert "Traceback" not in said.err, said.err
    helped = any(line.startswith("Usage") for line in lines)
    assert helped or any(line.startswith("palsgd: ") for line in lines[-1:]), said.err
    return f"exit code {said.code}"


KINDS: dict[str, Callable] = {"commands": commands_case}
