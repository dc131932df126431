"""The clock of every action: the rounds, the steps that need a gradient, and what is due after a
step.

Everything here is a pure function of the settings and of facts about finished rounds. The worker,
both simulators, the cluster model, forecasts and evaluation rules all use this module.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from palsgd.checks import LONGEST_ROUND, check_choice, check_int, check_mix_prob, in_error

EVEN_DRAWS = ("balanced", "independent", "shared")  # those under which no worker's speed matters
DRAWS = (*EVEN_DRAWS, "paced")
LARGEST_SEED = 2**128 - 1  # a plan needs no state, so that its seed may be any that is drawn
MOST_RAISED = 3.0  # with paced draws a gradient step uses at most so many times the learning rate


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

    The coins come from a counter-based generator keyed by the arguments alone, so nothing has to be
    saved to resume, and any process can compute any other worker's plan.

    Args:
        seed: the run's seed.
        worker: which worker, from 0.
        round: which round, from 0.
        sync_every: the number of steps of the round, H.
        mix_prob: the probability p of a mixing step.
        draws: "balanced", "independent", "shared" or "paced".
        stops: offsets 0 < s < H within the round at which something is sent or applied. With
            balanced draws all workers take equally many gradients between two stops.
        speeds: for "paced", and for it alone: a number > 0 for each worker, the gradients that it
            computes in a second or in any other unit of time. Between two stops the fastest worker
            takes as many gradients as with balanced draws, and each other one so many fewer as it
            is slower, but at least one. With equal speeds the plan is that of balanced draws.

    Raises:
        ValueError: an argument is out of its range; the message names the range.

    Example:
        >>> import palsgd
        >>> palsgd.round_plan(
        ...     seed=0, worker=1, round=0, sync_every=4, mix_prob=0.0, draws="balanced"
        ... )
        [False, False, False, False]
        >>> slow = palsgd.round_plan(
        ...     seed=0, worker=1, round=0, sync_every=6, mix_prob=0.0, draws="paced", speeds=(3, 1)
        ... )
        >>> slow.count(False)
        2
    """
    seed, worker = check_int("seed", seed, most=LARGEST_SEED), check_int("worker", worker)
    round = check_int("round", round)
    steps = check_int("sync_every", sync_every, least=1, most=LONGEST_ROUND)
    check_mix_prob(mix_prob)
    check_choice("draws", draws, DRAWS)
    paced = draws == "paced"
    if speeds is not None and not paced:
        raise ValueError(
            f"speeds={in_error(speeds)} has no meaning with draws={draws!r}, under which workers "
            "of any speed mix alike; leave it out"
        )
    found = check_speeds(speeds, worker=worker) if paced else (1.0,)
    stops = check_stops(stops, steps)
    if mix_prob == 0 and not paced:
        return [False] * steps
    if draws == "independent":
        return _coins(seed, (round, 1 + worker), steps, mix_prob).tolist()
    if draws == "shared":
        return _common_coins(seed, round, steps, mix_prob).tolist()
    stretches = _stretches(seed, round, steps, mix_prob, stops, found)
    counts = {(s.start, s.stop): s.mixing_of(worker if paced else 0) for s in stretches}
    return _placed(_uniforms(seed, (round, 1 + worker), steps), counts)


def _placed(uniforms: np.ndarray, counts: Mapping[tuple[int, int], int]) -> list[bool]:
    """A round with so many mixing steps in each of its stretches, at places of a worker's own."""
    # Balanced. In a stretch of L steps there are L common i.i.d. coins, so their sum is
    # Binomial(L, p). Given the sum, the places of the heads among L i.i.d. coins are a uniform
    # subset. Each worker draws its own subset (by the ranks of L uniforms). The coins of one worker
    # are therefore i.i.d. Bernoulli(p), while all workers have the same number of mixing steps in
    # every stretch. Paced draws differ in the size of a slower worker's subset only.
    mixing = np.zeros(len(uniforms), dtype=bool)
    for (start, stop), count in counts.items():
        mixing[start + np.argsort(uniforms[start:stop], kind="stable")[:count]] = True
    return mixing.tolist()


# -- uneven workers --------------------------------------------------------------------------------


class StepPace(NamedTuple):
    """What a step of one worker counts for in a round of unevenly fast workers."""

    share: float  # the learning rate of a gradient step is divided by it
    power: float  # of a mixing step: its pull leaves (1 - beta)^power of a displacement


class _Stretch(NamedTuple):
    """The steps of a round between two stops."""

    start: int
    stop: int
    mixing: int  # m, of the fastest worker
    gradients: tuple[int, ...]  # g_k, of each worker

    def mixing_of(self, worker: int) -> int:
        return self.stop - self.start - self.gradients[worker]

    def pace_of(self, worker: int) -> StepPace:
        """The rates of a stretch add up to L times the learning rate, unless the bound forbids it,
        and its m_k mixing steps pull as m mixing steps of the fastest worker do:
        (1 - beta_k)^(m_k) = (1 - beta)^m. If m is 0 they pull nothing."""
        share = self.gradients[worker] / (self.stop - self.start)
        mixing = self.mixing_of(worker)
        return StepPace(max(share, 1 / MOST_RAISED), self.mixing / mixing if mixing else 1.0)


def round_pace(
    *,
    seed: int,
    worker: int,
    round: int,
    sync_every: int,
    mix_prob: float,
    stops: Sequence[int],
    speeds: Sequence[float],
) -> list[StepPace]:
    """What each step of a worker's round counts for, with paced draws."""
    found = []
    for stretch in _stretches(seed, round, sync_every, mix_prob, stops, speeds):
        found += [stretch.pace_of(worker)] * (stretch.stop - stretch.start)
    return found


def paced_gradients(gradients: int, speeds: Sequence[float] | np.ndarray) -> np.ndarray:
    """The gradients of each worker in a stretch in which the fastest takes so many: as many fewer
    as it is slower, but at least one, unless the stretch has none at all."""
    found = np.rint(gradients * np.asarray(speeds, dtype=np.float64) / np.max(speeds))
    return np.minimum(np.maximum(found, 1), gradients).astype(np.int64)


def check_speeds(speeds: Any, *, worker: int = 0) -> tuple[float, ...]:
    """The speeds as floats, or a ValueError that says what they must be."""
    try:
        found = () if isinstance(speeds, str) else tuple(map(float, speeds))
    except (TypeError, ValueError, OverflowError):
        found = ()
    if not found or not all(0 < speed < math.inf for speed in found) or worker >= len(found):
        raise ValueError(
            f"speeds={in_error(speeds)} must have a number > 0 for each worker with draws='paced', "
            f"worker {worker} among them; give for instance the gradients that each computes in a "
            "second"
        )
    return found


def _stretches(
    seed: int,
    round: int,
    steps: int,
    mix_prob: float,
    stops: Sequence[int],
    speeds: Sequence[float],
) -> Iterator[_Stretch]:
    common = _common_coins(seed, round, steps, mix_prob)
    for start, stop in pairwise([0, *stops, steps]):
        mixing = int(common[start:stop].sum())
        gradients = paced_gradients(stop - start - mixing, speeds)
        yield _Stretch(start, stop, mixing, tuple(gradients.tolist()))


def check_stops(stops: Sequence[int], steps: int) -> list[int]:
    """`stops` as ints, or a ValueError that says what they must be."""
    try:
        found = [check_int("stop", stop, least=1) for stop in stops]
    except (TypeError, ValueError):
        found = [steps]
    if any(stop >= later for stop, later in pairwise([*found, steps])):
        raise ValueError(
            f"stops={in_error(stops)} must be whole numbers between 0 and sync_every={steps}, each "
            "larger than the one before; use those of the fragments and the delay, or () for none"
        )
    return found


def _uniforms(seed: int, stream: tuple[int, int], count: int) -> np.ndarray:
    # This function turns raw 64-bit words into doubles itself. The Philox specification fixes the
    # words, so hosts with other numpy releases draw the same plan.
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(count)
    return (words >> np.uint64(11)) * 2.0**-53


def _common_coins(seed: int, round: int, count: int, probability: float) -> np.ndarray:
    return _coins(seed, (round, 0), count, probability)


def _coins(seed: int, stream: tuple[int, int], count: int, probability: float) -> np.ndarray:
    return _uniforms(seed, stream, count) < probability


class Due(NamedTuple):
    """An action after a step: "average" (the gradients, in the warm-up), "send", "apply", or
    "sync", which is "send" and "apply" at one clock."""

    kind: str
    fragment: int = 0


class Span(NamedTuple):
    """Rounds of one length, one after another."""

    start: int  # the clock at which the first of them begins
    round: int  # the number of the first of them
    length: int  # steps of each, H
    delay: int  # steps between sending and applying


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Rounds of H steps after a warm-up, in each of which every fragment is synced once.

    A clock counts finished steps. What is due at clock c follows the step that ends at c.
    """

    spans: tuple[Span, ...]
    warmup: float = 0  # steps of plain DDP before the first round; infinity: DDP throughout
    fragments: int = 1
    end: int | None = None  # the clock at which training ends and every fragment is synced
    settled: bool = True  # True: the last span has no end; False: it has one round

    @classmethod
    def fixed(
        cls,
        *,
        sync_every: int,
        warmup: float = 0,
        fragments: int = 1,
        delay: int = 0,
        end: int | None = None,
        settled: bool = True,
    ) -> "Schedule":
        first = 0 if warmup == float("inf") else int(warmup)
        span = Span(first, 0, sync_every, delay)
        return cls(spans=(span,), warmup=warmup, fragments=fragments, end=end, settled=settled)

    # -- rounds --------------------------------------------------------------------------------

    def warms_up(self, clock: int) -> bool:
        """Is the step that begins at this clock one of the warm-up?"""
        return clock < self.warmup

    def span(self, clock: int) -> Span:
        """The span of the step that begins at this clock."""
        if len(self.spans) == 1:
            return self.spans[0]
        return self.spans[max(0, bisect_right(self.spans, clock, key=lambda s: s.start) - 1)]

    def place(self, clock: int) -> tuple[int, int]:
        """The round of the step that begins at this clock, and the offset of the step in that
        round."""
        span = self.span(clock)
        rounds, offset = divmod(clock - span.start, span.length)
        return span.round + rounds, offset

    def round_of(self, clock: int) -> int:
        return self.place(clock)[0]

    def round_start(self, clock: int) -> int:
        """The clock at which the round that contains the step from this clock on began."""
        return clock - self.place(clock)[1]

    def steps_of(self, round: int) -> range:
        """The clocks at which the steps of a round begin, up to the end of training."""
        at = max(0, bisect_right(self.spans, round, key=lambda s: s.round) - 1)
        span = self.spans[at]
        start = span.start + (round - span.round) * span.length
        stop = start + span.length
        return range(start, stop if self.end is None else min(stop, self.end))

    def length(self, clock: int) -> int:
        """H of the round of the step that begins at this clock."""
        return self.span(clock).length

    def with_end(self, end: int | None) -> "Schedule":
        return replace(self, end=end)

    def restarted(self, clock: int, *, length: int, delay: int, settled: bool = True) -> "Schedule":
        """A schedule whose rounds have another length from this clock on, at which a round ends."""
        span = Span(clock, self.round_of(clock - 1) + 1, length, delay)
        # older spans are not needed any more
        kept = tuple(s for s in self.spans if s.start < clock)[-8:]
        return replace(self, spans=(*kept, span), settled=settled)

    def lengthened(self, clock: int, round: int, length: int) -> "Schedule":
        """A schedule whose round from this clock on has this length; later lengths are not known
        yet."""
        kept = tuple(s for s in self.spans if s.start < clock)[-8:]
        return replace(self, spans=(*kept, Span(clock, round, length, 0)), settled=False)

    # -- stops ---------------------------------------------------------------------------------

    def offsets(self, length: int) -> tuple[int, ...]:
        """The steps of a round after which its fragments are sent, in order."""
        return _offsets(length, self.fragments)

    def stops(self, clock: int) -> tuple[int, ...]:
        """Offsets 0 < s < H at which something is sent or applied in the round of this clock."""
        span = self.span(clock)
        return round_stops(span.length, self.fragments, span.delay)

    def sends(self, clock: int) -> list[int]:
        """The fragments that are sent at this clock."""
        if clock <= self.warmup:
            return []
        span = self.span(clock - 1)
        offset = (clock - 1 - span.start) % span.length + 1
        return [f for f, at in enumerate(self.offsets(span.length)) if at == offset]

    def applies(self, clock: int) -> list[int]:
        """The fragments that were sent `delay` steps before this clock and are applied at it."""
        delays = {span.delay for span in self.spans if span.delay}
        return [
            fragment
            for delay in delays
            if clock - delay > self.warmup and self.span(clock - delay - 1).delay == delay
            for fragment in self.sends(clock - delay)
        ]

    def due(self, clock: int) -> list[Due]:
        """What follows the step that ends at this clock."""
        if 0 < clock <= self.warmup:
            return [Due("average")]
        if clock <= self.warmup:
            return []
        if clock == self.end:
            return self._due_at_end(clock)
        applied = [Due("apply", f) for f in self.applies(clock)]
        kind = "send" if self.span(clock - 1).delay else "sync"
        return applied + [Due(kind, f) for f in self.sends(clock)]

    def _due_at_end(self, clock: int) -> list[Due]:
        """At the end of training every pending fragment is applied, then every fragment is
        synced."""
        delay = self.span(clock - 1).delay
        sent = [f for before in range(clock - delay, clock) for f in self.sends(before)]
        return [Due("apply", f) for f in sent] + [Due("sync", f) for f in range(self.fragments)]

    def next_due(self, clock: int) -> int:
        """The next clock after this one at which something is due."""
        if clock < self.warmup:
            return clock + 1
        span, start = self.span(clock), self.round_start(clock)
        inside = (start + stop for stop in round_stops(span.length, self.fragments, span.delay))
        found = next((c for c in inside if c > clock and self.due(c)), start + span.length)
        return found if self.end is None or not clock < self.end < found else self.end

    def next_send(self, clock: int) -> int:
        """The next clock after this one at which a fragment is sent, wherever training ends."""
        schedule = self.with_end(None)
        clock = schedule.next_due(clock)
        while not schedule.sends(clock):
            clock = schedule.next_due(clock)
        return clock

    def exchanges(self, end: int, start: int = 0) -> Iterator[tuple[int, list[Due]]]:
        """Every clock after `start` at which something is due, and what is due, up to `end`, where
        training ends."""
        schedule, clock = self.with_end(end), start
        while clock < end:
            clock = schedule.next_due(clock)
            yield clock, schedule.due(clock)

    def changes_model(self, clock: int) -> bool:
        """Does what is due at this clock change the global model?"""
        return any(due.kind != "send" for due in self.due(clock))

    def last_change(self, clock: int) -> int:
        """The last clock before this one at which the global model changed; 0 if there is none."""
        for before in self._stops_before(clock):
            if self.changes_model(before):
                return before
        return max(0, min(clock - 1, int(min(self.warmup, clock))))

    def _stops_before(self, clock: int) -> Iterator[int]:
        """Clocks of the local phase before this one at which something may be due, latest first."""
        while clock - 1 > self.warmup:
            start, span = self.round_start(clock - 1), self.span(clock - 1)
            inside = round_stops(span.length, self.fragments, span.delay)
            yield from (start + stop for stop in reversed(inside) if start + stop < clock)
            if start > self.warmup:
                yield start
            clock = start


@lru_cache
def _offsets(length: int, fragments: int) -> tuple[int, ...]:
    return tuple((f + 1) * length // fragments for f in range(fragments))


@lru_cache
def round_stops(sync_every: int, fragments: int = 1, delay: int = 0) -> tuple[int, ...]:
    """The steps inside a round after which a fragment is sent or a delayed one is applied. They are
    the same in every round, also in the first one and at the end of a run."""
    sends = _offsets(sync_every, fragments)
    applies = ((at + delay) % sync_every for at in sends)
    return tuple(sorted({stop for stop in (*sends, *applies) if 0 < stop < sync_every}))
