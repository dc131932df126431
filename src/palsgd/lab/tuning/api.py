"""`palsgd tune` from Python."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palsgd import references
from palsgd.checks import check_path
from palsgd.lab import workloads
from palsgd.lab.api import Result, method_list, run_options
from palsgd.lab.folder_lock import locked
from palsgd.lab.methods import whole_names
from palsgd.lab.run_set import Options, check_folder
from palsgd.lab.settings import Settings
from palsgd.lab.tuning.halving import Outcome, unlucky
from palsgd.lab.tuning.record import record_of, sentences
from palsgd.lab.tuning.tuned_file import read_tuned, tuned_settings, write_tuned
from palsgd.lab.tuning.tuner import Search, run_search

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Tuning:
    """What tuning chose. `path` is the file for `palsgd compare --tuned`."""

    path: Path
    runs: Path  #: the folder of all trials
    record: dict[str, Any]

    @property
    def verdicts(self) -> list[str]:
        """A sentence for each method: its settings, its loss on the held out data, and values at
        the edge of what was searched."""
        return sentences(self.record)

    @cached_property
    def _result(self) -> Result:
        """The trials as runs beside each other."""
        return Result(self.runs, {})

    @property
    def frame(self) -> "pandas.DataFrame":
        """One row for each run and evaluation, as of a comparison."""
        return self._result.frame

    def settings(self, method: str, base: Settings | None = None) -> Settings:
        """Those of a method, on top of `base`; by default the recipe's, evaluated on the test
        set."""
        return tuned_settings(self.path, method, base or workloads.recipe(self.record["recipe"]))

    def report(self, path: Path | str) -> Path:
        """A page about all trials."""
        return self._result.report(path)


def tune(
    workload: str,
    methods: Sequence[str] | str | None = None,
    *,
    workers: int | None = None,
    trials: int = 16,
    seeds: int = 4,
    simulate: bool = True,
    out: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Tuning:
    """Choose settings for each method by equally many trials with equally many gradient examples,
    on training data that are held out.

    Args:
        workload: a workload or recipe. Its `SEARCH` says what is tried.
        methods: their names; by default the paper's four.
        workers: how many; by default the recipe's.
        trials: points of the search space for each method.
        seeds: of each of the better half of the points; all points have half of them before. The
            two best are confirmed with so many fresh ones. Points are ranked by mean plus standard
            deviation over seeds.
        simulate: all workers in this process; False: real processes.
        out: the file to write, by default `runs/NAME-TIME/tuned.yaml`; trials go into a folder
            beside it.
        options: how runs are done: `data`, `download`, `device`, `force`, `resume`, `quiet`,
            `at_once`.
        settings: any other settings, which are then not searched.

    Raises:
        ValueError: for settings that are unknown or cannot work, before anything runs; after all
            trials, if no point of a method ends well. No file is written then.

    Example:
        >>> import tempfile, palsgd.lab
        >>> tuning = palsgd.lab.tune(
        ...     "digits", "ddp", trials=2, seeds=1, workers=2, steps=24,
        ...     out=tempfile.mkdtemp() + "/tuned.yaml",
        ... )
        >>> len(tuning.verdicts)
        1
    """
    given = settings if workers is None else {**settings, "workers": workers}
    names = whole_names(method_list(methods))
    base = workloads.recipe(workload).changed(given)
    name = f"{references.short(workload)}-tune-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path("runs") / name / "tuned.yaml" if out is None else check_path("out", out)
    return run_tuning(
        workload, base, names, path, run_options(simulate, options),
        trials=trials, seeds=seeds, given=given,
    )  # fmt: skip


def run_tuning(
    recipe: str, base: Settings, methods: Sequence[str], out: Path, options: Options, *,
    trials: int, seeds: int, given: Collection[str],
) -> Tuning:  # fmt: skip
    """What `tune` and the command do. A search that was stopped goes on with `options.resume`."""
    runs = runs_beside(out)
    check_folder(runs, options)
    search = Search.of(
        recipe, base, methods, trials=trials, seeds=seeds, given=given, data=options.data
    )
    with locked(runs):
        tried, outcomes = run_search(search, runs, options)
        _check_ends(outcomes, runs)
        write_tuned(out, record_of(tried, outcomes))
    return Tuning(out, runs, read_tuned(out))


def _check_ends(outcomes: Mapping[str, Outcome], runs: Path) -> None:
    """Refuse to call settings tuned that diverge, as a comparison would take them for a method's
    best."""
    lost = [
        references.short(method)
        for method, outcome in outcomes.items()
        if not math.isfinite(unlucky(list(outcome.judged[outcome.winner].values())))
    ]
    if not lost:
        return
    others = ", or tune the other methods alone" if len(lost) < len(outcomes) else ""
    raise ValueError(
        f"no point of {', '.join(lost)} in {runs} ends well with each of its seeds, so that "
        f"nothing is tuned; try gentler settings{others}"
    )


def runs_beside(out: Path) -> Path:
    """The folder of the trials of a tuned.yaml."""
    if out.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--out {out} is no YAML file; give for instance {out}/tuned.yaml")
    return out.with_name(f"{out.stem}-runs")
