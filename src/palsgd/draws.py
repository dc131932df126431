"""Which steps of a round mix: a pure function of seed, worker and round."""

import numpy as np

from palsgd.checks import check_choice, check_int, check_mix_prob, check_mix_rate

# The core still imports the checks from here under these names. They go when it is rebuilt.
whole, one_of = check_int, check_choice
__all__ = ["DRAWS", "check_mix_prob", "check_mix_rate", "one_of", "round_plan", "whole"]

DRAWS = ("balanced", "independent", "shared")


def round_plan(
    *, seed: int, worker: int, round: int, sync_every: int, mix_prob: float, draws: str
) -> list[bool]:
    """The steps of one round, in order: True for a mixing step, False for a gradient step.

    The coins come from a counter-based generator keyed by the arguments alone, so nothing has
    to be saved to resume, and any process can read any other worker's future.
    """
    seed, worker = check_int("seed", seed), check_int("worker", worker)
    round, steps = check_int("round", round), check_int("sync_every", sync_every, least=1)
    check_mix_prob(mix_prob)
    check_choice("draws", draws, DRAWS)
    if mix_prob == 0:
        return [False] * steps
    everyone, own = (round, 0), (round, 1 + worker)
    if draws == "independent":
        return _coins(seed, own, steps, mix_prob).tolist()
    common = _coins(seed, everyone, steps, mix_prob)
    if draws == "shared":
        return common.tolist()
    # Balanced. `common` holds H i.i.d. coins, so its sum is Binomial(H, p). Given the sum, the
    # places of the heads among H i.i.d. coins are a uniform subset; each worker draws that
    # subset for itself (the ranks of H uniforms). One worker alone therefore still sees i.i.d.
    # Bernoulli(p) coins, while all workers share the number of mixing steps.
    mixing = np.zeros(steps, dtype=bool)
    mixing[np.argsort(_uniforms(seed, own, steps), kind="stable")[: common.sum()]] = True
    return mixing.tolist()


def _uniforms(seed: int, stream: tuple[int, int], count: int) -> np.ndarray:
    # Raw 64-bit words turned into doubles by hand: the words are fixed by the Philox
    # specification, so hosts with other numpy releases draw the same plan.
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(count)
    return (words >> np.uint64(11)) * 2.0**-53


def _coins(seed: int, stream: tuple[int, int], count: int, probability: float) -> np.ndarray:
    return _uniforms(seed, stream, count) < probability
