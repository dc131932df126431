"""All studies and checks of one setting, and the document they make."""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import palsgd
from palsgd.theory import bound_terms, drift, variations
from palsgd.theory.lemmas import Check, all_checks
from palsgd.theory.studies import Line, Study, StudyContext

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
    variations.by_mix_rate,
)


@dataclass
class Results:
    context: StudyContext
    studies: list[Study]
    checks: list[Check]

    @property
    def outside(self) -> list[str]:
        return self.context.setting.outside(self.context.problem)

    def document(self) -> dict[str, Any]:
        """The contents of theory.json, whose fields docs/theory.md explains."""
        context, problem = self.context, self.context.problem
        return {
            "schema": 1,
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
            "exponents": [
                {
                    "study": study.name, "claim": each.claim, "claimed": each.claimed,
                    "measured": each.measured.slope, "half": each.measured.half,
                    "bound": each.bound, "verdict": each.verdict, "why": each.why,
                }
                for study in self.studies for each in study.exponents
            ],
            "studies": [
                {
                    "name": study.name, "title": study.title, "x": study.xlabel,
                    "lines": [_line(line) for line in study.lines], "notes": study.notes,
                }
                for study in self.studies
            ],
            "lemmas": [asdict(check) for check in self.checks],
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
    checks = all_checks(context)
    at(len(STUDIES) + 1, "done")
    return Results(context, studies, checks)


def _line(line: Line) -> dict[str, Any]:
    return {
        "label": line.label,
        "x": line.x,
        "mean": [each.mean for each in line.measured],
        "half": [each.half for each in line.measured],
        "bound": line.bound,
    }


def _machine(device: torch.device | str) -> str:
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{kind} ({platform.machine()})"
