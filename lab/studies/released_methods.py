"""Two readings of PALSGD that are not the paper's text, as methods of one's own.

`ReleasedCode` is what the paper's released code computes. Its mixing loop pairs the parameters with
a list that has one entry for each parameter group, so that only the first tensor is mixed:

    x_k[0] <- x_k[0] - beta (x_k[0] - x[0])      with probability p
    x_k <- InnerOPT(x_k, gradient, lr / (1 - p))     otherwise

It also has one coin for all workers (draws=shared), and a mixing step uses up a batch
(discard_batches=true). Both are settings of a run; `RELEASED` has them.

`AsPrinted` is Algorithm 1 line by line: it never sets the local models to the new global one, as
the paper's text says that it does. The outer step moves x by the mean of x - x_k, and the pull of
the mixing steps is all that brings x_k back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from palsgd.method import Rate, Rates
from palsgd.methods.palsgd import PALSGDMethod, collapsed, weakened
from palsgd.tensors import WorkerTensors, highest, lowest, mix_

FIRST_TENSOR, PRINTED = "released_methods:ReleasedCode", "released_methods:AsPrinted"
RELEASED = {"draws": "shared", "discard_batches": True}


@dataclass(frozen=True, kw_only=True)
class ReleasedCode(PALSGDMethod):
    """PALSGD that mixes the first tensor of the model alone, as the paper's released code does."""

    refuses: ClassVar[Mapping[str, str]] = {
        "offload": "it mixes the first tensor, and offloaded tensors are seen piece by piece"
    }

    def after_gradient(
        self, w: WorkerTensors, rate: Rates | None, mixing: Sequence[Rates]
    ) -> tuple[Rate, Rate] | None:
        if not self.mix_prob:
            return None
        first = w.clock - len(mixing)
        betas = [
            weakened(self.betas(step, first + i, w.length)[0], power)
            for i, (step, power) in enumerate(zip(mixing, w.pull_powers, strict=True))
        ]
        mix_(w.local[:1], w.anchor[:1], collapsed(betas))
        return lowest(betas), highest(betas)


@dataclass(frozen=True, kw_only=True)
class AsPrinted(PALSGDMethod):
    """PALSGD whose local models are never set to the global one, as Algorithm 1 is printed."""

    def restart(self, w: WorkerTensors) -> None:
        """The local model goes on from where it is."""
