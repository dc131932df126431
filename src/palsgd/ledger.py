"""What a worker did: counts, bytes, seconds, and one line per sync."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from palsgd.units import size

HISTORY = 1000  # entries that are kept, so that a ledger takes the same room after any number


@dataclass
class Ledger:
    """Totals of one worker so far. Seconds are device seconds on a GPU.

    `gradient_s` has the seconds from the end of one `step()` to the end of the next inner step:
    data, forward, backward and the update. It lacks the seconds before a run's first step. `sync_s`
    has the seconds of exchanges and outer steps without `waiting_s`, the seconds until the slowest
    worker began the exchange. Each worker learns how long it waited one sync later, from the next
    sync's header. For an overlapped sync, only the seconds count in which no step ran.

    Attributes:
        gradient_steps: gradient steps, those of the warm-up included.
        warmup_steps: those of them that were plain DDP.
        skipped_steps: those of the warm-up that all workers skipped, as a gradient had inf or nan.
        mixing_steps: steps without data.
        syncs: exchanges, one per sync of a fragment and one per step of the warm-up.
        messages: messages handed to the transport.
        bytes_sent: bytes handed to the transport, headers included.
        bytes_on_the_wire: the bytes that the collectives send for them.
        gradient_s, mixing_s, sync_s, waiting_s: seconds, as above.
        beta_min, beta_max: the range of the mixing weights so far.
        distance: from the local model to the anchor, at the last sync.
        interval: H that `sync_every="auto"` chose, and the costs it was chosen from.
        changes: which workers left and came, at which clock, and how many there were then.
        speeds: with `draws="paced"`, the speeds of all workers, each time with the first round in
            which they hold. `speeds=ledger.speeds` repeats a run bit for bit.
        history: one entry per sync, of the last 1,000 syncs.
        forgotten: how many entries before those have been dropped. All totals count them.
        worker_changes: the clocks at which training went on with another number of workers.

    Example:
        >>> import palsgd
        >>> palsgd.Ledger(gradient_steps=9, mixing_steps=1).realised_p
        0.1
    """

    gradient_steps: int = 0
    warmup_steps: int = 0  # those of them that were plain DDP
    skipped_steps: int = 0  # those of the warm-up that were skipped
    mixing_steps: int = 0  # includes those at the head of a round, which change nothing
    syncs: int = 0  # exchanges: one per round, one per warm-up step
    messages: int = 0
    bytes_sent: int = 0  # handed to the transport, headers included
    # bytes that the collectives send: a ring sends each byte nearly twice
    bytes_on_the_wire: int = 0
    gradient_s: float = 0.0
    mixing_s: float = 0.0
    sync_s: float = 0.0
    waiting_s: float = 0.0
    beta_min: float = math.inf
    beta_max: float = -math.inf
    distance: float = 0.0  # from the local model to the anchor, at the last sync
    interval: dict[str, Any] | None = None  # H chosen by sync_every="auto", and from which costs
    # workers that left and came: clock, left, joined, workers
    changes: list[dict[str, Any]] = field(default_factory=list, repr=False)
    # with draws="paced": those that hold from a round on, of all workers
    speeds: list[dict[str, Any]] = field(default_factory=list)
    # one entry per sync; long, so it is not part of what print() shows
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    forgotten: int = field(default=0, repr=False)  # earlier entries, which are no longer in history
    # clock, and the numbers of workers before and from then on
    worker_changes: list[dict[str, int]] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        """One screen: what was done, sent and waited for."""
        p = f" (p = {self.realised_p:.3g})" if self.mixing_steps else ""
        lines = [
            f"steps      {self.gradient_steps:,} gradient, {self.warmup_steps:,} of them in the "
            f"warm-up; {self.mixing_steps:,} mixing{p}",
            f"exchanges  {self.syncs:,} in {self.messages:,} messages; "
            f"{size(self.bytes_sent)} sent, {size(self.bytes_on_the_wire)} on the wire",
            f"seconds    {self.gradient_s:.3g} gradient, {self.mixing_s:.3g} mixing, "
            f"{self.sync_s:.3g} sync, {self.waiting_s:.3g} waiting",
            f"distance   {self.distance:.4g} from the global model at the last sync",
        ]
        if self.mixing_steps and self.beta_max >= self.beta_min:
            lines.append(f"beta       {self.beta_min:.3g} to {self.beta_max:.3g}")
        if self.interval is not None:
            lines.append(f"interval   H = {self.interval['sync_every']}, chosen by its cost")
        if self.changes:
            left, joined = (sum(len(c[kind]) for c in self.changes) for kind in ("left", "joined"))
            now = self.changes[-1]["workers"]
            lines.append(f"workers    {now} at the end; {left} left, {joined} came")
        if self.speeds:
            last = self.speeds[-1]
            shown = ", ".join(f"{speed:.3g}" for speed in last["speeds"])
            lines.append(f"speeds     {shown} of the workers, from round {last['round']} on")
        if self.worker_changes:
            clock, before, now = self.worker_changes[-1].values()
            lines.append(f"workers    {now} since clock {clock:,}, {before} before")
        kept = f"the last {len(self.history):,} of them " if self.forgotten else ""
        lines.append(f"history    {self.recorded:,} syncs, {kept}in ledger.history")
        return "\n".join(lines)

    @property
    def recorded(self) -> int:
        """The syncs so far, those of the warm-up left out."""
        return self.forgotten + len(self.history)

    def record(self, entry: dict[str, Any]) -> None:
        """Add the entry of a sync to the history, and drop the oldest beyond its length."""
        self.history.append(entry)
        self.forgotten += len(self.history[:-HISTORY])
        del self.history[:-HISTORY]

    @property
    def realised_p(self) -> float:
        """The share of the local phase's steps that mixed."""
        steps = self.gradient_steps - self.warmup_steps + self.mixing_steps
        return self.mixing_steps / steps if steps else 0.0

    def saw_betas(self, low: float, high: float) -> None:
        self.beta_min, self.beta_max = min(self.beta_min, low), max(self.beta_max, high)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"realised_p": self.realised_p}

    def load(self, saved: dict[str, Any]) -> None:
        for name in (f.name for f in fields(self)):
            if name in saved:  # older states have fewer fields
                setattr(self, name, saved[name])
        entries, self.history = self.history, []
        for entry in entries:  # those of an older state may be more than are kept
            self.record(dict(entry))
        self.worker_changes = [dict(change) for change in self.worker_changes]
        self.changes = [dict(entry) for entry in saved.get("changes", [])]
