"""Every method of the family as a function that builds its optimizer.

`palsgd.methods.FedProx(model, inner, mu=0.01, sync_every=64)` is an optimizer. The functions are
made from the rows that the files of this folder hold, when they are asked for.
"""

from importlib import import_module
from typing import Any

from palsgd import registry


def __getattr__(title: str) -> Any:
    if title in registry.names():  # a file of this folder
        return import_module(f"{__name__}.{title}")
    found = next((row for row in registry.rows() if row.title == title), None)
    if found is None:
        raise AttributeError(f"palsgd.methods has no {title!r}; it has {', '.join(__dir__())}")
    from palsgd.optimizer import builder_of  # the optimizer is a layer above the methods

    return builder_of(found)


def __dir__() -> list[str]:
    return [row.title for row in registry.rows()]
