"""The settings of PALSGD in Theorem 2, and the conditions of the theorem."""

import math
from dataclasses import dataclass

from palsgd.checks import check_choice, check_int, check_mix_rate, check_pull
from palsgd.methods.palsgd import step_beta
from palsgd.schedule import EVEN_DRAWS
from palsgd.theory.problems import Problem


@dataclass(frozen=True, kw_only=True)
class Setting:
    workers: int  # K
    steps: int  # T
    sync_every: int  # H
    mix_prob: float  # p
    lr: float  # alpha
    mix_rate: float  # eta
    draws: str = "independent"

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "sync_every"):
            check_int(name, getattr(self, name), least=1)
        check_share(self.mix_prob)
        check_lr(self.lr)
        check_mix_rate(self.mix_rate)
        check_choice("draws", self.draws, EVEN_DRAWS)
        if self.beta > 1 + 1e-9:
            raise ValueError(
                f"mix_rate={self.mix_rate:g} gives beta={self.beta:.4g}, outside [0, 1] "
                f"(lr={self.lr:g}, mix_prob={self.mix_prob:g}); use "
                f"mix_rate <= {self.mix_prob / self.lr:.12g}"
            )

    @property
    def beta(self) -> float:
        return self.lr * self.mix_rate / self.mix_prob

    def outside(self, problem: Problem) -> list[str]:
        """What of this setting the theorem does not cover, with values. It can be run anyway."""
        return list(self.unmet(problem).values())

    def unmet(self, problem: Problem) -> dict[str, str]:
        """The conditions of the theorem that this setting does not meet: why not, and with which
        values."""
        found = {}
        if self.mix_prob > 0.5:
            found["p is above 1/2"] = f"mix_prob={self.mix_prob:g} is above 1/2"
        most = largest_lr(problem, self.sync_every, self.mix_prob)
        if self.lr > most * (1 + 1e-9):
            found["alpha is above p/(48 L H)"] = (
                f"lr={self.lr:.4g} is above p/(48 L H) = {most:.4g}"
            )
        stated = theorem_mix_rate(self.lr, self.sync_every, self.mix_prob)
        if not math.isclose(self.mix_rate, stated, rel_tol=1e-9):
            found["eta is not p/(2 H alpha)"] = (
                f"mix_rate={self.mix_rate:.4g} is not p/(2 H alpha) = {stated:.4g}"
            )
        if self.draws != "independent":
            found["draws are not independent"] = (
                f"draws={self.draws!r}: Lemma 2 needs independent coins of the workers"
            )
        return found


def theorem_setting(
    problem: Problem, *, workers: int, steps: int, sync_every: int, mix_prob: float,
    distance: float, draws: str = "independent", lr: float | None = None,
    mix_rate: float | None = None, pull: float | None = None,
) -> Setting:  # fmt: skip
    """The theorem's alpha and eta, where none are given. `pull` is another way to say eta."""
    check_share(mix_prob)
    check_int("workers", workers, least=1), check_int("steps", steps, least=1)
    check_int("sync_every", sync_every, least=1)
    if lr is None:
        lr = theorem_lr(problem, workers, steps, sync_every, mix_prob, distance)
    check_lr(lr)
    if pull is not None:
        if mix_rate is not None:
            raise ValueError(
                f"mix_rate={mix_rate:g} and pull={pull:g} both say how strongly mixing steps pull; "
                "give one of them"
            )
        check_pull(pull)
        mix_rate = mix_prob / lr * step_beta(pull, mix_prob, sync_every)
    if mix_rate is None:
        mix_rate = theorem_mix_rate(lr, sync_every, mix_prob)
    return Setting(
        workers=workers, steps=steps, sync_every=sync_every, mix_prob=mix_prob, lr=lr,
        mix_rate=mix_rate, draws=draws,
    )  # fmt: skip


def largest_lr(problem: Problem, sync_every: int, mix_prob: float) -> float:
    return mix_prob / (48 * problem.smoothness * sync_every)


def theorem_lr(
    problem: Problem, workers: int, steps: int, sync_every: int, mix_prob: float, distance: float
) -> float:
    """min(p/(48 L H), ln(mu^2 d0 T^2 K / sigma^2) / (mu T)).

    The first alone where the logarithm is not positive (so few steps, so much noise, or a start so
    near to x* that the theorem names no step size) or infinite (no noise).
    """
    most = largest_lr(problem, sync_every, mix_prob)
    log = theorem_log(problem, workers, steps, distance)
    return min(most, log / (problem.mu * steps)) if log > 0 else most


def theorem_log(problem: Problem, workers: int, steps: int, distance: float) -> float:
    signal = (problem.mu * distance * steps) ** 2 * workers
    if signal == 0 or problem.sigma == 0:
        return math.inf if signal else -math.inf
    return math.log(signal / problem.sigma**2)


def theorem_mix_rate(lr: float, sync_every: int, mix_prob: float) -> float:
    """p/(2 H alpha), which makes beta 1/(2H)."""
    return mix_prob / (2 * sync_every * lr)


def check_share(mix_prob: float) -> None:
    if not 0 < mix_prob < 1:
        raise ValueError(
            f"mix_prob={mix_prob:g} must be in (0, 1): the theorem divides by it, "
            "and holds for p in (0, 1/2]"
        )


def check_lr(lr: float) -> None:
    if not 0 < lr < math.inf:
        raise ValueError(f"lr={lr:g} must be a finite number > 0")
