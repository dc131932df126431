"""States that release 0.1.0 saved, in today's form."""

import math
import re
from typing import Any


def converted(
    state: dict[str, Any], here: dict[str, Any], *, version: int, sync_every: int, groups: int
) -> dict[str, Any]:
    """A state that release 0.1.0 saved, as `version` of today's schema. `here` are the settings of
    the optimizer that it is for, which has so many parameter groups and begins with that H."""
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
        # settings that 0.1.0 did not have, or did not give this method, are as they are here
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
                "pending": None if own["flight"] is None else _flight(own["flight"], none),
            }
            for rank, own in state["own"].items()
        },
    }


def _flight(flight: dict[str, Any], rate_sums: tuple[float, ...]) -> dict[str, Any]:
    """A sync that was under way; its text names the round and the clock it was sent at."""
    found = re.search(r"round (\d+) \(clock (\d+)\)", flight["where"])
    round, clock = (int(n) for n in found.groups()) if found else (0, flight["due"])
    return {
        "at": (flight["fragment"], clock, round, flight["due"], 0, rate_sums, 0.0),
        "finite": flight["finite"],
        "parts": [("model", "mean", True)],
        "messages": [
            {
                "values": flight["values"],
                "sent": flight["sent"],
                "gather": False,
                "rows": None,
                "left": flight["left"],
            }
        ],
        "scalars": [],
        "tail": flight["extras"],
        "distance": flight["distance"],
        "sent": 0,
        "arrived": flight["arrived"],
        "parked": False,
        "local_when_sent": flight["departure"],
    }
