"""Converts states that release 0.1.0 saved into the present schema."""

import math
import re
from typing import Any

import torch
from torch import Tensor

from palsgd.payload import REPORT, REPORT_WITH_COSTS


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
        "method": None,
        "ledger": state["ledger"],
        "rank": {
            rank: {
                "residues": own["residues"],
                "pending": None
                if own["flight"] is None
                else _pending_sync(own["flight"], none, here),
            }
            for rank, own in state["own"].items()
        },
    }


def _pending_sync(
    saved: dict[str, Any], rate_sums: tuple[float, ...], here: dict[str, Any]
) -> dict[str, Any]:
    """The pending sync of a saved state. Its text `where` has the round and clock of sending."""
    found = re.search(r"round (\d+) \(clock (\d+)\)", saved["where"])
    round, clock = (int(n) for n in found.groups()) if found else (0, saved["due"])
    values = _with_header(saved["values"], saved["extras"], here)
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
        "tail": saved["extras"] + len(values) - len(saved["values"]),
        "distance": saved["distance"],
        "sent": 0,
        "arrived": saved["arrived"],
        "parked": False,
        "local_when_sent": saved["departure"],
    }


def _with_header(values: Tensor, extras: int, here: dict[str, Any]) -> Tensor:
    """The values with a header of today's size. 0.1.0 sent fewer numbers of each worker, the first
    of today's, and behind them two more while H was measured."""
    measured = isinstance(here["sync_every"], str)
    workers, width = here["workers"], REPORT_WITH_COSTS if measured else REPORT
    size = (6 if measured else 4) * workers
    sent, header, rest = values.split([len(values) - extras, size, extras - size])
    rows = values.new_zeros(workers, width)
    rows[:, :4] = header.view(workers, -1)[:, :4]
    return torch.cat([sent, rows.view(-1), rest])
