"""What pyproject.toml states."""

import re
import tomllib
from functools import cache
from typing import Any

from support.places import ROOT


@cache
def project() -> dict[str, Any]:
    """Its table `project`."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(*extras: str) -> set[str]:
    """The names of the packages that an installation with these extras asks for."""
    stated = [*project()["dependencies"]]
    for extra in extras:
        stated += project()["optional-dependencies"][extra]
    return {re.match(r"[\w.-]+", each)[0].lower() for each in stated}
