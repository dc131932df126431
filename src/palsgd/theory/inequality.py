"""An inequality between expectations at many steps, judged on many runs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from palsgd.theory.fits import reach
from palsgd.theory.verdicts import UNDECIDED, Family, Verdict, enough

HOLDS, FAILS = "holds", "fails"
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Check:
    claim: str
    form: str
    where: str
    left: float  # at the step where it comes nearest to, or furthest beyond, the right
    right: float
    errors: float | None  # smallest margin in standard errors; None where nothing is random
    broken: bool  # at a step without chance
    steps: int
    runs: int
    seeds: int  # that so many runs stand for
    why: str = ""

    def verdict(self, family: Family) -> Verdict:
        """It holds if at all steps the mean margin is positive beyond doubt, and fails if at some
        step it is negative beyond doubt. The family's doubt is shared out among the steps."""
        if self.errors is None or self.broken:
            return Verdict(FAILS if self.broken else HOLDS)
        needed = reach(family.doubt / self.steps, self.runs - 1)
        if abs(self.errors) > needed:
            return Verdict(HOLDS if self.errors > 0 else FAILS)
        factor = needed / abs(self.errors) if self.errors else math.inf
        return Verdict(UNDECIDED, seeds=enough(self.seeds, factor))


def check(claim: str, form: str, where: str, left: Tensor, right: Tensor, why: str = "") -> Check:
    """`left <= right` in expectation at every step: tensors (steps, runs), paired by run."""
    margin = right - left
    mean, runs = margin.mean(1), margin.shape[1]
    spread = margin.std(1) / math.sqrt(runs) if runs > 1 else 0 * mean
    lefts, rights = left.mean(1), right.mean(1)
    slack = _ROUNDING * (left.abs() + right.abs()).mean(1)
    random = spread > slack
    errors = ((mean + slack) / spread)[random]
    # Steps at which both sides are 0 are left out.
    ratio = torch.where(lefts.abs() + rights.abs() > 0, lefts / rights, -math.inf)
    worst = int(ratio.nan_to_num(nan=-math.inf).argmax())
    return Check(
        claim, form, where, lefts[worst].item(), rights[worst].item(),
        errors.min().item() if len(errors) else None,
        # A run that diverges is beyond every bound.
        broken=bool((mean[~random] < -slack[~random]).any() or not mean.isfinite().all()),
        steps=len(mean), runs=runs, seeds=runs, why=why,
    )  # fmt: skip
