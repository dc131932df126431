"""Theorem 2 of the paper beside what PALSGD does: problems whose constants are known, thousands of
runs at once, the explicit bound, fitted exponents, and every lemma on sampled trajectories."""

from palsgd.theory.algorithm import Outcome, RandomSource, Source, run
from palsgd.theory.bound import Bound, explicit_bound
from palsgd.theory.problems import Bent, Logistic, Noiseless, Problem, Quadratic, spectrum
from palsgd.theory.theorem import Setting, largest_lr, theorem_lr, theorem_mix_rate

__all__ = [
    "Bent",
    "Bound",
    "Logistic",
    "Noiseless",
    "Outcome",
    "Problem",
    "Quadratic",
    "RandomSource",
    "Setting",
    "Source",
    "explicit_bound",
    "largest_lr",
    "run",
    "spectrum",
    "theorem_lr",
    "theorem_mix_rate",
]
