"""Commands that train, and those that say something about runs: before, and from their files."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from palsgd.lab.cli.common_options import (
    Changes,
    Data,
    Device,
    Download,
    Force,
    MethodName,
    Methods,
    MixProb,
    MixRate,
    OnCluster,
    Out,
    Pull,
    Quiet,
    RanksPerWorker,
    Recipe,
    Report,
    Resume,
    Seed,
    Simulate,
    Steps,
    SyncEvery,
    Workers,
    cluster_fields,
    method_names,
    new_folder,
    settings_from,
)
from palsgd.lab.cli.output import fail, print_table, progress_reporter
from palsgd.lab.settings import Settings, assignments


def demo(
    out: Out = None, quiet: Quiet = False, force: Force = False, resume: Resume = False
) -> None:
    """Four methods on handwritten digits, in real processes: a table and a report in a minute.

    Example: palsgd demo
    """
    settings, methods = settings_from("digits", None), method_names(None)
    _compare(settings, methods, out, "demo", quiet=quiet, force=force, resume=resume)


def train(
    recipe: Recipe,
    changes: Changes = None,
    method: MethodName = None,
    workers: Workers = None,
    ranks_per_worker: RanksPerWorker = None,
    simulate: Simulate = False,
    cluster: OnCluster = None,
    steps: Steps = None,
    sync_every: SyncEvery = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
    pull: Pull = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = "auto",
    force: Force = False,
    resume: Resume = False,
    quiet: Quiet = False,
    report: Report = True,
) -> None:
    """Train one workload with one method, in processes started here, under torchrun, or simulated.

    Example: palsgd train stories --method palsgd --workers 2 --steps 500
    """
    settings = settings_from(
        recipe, changes, method=method, workers=workers, ranks_per_worker=ranks_per_worker,
        steps=steps, sync_every=sync_every, mix_prob=mix_prob, mix_rate=mix_rate, pull=pull,
        seed=seed, cluster=cluster_fields(cluster),
    )  # fmt: skip
    _run({settings.method: settings}, out or new_folder(recipe), report, simulate=simulate,
         data=data, download=download, device=device, force=force, resume=resume,
         quiet=quiet)  # fmt: skip


def compare(
    recipe: Recipe,
    changes: Changes = None,
    methods: Methods = None,
    workers: Workers = None,
    ranks_per_worker: RanksPerWorker = None,
    simulate: Simulate = False,
    cluster: OnCluster = None,
    steps: Steps = None,
    sync_every: SyncEvery = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
    pull: Pull = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = "auto",
    force: Force = False,
    resume: Resume = False,
    quiet: Quiet = False,
    report: Report = True,
) -> None:
    """Run several methods on the same data and seeds; the target is what DDP reaches.

    Example: palsgd compare stories --workers 4 --simulate --steps 1000
    """
    settings = settings_from(
        recipe, changes, workers=workers, ranks_per_worker=ranks_per_worker, steps=steps,
        sync_every=sync_every, mix_prob=mix_prob, mix_rate=mix_rate, pull=pull, seed=seed,
        cluster=cluster_fields(cluster),
    )  # fmt: skip
    _compare(settings, method_names(methods), out, recipe, report=report, simulate=simulate,
             data=data, download=download, device=device, force=force, resume=resume,
             quiet=quiet)  # fmt: skip


def sweep(
    recipe: Recipe,
    values: Annotated[
        list[str],
        typer.Argument(
            help="Fields and their values, e.g. sync_every=32,64,128 seed=2022,2023,2024; or the "
            "name of one of the paper's grids, e.g. cifar10-vgg16/H.",
            show_default=False,
        ),
    ],
    random: Annotated[
        int | None,
        typer.Option(help="So many random points; values may be ranges such as lr=1e-4..1e-1."),
    ] = None,
    simulate: Simulate = False,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = "auto",
    force: Force = False,
    resume: Resume = False,
    quiet: Quiet = False,
    report: Report = True,
) -> None:
    """Run a grid, or random points, over any fields. Finished points are not run again.

    Example: palsgd sweep digits method=ddp,palsgd seed=1,2,3 --simulate
    """
    from palsgd.lab.run_set import grid_of, random_points

    base, fields = settings_from(recipe, None), _swept(values)
    points = (
        grid_of(base, fields)
        if random is None
        else random_points(base, fields, random, seed=base.seed)
    )
    if not quiet:
        typer.echo(f"{len(points)} points", err=True)
    _run(points, out or new_folder(f"{recipe}-sweep"), report, swept=tuple(fields),
         simulate=simulate, data=data, download=download, device=device, force=force,
         resume=resume, quiet=quiet)  # fmt: skip


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that train, compare or sweep wrote.")],
    out: Annotated[Path | None, typer.Option(help="The page.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write TensorBoard event files into this folder.")
    ] = None,
) -> None:
    """Make one self-contained HTML page of any runs, with its figures as SVG and PNG beside it.

    Example: palsgd report runs/digits-20260101-120000
    """
    from palsgd.lab.report import write_report, write_tensorboard

    for folder in runs:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give one that palsgd compare wrote")
    page = write_report(runs, out or runs[0] / "report.html")
    print_table(runs)
    typer.echo(f"report: {page}")
    if tensorboard is not None:
        typer.echo(f"TensorBoard files: {write_tensorboard(runs, tensorboard)}")


def explain(
    recipe: Recipe,
    changes: Changes = None,
    method: MethodName = None,
    workers: Workers = None,
    steps: Steps = None,
    sync_every: SyncEvery = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
    pull: Pull = None,
    seed: Seed = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many to show.")] = 2,
    first_round: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
) -> None:
    """Show what a setting will do: who mixes when, gradients, bytes, beta, and warnings.

    Example: palsgd explain stories --sync-every 64 --mix-prob 0.1
    """
    from rich.console import Console

    from palsgd.lab.explain import explain as explained

    settings = settings_from(
        recipe, changes, method=method, workers=workers, steps=steps, sync_every=sync_every,
        mix_prob=mix_prob, mix_rate=mix_rate, pull=pull, seed=seed,
    )  # fmt: skip
    console = Console()
    for part in explained(settings, rounds=rounds, first_round=first_round):
        console.print(part)


def recipes() -> None:
    """List workloads, recipes and grids.

    Example: palsgd recipes
    """
    from rich.console import Console
    from rich.table import Table

    from palsgd.lab import workloads

    table = Table("recipe", "K", "H", "p", "eta", "inner", "length", "batch", box=None)
    for name, each in workloads.recipes().items():
        length = f"{each.epochs:g} epochs" if each.steps is None else f"{each.steps} steps"
        table.add_row(name, str(each.workers), str(each.sync_every), f"{each.mix_prob:g}",
                      _strength(each), f"{each.inner} {each.lr:g}", length,
                      str(each.batch_size))  # fmt: skip
    console = Console()
    console.print(table)
    console.print("\nGrids, for palsgd sweep RECIPE GRID:")
    for name, fields in workloads.grids().items():
        console.print(
            f"  {name}: " + "; ".join(f"{k} = {', '.join(map(str, v))}" for k, v in fields.items())
        )


def _strength(settings: Settings) -> str:
    """What sets the weight of a mixing step."""
    if settings.mix_rate is not None:
        return f"{settings.mix_rate:g}"
    return "the default" if settings.pull is None else f"pull {settings.pull:g}"


def prepare(
    source: Annotated[Path, typer.Argument(help="Folder with the texts, .txt or .txt.xz.")],
    destination: Annotated[Path, typer.Argument(help="Folder for the tokens.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with GPT-2's vocab.json and merges.txt.", show_default="SOURCE"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Turn TinyStories text into tokens that training maps into memory.

    Example: palsgd data prepare texts tokens --tokenizer gpt2-tokenizer
    """
    from palsgd.lab.data import tokens

    tokens.prepare(source, destination, tokenizer or source, progress_reporter(quiet))
    typer.echo(f"tokens: {destination}")


# -- what they share ---------------------------------------------------------------------------


def _compare(
    settings: Settings, methods: tuple[str, ...], out: Path | None, name: str, *,
    report: bool = True, **options: Any,
) -> None:  # fmt: skip
    runs = {method: settings.changed({"method": method}) for method in methods}
    _run(runs, out or new_folder(name), report, share_program=False, **options)


def _run(
    runs: dict[str, Settings], out: Path, report: bool, *, swept: tuple[str, ...] = (),
    **options: Any,
) -> None:  # fmt: skip
    from palsgd.lab.launcher import StoppedError, first_rank
    from palsgd.lab.run_set import FailedRunsError, Options, run_all

    failure = None
    try:
        run_all(runs, out, Options(**options), swept)
    except (StoppedError, KeyboardInterrupt):
        _stopped(out)
    except FailedRunsError as error:
        failure = error
    if first_rank():
        _show(out, report)
    if failure is not None:
        raise failure


def _show(out: Path, report: bool) -> None:
    """What the runs in a folder say, as far as they went."""
    from palsgd.lab.report import write_report

    print_table([out])
    typer.echo(f"results: {out}")
    if report:
        typer.echo(f"report: {write_report([out], out / 'report.html')}")


def _stopped(out: Path) -> NoReturn:
    """After Ctrl-C: say what is in the folder, and how to go on."""
    from palsgd.lab.kept import kept

    words = [word for word in sys.argv[1:] if word not in ("--force", "--resume")]
    named = any(word == "--out" or word.startswith("--out=") for word in words)
    flags = ["--resume"] if named else ["--out", str(out), "--resume"]
    again = shlex.join(["palsgd", *words, *flags])
    fail(f"stopped; {kept(out)}. Go on with: {again}", 130)


def _swept(values: list[str]) -> dict[str, list[Any]]:
    from palsgd.lab import workloads

    found: dict[str, list[Any]] = {}
    for text in values:
        if "=" not in text:
            found |= workloads.grid(text)
        else:
            found |= {name: value.split(",") for name, value in assignments([text]).items()}
    return found
