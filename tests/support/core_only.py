"""`python core_only.py SCRIPT WORDS` runs a script as if pip had installed palsgd and what palsgd
depends on, and nothing else."""

import re
import runpy
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def dependencies(*roots: str) -> set[str]:
    """These distributions, and what they need without any extra."""
    found: set[str] = set()
    left = list(roots)
    while left:
        name = normal(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        left += [re.split(r"[^\w.-]", line)[0] for line in needed if "extra ==" not in line]
    return found


DISTRIBUTIONS = metadata.packages_distributions()
KEPT = dependencies("palsgd", "torch", "numpy")


def is_there(module: str) -> bool:
    """Modules that belong to no distribution are Python's own, or of a folder on the path."""
    owners = {normal(each) for each in DISTRIBUTIONS.get(module.partition(".")[0], [])}
    return not owners or bool(owners & KEPT)


class CoreFinder(PathFinder):
    """Finds what is in a folder of the path, unless it would not be there."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return super().find_spec(fullname, path, target) if is_there(fullname) else None


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    sys.meta_path[:] = [CoreFinder if each is PathFinder else each for each in sys.meta_path]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
