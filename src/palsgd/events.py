"""The events of an optimizer, and the listeners that are called with them.

After `opt.on(palsgd.events.Synced, listener)`, `listener(event)` is called after every sync. Any
number of listeners may be registered. `on` returns a handle that removes the listener.

Example:
    >>> import torch, palsgd
    >>> model = torch.nn.Linear(2, 1)
    >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> opt = palsgd.LocalSGD(model, inner, sync_every=2, transport=palsgd.Alone())
    >>> handle = opt.on(palsgd.events.Synced, lambda event: print("synced at", event.clock))
    >>> for batch in palsgd.until([torch.ones(1, 2)], opt, steps=4):
    ...     model(batch).sum().backward()
    ...     opt.step()
    synced at 2
    synced at 4
    >>> handle.remove()
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from palsgd.checks import in_error


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to one worker."""

    worker: int
    clock: int


@dataclass(frozen=True, kw_only=True)
class Averaged(Event):
    """A step of the warm-up was taken with averaged gradients, or skipped on all workers."""

    bytes_sent: int
    skipped: bool = False  #: was a gradient not finite?


@dataclass(frozen=True, kw_only=True)
class Mixed(Event):
    """Several steps without data in a row were taken. The last one ended at this clock."""

    steps: int
    weight_min: float  #: the smallest weight of one of these steps
    weight_max: float


@dataclass(frozen=True, kw_only=True)
class Sent(Event):
    """A fragment was sent. Training goes on until its mean is applied."""

    round: int
    fragment: int


@dataclass(frozen=True, kw_only=True)
class Synced(Event):
    """A sync has changed a fragment of the global model."""

    round: int
    fragment: int
    bytes_sent: int
    distance: float  #: from the local model, as it was sent, to the anchor
    contributors: int  #: workers whose model is in the mean
    completes: bool  #: nothing more is exchanged at this clock


@dataclass(frozen=True, kw_only=True)
class Left(Event):
    """Workers are no longer there, and the others go on without them. `worker` is the one that
    tells."""

    numbers: tuple[int, ...]  #: of those who have left
    workers: int  #: how many go on


@dataclass(frozen=True, kw_only=True)
class Joined(Event):
    """Workers were let in after a sync. `worker` is the one that tells."""

    numbers: tuple[int, ...]  #: of the newcomers
    workers: int  #: how many there are now


@dataclass(frozen=True, kw_only=True)
class IntervalChosen(Event):
    """`sync_every="auto"` has settled on an H."""

    sync_every: int
    sync_s: float
    step_s: float


class Handle:
    """Removes a listener."""

    def __init__(self, listeners: list[Callable[[Any], None]], listener: Callable[[Any], None]):
        self._listeners, self._listener = listeners, listener

    def remove(self) -> None:
        if self._listener in self._listeners:
            self._listeners.remove(self._listener)


class Listeners:
    """The listeners of each kind of event."""

    def __init__(self) -> None:
        self._by_kind: dict[type[Event], list[Callable[[Any], None]]] = {}

    def on(self, kind: type[Event], listener: Callable[[Any], None]) -> Handle:
        if not (isinstance(kind, type) and issubclass(kind, Event)):
            raise ValueError(f"{in_error(kind)} is no event; use for instance palsgd.events.Synced")
        if not callable(listener):
            raise ValueError(f"listener={in_error(listener)} must be a function of the event")
        listeners = self._by_kind.setdefault(kind, [])
        listeners.append(listener)
        return Handle(listeners, listener)

    def wanted(self, kind: type[Event]) -> bool:
        return any(self._by_kind.get(each) for each in kind.__mro__)

    def tell(self, event: Event) -> None:
        for kind in type(event).__mro__:
            for listener in list(self._by_kind.get(kind, ())):
                listener(event)
