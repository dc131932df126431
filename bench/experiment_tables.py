"""Tables of the experiments of lab/LOG.md, from lab/records; `tables.py` puts them into pages."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from markdown_table import markdown

REPOSITORY = Path(__file__).resolve().parents[1]
EXPERIMENTS = REPOSITORY / "lab" / "records"
TUNED_DIGITS = REPOSITORY / "src" / "palsgd" / "lab" / "workloads" / "tuned" / "digits.yaml"

Record = dict[str, Any]


def experiment(name: str) -> Record:
    return json.loads((EXPERIMENTS / name / "summary.json").read_text())


def titles(methods: Iterable[str]) -> list[str]:
    """The names that pages use."""
    from palsgd import registry

    return [registry.row(method).title for method in methods]


def tuned_digits() -> str:
    import yaml

    found = yaml.safe_load(TUNED_DIGITS.read_text())["methods"]
    losses = {name: each["loss"] for name, each in found.items()}
    ddp = losses["ddp"]["value"]
    rows = [
        (title, loss_of(loss), f"{loss['deviation']:.1%}",
         "" if loss["value"] == ddp else f"{loss['value'] / ddp - 1:+.0%}")
        for title, loss in zip(titles(losses), losses.values(), strict=True)
    ]  # fmt: skip
    columns = ("method", "loss, 95% interval", "deviation of seeds", "over DDP")
    return markdown(columns, rows)


def stories_run() -> str:
    found = experiment("2026-11-15-stories")
    methods = [name for name in found if "final_loss" in found[name]]
    rows = [
        (title, f"{run['final_loss']:.3f}", f"{run['gradient_steps']}", f"{run['wall_s']:.0f}",
         f"{run['bytes_sent'] / 1e6:.0f} MB")
        for title, run in zip(titles(methods), (found[name] for name in methods), strict=True)
    ]  # fmt: skip
    columns = ("method", "final loss", "gradients", "seconds over loopback", "sent by each worker")
    return markdown(columns, rows)


def small_cnn() -> str:
    found = experiment("2026-11-15-small-cnn")["rows"]
    methods = list(dict.fromkeys(row["method"] for row in found))
    rows = []
    for workers in sorted({row["workers"] for row in found}):
        runs = {row["method"]: row for row in found if row["workers"] == workers}
        accuracies = [f"{runs[name]['accuracy']:.1%}" for name in methods]
        share = runs["palsgd"]["gradient_steps"] / runs["ddp"]["gradient_steps"]
        rows.append((str(workers), str(runs["ddp"]["steps"]), *accuracies, f"{share:.0%}"))
    columns = ("workers", "steps", *titles(methods), "PALSGD's gradients over DDP's")
    return markdown(columns, rows)


def share(found: Record | None, digits: int = 2) -> str:
    """A share with its interval, in percent, if there is one. One pair has no interval; a run that
    diverged has no share."""
    if found is None:
        return ""
    if found["value"] is None:
        return "diverged"
    value, *bounds = (found[key] for key in ("value", "low", "high"))
    ends = ", ".join(f"{100 * end:+.{digits}f}" for end in bounds if end is not None)
    return f"{100 * value:+.{digits}f}%" + (f" [{ends}]" if ends else "")


def released_table(name: str, part: str) -> str:
    """Readings of PALSGD beside DiLoCo."""
    rows = [
        (READINGS.get(row["label"], row["label"]), f"{row['loss']['value']:.4f}",
         share(row["difference"], 1), share(row["over_plain"], 1))
        for row in experiment(name)["parts"][part]["settings"]
    ]  # fmt: skip
    return markdown(("what is mixed", "loss", "over DDP", "over DiLoCo"), rows)


def statistics_table(name: str, part: str) -> str:
    """Accuracy by method, shards and the policy for BatchNorm's statistics."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for row in experiment(name)["parts"][part]["settings"]:
        place = rows.setdefault((row["method"], row["given"]["sharding"]), {})
        place[row["given"]["buffers"]] = accuracy_of(row)
    columns = ("average", "local", "recompute")
    cells = [(*head, *(own[each] for each in columns)) for head, own in rows.items()]
    return markdown(("method", "shards", *columns), cells)


def accuracy_along(field: str, name: str, part: str) -> str:
    """Accuracy of each method, by K or H. DDP, which has no H, is beside every one."""
    rows: dict[int | None, dict[str, str]] = {}
    for row in experiment(name)["parts"][part]["settings"]:
        label = row["label"].split()[0]
        rows.setdefault(row["given"][field], {})[label] = accuracy_of(row)
    for_all = rows.pop(None, {})
    rows = {k: for_all | own for k, own in sorted(rows.items())}
    columns = list(dict.fromkeys(label for own in rows.values() for label in own))
    cells = [(str(k), *(own.get(each, "") for each in columns)) for k, own in rows.items()]
    return markdown(("H" if field == "sync_every" else field, *columns), cells)


def accuracies(name: str, part: str) -> str:
    """Accuracy and gradients of each method."""
    rows = [
        (row["label"], accuracy_of(row), f"{row['totals']['gradient_steps']:.0f}")
        for row in experiment(name)["parts"][part]["settings"]
    ]  # fmt: skip
    return markdown(("method", "accuracy", "gradients"), rows)


def slowmo_rows() -> str:
    """The rows of SlowMo's Table 1 beside ours."""
    published = {"ddp": 92.66, "localsgd": 91.73, "slowmo": 93.20}
    rows = []
    for row in experiment("2026-11-19-slowmo-table")["parts"]["published"]["settings"]:
        ours, theirs = 100 * row["metric"]["value"], published[row["label"]]
        rows.append((row["label"], f"{row['given']['lr']:g}", f"{theirs:.2f}%", f"{ours:.2f}%",
                     f"{ours - theirs:+.1f}"))  # fmt: skip
    columns = ("method", "learning rate", "published, 200 epochs", "ours, 100 epochs", "difference")
    return markdown(columns, rows)


def accuracy_of(row: Record) -> str:
    """One seed has no interval."""
    value, low, high = (row["metric"][key] for key in ("value", "low", "high"))
    return f"{100 * value:.1f}%" + ("" if low is None else f" [{100 * low:.1f}, {100 * high:.1f}]")


def losses(name: str, part: str) -> str:
    """Loss and gradients of each method, beside DDP and DiLoCo."""
    rows = [
        (row["label"], loss_of(row["loss"]),
         share(row["difference"], 1), share(row["over_plain"], 1),
         f"{row['totals']['gradient_steps']:.0f}")
        for row in experiment(name)["parts"][part]["settings"]
    ]  # fmt: skip
    return markdown(("method", "loss", "over DDP", "over DiLoCo", "gradients"), rows)


def loss_of(found: Record) -> str:
    """With its interval. One seed has none, and that of two says nothing."""
    if found["n"] < 3:
        return f"{found['value']:.4f}" + (", mean of two" if found["n"] == 2 else "")
    return "{value:.4f} [{low:.4f}, {high:.4f}]".format(**found)


def times_table(subject: str, varied: tuple[str, ...], *, over: str = "", **only: Any) -> str:
    """Projected seconds to DDP's quality at its end, or to the method's own, and how many times
    sooner than DDP has the same. `over`: the name of the paper's cluster, if there is one."""
    found = experiment(PROJECTED)["subjects"][subject]
    columns = [VARIED[name] for name in varied]
    rows: dict[str, list[tuple[str, ...]]] = {}  # by method, in the order of their first ones
    for row in found["rows"]:
        given = row["given"]
        if any(given[name] is not None and given[name] not in only[name] for name in only):
            continue
        cells = ["" if given[name] is None else f"{given[name]:g}" for name in varied]
        rows.setdefault(row["method"], []).append(
            (row["method"], *cells, _goal(row), *map(_sooner, row["links"].values()))
        )
    links = [over if "all_reduce" in link else _rate(link) for link in found["links"]]
    lines = [line for own in rows.values() for line in own]
    return markdown(("method", *columns, f"{found['quality']} to reach", *links), lines)


def _goal(row: Record) -> str:
    value = row["target"]["value"]
    shown = f"{100 * value:.1f}%" if row["target"]["on"] == "metric" else f"{value:.3f}"
    whose = "" if row["baseline"] else "DDP's, " if row["reached"] else "its own, "
    return f"{whose}{shown}"


def _sooner(found: Record) -> str:
    seconds, faster = found["seconds"], found["speed_up"]
    if seconds is None:
        return ""
    shown = f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if faster is None:
        return shown
    if faster["low"] is None:
        return f"{shown}, {_digits(faster['value'])} x"
    low = _digits(faster["low"]) if faster["low"] else "no bound"
    return f"{shown}, {_digits(faster['value'])} x [{low}, {_digits(faster['high'])}]"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _rate(link: str) -> str:
    rate = link.partition(",")[0]
    return f"{rate[:-4]} {rate[-4].upper()}bit/s"


def margins_table(subject: str, over: str) -> str:
    """Steps and seconds to what DDP ends with, against how much worse counts as being there."""
    found = experiment(PROJECTED)["subjects"][subject]
    rows = [
        (f"{100 * row['margin']:g}%", f"{row['target']['value']:.4f}", row["label"],
         *_steps(row), *map(_sooner, row["links"].values()))
        for row in found["margins"] if row["steps"] is not None
    ]  # fmt: skip
    links = [over if "all_reduce" in link else _rate(link) for link in found["links"]]
    columns = (
        "worse by",
        f"{found['quality']} to reach",
        "method",
        "steps",
        "share of DDP's",
        *links,
    )
    return markdown(columns, rows)


def _steps(row: Record) -> tuple[str, str]:
    """Its own, and as a share of DDP's."""
    shown, faster = f"{row['steps']:.0f}", row["steps_speed_up"]
    if faster is None:
        return shown, ""
    value, low, high = (faster[key] for key in ("value", "low", "high"))
    ends = f"[{1 / high:.2f}, {1 / low:.2f}]" if low else "[no bound]"
    return shown, f"{1 / value:.2f} {ends}"


def step_shares() -> str:
    """A step of PALSGD as a share of DDP's, against what the paper's figures vary."""
    rows = [
        (row["workload"], str(row["workers"]), str(row["H"]), f"{row['p']:g}",
         *(f"{share:.2g}" for share in row["share"].values()))
        for row in experiment(PROJECTED)["steps"]
    ]  # fmt: skip
    rows = list(dict.fromkeys(rows))  # the usual point is one of each figure
    columns = ("workload", "K", "H", "p", "the paper's cluster", "1 Gbit/s", "100 Mbit/s")
    return markdown(columns, rows)


def chaos() -> str:
    shown = {
        "injected": "injected",
        "survived": "went on to the twin's weights",
        "clean error": "ended in clear words, resumed to the twin's weights",
        "steps lost": "steps lost",
        "hang": "hangs",
        "wrong weights": "other weights",
        "unclean error": "unclean",
    }
    tallies = [run["tally"] for run in experiment("2026-11-16-chaos")["runs"]]
    return markdown([*shown.values()], [[str(tally[name]) for name in shown] for tally in tallies])


PROJECTED = "2026-11-19-times"
VARIED = {"workers": "K", "sync_every": "H", "mix_prob": "p", "pull": "pull"}
READINGS = {  # of PALSGD, as the labels of their settings say them
    "ddp": "DDP",
    "diloco": "nothing: DiLoCo",
    "palsgd": "the whole model",
    "palsgd draws=balanced discard batches=no": "the whole model",
    "palsgd draws=shared discard batches=yes": "the same with the code's coins and batches",
    "ReleasedCode": "the first tensor alone, as the code does",
    "ReleasedCode draws=balanced discard batches=no": "the first tensor alone, as the code does",
    "ReleasedCode draws=shared discard batches=yes": "the same with the code's coins and batches",
    "AsPrinted": "the whole model, never set to the anchor: Algorithm 1 as printed",
}
TABLES: dict[str, Callable[[], str]] = {
    "tuned-digits": tuned_digits,
    "stories-run": stories_run,
    "small-cnn": small_cnn,
    "released-digits": partial(released_table, "2026-11-17-released-code-digits", "digits"),
    "statistics-small": partial(
        statistics_table, "2026-11-17-batchnorm-digits", "small-statistics"
    ),
    "released-paper": partial(released_table, "2026-11-17-released-code", "paper"),
    "released-gentle": partial(released_table, "2026-11-17-released-code", "gentle"),
    "small-cnn-workers": partial(accuracy_along, "workers", "2026-11-17-small-cnn", "workers"),
    "small-cnn-interval": partial(
        accuracy_along, "sync_every", "2026-11-18-small-cnn-interval", "interval"
    ),
    "vgg16-interval": partial(accuracy_along, "sync_every", "2026-11-18-vgg16", "interval"),
    "resnet50": partial(accuracies, "2026-11-18-resnet50", "target"),
    "resnet50-steady": partial(accuracies, "2026-11-19-resnet50-steady", "steady"),
    "gpt-neo-8m-seeds": partial(losses, "2026-11-19-gpt-neo-8m-seeds", "seeds"),
    "gpt-neo-8m-k4": partial(losses, "2026-11-19-gpt-neo-8m-k4", "figure-k4"),
    "slowmo-table": slowmo_rows,
    "gpt-neo-125m": partial(losses, "2026-11-19-gpt-neo-125m-gentle", "gentle"),
    "times-cnn-interval": partial(times_table, "small-cnn-H", ("sync_every",)),
    "times-cnn-workers": partial(times_table, "small-cnn-K", ("workers",)),
    "times-stories": partial(times_table, "stories-H", ("sync_every",)),
    "times-stories-p": partial(
        times_table, "stories-p", ("sync_every", "mix_prob", "pull"), pull=(0, 0.5)
    ),
    "times-resnet50": partial(times_table, "resnet50", ("sync_every",), over="4 L40S, PCIe"),
    "times-8m": partial(times_table, "gpt-neo-8m", ("sync_every",), over="8 V100, NVLink"),
    "times-8m-seeds": partial(
        times_table, "gpt-neo-8m-seeds", ("sync_every",), over="8 V100, NVLink"
    ),
    "times-8m-k4": partial(margins_table, "gpt-neo-8m-k4", over="4 T4, PCIe"),
    "times-slowmo": partial(times_table, "slowmo-table", ("sync_every",)),
    "times-steps": step_shares,
    "chaos": chaos,
}
