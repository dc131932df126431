"""A grid of settings for each method: it chooses the best, and shows how much room there is."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from calls import Call, Compare, Options, tuning_file

from palsgd.lab import workloads
from palsgd.lab.api import run_options
from palsgd.lab.provenance import provenance
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.run_set import FailedRunsError, grid_of, run_all
from palsgd.lab.settings import Settings
from palsgd.lab.tuning.api import runs_beside
from palsgd.lab.tuning.halving import SEARCH_SEEDS, unlucky
from palsgd.lab.tuning.record import CONDITIONS
from palsgd.lab.tuning.search_space import edges
from palsgd.lab.tuning.tuned_file import read_tuned, write_tuned
from palsgd.lab.workload import Workload

Varied = Mapping[str, Sequence[Any]]  # the settings that are varied, with their values


@dataclass(frozen=True, kw_only=True)
class Grid(Call):
    """All points of a grid for each method, in one rung, equally many steps each, on the data of
    `split`, with seeds that no comparison has. A method of fewer points has more seeds, so that all
    have about as many runs. The best point of a method is written as `palsgd tune` writes it."""

    RULE: ClassVar = "the lowest mean plus standard deviation over seeds, of all points of a grid"
    ON: ClassVar = {
        "choose": "on data that are held out of the training data",
        "test": "on the data that are judged, with other seeds",
    }

    methods: Mapping[str, Varied]
    # Points that are run beside them and not chosen, by a name; what they vary names the method.
    beside: Mapping[str, Varied] = field(default_factory=dict)
    split: str = "choose"

    def judged(self, runs: Path, tuning: Path) -> None:
        return None

    def stages(self) -> list[list[Settings]]:
        return [list(self.points().values())]

    def points(self) -> dict[str, Settings]:
        """By the name of the run."""
        base = workloads.recipe(self.recipe).changed({**self.settings, "split": self.split})
        varied = {name: {"method": [name], **own} for name, own in self.methods.items()}
        grids = {
            name: grid_of(base, {key: list(values) for key, values in own.items()})
            for name, own in {**varied, **self.beside}.items()
        }
        most = self.seeds * max(map(len, grids.values()))
        return {
            f"{name},{point},seed={seed}": settings.changed({"seed": seed})
            for name, grid in grids.items()
            for point, settings in grid.items()
            for seed in range(
                base.seed + SEARCH_SEEDS, base.seed + SEARCH_SEEDS + max(1, most // len(grid))
            )
        }

    def do(self, runs: Path, tuning: Path, options: Options) -> None:
        path = tuning_file(tuning, self.name)
        with suppress(FailedRunsError):  # a point that diverges has lost
            run_all(self.points(), runs_beside(path), run_options(True, self.how(options)))
        found = self._record(runs_beside(path))
        if not path.exists() or read_tuned(path)["methods"] != found["methods"]:
            write_tuned(path, found)

    def _record(self, folder: Path) -> dict[str, Any]:
        base = workloads.recipe(self.recipe).changed(self.settings)
        return {
            "workload": base.workload, "recipe": self.recipe, **provenance(), "split": self.split,
            "judged_on": workloads.kind(base.workload).judged_on,
            "rule": f"{self.RULE}, {self.ON[self.split]}",
            "conditions": {name: getattr(base, name) for name in CONDITIONS},
            "search": {name: _lists(own) for name, own in self.methods.items()},
            "methods": {name: self._chosen(name, folder) for name in self.methods},
        }  # fmt: skip

    def _chosen(self, method: str, folder: Path) -> dict[str, Any]:
        """The best point of a method, and what its runs ended with."""
        varied, ended = self.methods[method], defaultdict(list)
        own = {n: s for n, s in self.points().items() if n.startswith(f"{method},")}
        for name, settings in own.items():
            given = settings.as_dict()
            point = tuple(given[key] for key in varied)
            ended[point].append(self._end(RunFolder(folder / name)))
        best = min(ended, key=lambda point: unlucky(ended[point]))
        if not math.isfinite(unlucky(ended[best])):
            raise ValueError(f"no point of {method} in {folder} ends well; try gentler settings")
        chosen = dict(zip(varied, best, strict=True))
        return {
            "settings": chosen,
            "judged": [self._sign * value for value in ended[best]],
            "runs": len(own),
            "failed": sum(value == math.inf for values in ended.values() for value in values),
            "edges": edges(_lists(varied), chosen),
        }

    def _end(self, run: RunFolder) -> float:
        """What a run is judged on, lower is better; infinite where training failed."""
        found = run.summary()
        value = None if found is None else found[f"final_{self._kind.judged_on}"]
        return math.inf if value is None or not math.isfinite(value) else self._sign * value

    @property
    def _kind(self) -> type[Workload]:
        return workloads.kind(workloads.recipe(self.recipe).workload)

    @property
    def _sign(self) -> int:
        return -1 if self._kind.judged_on == "metric" and self._kind.higher_is_better else 1


def grid_comparison(
    name: str, recipe: str, methods: Mapping[str, Varied], *, tried: int, seeds: int,
    beside: Mapping[str, Varied], controls: bool | Sequence[str] = False, together: bool = True,
    **settings: Any,
) -> list[Call]:  # fmt: skip
    """A grid of each method's settings, `tried` times each, and a comparison at the best of them
    over fresh seeds."""
    common: dict[str, Any] = dict(name=name, recipe=recipe, together=together)
    return [
        Grid(**common, settings=settings, methods=methods, beside=beside, seeds=tried),
        Compare(**common, settings=settings, methods=tuple(methods), seeds=seeds,
                controls=controls, tuned_by=name),
    ]  # fmt: skip


def _lists(varied: Varied) -> dict[str, list[Any]]:
    return {key: list(values) for key, values in varied.items()}
