"""Converts states that release 0.1.0 saved into the present schema."""

import math
import re
from typing import Any

import torch
from torch import Tensor

from palsgd.payload import REPORT


def converted(
    state: dict[str, Any],
    here: dict[str, Any],
    *,
    version: int,
    sync_every: int,
    groups: int,
    worker: int,
) -> dict[str, Any]:
    """A state that release 0.1.0 saved, as `version` of today's schema. `here` are the settings of
    the optimizer that will load it. That optimizer has `groups` parameter groups, and `sync_every`
    is the H of its first round."""
    counts, config, fragments = state["counts"], state["config"], state["config"]["fragments"]
    none = tuple([0.0] * groups)
    [own] = state["own"].values()  # of the rank that saved
    warmup = here["warmup_steps"]
    start = 0 if warmup == math.inf else int(warmup)
    spans = [(start, 0, sync_every, 0)]
    if not counts["measuring"] and tuple(counts["origin"]) != (warmup, 0):
        clock, round = counts["origin"]
        spans.append((int(clock), round, counts["sync_every"], config["delay"]))
    return {
        "version": version,
        "parameters": None if state["anchor"] is None else list(state["anchor"]),
        "worker": {"number": worker},  # 0.1.0 did not save it
        # Settings that 0.1.0 did not have, or did not have for this method, are those of the
        # optimizer.
        "config": {name: config.get(name, mine) for name, mine in here.items()},
        "progress": {
            "fragments": fragments,
            "gradient_steps": counts["gradient_steps"],
            "rounds": counts["rounds"],
            "epoch": counts["epoch"],
            "synced": counts["synced"],
            "has_anchor": state["anchor"] is not None,
            "sent_at": list(counts["sent_at"]),
            "last_record": tuple(counts["since_sync"]),
            "rate_sums": list(none),
            "marks": [(counts["gradient_steps"], none)] * fragments,
            "scalars": {},
            "spans": spans,
            "measuring": counts["measuring"],
            "costs": [{"sync_s": sync, "step_s": step} for sync, step in counts["costs"]],
        },
        **{name: state[name] for name in ("clock", "inner", "outer", "anchor", "buffers")},
        "scheduler": state["scheduler"],
        "outer_scheduler": None,
        "data": None,
        "method": None,
        "ledger": state["ledger"],
        "rank": {
            "residues": own["residues"],
            "pending": None
            if own["flight"] is None
            else _pending_sync(own["flight"], none, here["workers"], here["sync_every"]),
        },
    }


def _pending_sync(
    saved: dict[str, Any],
    rate_sums: tuple[float, ...],
    workers: int,
    sync_every: int | str,
) -> dict[str, Any]:
    """The pending sync of a saved state. Its text `where` has the round and clock of sending."""
    costs = 2 if isinstance(sync_every, str) else 0  # "auto" has two more numbers per worker
    values, tail = _with_header(saved["values"], saved["extras"], workers, costs)
    found = re.search(r"round (\d+) \(clock (\d+)\)", saved["where"])
    round, clock = (int(n) for n in found.groups()) if found else (0, saved["due"])
    return {
        "at": (saved["fragment"], clock, round, saved["due"], 0, rate_sums, 0.0),
        "finite": saved["finite"],
        "parts": [("model", "mean", True)],
        "messages": [
            {
                "values": values,
                "sent": saved["sent"],
                "gather": False,
                "rows": None,
                "left": saved["left"],
            }
        ],
        "scalars": [],
        "tail": tail,
        "distance": saved["distance"],
        "sent": 0,
        "arrived": saved["arrived"],
        "parked": False,
        "local_when_sent": saved["departure"],
    }


def _with_header(values: Tensor, tail: int, workers: int, costs: int) -> tuple[Tensor, int]:
    """A message of 0.1.0 whose header has the numbers of today, and the length of its tail. 0.1.0
    had four of them (digest in two halves, finite flag, seconds) before the costs."""
    before, old = values[:-tail], values[-tail:]
    lines, rest = old[: (4 + costs) * workers].view(workers, -1), old[(4 + costs) * workers :]
    new = values.new_zeros(workers, REPORT + costs)
    new[:, :4] = lines[:, :4]
    new[:, REPORT:] = lines[:, 4:]
    return torch.cat([before, new.view(-1), rest]), new.numel() + len(rest)
