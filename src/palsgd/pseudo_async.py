"""PALSGD's rules (Algorithm 1 of the paper). With `mix_prob=0` they are DiLoCo's."""

from collections.abc import Sequence
from dataclasses import dataclass

from palsgd.draws import DRAWS, check_mix_prob, check_mix_rate, one_of, round_plan, whole
from palsgd.method import Method
from palsgd.replica import Replica, mix_


@dataclass(frozen=True, kw_only=True)
class PseudoAsync(Method):
    mix_prob: float  # p
    mix_rate: float  # eta
    draws: str = "balanced"
    seed: int = 0

    def __post_init__(self) -> None:
        whole("sync_every", self.sync_every, least=1)
        whole("warmup_steps", self.warmup_steps)
        whole("seed", self.seed)
        check_mix_prob(self.mix_prob)
        check_mix_rate(self.mix_rate)
        one_of("draws", self.draws, DRAWS)

    @property
    def gradient_share(self) -> float:
        return 1.0 - self.mix_prob

    def plan(self, *, worker: int, round: int, stops: Sequence[int] = ()) -> list[bool]:
        return round_plan(
            seed=self.seed,
            worker=worker,
            round=round,
            sync_every=self.sync_every,
            mix_prob=self.mix_prob,
            draws=self.draws,
            stops=stops,
        )

    def check(self, replica: Replica) -> None:
        if self.mix_prob:
            self.betas(replica.learning_rates())

    def local_rule(self, replica: Replica, rates: list[list[float]]) -> tuple[float, float] | None:
        if not rates:
            return None
        betas = [self.betas(step) for step in rates]
        for group, weight in enumerate(map(collapsed, zip(*betas, strict=True))):
            mix_(*replica.group(group), weight)
        flat = [beta for step in betas for beta in step]
        return min(flat), max(flat)

    def betas(self, rates: list[float]) -> list[float]:
        """The weight of one mixing step for each parameter group: alpha * eta / p."""
        return [self._beta(group, rate) for group, rate in enumerate(rates)]

    def _beta(self, group: int, rate: float) -> float:
        beta = rate * self.mix_rate / self.mix_prob
        if 0 <= beta <= 1 + 1e-9:  # a mix_rate of exactly p / lr may land an ulp above 1
            return min(beta, 1.0)
        raise ValueError(
            f"mix_rate={self.mix_rate:g} gives beta={beta:.4g}, outside [0, 1], for param group "
            f"{group} (lr={rate:g}, mix_prob={self.mix_prob:g}); use "
            + (f"mix_rate <= {self.mix_prob / rate:.12g}" if rate > 0 else "a learning rate >= 0")
        )


def collapsed(betas: tuple[float, ...]) -> float:
    """The weight of several mixing steps in a row as one interpolation.

    One step leaves x - a = (1 - beta)(x0 - a), with a the anchor. After all of them
    x - a = prod(1 - beta_i) (x0 - a), which is one step of weight 1 - prod(1 - beta_i);
    1 - (1 - beta)^m when the learning rate stands still.
    """
    if len(betas) == 1:
        return betas[0]
    left = 1.0
    for beta in betas:
        left *= 1.0 - beta
    return 1.0 - left
