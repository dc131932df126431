"""What a simulation returns."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from palsgd.ledger import Ledger


@dataclass
class Result:
    """`history` has one entry per exchange between the workers, each a flat dict of figures:

    clock, round, loss (mean over workers and gradient steps since the last entry), losses (per
    worker), distance (from each worker to the anchor, before the sync), worker 0's bytes_sent (as
    if sent), gradient_steps and syncs so far, seconds (of the simulation, evaluation excluded), and
    metric (what `evaluate` said of the global model, where it was asked); with a cluster also
    time_s, the projected wall-clock time on it.
    """

    model: nn.Module  #: the global model
    engine: str  #: "exact" or "vectorized"
    history: list[dict[str, Any]] = field(default_factory=list)
    ledgers: list[Ledger] = field(default_factory=list)  #: one per worker
    optimizers: list[Any] = field(default_factory=list)  #: one per worker; exact engine only
    error: Exception | None = None  #: why it ended early (simulate_many; simulate raises it)

    @property
    def ledger(self) -> Ledger:
        """Worker 0's. Bytes and counts are those of a real run; the vectorized engine keeps no
        seconds and no history of its own in it (see `history` here)."""
        return self.ledgers[0]
