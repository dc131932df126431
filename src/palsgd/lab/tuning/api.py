"""`palsgd tune` from Python."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palsgd import references
from palsgd.lab import workloads
from palsgd.lab.methods import default_names, whole_names
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.run_set import Options, check_folder
from palsgd.lab.settings import Settings
from palsgd.lab.tuning.record import record_of, sentences
from palsgd.lab.tuning.tuned_file import read_tuned, tuned_settings, write_tuned
from palsgd.lab.tuning.tuner import Search, run_search

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Tuning:
    """What tuning chose. `path` is the file for `palsgd compare --tuned`."""

    path: Path
    runs: Path  # the folder of all trials
    record: dict[str, Any]

    @property
    def verdicts(self) -> list[str]:
        """A sentence for each method: its settings, its loss on the held out data, and values at
        the edge of what was searched."""
        return sentences(self.record)

    @property
    def frame(self) -> "pandas.DataFrame":
        """One row for each run and evaluation."""
        import pandas

        rows = []
        for config in sorted(self.runs.glob("*/config.yaml")):
            folder = RunFolder(config.parent)
            settings = {"run": folder.path.name, **folder.config()}
            rows += [settings | line for line in folder.lines() if "loss" in line]
        return pandas.DataFrame(rows)

    def settings(self, method: str, base: Settings | None = None) -> Settings:
        """Those of a method, on top of `base`; by default the recipe's, evaluated on the test
        set."""
        return tuned_settings(self.path, method, base or workloads.recipe(self.record["recipe"]))

    def report(self, path: Path | str) -> Path:
        """A page about all trials."""
        from palsgd.lab.report import write_report

        return write_report([self.runs], Path(path))


def tune(
    workload: str,
    methods: Sequence[str] | None = None,
    *,
    trials: int = 16,
    seeds: int = 4,
    out: Path | str | None = None,
    simulate: bool = True,
    data: str | None = None,
    download: bool = False,
    device: str = "auto",
    force: bool = False,
    resume: bool = False,
    quiet: bool = True,
    **settings: Any,
) -> Tuning:
    """Choose settings for each method by equally many trials with equally many gradient examples,
    on training data that are held out.

    Args:
        workload: a workload or recipe. Its `SEARCH` says what is tried.
        methods: their names; by default the paper's four.
        trials: points of the search space for each method.
        seeds: with which the two best points of a method are confirmed.
        out: the file to write, by default `runs/NAME-TIME/tuned.yaml`; trials go into a folder
            beside it.
        simulate: all workers in this process; False: real processes.
        data, download, device, force, resume, quiet: as on the command line.
        **settings: any settings, which are then not searched.

    Raises:
        ValueError: a setting is wrong, or `out` is in use without `force` or `resume`.

    Example:
        palsgd.lab.tune("digits", ["ddp", "palsgd"], trials=8, seeds=2, out="tuned.yaml")
    """
    methods = default_names() if methods is None else whole_names(methods)
    base = workloads.recipe(workload).changed(settings)
    name = f"{references.short(workload)}-tune-{time.strftime('%Y%m%d-%H%M%S')}"
    options = Options(
        simulate=simulate, data=data, download=download, device=device, force=force,
        resume=resume, quiet=quiet,
    )  # fmt: skip
    return run_tuning(
        workload, base, methods, Path(out or Path("runs") / name / "tuned.yaml"),
        options, trials=trials, seeds=seeds, given=settings,
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
    write_tuned(out, record_of(*run_search(search, runs, options)))
    return Tuning(out, runs, read_tuned(out))


def runs_beside(out: Path) -> Path:
    """The folder of the trials of a tuned.yaml."""
    if out.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--out {out} is no YAML file; give for instance {out}/tuned.yaml")
    return out.with_name(f"{out.stem}-runs")
