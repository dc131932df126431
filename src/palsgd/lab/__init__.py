"""Workloads and experiments on top of the library, which never imports them.

`compare`, `sweep` and `tune` are those of the command line. They are imported when they are asked
for, as they need torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palsgd.lab.api import Result, compare, sweep

__all__ = ["Result", "compare", "sweep"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from palsgd.lab import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
