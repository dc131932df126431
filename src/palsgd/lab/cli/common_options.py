"""Options that several commands take, and what they mean."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from palsgd import references, registry
from palsgd.lab.settings import Settings, assignments
from palsgd.lab.torchrun import under_torchrun

Recipe = Annotated[
    str,
    typer.Argument(help="A workload or recipe; `palsgd recipes` lists them.", show_default=False),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(help="Any other settings, e.g. lr=0.01 warmup_steps=100.", show_default=False),
]
METHODS = ", ".join(registry.names())
MethodName = Annotated[str | None, typer.Option(help=f"One of {METHODS}.")]
Methods = Annotated[
    str | None,
    typer.Option(
        help=f"Which, separated by commas, of {METHODS}.", show_default="the paper's four"
    ),
]
Workers = Annotated[int | None, typer.Option(help="How many.", show_default="the recipe's")]
RanksPerWorker = Annotated[
    int | None,
    typer.Option(
        help="Processes of each worker, which share its batches and average every gradient.",
        show_default="the recipe's",
    ),
]
Steps = Annotated[int | None, typer.Option(help="Of the clock.", show_default="the recipe's")]
SyncEvery = Annotated[
    str | None,
    typer.Option(
        help="H; or auto: by what a sync costs; or how it changes: 0:16,1000:64, or qsr:16:0.05 "
        "for max(16, (0.05 / lr)^2).",
        show_default="the recipe's",
    ),
]
MixProb = Annotated[float | None, typer.Option(help="p.", show_default="the recipe's")]
MixRate = Annotated[
    str | None,
    typer.Option(
        help="eta, or how it changes: 0:16,1000:8 (at steps) or cosine:16..0.",
        show_default="the recipe's",
    ),
]
Pull = Annotated[
    str | None,
    typer.Option(
        help="Instead of --mix-rate: the share of a round's displacement that its mixing steps "
        "take back.",
        show_default="the recipe's",
    ),
]
Seed = Annotated[int | None, typer.Option(show_default="the recipe's")]
Seeds = Annotated[
    int, typer.Option(min=1, help="So many, counted from --seed; the same for all methods.")
]
Controls = Annotated[
    bool,
    typer.Option(
        "--controls",
        help="Also run what tells the parts of a mixing method apart: no pull, the raised learning "
        "rate alone, equal gradients, and more.",
    ),
]
Tuned = Annotated[
    str | None,
    typer.Option(
        help="A file of palsgd tune, with settings for each method; none: the recipe's for all.",
        show_default="the recipe's, if it comes with one and no settings are given",
    ),
]
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
OnLink = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="Project seconds on this link: rate, latency and other fields of a cluster, e.g. "
        "100mbit,20ms or 100mbit,20ms,step=50ms.",
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
Elastic = Annotated[
    bool,
    typer.Option(
        "--elastic",
        help="With --resume: go on with --workers, or with as many as torchrun has started, though "
        "the run had another number.",
    ),
]
KeepBatch = Annotated[
    str,
    typer.Option(
        help="Whose batch stays the same where the number of workers changes: that of a worker, or "
        "the global one, which is that of all together.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only results.")]
Restarts = Annotated[
    int,
    typer.Option(
        min=0,
        help="If a worker process fails, start all of them again from the last checkpoint, at most "
        "so many times; under torchrun use its --max-restarts.",
    ),
]
GoOn = Annotated[
    bool,
    typer.Option(
        "--go-on",
        help="Go on without a worker process that dies; with --restarts it is started again and "
        "joins the others at a sync.",
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(min=1, help="With --go-on: end when fewer workers are left.", show_default="1"),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        help="With --go-on: seconds from the first worker's arrival at a sync after which it goes "
        "on without the others.",
        show_default="none",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        help="Seconds that a worker waits in one exchange for the others before it gives up."
    ),
]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")]


def settings_from(recipe: str, changes: list[str] | None, **flags: Any) -> Settings:
    from palsgd.lab import workloads

    given = {name: value for name, value in flags.items() if value is not None}
    import_method(given.get("method"), *(changes or []))
    return workloads.recipe(recipe).changed(assignments(changes or []) | given)


def is_elastic(
    elastic: bool, *, resume: bool, workers: int | None, changes: list[str] | None
) -> bool:
    """May a run that is resumed get another number of workers? Also where one is given with
    --resume, but not under torchrun, whose command stays the same however many there are."""
    given = workers is not None or "workers" in assignments(changes or [])
    return elastic or (resume and given and not under_torchrun())


def import_method(method: str | None, *changes: str) -> None:
    """Settings may be those of a user's own method, which must be known before they are read. It is
    given by an option, or as one of the changes."""
    words = [method] if method else []
    words += [word.removeprefix("method=") for word in changes if word.startswith("method=")]
    for name in (each for word in words for each in word.split(",")):
        if references.is_reference(name):
            registry.row(name)


def cluster_fields(spec: str | None) -> str | None:
    """The fields of a file in one line, so that a run's config says all."""
    if spec is None or not spec.endswith((".yaml", ".yml")):
        return spec
    from palsgd.lab.yaml_files import read_yaml

    fields = read_yaml(spec, fix="give lines such as rate: 100mbit, or 100mbit,20ms,step=50ms")
    return ",".join(f"{name}={value}" for name, value in fields.items())


def method_names(methods: str | None) -> tuple[str, ...]:
    """Those that are asked for; by default the ones whose rows say so. It is called before settings
    are read, which may be those of a user's own method."""
    from palsgd.lab.methods import default_names, whole_names

    if methods is None:
        return default_names()
    return whole_names(name.strip() for name in methods.split(","))


def new_folder(name: str, purpose: str = "") -> Path:
    if under_torchrun():
        raise ValueError("under torchrun give --out DIR, the same on every machine")
    return Path("runs") / f"{references.short(name)}{purpose}-{time.strftime('%Y%m%d-%H%M%S')}"
