"""Which steps of a round mix: a pure function of seed, worker and round."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from palsgd.checks import check_choice, check_int, check_mix_prob, check_mix_rate

# The core still imports the checks from here under these names. They go when it is rebuilt.
whole, one_of = check_int, check_choice
__all__ = ["DRAWS", "check_mix_prob", "check_mix_rate", "one_of", "round_plan", "whole"]

DRAWS = ("balanced", "independent", "shared")


def round_plan(
    *,
    seed: int,
    worker: int,
    round: int,
    sync_every: int,
    mix_prob: float,
    draws: str,
    stops: Sequence[int] = (),
    speeds: Sequence[float] | None = None,
) -> list[bool]:
    """The steps of one round, in order: True for a mixing step, False for a gradient step.

    `stops` are the steps inside a round after which workers meet (see `round_stops`): with balanced
    draws, all take equally many gradients between any two of them. `speeds` must be None, as none
    of the kinds of draws depends on it. The coins come from a counter-based generator keyed by the
    arguments alone, so nothing has to be saved to resume, and any process can read any other
    worker's future.
    """
    seed, worker = check_int("seed", seed), check_int("worker", worker)
    round, steps = check_int("round", round), check_int("sync_every", sync_every, least=1)
    check_mix_prob(mix_prob)
    check_choice("draws", draws, DRAWS)
    stops = check_stops(stops, steps)
    if speeds is not None:
        raise ValueError(
            f"speeds={speeds!r} has no meaning with draws={draws!r}, under which workers of any "
            "speed mix alike; leave it out"
        )
    if mix_prob == 0:
        return [False] * steps
    everyone, own = (round, 0), (round, 1 + worker)
    if draws == "independent":
        return _coins(seed, own, steps, mix_prob).tolist()
    common = _coins(seed, everyone, steps, mix_prob)
    if draws == "shared":
        return common.tolist()
    # Balanced. The common coins of a stretch of n steps are i.i.d., so their sum is Binomial(n, p).
    # Given the sum, the places of the heads among n i.i.d. coins are a uniform subset; each worker
    # draws that subset for itself (the ranks of n uniforms). Stretches are independent of each
    # other, so one worker alone still sees i.i.d. Bernoulli(p) coins, while all workers share the
    # number of mixing steps of every stretch.
    uniforms, mixing = _uniforms(seed, own, steps), np.zeros(steps, dtype=bool)
    for start, stop in pairwise([0, *stops, steps]):
        order = start + np.argsort(uniforms[start:stop], kind="stable")
        mixing[order[: common[start:stop].sum()]] = True
    return mixing.tolist()


def round_stops(*, sync_every: int, fragments: int = 1, delay: int = 0) -> list[int]:
    """The steps inside a round after which a fragment is sent, or one sent earlier is applied. They
    are the same in every round, also where nothing is due there: in the first, or past the end."""
    sent = [(f + 1) * sync_every // fragments for f in range(fragments)]
    applied = [(step + delay) % sync_every for step in sent]
    return sorted({step for step in sent + applied if 0 < step < sync_every})


def _uniforms(seed: int, stream: tuple[int, int], count: int) -> np.ndarray:
    # Raw 64-bit words turned into doubles by hand: the words are fixed by the Philox
    # specification, so hosts with other numpy releases draw the same plan.
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(count)
    return (words >> np.uint64(11)) * 2.0**-53


def _coins(seed: int, stream: tuple[int, int], count: int, probability: float) -> np.ndarray:
    return _uniforms(seed, stream, count) < probability


def check_stops(stops: Sequence[int], steps: int) -> list[int]:
    """`stops` as ints, or a ValueError that says what they must be."""
    try:
        found = [check_int("stop", stop, least=1) for stop in stops]
    except (TypeError, ValueError):
        found = [steps]
    if any(stop >= later for stop, later in pairwise([*found, steps])):
        raise ValueError(
            f"stops={stops!r} must be whole numbers between 0 and sync_every={steps}, each larger "
            "than the one before; use those of the fragments and the delay, or () for none"
        )
    return found
