"""Each inequality of the proof on sampled trajectories, as written and as the algorithm is.

The paper's g_k has the mixing term eta b/(pK) (x_k - x); its algorithm, and its own mean of g over
the coins, have eta b/p (x_k - x). "As defined" below runs and measures the former, with the lemmas'
eta; "as the algorithm" the latter. The two are one for K = 1.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from palsgd.theory.algorithm import RandomSource, run
from palsgd.theory.inequality import Check, check
from palsgd.theory.problems import Noiseless, Problem
from palsgd.theory.studies import StudyContext, with_
from palsgd.theory.theorem import Setting, largest_lr

ALGORITHM, DEFINED, STATED = "as the algorithm", "as defined", "as stated"
_ROUNDS = 8
_SEEDS_PER_RUN = 10  # of the counterexamples


class Trajectory:
    """The quantities of the lemmas for each step and run: lists that become tensors (steps,
    runs)."""

    def __init__(
        self, context: StudyContext, problem: Problem, setting: Setting, *, form: str,
        distance: float, runs: int,
    ):  # fmt: skip
        self.problem, self.setting = problem, setting
        # `eta` is the lemmas'; a run by the paper's definition mixes K times less.
        self.eta = setting.mix_rate
        self.own_eta = self.eta / setting.workers if form == DEFINED else self.eta
        self._rows: dict[str, list[Tensor]] = {}
        own = with_(setting, mix_rate=self.own_eta)
        source = RandomSource(problem, own, runs=runs, seed=context.seed, device=context.device)
        run(problem, own, problem.start(distance), source, watch=self._watch)
        self.rows = {name: torch.stack(rows) for name, rows in self._rows.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.rows[name]

    @property
    def weights(self) -> Tensor:
        """w_t as a column, relative to the last."""
        steps = torch.arange(self.setting.steps, dtype=torch.float64) + 1 - self.setting.steps
        decay = 1 - self.problem.mu * self.setting.lr
        return (decay**-steps)[:, None].to(self["error"].device)

    def _watch(self, clock: int, before: Tensor, after: Tensor, anchor: Tensor) -> None:
        problem, alpha = self.problem, self.setting.lr
        mean, moved, anchor = before.mean(1), after.mean(1), anchor[:, 0]
        g = (mean - moved) / alpha
        slope = problem.gradient(before).mean(1)
        expected = slope + self.own_eta * (mean - anchor)
        written = slope + self.eta * (mean - anchor)  # g-bar as the paper has it
        away = mean - problem.optimum
        # This term has expectation 0. It is subtracted so that fewer runs are needed.
        chance = 2 * alpha * ((away - alpha * expected) * (g - expected)).sum(1)
        self._add("distance", away.square().sum(1))
        self._add("next", (moved - problem.optimum).square().sum(1))
        self._add("next_steadied", self._rows["next"][-1] + chance)
        self._add("error", problem.excess(mean))
        self._add("anchor_error", problem.excess(anchor))
        self._add("scatter", (before - mean[:, None]).square().sum(2).mean(1))
        self._add("departure", (before - anchor[:, None]).square().sum(2).mean(1))
        self._add("variance", (g - written).square().sum(1))

    def _add(self, name: str, row: Tensor) -> None:
        self._rows.setdefault(name, []).append(row)


# -- the lemmas on one trajectory --------------------------------------------------------------


def lemma1(path: Trajectory, form: str, where: str, why: str = "") -> Check:
    alpha, problem = path.setting.lr, path.problem
    # Balanced coins are not independent of the past, given all workers' coins.
    after = path["next" if path.setting.draws == "balanced" else "next_steadied"]
    right = (
        (1 - problem.mu * alpha) * path["distance"]
        + alpha**2 * path["variance"]
        - alpha / 2 * path["error"]
        + 2 * alpha * problem.smoothness * path["scatter"]
    )
    return check("Lemma 1: one step", form, where, after, right, why)


def lemma2(path: Trajectory, form: str, where: str, why: str = "") -> Check:
    s, p = path.setting, path.setting.mix_prob
    right = (
        3 * path.eta**2 * (1 - p) / p * path["departure"]
        + 24 * path.problem.smoothness * path["error"]
        + 12 * path.problem.sigma**2
    ) / s.workers
    return check("Lemma 2: variance of g", form, where, path["variance"], right, why)


def lemma3(path: Trajectory, form: str, where: str) -> Iterable[Check]:
    """Checks the lemma's recursion with p^2/(2H), as stated, and with p/(2H), which its proof
    shows."""
    s, problem = path.setting, path.problem
    H, p, squared = s.sync_every, s.mix_prob, s.lr**2
    constants = {"p^2/(2H), as stated": p**2 / (2 * H), "p/(2H), as the proof has it": p / (2 * H)}
    times = [t for t in range(s.steps) if (t + 1) % H]
    for name, constant in constants.items() if times else ():
        right = [
            12 * problem.smoothness * H * squared * path["anchor_error"][t - t % H : t].sum(0)
            + 6 * H**2 * squared * problem.sigma**2
            + constant * path["departure"][t - t % H : t].sum(0)
            for t in times
        ]
        yield check(
            f"Lemma 3: departure, {name}", form, where, path["departure"][times],
            torch.stack(right),
        )  # fmt: skip


def lemma3_index(path: Trajectory, where: str) -> Iterable[Check]:
    """Departure 0 where (t+1) mod H = 0, as stated; the algorithm has it where t mod H = 0."""
    H, steps = path.setting.sync_every, path.setting.steps
    for name, shift in {"(t+1) mod H = 0": 1, "t mod H = 0": 0}.items():
        left = path["departure"][[t for t in range(steps) if (t + shift) % H == 0]]
        yield check(
            f"Lemma 3: no departure where {name}", STATED if shift else ALGORITHM, where,
            left, 0 * left, "the sync comes after step t, so x_k = x at t + 1" if shift else "",
        )  # fmt: skip


def lemma4(path: Trajectory, form: str, where: str) -> Iterable[Check]:
    s, problem, weights = path.setting, path.problem, path.weights
    noise = 9 * (s.lr * s.sync_every * problem.sigma) ** 2 * weights.sum()
    for name, of in {"F at xbar": "error", "F at the anchor": "anchor_error"}.items():
        errors = (weights * path[of]).sum(0, keepdim=True)
        right = noise + s.mix_prob**2 / (48 * problem.smoothness) * errors
        left = (weights * path["departure"]).sum(0, keepdim=True)
        yield check(f"Lemma 4: sum of departures, e_t of {name}", form, where, left, right)


def proof_steps(path: Trajectory, where: str) -> Iterable[Check]:
    s, problem, weights = path.setting, path.problem, path.weights
    alpha, L = s.lr, problem.smoothness
    left = path["error"] / 4
    right = (
        ((1 - problem.mu * alpha) * path["distance"] - path["next_steadied"]) / alpha
        + 9 * L * path["departure"]
        + 12 * alpha * problem.sigma**2 / s.workers
    )
    yield check("Proof: e_t/4 <= ... + 9 L Xi_t + ...", ALGORITHM, where, left, right)
    yield check(
        "Proof: sum w_t F(x_t) <= sum w_t F(xbar_t)", STATED, where,
        (weights * path["anchor_error"]).sum(0, keepdim=True),
        (weights * path["error"]).sum(0, keepdim=True),
        "the anchor is older than the workers' mean, and worse while the error falls",
    )  # fmt: skip


# -- statements without chance -----------------------------------------------------------------


def _sure(claim: str, form: str, where: str, left: float, right: float, why: str) -> Check:
    one = torch.ones(1, 1, dtype=torch.float64)
    return check(claim, form, where, left * one, right * one, why)


def largest_factor(problem: Problem, setting: Setting) -> Check:
    """8 L + 12 eta^2 alpha (1-p)/(pK) <= 9 L, which the proof takes from alpha <= p/(48 L H)."""
    s, p = setting, setting.mix_prob
    least = 3 * p * (1 - p) / (s.sync_every**2 * problem.smoothness * s.workers)
    return _sure(
        "Proof: 8L + 12 eta^2 alpha (1-p)/(pK) <= 9L", STATED, "this setting",
        8 * problem.smoothness + 12 * s.mix_rate**2 * s.lr * (1 - p) / (p * s.workers),
        9 * problem.smoothness,
        f"needs alpha >= 3p(1-p)/(H^2 L K) = {least:.3g}, a lower bound, where only an upper one "
        f"is given; alpha is {s.lr:.3g}",
    )  # fmt: skip


def lemma4_extreme(context: StudyContext) -> Iterable[Check]:
    """A sequence for which Lemma 4's recursion is an equality: no noise, e_t = 1 at the first step
    of each round and 0 at the others."""
    base, problem = context.setting, context.problem
    H, p, L = max(8, base.sync_every), base.mix_prob, problem.smoothness
    rates = {"p/(6LH), as stated": p / (6 * L * H), "p/(48LH), the theorem's": p / (48 * L * H)}
    for name, alpha in rates.items():
        decay, left, right, departures = 1 - problem.mu * alpha, 0.0, 0.0, [0.0]
        for t in range(1, H):
            found = p / (2 * H) * sum(departures) + 12 * L * H * alpha**2
            departures.append(found if (t + 1) % H else 0.0)
        for t, departure in enumerate(departures):
            left += decay ** -(t + 1) * departure
        right = p**2 / (48 * L) / decay
        yield _sure(
            f"Lemma 4 for sequences, alpha = {name}", STATED, f"H = {H}, p = {p:g}", left, right,
            "" if "theorem" in name else "a sequence with equality in its recursion is beyond it",
        )  # fmt: skip


# -- all of them -------------------------------------------------------------------------------


def all_checks(context: StudyContext) -> list[Check]:
    """On the study's own setting, with the theorem's alpha, eta and independent coins; then where
    the statements fail."""
    checks: list[Check] = []
    setting = _theorems_own(context)
    for where, distance in {"from the start": context.distance, "from x*": 0.0}.items():
        for form in (ALGORITHM, DEFINED):
            path = _path(context, context.problem, setting, form, distance, context.runs)
            checks += [lemma1(path, form, where), lemma2(path, form, where)]
            checks += [*lemma3(path, form, where), *lemma4(path, form, where)]
            if form == ALGORITHM:
                checks += [*lemma3_index(path, where), *proof_steps(path, where)]
    checks += [largest_factor(context.problem, setting), *lemma4_extreme(context)]
    return checks + counterexamples(context)


def counterexamples(context: StudyContext) -> list[Check]:
    """Within what a lemma asks for, but beyond it; without noise, so that nothing hides it, with
    many workers and so with fewer runs."""
    runs = max(64, context.runs // _SEEDS_PER_RUN)
    problem, base = Noiseless.like(context.problem), with_(_theorems_own(context), mix_prob=0.5)
    largest = 1 / (4 * problem.smoothness)
    free = with_(base, sync_every=8, steps=16, lr=largest, mix_rate=0.5 / largest)
    many = _stated(problem, with_(base, sync_every=16, steps=16, workers=1024))
    some = _stated(problem, with_(base, sync_every=4, steps=4, workers=256))

    def path(setting: Setting, form: str = ALGORITHM) -> Trajectory:
        return _path(context, problem, setting, form, context.distance, runs)

    found = [
        lemma1(
            path(free),
            STATED,
            "alpha = 1/(4L), beta = 1, no noise",
            "it names no condition on eta: mixing back to an older anchor undoes progress",
        ),
        lemma2(
            path(many, DEFINED),
            DEFINED,
            "K = 1024, H = 16, p = 1/2, no noise",
            "g-bar as written is not the mean of g as defined; the gap does not fall with K",
        ),
        *(
            lemma2(
                path(with_(some, draws=draws)),
                ALGORITHM,
                f"{draws} draws, K = 256, H = 4, p = 1/2, no noise",
                why,
            )
            for draws, why in {
                "independent": "",
                "balanced": "coins of a step have correlation 1/H",
                "shared": "one coin for all: its variance does not fall with K",
            }.items()
        ),
    ]
    return [replace(each, seeds=runs * _SEEDS_PER_RUN) for each in found]


def _theorems_own(context: StudyContext) -> Setting:
    """Some rounds, p and alpha no larger than the theorem allows."""
    base = context.setting
    p = min(base.mix_prob, 0.5)
    lr = min(base.lr, largest_lr(context.problem, base.sync_every, p))
    few = with_(base, steps=_ROUNDS * base.sync_every, draws="independent", mix_rate=0.0)
    return _eta_as_stated(with_(few, mix_prob=p, lr=lr))


def _stated(problem: Problem, setting: Setting) -> Setting:
    lr = largest_lr(problem, setting.sync_every, setting.mix_prob)
    return _eta_as_stated(with_(setting, mix_rate=0.0, lr=lr))


def _eta_as_stated(setting: Setting) -> Setting:
    return with_(setting, mix_rate=setting.mix_prob / (2 * setting.sync_every * setting.lr))


def _path(
    context: StudyContext, problem: Problem, setting: Setting, form: str, distance: float, runs: int
) -> Trajectory:
    return Trajectory(context, problem, setting, form=form, distance=distance, runs=runs)
