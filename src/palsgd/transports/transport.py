"""The contract of a transport: it replaces a message by its mean over the workers.

A user's transport is a subclass that sets `worker` and `workers` and defines `mean`. That is enough
to train, also with `delay`. Compressed messages need `scatter` and `gather` too.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from palsgd.codecs.codec import Codec
from palsgd.codecs.coded_mean import Coded, Residue, coded_segments, message_bytes, new_residue
from palsgd.rows import own_row, rows_of_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class UnsupportedError(ValueError):
    """A transport lacks a method that the settings need."""


class CodecError(Exception):
    """A codec failed. It is no RuntimeError, as those of an exchange mean that a worker is lost."""


@dataclass(eq=False)
class Message:
    """Values to be replaced by their mean over the workers. Every worker brings a message of the
    same size.

    With a `codec` the mean is that of coded values (see palsgd.codecs); the last `exact` values are
    not coded. With `gather` the values stay unchanged, no codec is used, and `rows` holds the
    values of all workers. `rows` must not be changed, as workers in one process share it. `residue`
    is what earlier messages left unsent; an exchange replaces it by what this one leaves unsent. An
    exchange that was started and finished later also sets `sent`, the bytes that this worker handed
    over. If `takes_sum` is set, the exchange may leave the sum in the values and set `divisor`;
    `divide` then makes the mean of the sum. `arrived_gathered` says of a saved message, which has
    no codec any more, whether it was gathered. Values that are kept in host memory are copied to
    `device` piece by piece, and transports see messages of one piece there.

    Example:
        >>> import torch, palsgd
        >>> palsgd.Message(torch.ones(3)).handed_over(workers=2)
        12
    """

    values: Tensor  # flat; replaced in place
    exact: int = 0
    codec: Codec | None = None
    residue: Residue | None = None  # what was not sent; an exchange replaces it
    gather: bool = False
    rows: Tensor | None = None  # (workers, len(values)) after a gather
    sent: int = 0  # bytes, set by an exchange that was started and finished later
    takes_sum: bool = False  # may the exchange leave the sum of the values and set `divisor`?
    arrived_gathered: bool = False  # of a saved message, which has no codec any more
    divisor: int = 1  # set by such an exchange: the mean is the values divided by it
    # of values in host memory: where transports see them, in pieces of so many elements
    device: torch.device | None = None
    piece: int = 0

    def divide(self) -> None:
        """Divide a sum in the values by `divisor`, which makes it the mean."""
        if self.divisor != 1:
            self.values.div_(self.divisor)
            self.divisor = 1

    @property
    def gathered(self) -> bool:
        """Do all workers get all workers' values, or their codes, instead of a mean?"""
        coded = self.codec is not None and self.codec.gathered
        return self.gather or coded or self.arrived_gathered

    def segments(self, worker: int, workers: int) -> list[Coded]:
        """The coded exchange of this message, segment by segment."""
        assert self.codec is not None
        coded, device = len(self.values) - self.exact, self.values.device
        if self.residue is None:
            self.residue = new_residue(
                coded, self.codec, worker=worker, workers=workers, device=device
            )
        return coded_segments(
            self.values,
            self.exact,
            self.codec,
            self.residue,
            worker=worker,
            workers=workers,
            device=self.device,
        )

    def keep_residue(self) -> None:
        """The exchange has ended well, and the residue is that of this message."""
        if self.residue is not None:
            self.residue.fresh = False

    def handed_over(self, workers: int) -> int:
        """The bytes that one of `workers` workers hands over for this message."""
        return message_bytes(
            elements=len(self.values),
            exact=self.exact,
            itemsize=self.values.itemsize,
            codec=None if self.gather else self.codec,
            workers=workers,
        )


class Transport(ABC):
    """How one worker exchanges with the others. A subclass sets `worker` and `workers` and defines
    `mean`. Every other method has a default, which may raise an UnsupportedError.

    Attributes:
        worker: which worker this is, from 0.
        workers: how many there are.
        rank_inside: the number of this rank among the ranks of this worker.
        inside: the process group of the ranks of this worker, if it has several.
        sharded: does each of them hold a part of the model, instead of a copy?
        shares_code: do all workers run in this process, with the same code and versions?
        elastic: may workers leave and come while training goes on?

    Example:
        >>> import torch, palsgd
        >>> class Counting(palsgd.Transport):
        ...     "One worker, whose exchanges are counted."
        ...     exchanges = 0
        ...     def mean(self, message):
        ...         self.exchanges += 1
        >>> transport = Counting()
        >>> transport.exchange(palsgd.Message(torch.ones(3)))
        0
        >>> transport.exchanges
        1
    """

    worker: int = 0  # which worker this is
    workers: int = 1  # how many there are
    rank_inside: int = 0  # the number of this rank among the ranks of this worker
    inside: "ProcessGroup | None" = None  # the ranks of this worker, if it has several
    sharded: bool = False  # does each of them hold a part of the model, instead of a copy?
    shares_code: bool = False  # do all workers run in this process?
    elastic: bool = False  # may workers leave and come while training goes on?

    awaits_newcomers: bool = False  # are newcomers let in after this sync?

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the workers that take part, in the order of their rows."""
        return tuple(range(self.workers))

    @property
    def place(self) -> int:
        """Which of the rows is this worker's."""
        return self.worker

    def meet(self, position: str, *, patient: bool = False) -> None:  # noqa: B027
        """Find out who takes part in the next exchange. Here that is always everybody."""

    def settle(self) -> None:  # noqa: B027
        """Agree that all workers have all of an exchange. Here a failed one is an error."""

    def lost(self) -> list[str]:
        """The workers that did not come to an exchange which has just failed; empty if nobody
        knows."""
        return []

    @property
    def channel(self) -> Any:
        """What the messages go through. Optimizers with the same channel could take each other's
        messages for their own."""
        return self

    @abstractmethod
    def mean(self, message: Message) -> int | None:
        """Replace `message.values` by their mean over all workers, in place; the same bits on
        every worker. Return the bytes this worker handed over, or None to have them counted as
        those of the values."""

    def scatter(self, rows: Tensor) -> Tensor:
        """Send row k of `rows` to worker k. Return the rows that all workers sent to this worker,
        in the order of the workers."""
        self._refuse("scatter", "compress=...")

    def gather(self, row: Tensor) -> Tensor:
        """Send `row` to all workers. Return the rows of all workers, in the order of the
        workers."""
        self._refuse("gather", "compress=..., or a method that collects all workers' values,")

    def exchange(self, message: Message) -> int:
        """Gather `message` or replace it by its mean, as its fields say. Return the bytes this
        worker handed over."""
        if message.gather:
            one = self.workers == 1
            message.rows = message.values.clone()[None] if one else self.gather(message.values)
        elif message.codec is None:
            return self._mean_in_pieces(message) if message.device else self._mean(message)
        elif self.workers > 1:
            self._exchange_codes(message)
        return message.handed_over(self.workers)

    def _mean(self, message: Message) -> int:
        sent = self.mean(message)
        return message.handed_over(self.workers) if sent is None else sent

    def _mean_in_pieces(self, message: Message) -> int:
        """The mean of values in host memory."""
        sent = 0
        for kept in message.values.split(message.piece):
            piece = Message(kept.to(message.device, copy=True))
            sent += self._mean(piece)
            piece.divide()
            kept.copy_(piece.values)
        return sent

    def _exchange_codes(self, message: Message) -> None:
        link = _Link(self)
        try:
            for segment in message.segments(self.worker, self.workers):
                segment.exchange(link)
        except RuntimeError as error:
            if link.broken:
                raise
            assert message.codec is not None
            raise CodecError(
                f"compress={message.codec.name!r} failed on a message of {len(message.values)} "
                f"values ({str(error).splitlines()[0]}); this is no lost worker, so look at the "
                "codec"
            ) from error
        message.keep_residue()

    def start(self, message: Message) -> None:
        """Begin an exchange that may run while training goes on. By default it runs at once."""
        message.sent = self.exchange(message)

    def finish(self, message: Message) -> int:
        """Wait for an exchange that was started. Return its bytes. It may be called several
        times."""
        return message.sent

    def prepare(self, device: torch.device) -> None:  # noqa: B027
        """Prepare for `start` with messages on `device`. All workers call this once if the delay is
        not 0."""

    def gather_inside(self, row: Tensor) -> Tensor:
        """The rows that all ranks of this worker give, in the order of the ranks."""
        return row[None]

    def sum_over_shards(self, values: Tensor) -> None:  # noqa: B027
        """Sum a small floating-point tensor, such as squared norms of shards, over the ranks of
        this worker, in place. A worker whose ranks hold copies has nothing to do."""

    def check(self, codec: Codec | None) -> None:
        """Raise an UnsupportedError if messages with `codec` need a method that this transport
        lacks."""
        if codec is None or self.workers == 1:
            return
        kind = type(self)
        if not codec.gathered and kind.scatter is Transport.scatter:
            self._refuse("scatter", f"compress={codec.name!r}")
        if kind.gather is Transport.gather:
            self._refuse("gather", f"compress={codec.name!r}")

    def agree(self, settings: dict[str, Any]) -> None:
        """Raise a ValueError on every worker unless all workers call with equal settings.

        By default `mean` exchanges a digest of the settings, so the error names the workers that
        differ, but not the settings.
        """
        lines = _digests_of_all(self, _digest(settings))
        common = Counter(lines).most_common(1)[0][0]
        odd = [str(worker) for worker, line in enumerate(lines) if line != common]
        if odd:
            shown = {k: v for k, v in settings.items() if "\n" not in str(v)}
            raise ValueError(
                f"worker {', '.join(odd)} of {self.workers} has other settings than the rest, or "
                f"another model; give every worker the same. This is worker {self.worker}, with "
                f"{shown}"
            )

    def _refuse(self, method: str, user: str) -> NoReturn:
        kind = type(self).__name__
        raise UnsupportedError(
            f"{kind} has no {method}(), which {user} needs; add {kind}.{method} as described in "
            f"palsgd.transports.Transport.{method}, or leave that out"
        )


class _Link:
    """The calls of a transport that coded means use. It knows whether one of them failed."""

    def __init__(self, transport: Transport):
        self._transport, self.broken = transport, False

    def scatter(self, rows: Tensor) -> Tensor:
        return self._watched(self._transport.scatter, rows)

    def gather(self, row: Tensor) -> Tensor:
        return self._watched(self._transport.gather, row)

    def _watched(self, call: Callable[[Tensor], Tensor], sent: Tensor) -> Tensor:
        self.broken = True
        received = call(sent)
        self.broken = False
        return received


def _digest(settings: dict[str, Any]) -> list[int]:
    """64 bits of the settings, as four numbers of 16 bits."""
    text = repr(sorted(settings.items())).encode()
    found = hashlib.blake2b(text, digest_size=8).digest()
    return [found[i] << 8 | found[i + 1] for i in range(0, 8, 2)]


def _digests_of_all(transport: Transport, mine: list[int]) -> list[tuple[int, ...]]:
    values = own_row(transport.worker, transport.workers, mine, torch.empty(0))
    transport.mean(Message(values))
    return [tuple(map(round, line)) for line in rows_of_all(values, transport.workers)]


_ambient: ContextVar["Transport | None"] = ContextVar("ambient transport", default=None)


@contextmanager
def ambient(transport: Transport) -> Iterator[None]:
    """Optimizers that are built inside use `transport` unless they are given another one."""
    token = _ambient.set(transport)
    try:
        yield
    finally:
        _ambient.reset(token)


def ambient_transport() -> Transport | None:
    return _ambient.get()


def check_agreement(settings: list[dict[str, Any]], names: list[str]) -> None:
    """Raise a ValueError that names the first setting in which a worker differs from the first
    worker."""
    for name, theirs in zip(names, settings, strict=True):
        for setting, value in settings[0].items():
            if theirs.get(setting) != value:
                other, own = _first_difference(theirs.get(setting), value)
                raise ValueError(
                    f"{setting} differs between workers: {name} has {other!r}, {names[0]} has "
                    f"{own!r}; give every worker the same"
                )


def _first_difference(one: Any, other: Any) -> tuple[Any, Any]:
    """Two settings, or the first lines in which two long texts differ."""
    if not all(isinstance(text, str) and "\n" in text for text in (one, other)):
        return one, other
    lines = zip_longest(one.splitlines(), other.splitlines(), fillvalue="nothing")
    return next((a.strip(), b.strip()) for a, b in lines if a != b)
