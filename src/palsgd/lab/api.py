"""`palsgd compare` and `palsgd sweep` from Python: `palsgd.lab.compare`, `palsgd.lab.sweep`."""

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palsgd.checks import check_choice, check_int, check_path, in_error
from palsgd.lab import workloads
from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import group
from palsgd.lab.methods import default_names, runs_of, whole_names
from palsgd.lab.run_folder import Line, Run, find_runs
from palsgd.lab.run_list import compared_runs, with_seeds
from palsgd.lab.run_set import FailedRunsError, Options, grid_of, run_all
from palsgd.lab.settings import Settings

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Result:
    """What was run. Without `out=` its files live as long as this object."""

    folder: Path
    failed: Mapping[str, str | None]  #: runs that ended early by themselves, with the reason

    @cached_property
    def runs(self) -> list[Run]:
        return find_runs([self.folder])

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """One for each workload."""
        kinds = dict.fromkeys(run.workload for run in self.runs)
        return [Comparison(group([r for r in self.runs if r.workload == kind])) for kind in kinds]

    @property
    def verdicts(self) -> list[str]:
        """Sentences with their numbers and intervals, the most important first."""
        return [sentence for each in self.comparisons for sentence in each.verdicts]

    @cached_property
    def frame(self) -> "pandas.DataFrame":
        """One row for each run and evaluation: the run's name, the label of its setting, what
        config.yaml says, and the figures of the line. `lr` is the setting and `lr_now` that of
        the step; `metric` is the figure and `metric_name` its name."""
        import pandas

        rows = []
        for each in (each for comparison in self.comparisons for each in comparison.groups):
            for run in each.runs:
                about = {"run": run.folder.path.name, "label": each.label, **run.config}
                about["metric_name"] = about.pop("metric", None)
                rows += [about | _figures(line) for line in run.lines if "metric" in line]
        return pandas.DataFrame(rows)

    def report(self, path: Path | str) -> Path:
        """Write the page, and its figures beside it."""
        from palsgd.lab.report import write_report

        return write_report([self.folder], Path(path))


def compare(
    workload: str,
    methods: Sequence[str] | str | None = None,
    *,
    workers: int | None = None,
    seeds: int = 1,
    simulate: bool = True,
    controls: bool | Sequence[str] = False,
    tuned: Path | str | None = None,
    out: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """Run several methods on the same data and seeds.

    Args:
        workload: a workload or recipe, as `palsgd recipes` lists them.
        methods: their names; by default the paper's four.
        workers: how many; by default the recipe's.
        seeds: so many for every method, counted from `seed`. One gives curves and no verdict.
        simulate: all workers in this process; False: real processes.
        controls: also run what tells the parts of a mixing method apart; a list of names, as
            `["no-pull", "equal-gradients"]`, for some of them.
        tuned: a file of `palsgd tune`, with settings for each method; by default the recipe's, if
            it comes with one and no settings are given, and "none" for the recipe's settings.
        out: a folder for the files; by default one that is gone with the result.
        options: how runs are done: `data`, `download`, `device`, `force`, `resume`, `elastic`,
            `keep_batch`, `quiet`; `at_once`, how many simulated programs have a process of their
            own at the same time; and `until`, a time as time.monotonic() has it, at which
            simulated runs are saved and an OutOfTimeError ends the call: `resume` goes on.
        settings: any other settings, as `steps=600` or `lr=0.002`.

    Raises:
        ValueError: for settings that are unknown or cannot work, before anything runs.

    Example:
        >>> import palsgd.lab
        >>> result = palsgd.lab.compare(
        ...     "digits", ["ddp", "palsgd"], workers=2, steps=24, sync_every=4, tuned="none"
        ... )
        >>> list(result.frame.groupby("label").loss.min().index)
        ['ddp', 'palsgd']

    With `seeds=5`, `result.verdicts` has sentences about who ends better or worse.
    """
    given = settings if workers is None else {**settings, "workers": workers}
    names = whole_names(method_list(methods))  # first: settings may be those of a user's own method
    base = workloads.recipe(workload).changed(given)
    runs, remarks = compared_runs(
        runs_of(base, names), recipe=workload, seeds=seeds, controls=controls, tuned=tuned,
        given=given,
    )  # fmt: skip
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return _run(runs, out, simulate, options)


def sweep(
    workload: str,
    *,
    seeds: int = 1,
    simulate: bool = True,
    out: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """Run all combinations of the settings that are given as lists.

    Args:
        workload, seeds, simulate, out, options: as for `compare`.
        settings: any settings; a list has the values that are tried, as `lr=[0.001, 0.002]` or
            `method=["ddp", "palsgd"]`.

    Raises:
        ValueError: for settings that are unknown or cannot work, before anything runs.

    Example:
        >>> import palsgd.lab
        >>> result = palsgd.lab.sweep("digits", lr=[0.001, 0.002], workers=2, steps=24)
        >>> len(result.runs)
        2
    """
    check_int("seeds", seeds, least=1)
    own = settings.get("method", ())
    whole_names([own] if isinstance(own, str) else own)  # its settings must be known first
    lists = {name: list(value) for name, value in settings.items() if _is_list(value)}
    rest = {name: value for name, value in settings.items() if name not in lists}
    if "seed" in lists and seeds > 1:
        raise ValueError(f"seeds={seeds} and seed={lists['seed']} both name seeds; give one")
    base = workloads.recipe(workload).changed(rest)
    points = grid_of(base, lists) if lists else runs_of(base, [base.method])
    return _run(with_seeds(points, seeds), out, simulate, options, swept=tuple(lists))


def _run(
    runs: dict[str, Settings],
    out: Path | str | None,
    simulate: bool,
    options: Mapping[str, Any] | None,
    swept: Sequence[str] = (),
) -> Result:
    how = run_options(simulate, options)
    folder = Path(tempfile.mkdtemp(prefix="palsgd-")) if out is None else check_path("out", out)
    failed: Mapping[str, str | None] = {}
    try:
        run_all(runs, folder, how, swept)
    except FailedRunsError as error:
        failed = error.reasons
        warnings.warn(str(error), stacklevel=3)
    result = Result(folder, failed)
    if out is None:
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result


def run_options(simulate: bool, options: Mapping[str, Any] | None) -> Options:
    """How runs are done, as the functions of this module and `tune` take it."""
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(
            f"options={in_error(options)} must be a mapping, such as {{'quiet': False}}"
        )
    given = {"quiet": True, **(options or {})}
    known = [each.name for each in fields(Options) if each.name != "simulate"]
    for name in given:
        check_choice("an option", name, known)
    return Options(simulate=simulate, **given)


def method_list(methods: Any) -> Sequence[str]:
    """The names of methods that are given as a list, or as text with commas; None: the usual."""
    if methods is None:
        return default_names()
    return [name.strip() for name in methods.split(",")] if isinstance(methods, str) else methods


def _figures(line: Line) -> dict[str, Any]:
    return {"lr_now" if key == "lr" else key: value for key, value in line.items()}


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | range)
