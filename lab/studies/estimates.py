"""How many minutes of a GPU a call takes, before it begins: by the speeds of bench/results.

Speeds are those of one NVIDIA H200 once a run is under way. What a command took beside its steps
(imports, loading, compiling, evaluations) counts once for each program.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from calls import Call, gradient_examples, warmup_examples

from palsgd import references
from palsgd.lab.settings import Settings
from palsgd.lab.simulated_run import shape_of
from palsgd.lab.warmups import warmup_of

RECORD = Path(__file__).resolve().parents[2] / "bench" / "results" / "lab-h200.json"
STORY = 161  # tokens of a row of endless stories


@dataclass(frozen=True)
class Source:
    """The case of the record that a workload's speed is taken from."""

    case: str
    units: float = 1.0  # of the case in an example: tokens of a row
    slower: float = 1.0  # than the case, where the workload was not measured; below 1: faster
    start_s: float | None = None  # of a program, where it is not as long as the case's
    reason: str = ""  # why so much


_LAST = "36,000 pictures a second, as gradients with channels last have 43,000 (bench/pictures.py)"
SOURCES = {
    "cifar10-cnn": Source("cnn-64"),
    "cifar10-vgg16": Source("vgg-16", 1, 0.6, 15.0, "30,000 pictures a second, a guess: two "
                            "processes had 37,000 (lab/records/2026-11-18-vgg16)"),
    "cifar10-resnet18": Source("vgg-16", 1, 0.5, 15.0, _LAST),
    "imagenet-resnet50": Source("resnet-50"),
    "ResNet50At96": Source("resnet-50", 1, 0.3, 2.0, "with --at-once 4, by 37 runs that took nine "
                           "minutes (lab/records/2026-11-18-resnet50)"),
    "tinystories-gptneo-8m": Source("gpt-neo-8m", 300),
    "tinystories-gptneo-125m": Source("gpt-neo-125m", 1024),
    "stories-gptneo-8m": Source("gpt-neo-8m", STORY, 1.25, 25.0, "by the runs of "
                                "lab/records/2026-11-17-gpt-neo-8m-endless"),
    "stories-gptneo-125m": Source("gpt-neo-125m", STORY),
    "stories-1m": Source("gpt-neo-8m", STORY, 0.6, 10.0, "by 567 runs that took 14 minutes, four "
                         "parts at once"),
    "stories": Source("gpt-neo-8m", STORY, 0.6, 10.0, "as if it had a million weights"),
    "digits": Source("cnn-64", 1, 1.0, 10.0, "as if it were the small CNN; a CPU will do"),
}  # fmt: skip
UNKNOWN = Source("resnet-50", 1, 1.0, None, "not measured: as if it were ResNet-50")


@dataclass(frozen=True)
class Estimate:
    runs: int
    programs: int
    examples: float
    minutes: float

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(
            self.runs + other.runs, self.programs + other.programs,
            self.examples + other.examples, self.minutes + other.minutes,
        )  # fmt: skip


NOTHING = Estimate(0, 0, 0.0, 0.0)


def estimate(call: Call) -> Estimate:
    stages = call.stages()
    return sum((_stage(runs, call.together, call.shares_warmups) for runs in stages), NOTHING)


def reasons(calls: Iterable[Call]) -> list[str]:
    """What was assumed where a workload was not measured, a line each."""
    kinds = {run.workload: source_of(run) for call in calls for run in call.stages()[0]}
    return [f"{references.short(name)}: {each.reason}" for name, each in kinds.items()
            if each.reason]  # fmt: skip


def source_of(settings: Settings) -> Source:
    return SOURCES.get(references.short(settings.workload), UNKNOWN)


def _stage(runs: list[Settings], together: bool, shares_warmups: bool) -> Estimate:
    programs: dict[Any, list[Settings]] = {}
    for number, run in enumerate(runs):
        programs.setdefault(shape_of(run) if together else number, []).append(run)
    starts = len(programs) * max(_start_s(source_of(run)) for run in runs)
    examples = seconds = 0.0
    known: set[Any] = set()  # warm-ups that an earlier program computes
    for program in programs.values():
        warm = {warmup_of(run) for run in program}
        for run in program:
            own = gradient_examples(run) - (warmup_examples(run) if warm <= known else 0)
            examples, seconds = examples + own, seconds + own / _per_s(source_of(run))
        known |= warm if shares_warmups else set()
    return Estimate(len(runs), len(programs), examples, (starts + seconds) / 60)


def _per_s(source: Source) -> float:
    """Examples a second once a run is under way."""
    return _case(source.case)["per_s"] / (source.units * source.slower)


def _start_s(source: Source) -> float:
    """The seconds of a command that were no steps."""
    if source.start_s is not None:
        return source.start_s
    case = _case(source.case)
    return case["command_s"] - case["gradient_steps"] / case["steps_per_s"]


@cache
def _case(name: str) -> dict[str, Any]:
    return json.loads(RECORD.read_text())["cases"][name]
