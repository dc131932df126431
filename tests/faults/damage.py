"""Damage to the files of a save, after all processes have ended."""

import random
from pathlib import Path

from faults.fault import Fault


def step_of(save: Path) -> int:
    """The clock in the name of a save, which may have a number behind it: step-28-2.

    >>> step_of(Path("step-28-2"))
    28
    """
    return int(save.name.split("-")[1])


def newest(saves: Path) -> list[Path]:
    """The saves that have their name, newest first."""
    found = [path for path in saves.glob("step-*") if path.name.replace("-", "")[4:].isdigit()]
    return sorted(found, key=lambda path: (step_of(path), path.name), reverse=True)


def damage(saves: Path, fault: Fault) -> str:
    """Cut a file of the newest save, or flip a bit in it. Returns which, and where."""
    draw = random.Random(fault.chance)
    file = draw.choice(sorted(path for path in newest(saves)[0].rglob("*") if path.is_file()))
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content))
    if fault.kind == "truncate":
        content = content[:place]
    else:
        content[place] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return f"{file.relative_to(saves)} at byte {place}"
