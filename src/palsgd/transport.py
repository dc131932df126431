"""The contract of a transport: it averages tensors over the workers. Nothing else is sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor


class Transport(Protocol):
    worker: int  # which worker this is, from 0
    workers: int  # how many there are

    def average(self, tensors: list[Tensor]) -> int:
        """Replace each tensor by its mean over all workers, in place; the same bits on every
        worker. Returns the bytes this worker handed over to be sent."""
        ...

    def combine(self, values: Tensor) -> None:
        """Sum a small integer tensor over the ranks that together are this worker, in place.
        A worker of one rank has nothing to do."""
        ...

    def agree(self, settings: dict[str, Any]) -> None:
        """Raise a ValueError on every worker, naming worker, setting and both values, unless
        all workers call with equal settings."""
        ...


class Alone:
    """The transport of a single worker: nobody to exchange with, no process group needed."""

    worker, workers = 0, 1

    def average(self, tensors: list[Tensor]) -> int:
        return 0

    def combine(self, values: Tensor) -> None:
        pass

    def agree(self, settings: dict[str, Any]) -> None:
        pass


_ambient: ContextVar["Transport | None"] = ContextVar("ambient transport", default=None)


@contextmanager
def ambient(transport: Transport) -> Iterator[None]:
    """Optimizers built inside use `transport` unless told otherwise."""
    token = _ambient.set(transport)
    try:
        yield
    finally:
        _ambient.reset(token)


def ambient_transport() -> Transport | None:
    return _ambient.get()


def check_agreement(settings: list[dict[str, Any]], names: list[str]) -> None:
    """The first setting in which a worker differs from the first one, as a ValueError."""
    for name, theirs in zip(names, settings, strict=True):
        for setting, value in settings[0].items():
            if theirs.get(setting) != value:
                raise ValueError(
                    f"{setting} differs between workers: {name} has {theirs.get(setting)!r}, "
                    f"{names[0]} has {value!r}; give every worker the same"
                )
