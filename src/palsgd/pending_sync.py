"""One sync, from the moment at which it is sent to its outcome."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from palsgd.codecs.residues import KeptResidues
from palsgd.guard import Verdict, WorkerReport
from palsgd.transports.transport import Message


class Moment(NamedTuple):
    """When a sync is sent, and the worker's steps since the last sync of this fragment."""

    fragment: int
    clock: int
    round: int
    due: int  # the clock at which it is applied
    gradient_steps: int
    rate_sums: tuple[float, ...]  # of each parameter group
    step_s: float  # seconds of a gradient step while H is being measured, else 0
    rates: tuple[float, ...] = ()  # of each parameter group, in the last step before sending
    idle: bool = False  # has the worker taken no step since the last sync of this fragment?
    taken: int = 0  # gradient steps of this worker since the start of training

    @property
    def known(self) -> dict[str, Any]:
        """What a method is told about the steps before the sync."""
        return {
            "rates": self.rates,
            "rate_sums": self.rate_sums,
            "round": self.round,
            "gradient_steps": self.gradient_steps,
        }


class Kept(NamedTuple):
    """What a sync was sent from, so that it can be sent again if a worker is lost."""

    members: tuple[int, ...]  # the workers that it was sent to
    report: WorkerReport
    values: list[Tensor]  # of each message, without the tail
    numbers: tuple[Tensor, Tensor]  # behind the header: of the first member, of another one
    residues: KeptResidues


class SentPart(NamedTuple):
    """What one message holds."""

    name: str
    reduction: str
    displacement: bool  # is it the anchor minus the local model, in the order of its bucket?


@dataclass
class PendingSync:
    """A fragment that has been sent and not yet applied."""

    at: Moment
    finite: bool = True  # is this worker's model finite?
    parts: list[SentPart] = field(default_factory=list)  # one for each message
    messages: list[Message] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    tail: int = 0  # numbers behind the values of the first message: header, buffers, scalars
    distance: float = 0.0
    sent: int = 0  # bytes
    arrived: bool = False
    parked: bool = False  # are the means kept in the local model until the last one arrives?
    local_when_sent: Tensor | None = None  # None: the local model has not moved since
    kept: Kept | None = None  # of a delayed sync between workers that may leave

    @property
    def where(self) -> str:
        return f"the sync of round {self.at.round} (clock {self.at.clock})"


@dataclass(frozen=True)
class Arrival:
    """The contents of the first message's tail, after the checks of its header have passed."""

    verdict: Verdict
    numbers: Tensor  # the mean of buffers and scalars


@dataclass(frozen=True)
class Outcome:
    """The result of a completed sync."""

    at: Moment
    distance: float
    sent: int
    contributors: int
    reports: list[WorkerReport]
    scalars: dict[str, float]
