"""All studies and checks of one setting, and the document they make."""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import palsgd
from palsgd.theory import bound_terms, drift, eta_worth, variations
from palsgd.theory.conclusion import conclusion
from palsgd.theory.inequality import Check
from palsgd.theory.lemmas import all_checks
from palsgd.theory.studies import Exponent, Line, Study, StudyContext, Worth
from palsgd.theory.verdicts import LEVEL, Family, Verdict

STUDIES: tuple[Callable[[StudyContext], Study], ...] = (
    bound_terms.convergence,
    bound_terms.speed_up,
    bound_terms.by_steps,
    drift.drift_by_interval,
    drift.drift_by_steps,
    drift.floor_by_workers,
    bound_terms.transient,
    variations.by_draws,
    variations.by_mix_prob,
    eta_worth.by_mix_rate,
)


@dataclass
class Results:
    context: StudyContext
    studies: list[Study]
    lemmas: list[Check]

    @property
    def checks(self) -> list[Check]:
        return [check for study in self.studies for check in study.checks] + self.lemmas

    @property
    def exponents(self) -> list[Exponent]:
        return [each for study in self.studies for each in study.exponents]

    @property
    def worths(self) -> list[Worth]:
        return [each for study in self.studies for each in study.worths]

    @property
    def family(self) -> Family:
        """Everything that gets a word is judged together."""
        return Family(len(self.checks) + len(self.exponents) + len(self.worths))

    @property
    def verdicts(self) -> list[Verdict]:
        statements: list[Exponent | Check | Worth] = [*self.exponents, *self.checks, *self.worths]
        return [each.verdict(self.family) for each in statements]

    @property
    def outside(self) -> list[str]:
        return self.context.setting.outside(self.context.problem)

    def document(self) -> dict[str, Any]:
        """The contents of theory.json, whose fields docs/theory.md explains."""
        context, problem, family = self.context, self.context.problem, self.family
        return {
            "schema": 2,
            "palsgd": palsgd.__version__,
            "torch": torch.__version__,
            "device": _machine(context.device),
            "problem": {
                "name": problem.name, "dim": problem.dim, "L": problem.smoothness,
                "mu": problem.mu, "kappa": problem.condition, "sigma": problem.sigma,
                "distance": context.distance,
            },
            "setting": asdict(context.setting) | {"beta": context.setting.beta},
            "seeds": context.runs,
            "seed": context.seed,
            "outside": self.outside,
            "conclusion": conclusion(self),
            "family": {"level": LEVEL, "statements": family.statements, "method": "Bonferroni"},
            "exponents": [
                {
                    "study": study.name, "claim": each.claim, "claimed": each.claimed,
                    "measured": each.measured.mean, "bound": each.bound, "why": each.why,
                    **_verdict(each.verdict(family)),
                }
                for study in self.studies for each in study.exponents
            ],
            "eta": [
                {
                    "regime": each.regime, "times": each.times, "alpha": each.alpha,
                    "ratio": each.ratio.mean,
                    **_verdict(each.verdict(family)),
                }
                for each in self.worths
            ],
            "studies": [
                {
                    "name": study.name, "title": study.title, "x": study.xlabel,
                    "lines": [_line(line) for line in study.lines], "notes": study.notes,
                }
                for study in self.studies
            ],
            "lemmas": [
                {
                    "claim": each.claim, "form": each.form, "where": each.where, "left": each.left,
                    "right": each.right, "errors": each.errors, "why": each.why,
                    "verdict": verdict.word, "seeds": verdict.seeds,
                }
                for each in self.checks for verdict in [each.verdict(family)]
            ],
        }  # fmt: skip


def examine(
    context: StudyContext, at: Callable[[int, str], None] = lambda done, what: None
) -> Results:
    """Run all studies and checks, one after another. `at(done, what)` is called before each."""
    studies = []
    for done, study in enumerate(STUDIES):
        at(done, study.__name__.replace("_", " "))
        studies.append(study(context))
    at(len(STUDIES), "lemmas")
    lemmas = all_checks(context)
    at(len(STUDIES) + 1, "done")
    return Results(context, studies, lemmas)


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"verdict": verdict.word, "half": verdict.half, "seeds": verdict.seeds}


def _line(line: Line) -> dict[str, Any]:
    return {
        "label": line.label,
        "x": line.x,
        "mean": [each.mean for each in line.measured],
        "half": [each.half() for each in line.measured],
        "bound": line.bound,
    }


def _machine(device: torch.device | str) -> str:
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{kind} ({platform.machine()})"
