"""How waiting and syncs grow with the number of workers.

    sudo python bench/scaling.py --out bench/results/scaling-2cores.json    # three minutes

draws: what balanced draws save of the waiting for each other's coins. sync: a bare sync of a model
of a million parameters over an emulated link, which needs root on Linux; --rate loopback does not.
"""

import argparse
import statistics
import sys
from functools import partial
from math import comb
from pathlib import Path

import numpy as np
from common import add_record_options, provenance, save, summary, table

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from starting import LOOPBACK, run_workers
from task import SEED

import palsgd
from palsgd.cluster.network import ring_hops
from palsgd.lab.links import Link
from palsgd.lab.links.link import modelled_ring_seconds

TIMEOUT_S = 900.0


def draws(*, tiny: bool) -> dict:
    """Waiting under balanced and under independent draws, in eight processes that sleep."""
    workers, every, p, gradient_s = 2 if tiny else 8, 64, 0.1, 0.01
    rounds = 5 if tiny else 40
    result: dict = {"workers": workers, "sync_every": every, "mix_prob": p}
    result |= {"gradient_s": gradient_s, "rounds": rounds}
    for kind in ("balanced", "independent"):
        order = {"draws": kind, "sync_every": every, "mix_prob": p}
        order |= {"gradient_s": gradient_s, "rounds": rounds}
        ranks = run_workers("draws.py", order, workers=workers, rate=LOOPBACK, timeout=TIMEOUT_S)
        waiting = statistics.fmean(rank["waiting_s"] for rank in ranks)
        round_s = statistics.fmean(rank["round_s"] for rank in ranks)
        result[kind] = {"round_s": round_s, "waiting_s": waiting}
    most = expected_maximum(workers, every, 1 - p)
    result["expected_excess_steps"] = most - every * (1 - p)
    result["theory_share"] = (most - every * (1 - p)) / (every * (1 - p))
    result["drawn_share"] = drawn_excess(workers, every, p, rounds) / (every * (1 - p))
    saved = result["independent"]["waiting_s"] - result["balanced"]["waiting_s"]
    result["measured_share"] = saved / result["balanced"]["round_s"]
    return result


def scaling(rate: str, *, tiny: bool) -> dict:
    """A bare sync at K = 2, 4, 8 against a ring, modelled to 1024."""
    result: dict = {"rate": rate, "measured": {}}
    for workers in (2, 3) if tiny else (2, 4, 8):
        order = {"size": "tiny" if tiny else "full", "syncs": 3 if tiny else 10}
        ranks = run_workers("bare_sync.py", order, workers=workers, rate=rate, timeout=TIMEOUT_S)
        slowest = [max(times) for times in zip(*(r["sync_s"] for r in ranks), strict=True)]
        size = result["bytes"] = ranks[0]["bytes"]
        found = {"sync_s": statistics.median(slowest)}
        if rate != LOOPBACK:
            found["ring_s"] = modelled_ring_seconds([Link(rate)] * workers, size)
        result["measured"][str(workers)] = found
    return result | fitted({int(k): each["sync_s"] for k, each in result["measured"].items()})


def expected_maximum(workers: int, steps: int, share: float) -> float:
    """Of `workers` independent Binomial(steps, share)."""
    chances = [comb(steps, n) * share**n * (1 - share) ** (steps - n) for n in range(steps + 1)]
    below = [sum(chances[: n + 1]) for n in range(steps + 1)]
    return sum(1 - each**workers for each in below[:-1])


def drawn_excess(workers: int, every: int, mix_prob: float, rounds: int) -> float:
    """The most gradient steps of a round less their mean, in the rounds that draws.py timed."""
    plans = partial(palsgd.round_plan, sync_every=every, mix_prob=mix_prob, draws="independent")
    taken = [
        [every - sum(plans(seed=SEED, worker=worker, round=n)) for worker in range(workers)]
        for n in range(1, rounds - 1)
    ]
    return statistics.fmean(max(each) - statistics.fmean(each) for each in taken)


def fitted(seconds: dict[int, float]) -> dict:
    """A ring's two costs from the syncs measured, one of the bytes that each worker sends and one
    of each hop; and what they give for more workers."""

    def terms(workers: int) -> list[float]:
        return [ring_hops(workers) / workers, ring_hops(workers)]

    table, measured = np.array([terms(k) for k in seconds]), np.array(list(seconds.values()))
    costs, *_ = np.linalg.lstsq(table, measured, rcond=None)
    if costs[1] < 0:  # hops too short to be seen
        costs = np.array([table[:, 0] @ measured / (table[:, 0] @ table[:, 0]), 0.0])
    model = {
        k: float(np.dot(terms(k), costs)) for k in sorted({*seconds, 2, 4, 8, 16, 64, 256, 1024})
    }
    return {
        "model_s": float(costs[0]),
        "hop_s": float(costs[1]),
        "modelled": {str(k): value for k, value in model.items()},
        "worst_misfit": max(abs(model[k] / measured - 1) for k, measured in seconds.items()),
    }


def rows(record: dict) -> list[tuple[str, str, str]]:
    """Figures, and what each is to be held against."""
    draws, syncs = record["draws"], record["sync"]
    found = [(
        "waiting that balanced draws save, of a round", f"{draws['measured_share']:.1%}",
        f"{draws['theory_share']:.1%} in theory, {draws['drawn_share']:.1%} for the coins drawn",
    )]  # fmt: skip
    for workers, each in syncs["measured"].items():
        ring = f"ring: {each['ring_s']:.3f} s" if "ring_s" in each else ""
        found.append((f"sync at K = {workers}, {syncs['rate']}", f"{each['sync_s']:.3f} s", ring))
    more = ", ".join(f"{k}: {s:.2f} s" for k, s in syncs["modelled"].items() if int(k) > 8)
    misfit = f"misses the measured by at most {syncs['worst_misfit']:.0%}"
    return [*found, ("a ring fitted to these, at K =", more, misfit)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rate", help="default: 100mbit, with --tiny loopback")
    add_record_options(parser)
    args = parser.parse_args()
    rate = args.rate or (LOOPBACK if args.tiny else "100mbit")
    record = provenance("cpu", tiny=args.tiny)
    record["draws"] = draws(tiny=args.tiny)
    record["sync"] = scaling(rate, tiny=args.tiny)
    record["untimed"] = {
        "gradient steps expected of the last": 64 * 0.9 + record["draws"]["expected_excess_steps"],
        "bytes of a sync": record["sync"]["bytes"],
    }
    save(record, args.out)
    print(table(rows(record)))
    print(summary(record))


if __name__ == "__main__":
    main()
