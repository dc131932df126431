"""The command line."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from palsgd import units
from palsgd.lab.settings import METHODS, Settings, assignments

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train data-parallel over links too slow for an all-reduce at every step: compare "
    "methods, see what they gain.",
)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Prepare data.")
app.add_typer(data_app, name="data")
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure.")
app.add_typer(bench_app, name="bench")

# -- options that several commands take --------------------------------------------------------

Recipe = Annotated[
    str,
    typer.Argument(help="A workload or recipe; `palsgd recipes` lists them.", show_default=False),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(help="Any other settings, e.g. lr=0.01 warmup_steps=100.", show_default=False),
]
Workers = Annotated[int | None, typer.Option(help="How many.", show_default="the recipe's")]
Steps = Annotated[int | None, typer.Option(help="Of the clock.", show_default="the recipe's")]
SyncEvery = Annotated[
    str | None, typer.Option(help="H, or auto: by what a sync costs.", show_default="the recipe's")
]
MixProb = Annotated[float | None, typer.Option(help="p.", show_default="the recipe's")]
MixRate = Annotated[float | None, typer.Option(help="eta.", show_default="the recipe's")]
Seed = Annotated[int | None, typer.Option(show_default="the recipe's")]
Simulate = Annotated[
    bool, typer.Option("--simulate", help="All workers in this process, on one device.")
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Tell a simulation's time as on this cluster: rate, latency and other fields, e.g. "
        "100mbit,20ms,step=50ms, or a YAML file with them.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the results.", show_default="runs/NAME-TIME")
]
Data = Annotated[
    str | None,
    typer.Option(help="Folder with the data, for workloads that need files.", show_default="data"),
]
Download = Annotated[bool, typer.Option("--download", help="Fetch missing data.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Force = Annotated[bool, typer.Option("--force", help="Start over in a folder that is in use.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where a stopped run is.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only results.")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")]


def settings_from(recipe: str, changes: list[str] | None, **flags: Any) -> Settings:
    from palsgd.lab import workloads

    given = {name: value for name, value in flags.items() if value is not None}
    return workloads.recipe(recipe).changed(assignments(changes or []) | given)


# -- commands ----------------------------------------------------------------------------------


@app.command()
def demo(
    out: Out = None, quiet: Quiet = False, force: Force = False, resume: Resume = False
) -> None:
    """Four methods on handwritten digits, in real processes: a table and a report in a minute.

    Example: palsgd demo
    """
    _compare(settings_from("digits", None), METHODS, out, "demo", quiet=quiet, force=force,
             resume=resume)  # fmt: skip


@app.command()
def train(
    recipe: Recipe,
    changes: Changes = None,
    method: Annotated[str | None, typer.Option(help=f"One of {', '.join(METHODS)}.")] = None,
    workers: Workers = None,
    simulate: Simulate = False,
    cluster: OnCluster = None,
    steps: Steps = None,
    sync_every: SyncEvery = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
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
        recipe, changes, method=method, workers=workers, steps=steps, sync_every=sync_every,
        mix_prob=mix_prob, mix_rate=mix_rate, seed=seed, cluster=_cluster(cluster),
    )  # fmt: skip
    _run({settings.method: settings}, out or _new_folder(recipe), report, simulate=simulate,
         data=data, download=download, device=device, force=force, resume=resume,
         quiet=quiet)  # fmt: skip


@app.command()
def compare(
    recipe: Recipe,
    changes: Changes = None,
    methods: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(METHODS),
    workers: Workers = None,
    simulate: Simulate = False,
    cluster: OnCluster = None,
    steps: Steps = None,
    sync_every: SyncEvery = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
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
        recipe, changes, workers=workers, steps=steps, sync_every=sync_every, mix_prob=mix_prob,
        mix_rate=mix_rate, seed=seed, cluster=_cluster(cluster),
    )  # fmt: skip
    _compare(settings, _names(methods), out, recipe, report=report, simulate=simulate, data=data,
             download=download, device=device, force=force, resume=resume, quiet=quiet)  # fmt: skip


@app.command()
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
    _run(points, out or _new_folder(f"{recipe}-sweep"), report, swept=tuple(fields),
         simulate=simulate, data=data, download=download, device=device, force=force,
         resume=resume, quiet=quiet)  # fmt: skip


@app.command()
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
    _table(runs)
    typer.echo(f"report: {page}")
    if tensorboard is not None:
        typer.echo(f"TensorBoard files: {write_tensorboard(runs, tensorboard)}")


@app.command()
def explain(
    recipe: Recipe,
    changes: Changes = None,
    method: Annotated[str | None, typer.Option(help=f"One of {', '.join(METHODS)}.")] = None,
    workers: Workers = None,
    steps: Steps = None,
    sync_every: SyncEvery = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
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
        mix_prob=mix_prob, mix_rate=mix_rate, seed=seed,
    )  # fmt: skip
    console = Console()
    for part in explained(settings, rounds=rounds, first_round=first_round):
        console.print(part)


@app.command()
def theory(
    problem: Annotated[str, typer.Option(help="quadratic, logistic or bent.")] = "quadratic",
    dim: Annotated[int, typer.Option(help="Dimensions.")] = 4,
    smoothness: Annotated[float, typer.Option("--l", help="L.")] = 1.0,
    mu: Annotated[float, typer.Option(help="Strong convexity.")] = 0.5,
    sigma: Annotated[
        float | None,
        typer.Option(help="Noise of a gradient at x*.", show_default="2; logistic: the data's"),
    ] = None,
    spectrum: Annotated[
        str, typer.Option(help="Of the quadratic: geometric, linear or ends.")
    ] = "geometric",
    distance: Annotated[float, typer.Option(help="From the start to x*.")] = 1.0,
    workers: Annotated[int, typer.Option(help="K.")] = 4,
    steps: Annotated[int, typer.Option(help="T.")] = 6144,
    sync_every: Annotated[int, typer.Option(help="H.")] = 4,
    mix_prob: Annotated[float, typer.Option(help="p.")] = 0.5,
    lr: Annotated[float | None, typer.Option(help="alpha.", show_default="the theorem's")] = None,
    mix_rate: Annotated[
        float | None, typer.Option(help="eta.", show_default="the theorem's")
    ] = None,
    draws: Annotated[str, typer.Option(help="independent, balanced or shared.")] = "independent",
    seeds: Annotated[int, typer.Option(help="Runs at once; sweeps take a quarter.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of all of them together.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "cpu",
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Measure Theorem 2: error against the bound, exponents, other draws, p and eta, each lemma.

    Example: palsgd theory --problem logistic --mu 0.25 --workers 8 --out runs/theory
    """
    from palsgd.theory.command import run_theory
    from palsgd.theory.terminal import show

    results, page = run_theory(
        problem=problem, dim=dim, mu=mu, smoothness=smoothness, sigma=sigma, curvatures=spectrum,
        distance=distance, workers=workers, steps=steps, sync_every=sync_every,
        mix_prob=mix_prob, lr=lr, mix_rate=mix_rate, draws=draws, seeds=seeds, seed=seed,
        device=device, out=out or _new_folder("theory"), force=force, quiet=quiet,
    )  # fmt: skip
    show(results)
    typer.echo(f"page: {page}")


@app.command()
def plan(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A recipe to measure; not needed with --step-ms and --parameters."),
    ] = None,
    workers: Workers = None,
    rate: Annotated[str, typer.Option(help="Of a worker's (or node's) link, each way.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="One way: milliseconds, or e.g. 50us.")] = "1",
    step_ms: Annotated[
        float | None, typer.Option(help="Of a gradient step.", show_default="measured")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="E.g. 8M or 70B.", show_default="the recipe's")
    ] = None,
    steps: Steps = None,
    mix_prob: MixProb = None,
    extra_steps: Annotated[
        float, typer.Option(help="The share of steps that local methods need beyond DDP's.")
    ] = 0.0,
    spread: Annotated[str, typer.Option(help="Of steps: constant, lognormal, heavy-tail.")] = (
        "constant"
    ),
    cv: Annotated[float, typer.Option(help="Deviation over mean of lognormal steps.")] = 0.1,
    straggler: Annotated[float, typer.Option(help="How much slower one worker is.")] = 1.0,
    per_node: Annotated[int, typer.Option(help="Workers that share a fast node.")] = 1,
    node_rate: Annotated[str, typer.Option(help="Inside a node.")] = "1200gbit",
    all_reduce: Annotated[str, typer.Option(help="auto, ring, tree, two-level, or gloo.")] = "auto",
    overlap: Annotated[
        float, typer.Option(help="Share of a step behind which DDP hides its all-reduces.")
    ] = 2 / 3,
    paper_clusters: Annotated[
        bool, typer.Option("--paper-clusters", help="The paper's clusters and speed-ups instead.")
    ] = False,
    scale_study: Annotated[
        bool, typer.Option("--scale-study", help="8 to 10,000 workers, 8M to 70B, instead.")
    ] = False,
    data: Data = None,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Say what pays on a cluster: H, overlap, compression, workers; time, bytes and memory.

    Example: palsgd plan --step-ms 50 --parameters 8M --rate 100mbit
    """
    from palsgd.lab.device import check_device
    from palsgd.lab.plan import command

    if paper_clusters:
        from palsgd.lab.plan.paper import paper_parts

        _print(paper_parts())
        return
    folder = out or _new_folder("plan")
    if scale_study:
        from palsgd.lab.plan.scale import scale_parts

        _print(scale_parts(folder))
        return
    check_device(device)
    settings = None if recipe is None else settings_from(recipe, None)
    number = workers or (4 if settings is None else settings.workers)
    cluster, task = command.prepare(
        settings, step_ms=step_ms, parameters=parameters, steps=steps, mix_prob=mix_prob,
        extra_steps=extra_steps, data=data, device=device, workers=number, rate=rate,
        latency=units.milliseconds("latency", latency, zero=True) / 1e3, spread=spread, cv=cv,
        straggler=straggler, per_node=per_node, node_rate=node_rate, all_reduce=all_reduce,
        overlap=overlap,
    )  # fmt: skip
    _print(command.plan(cluster, task, folder))


@app.command()
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
                      f"{each.mix_rate:g}", f"{each.inner} {each.lr:g}", length,
                      str(each.batch_size))  # fmt: skip
    console = Console()
    console.print(table)
    console.print("\nGrids, for palsgd sweep RECIPE GRID:")
    for name, fields in workloads.grids().items():
        console.print(
            f"  {name}: " + "; ".join(f"{k} = {', '.join(map(str, v))}" for k, v in fields.items())
        )


@data_app.command()
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

    tokens.prepare(source, destination, tokenizer or source, _reporter(quiet))
    typer.echo(f"tokens: {destination}")


@bench_app.command()
def link(
    recipe: Annotated[
        str, typer.Argument(help="A workload or recipe; `palsgd recipes` lists them.")
    ] = "stories",
    changes: Changes = None,
    rate: Annotated[
        str, typer.Option(help="Of every worker's link, each way, e.g. 10mbit, 1gbit; or none.")
    ] = "100mbit",
    latency: Annotated[
        str, typer.Option(help="Of every packet, one way: milliseconds, or e.g. 50us.")
    ] = "0",
    loss: Annotated[float, typer.Option(help="Share of the packets that every link drops.")] = 0.0,
    slow_worker: Annotated[
        str | None, typer.Option(help="Another rate for the last worker's link, e.g. 10mbit.")
    ] = None,
    lossy: Annotated[
        float | None, typer.Option(help="Share of the packets that the last worker's link drops.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(METHODS),
    workers: Workers = None,
    steps: Annotated[int | None, typer.Option(help="Of the clock.", show_default="64")] = None,
    sync_every: Annotated[int | None, typer.Option(help="H.", show_default="16")] = None,
    mix_prob: MixProb = None,
    mix_rate: MixRate = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = "auto",
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Methods over emulated links: every worker in a network namespace behind a shaped interface.

    That takes Linux and root; elsewhere the times are projected from a run over loopback.

    Example: palsgd bench link stories --workers 4 --rate 100mbit --latency 20
    """
    from rich.console import Console

    from palsgd.lab import bench_link
    from palsgd.lab.links import unavailable
    from palsgd.lab.run_set import Options

    if "=" in recipe:  # no workload named, only settings
        recipe, changes = "stories", [recipe, *(changes or [])]
    settings = settings_from(
        recipe, bench_link.with_defaults(changes or []), workers=workers, steps=steps,
        sync_every=sync_every, mix_prob=mix_prob, mix_rate=mix_rate, seed=seed,
    )  # fmt: skip
    links = bench_link.links_of(workers=settings.workers, rate=rate, latency=latency, loss=loss,
                                slow=slow_worker, lossy=lossy)  # fmt: skip
    runs = {name: settings.changed({"method": name}) for name in _names(methods)}
    out = out or _new_folder(f"{recipe}-link")
    options = Options(data=data, download=download, device=device, force=force, quiet=quiet)
    bench_link.check(runs, out, options)
    if reason := unavailable():
        typer.echo(f"{reason}. Times are projected from a run over loopback instead.", err=True)
    try:
        result = bench_link.bench(runs, links, out, options)
    except KeyboardInterrupt:
        _fail(f"stopped; what is done is in {out}", 130)
    console = Console()
    for part in bench_link.tables(result):
        (console if console.is_terminal else Console(width=160)).print(part, highlight=False)
    typer.echo(f"results: {out}")


# -- what they share ---------------------------------------------------------------------------


def _cluster(spec: str | None) -> str | None:
    """The fields of a file in one line, so that a run's config says all."""
    if spec is None or not spec.endswith((".yaml", ".yml")):
        return spec
    import yaml

    if not Path(spec).is_file():
        raise ValueError(f"there is no file {spec}; give one, or fields: 100mbit,20ms,step=50ms")
    fields = yaml.safe_load(Path(spec).read_text())
    if not isinstance(fields, dict):
        raise ValueError(f"{spec} has no fields; write lines such as rate: 100mbit")
    return ",".join(f"{name}={value}" for name, value in fields.items())


def _names(methods: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in methods.split(","))


def _compare(
    settings: Settings, methods: tuple[str, ...], out: Path | None, name: str, *,
    report: bool = True, **options: Any,
) -> None:  # fmt: skip
    runs = {method: settings.changed({"method": method}) for method in methods}
    _run(runs, out or _new_folder(name), report, share_program=False, **options)


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

    _table([out])
    typer.echo(f"results: {out}")
    if report:
        typer.echo(f"report: {write_report([out], out / 'report.html')}")


def _stopped(out: Path) -> NoReturn:
    """After Ctrl-C: what is done is in the folder."""
    words = [word for word in sys.argv[1:] if word not in ("--force", "--resume")]
    named = any(word == "--out" or word.startswith("--out=") for word in words)
    flags = ["--resume"] if named else ["--out", str(out), "--resume"]
    again = shlex.join(["palsgd", *words, *flags])
    _fail(f"stopped; what is done is kept. Go on with: {again}", 130)


def _swept(values: list[str]) -> dict[str, list[Any]]:
    from palsgd.lab import workloads

    found: dict[str, list[Any]] = {}
    for text in values:
        if "=" not in text:
            found |= workloads.grid(text)
        else:
            found |= {name: value.split(",") for name, value in assignments([text]).items()}
    return found


def _new_folder(name: str) -> Path:
    from palsgd.lab.launcher import under_torchrun

    if under_torchrun():
        raise ValueError("under torchrun give --out DIR, the same on every machine")
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _table(folders: list[Path]) -> None:
    from rich.console import Console

    from palsgd.lab.report import terminal_table

    console = Console()
    # in a file or pipe nothing forces long names of runs to be folded
    wide = console if console.is_terminal else Console(width=160)
    wide.print(terminal_table(folders))


def _print(parts: Iterable[Any]) -> None:
    """Wide where nothing forces tables to be folded."""
    from rich.console import Console

    console = Console()
    wide = console if console.is_terminal else Console(width=200)
    for part in parts:
        wide.print(part, highlight=False)


def _reporter(quiet: bool) -> Callable[[str, int, int], None]:
    from palsgd.progress import ProgressBar

    bars: dict[str, ProgressBar] = {}

    def at(what: str, done: int, total: int) -> None:
        if what not in bars:
            bars[what] = ProgressBar(what, total, unit="", quiet=quiet)
        bars[what].at(done)
        if done >= total:
            bars[what].close()

    return at


# click's, or that of the click which newer versions of typer bring along
_UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Exit code 2 and one line for what the user can mend."""
    try:
        sys.exit(app(standalone_mode=False))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `palsgd` alone
            error.show()
            sys.exit(2)
        _fail(error.format_message(), 2)
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped", 130)
    except ValueError as error:
        _fail(str(error), 2)
    except (RuntimeError, OSError) as error:
        _fail(f"{error}", 1)


def _fail(message: str, code: int) -> NoReturn:
    """torchrun's processes all find the same fault in the input; one of each machine says so."""
    if code != 2 or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"palsgd: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
