"""Workloads and experiments on top of the library, which never imports them.

`compare`, `sweep` and `tune` are those of the command line. They are imported when they are asked
for, as they need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palsgd.lab.api import Result, compare, sweep
    from palsgd.lab.tuning.api import Tuning, tune

__all__ = ["Result", "Tuning", "compare", "sweep", "tune"]
_PLACES = {"Result": "api", "compare": "api", "sweep": "api", "Tuning": "tuning.api",
           "tune": "tuning.api"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
