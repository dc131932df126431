"""AnchorDecay: decoupled decay towards the last global model.

After every gradient step the local model is pulled to the anchor x, as AdamW's weight decay pulls
it to zero: outside of the inner optimizer, and in proportion to the learning rate.

    x_k <- InnerOPT(x_k, g_k),  x_k <- x_k - c (lr_t / lr_0) (x_k - x)

lr_0 is the group's `initial_lr`, which schedulers set, or else its learning rate when the optimizer
was built. It differs from FedProx in that an adaptive inner optimizer does not rescale the pull. It
differs from PALSGD in that every step has a pull and no gradient step is replaced. The outer step
is Nesterov with learning rate 0.7 and momentum 0.5 unless outer= is given.

It keeps no state. With `delay` and `fragments` the pull is to the present anchor. Compression and
workers that are left out do not change the rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from palsgd.checks import below, check_number
from palsgd.method import Method, Rate, Rates
from palsgd.outer import nesterov
from palsgd.registry import Row
from palsgd.tensors import WorkerTensors, bounds, mix_


@dataclass(frozen=True, kw_only=True)
class AnchorDecayMethod(Method):
    """`x_k <- x_k - c (lr_t / lr_0) (x_k - x)` after each gradient step, with x the anchor.

    Args:
        decay: c of the rule.
    """

    decay: float = 0.01

    def __post_init__(self) -> None:
        words = "a number >= 0 and < 1"
        check_number("decay", self.decay, words, low=below(0.0), high=1.0)

    def after_gradient(
        self, w: WorkerTensors, rate: Rates | None, mixing: Sequence[Rates]
    ) -> tuple[Rate, Rate] | None:
        if rate is not None and self.decay:
            for group, now in enumerate(rate):
                if bounds(now) != (0.0, 0.0):
                    mix_(*w.group(group), self.weight(group, now, w.initial_rates[group]))
        return None

    def weight(self, group: int, rate: Rate, initial: Rate) -> Rate:
        """c lr_t / lr_0, of one parameter group."""
        if bounds(initial)[0] <= 0:
            raise ValueError(
                f"AnchorDecay measures learning rates by param group {group}'s first one, which is "
                f"{bounds(initial)[0]:g}; build the inner optimizer with the highest rate it will "
                "have, and let a scheduler lower it"
            )
        found = self.decay * rate / initial
        if bounds(found)[1] > 1:
            raise ValueError(
                f"decay={self.decay:g} gives a pull of {bounds(found)[1]:.4g}, above 1, as param "
                f"group {group}'s learning rate has risen to {bounds(rate)[1]:g} from "
                f"{bounds(initial)[0]:g}; use a smaller decay, or build the inner optimizer with "
                "the highest rate it will have"
            )
        return found


ROW = Row(
    name="anchordecay",
    title="AnchorDecay",
    method=AnchorDecayMethod,
    summary="every gradient step is followed by a small pull to the anchor",
    colours=("#b3212d", "#ff8a8f"),
    dashes=(2, 1, 6, 1),
    outer=nesterov,
)
