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
    typer.Argument(help="Other settings, e.g. lr=0.01 warmup_steps=100.", show_default=False),
]
METHODS = ", ".join(registry.names())
MethodName = Annotated[str | None, typer.Option(help=f"The method: one of {METHODS}.")]
Methods = Annotated[
    str | None,
    typer.Option(
        help=f"Methods, separated by commas, out of {METHODS}.", show_default="the paper's four"
    ),
]
Workers = Annotated[
    int | None, typer.Option(help="Number of workers.", show_default="the recipe's")
]
RanksPerWorker = Annotated[
    int | None,
    typer.Option(
        help="Processes per worker. They share its batches and average every gradient.",
        show_default="the recipe's",
    ),
]
Steps = Annotated[int | None, typer.Option(help="Steps of the clock.", show_default="the recipe's")]
SyncEvery = Annotated[
    str | None,
    typer.Option(
        help="H, the steps between two syncs. auto chooses H by what a sync costs. 0:16,1000:64 "
        "changes it at these clocks. qsr:16:0.05 means max(16, (0.05 / lr)^2).",
        show_default="the recipe's",
    ),
]
MixProb = Annotated[
    float | None, typer.Option(help="p, the share of steps that mix.", show_default="the recipe's")
]
MixRate = Annotated[
    str | None,
    typer.Option(
        help="eta, the paper's strength of mixing. 0:16,1000:8 changes it at these clocks, "
        "cosine:16..0 along a cosine.",
        show_default="the recipe's",
    ),
]
Pull = Annotated[
    str | None,
    typer.Option(
        help="In place of --mix-rate: the share of a round's displacement that its mixing steps "
        "take back.",
        show_default="the recipe's",
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the first run.", show_default="the recipe's")
]
Seeds = Annotated[
    int,
    typer.Option(min=1, help="Number of seeds, counted from --seed. All methods have the same."),
]
Controls = Annotated[
    bool,
    typer.Option(
        "--controls",
        help="Also run controls, which tell the parts of a mixing method apart: no pull, the "
        "raised learning rate alone, equal gradients, and more.",
    ),
]
Tuned = Annotated[
    str | None,
    typer.Option(
        help="A file of palsgd tune with settings for each method. none gives all methods the "
        "recipe's.",
        show_default="the recipe's, if it comes with one and no settings are given",
    ),
]
Simulate = Annotated[
    bool, typer.Option("--simulate", help="Simulate all workers in this process, on one device.")
]
AtOnce = Annotated[
    int,
    typer.Option(
        min=1,
        help="With --simulate: simulate this many programs at once, in as many processes. "
        "Several fill a GPU that one leaves idle.",
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Give the time of a simulation as on this cluster: rate, latency and other fields, "
        "e.g. 100mbit,20ms,step=50ms, or a YAML file with them.",
        show_default=False,
    ),
]
OnLink = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="Project seconds onto this link: rate, latency and other fields of a cluster, e.g. "
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
Device = Annotated[
    str, typer.Option(help="cpu, cuda or auto. auto takes a GPU where there is one.")
]
Force = Annotated[bool, typer.Option("--force", help="Start over in a folder that is in use.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]
Elastic = Annotated[
    bool,
    typer.Option(
        "--elastic",
        help="With --resume: the number of workers may differ from the run's. It is --workers, or "
        "as many as torchrun has started.",
    ),
]
KeepBatch = Annotated[
    str,
    typer.Option(
        help="What stays the same if the number of workers changes: worker, the batch of each "
        "worker, or global, the batch of all together.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress, only results.")]
Restarts = Annotated[
    int,
    typer.Option(
        min=0,
        help="If a worker process fails, start all of them again from the last checkpoint, at most "
        "this many times. Under torchrun use its --max-restarts.",
    ),
]
GoOn = Annotated[
    bool,
    typer.Option(
        "--go-on",
        help="Go on without a worker process that dies. With --restarts it is started again and "
        "joins the others at a sync.",
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        min=1, help="With --go-on: end if fewer workers than this are left.", show_default="1"
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        help="With --go-on: seconds that a sync waits for late workers. They count from the "
        "arrival of its first worker.",
        show_default="none",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(help="Seconds that a worker waits for the others in one exchange."),
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
