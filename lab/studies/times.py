"""Seconds to a quality, and of a step, on the paper's clusters and on slower links, by the model of
time (docs/cluster.md), from the runs that records keep.

    python lab/studies/times.py --record lab/records/DATE-times

The quality is what DDP ends with. A method that never has it is asked for what it ends with itself,
beside DDP at that same quality. Both are worse by the lab's margin of 1%. No run is computed.
"""

import argparse
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimates import STORY
from hardware import TINY_STORY, VGG_16, assumed, links, of_gpt_neo_8m
from recording import GIVEN, RUNS

from palsgd.cluster import Cluster, Work
from palsgd.cluster.gradient_counts import Expected
from palsgd.lab.comparison import Comparison, ToTarget
from palsgd.lab.groups import Group, group
from palsgd.lab.judging.interval import of_mean
from palsgd.lab.plan.paper import (
    GPT_8M,
    GPT_125M,
    RESNET_50,
    B,
    C,
    Machine,
    of_photographs,
    of_stories,
)
from palsgd.lab.provenance import provenance, without_folders
from palsgd.lab.run_folder import Run, find_runs, write_json
from palsgd.lab.targets import end_target

RECORDS = Path(__file__).resolve().parents[1] / "records"


@dataclass(frozen=True)
class Subject:
    """Runs that are compared with each other."""

    name: str
    record: str
    parts: tuple[str, ...]
    links: tuple[str, ...]
    baseline: str | None = None  # the part whose DDP the others are beside, if they have none
    margins: tuple[float, ...] = ()  # at which DDP's end is asked for; the paper's is 0


SUBJECTS = (
    Subject("small-cnn-H", "2026-11-18-small-cnn-interval", ("interval",), assumed("10ms")),
    Subject("small-cnn-K", "2026-11-17-small-cnn", ("workers",), assumed("10ms")),
    Subject("stories-H", "2026-11-16-when-it-pays", ("H16", "H64", "H256"), assumed("50ms")),
    Subject("stories-p", "2026-11-16-when-it-pays", ("strength",), assumed("50ms"), "H16"),
    Subject("resnet50", "2026-11-19-resnet50-steady", ("steady",),
            links(C, 4, of_photographs(64, pixels=96))),
    Subject("gpt-neo-8m", "2026-11-16-gpt-neo-8m", ("corpus",),
            of_gpt_neo_8m(16, tokens=TINY_STORY)),
    Subject("gpt-neo-8m-endless", "2026-11-17-gpt-neo-8m-endless", ("main",), of_gpt_neo_8m(256)),
    Subject("gpt-neo-8m-seeds", "2026-11-19-gpt-neo-8m-seeds", ("seeds",), of_gpt_neo_8m(32),
            margins=(0.01, 0.005, 0.0)),
    Subject("gpt-neo-8m-k4", "2026-11-19-gpt-neo-8m-k4", ("figure-k4",),
            of_gpt_neo_8m(64, workers=4), margins=(0.01, 0.005, 0.0)),
    Subject("slowmo-table", "2026-11-19-slowmo-table", ("published",), assumed("50ms")),
    Subject("gpt-neo-125m", "2026-11-19-gpt-neo-125m-gentle", ("gentle",),
            links(B, 8, of_stories(GPT_125M, 32, STORY))),
)  # fmt: skip


# -- to a quality ----------------------------------------------------------------------------------


def subject_record(subject: Subject, records: Path = RECORDS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(records / subject.record / RUNS) as packed:
            packed.extractall(folder, filter="data")
        runs = list(_runs(subject, Path(folder) / "runs"))
        found = {link: Comparison(group(runs), link) for link in subject.links}
    first = next(iter(found.values()))
    reached = {row.group: row.reached for row in first.to_target()}
    finished = [each for each in first.groups if each.finished]
    if lacking := [each.label for each in finished if each not in reached]:
        raise ValueError(
            f"{subject.record} has no baseline at the scale of {', '.join(lacking)}; leave their "
            "part out, or name the part that has one"
        )
    ends = [each for each in finished if reached[each] or first.to_own_end(each) is not None]
    rows = [_row(found, each, reached[each]) for each in ends]
    return {
        "record": subject.record,
        "margin": first.margin,
        "quality": first.quality.name,
        "links": list(subject.links),
        "rows": rows,
        "without_an_end": [each.label for each in finished if each not in ends],
        "margins": [row for margin in subject.margins for row in _at_margin(found, margin)],
    }


def _runs(subject: Subject, folder: Path) -> Iterator[Run]:
    yield from find_runs([folder / part for part in subject.parts])
    if subject.baseline is not None:
        found = group(find_runs([folder / subject.baseline]))
        yield from (run for each in found if each.is_baseline for run in each.runs)


def _row(found: dict[str, Comparison], own: Group, reached: bool) -> dict[str, Any]:
    """A setting of a method, with its seconds on every link."""
    place = next(iter(found.values())).groups.index(own)
    goals = {link: _goal(each, place, reached) for link, each in found.items()}
    goal = next(iter(goals.values()))
    return {
        "label": own.label,
        "method": own.kind,
        "baseline": own.is_baseline,
        "given": {name: own.settings.get(name) for name in GIVEN},
        "seeds": own.seeds,
        "reached": reached,
        "target": goal.target.as_dict(),
        "in_warmup": goal.in_warmup,
        "links": {link: _seconds(each, place, goals[link]) for link, each in found.items()},
    }


def _goal(found: Comparison, place: int, reached: bool) -> ToTarget:
    own = found.groups[place]
    goal = None if reached else found.to_own_end(own)
    return goal or next(row for row in found.to_target() if row.group is own)


def _seconds(found: Comparison, place: int, goal: ToTarget) -> dict[str, Any]:
    pace = found.paces[found.groups[place]]
    assert pace is not None
    faster = goal.speed_ups.get("time_s")
    return {
        "seconds": goal.costs["time_s"].cost.value if goal.reached else None,
        "speed_up": None if faster is None else faster.as_dict(),
        "whole_run": pace.seconds(goal.steps),
    }


def _at_margin(found: dict[str, Comparison], margin: float) -> Iterator[dict[str, Any]]:
    """What takes how long to what DDP ends with, worse by this margin in place of the lab's."""
    first = next(iter(found.values()))
    for place, own in enumerate(first.groups):
        base = first.baseline(own)
        assert base is not None
        final = of_mean(list(first.final_losses(base).values()))
        target = end_target(base, final, first.quality, margin)
        goals = {link: each.to_quality(each.groups[place], target) for link, each in found.items()}
        goal = next(iter(goals.values()))
        faster = goal.speed_ups.get("step")
        yield {
            "margin": margin,
            "label": own.label,
            "method": own.kind,
            "baseline": own.is_baseline,
            "target": target.as_dict(),
            "in_warmup": goal.in_warmup,
            "steps": goal.costs["step"].cost.value if goal.reached else None,
            "steps_speed_up": None if faster is None else faster.as_dict(),
            "links": {link: _seconds(each, place, goals[link]) for link, each in found.items()},
        }


# -- of a step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A workload of the paper, and what its figures vary."""

    name: str
    machine: Machine
    parameters: int
    operations: float  # of a worker's gradient
    workers: int
    sync_every: int
    mix_prob: float
    varied: dict[str, tuple[float, ...]]

    def steps(self) -> Iterator[dict[str, Any]]:
        for field, values in self.varied.items():
            for value in values:
                yield self._step(field, value)

    def _step(self, field: str, value: float) -> dict[str, Any]:
        """As a share of DDP's step, torch's, which hides what it can."""
        usual = {"workers": self.workers, "H": self.sync_every, "p": self.mix_prob}
        now = usual | {field: value}
        workers, every, p = int(now["workers"]), int(now["H"]), float(now["p"])
        work = Work(parameters=self.parameters, sync_every=every, mix_prob=p)
        counts = Expected(workers=workers, mix_prob=p)
        shares = {}
        for link in links(self.machine, workers, self.operations):
            place = Cluster.parse(link, workers=workers)
            ddp = place.project(Work.ddp(self.parameters), steps=1).time_s
            shares[link] = place.project(work, steps=every, counts=counts).time_s / every / ddp
        return {"workload": self.name, "varied": field, "value": value, **now, "share": shares}


INTERVALS = (32, 64, 128, 256, 512, 1024)
WORKERS = (4, 8, 16, 32)
SHAPES = (
    Shape("GPT-Neo-8M", B, GPT_8M, of_stories(GPT_8M, 256), 8, 64, 0.1,
          {"H": INTERVALS[:4], "p": (0.025, 0.05, 0.1, 0.25, 0.5)}),
    Shape("GPT-Neo-125M", B, GPT_125M, of_stories(GPT_125M, 256), 8, 16, 0.1, {"H": (16, 64)}),
    Shape("ResNet-50", C, RESNET_50, of_photographs(64), 4, 64, 0.05, {"H": (64,)}),
    Shape("VGG-16", C, 134_301_514, 128 * VGG_16, 4, 128, 0.05, {"H": INTERVALS}),
    Shape("VGG-16, batch 256", C, 134_301_514, 256 * VGG_16, 4, 128, 0.05, {"workers": WORKERS}),
)  # fmt: skip


# -- the record ------------------------------------------------------------------------------------


def record(subjects: Sequence[Subject] = SUBJECTS, records: Path = RECORDS) -> dict[str, Any]:
    return {
        **provenance(),
        "subjects": {each.name: subject_record(each, records) for each in subjects},
        "steps": [row for shape in SHAPES for row in shape.steps()],
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args(words)
    if words is None:
        sys.argv[:] = [without_folders(word, Path(__file__).parents[2]) for word in sys.argv]
    args.record.mkdir(parents=True, exist_ok=True)
    write_json(args.record / "summary.json", record())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
