"""Where PALSGD beats DDP: 8 to 10,000 workers, 10 Mbit/s to 400 Gbit/s, 8 M to 70 B parameters."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from palsgd.cluster import Cluster, Work
from palsgd.lab.atomic import atomic_write
from palsgd.lab.plan.candidates import UNUSABLE
from palsgd.lab.plan.text import rate_words
from palsgd.lab.report.canvas import MUTED, drawing_style, publish
from palsgd.lab.report.styles import THEME

WORKERS = (8, 64, 512, 2048, 10_000)
RATES = (1e7, 1e8, 1e9, 1e10, 1e11, 4e11)
MODELS = {"8 M": 8e6, "125 M": 1.25e8, "7 B": 7e9, "70 B": 7e10}
H, P = 64, 0.1
BUCKETS = (25.0, 1000.0)  # of DDP, in MiB: torch's, and one for links with much latency

TOKENS = 8 * 16_384  # of a worker's step
FLOPS = 8 * 400e12  # operations per second of a worker: eight GPUs at a realistic rate
LEAST_S = 0.05  # a step of a small model: launches and data
CV = 0.1  # of step times, from step to step

ASSUMED = (
    f"a worker is eight GPUs that get 400 TFLOP/s each done, with {TOKENS:,} tokens a step, so a "
    f"step takes {1e3 * LEAST_S:.0f} ms for small models, 1.7 s for 7 B, 17 s for 70 B; lognormal, "
    f"with a deviation of {CV:.0%}",
    "slowness changes from step to step, which H steps even out: of the gain that is left over "
    "fast links, all is this, and none would be left were the same workers always the slow ones",
    "20 ms of latency up to 1 Gbit/s, 1 ms at 10 Gbit/s, 10 us above; the cheaper of a ring and a "
    "tree",
    "DDP sends bf16 gradients, hidden behind the backward pass, in buckets of 25 MiB or 1 GiB, "
    "whichever is faster; PALSGD sends fp32, not hidden, not coded",
    f"H = {H}, p = {P}, equal gradients and as many of them as DDP needs: at equal steps PALSGD "
    f"gains {P:.0%} more",
)


@dataclass(frozen=True)
class Cell:
    model: str
    rate: float
    workers: int
    ddp_s: float  # per gradient
    palsgd_s: float
    utilisation: float  # the share of PALSGD's time in which it computes
    exchanging: float  # the share in which it communicates

    @property
    def faster(self) -> float:
        return self.ddp_s / self.palsgd_s

    @property
    def usable(self) -> bool:
        return self.exchanging <= UNUSABLE


def cells(
    workers: tuple[int, ...] = WORKERS, rates: tuple[float, ...] = RATES, rounds: int = 6
) -> Iterator[Cell]:
    """The cells of the study, by event simulation in which every step of every worker is drawn."""
    for model, size in MODELS.items():
        step = max(LEAST_S, 6 * size * TOKENS / FLOPS)
        for rate in rates:
            for number in workers:
                place = Cluster(
                    workers=number, step=step, rate=rate, latency=_latency(rate),
                    spread="lognormal", cv=CV,
                )  # fmt: skip
                ddp = min(_ddp_s(place, int(size), rounds * H, bucket) for bucket in BUCKETS)
                work = Work(parameters=int(size), sync_every=H, mix_prob=P)
                found = place.project(work, steps=rounds * H)
                each = found.time_s / found.gradient_steps
                computing, sending = found.compute_s, found.exchange_s
                yield Cell(
                    model, rate, number, ddp, each, computing / found.time_s, sending / found.time_s
                )


def _ddp_s(place: Cluster, size: int, steps: int, bucket_mb: float) -> float:
    work = Work.ddp(size, gradient_bytes=2, bucket_mb=bucket_mb)
    return place.project(work, steps=steps).time_s / steps


def _latency(rate: float) -> float:
    return 0.02 if rate <= 1e9 else 1e-3 if rate <= 1e10 else 1e-5


def scale_parts(folder: Path) -> Iterator[Table | Text]:
    """The study as tables; its figure and scale.json go into `folder`."""
    found = list(cells())
    folder.mkdir(parents=True, exist_ok=True)
    draw(found, folder)
    records: list[dict[str, Any]] = [
        vars(cell) | {"faster": cell.faster, "usable": cell.usable} for cell in found
    ]
    atomic_write(folder / "scale.json", json.dumps(records, indent=1) + "\n")
    yield Text(conclusion(found), style="bold")
    yield Text("DDP's time over PALSGD's, at equal gradients, and the share PALSGD computes")
    for model in MODELS:
        yield _table(model, found)
    yield Text(f"unusable: PALSGD itself communicates more than {UNUSABLE:.0%} of its time")
    yield Text("Assumed:")
    for text in ASSUMED:
        yield Text(f"- {text}")
    yield Text(f"figure: {folder / 'scale.png'}")


def _table(model: str, found: list[Cell]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"{model} parameters")
    for rate in RATES:
        table.add_column(rate_words(rate), justify="right")
    for number in WORKERS:
        row = [c for c in found if (c.model, c.workers) == (model, number)]
        table.add_row(f"{number:,} workers", *(_words(cell) for cell in row))
    return table


def _words(cell: Cell) -> str:
    if not cell.usable:
        return "unusable"
    return f"{cell.faster:.2f} ({cell.utilisation:.0%})"


def conclusion(found: list[Cell]) -> str:
    usable = [cell for cell in found if cell.usable]
    gains = [cell.faster for cell in usable]
    return (
        f"PALSGD with H = {H} is usable in {len(usable)} of {len(found)} cells, and there "
        f"{min(gains):.2g} to {max(gains):.2g} times as fast as DDP at equal gradients."
    )


def draw(found: list[Cell], folder: Path) -> None:
    with drawing_style():
        figure = Figure(figsize=(7.4, 4.1))
        title = (
            "Times as fast as DDP: PALSGD, H = 64, at equal gradients (by the model); darker: it "
            "computes more of the time"
        )
        figure.text(0.012, 0.985, title, va="top", size=8.6, weight="bold", color=THEME["ink"][0])
        for place, model in enumerate(MODELS):
            left, bottom = 0.085 + 0.475 * (place % 2), 0.555 - 0.46 * (place // 2)
            axes = figure.add_axes((left, bottom, 0.43, 0.335))
            _heat(axes, model, [cell for cell in found if cell.model == model])
            if place % 2:
                axes.set_yticklabels([])
        publish(figure, "scale", title, {}, folder)


def _figure(value: float) -> str:
    return f"{value:.{0 if value >= 9.95 else 1 if value >= 1.95 else 2}f}"


def _heat(axes: Axes, model: str, found: list[Cell]) -> None:
    shape = len(RATES), len(WORKERS)
    shares = np.array([cell.utilisation if cell.usable else 0.0 for cell in found])
    axes.imshow(
        shares.reshape(shape).T, origin="lower", aspect="auto", vmin=0.0, vmax=1.25,
        cmap=mpl.colormaps["Oranges"],
    )  # fmt: skip
    for place, cell in enumerate(found):
        column, row = divmod(place, len(WORKERS))
        ink = MUTED if not cell.usable else "white" if cell.utilisation > 0.85 else THEME["ink"][0]
        style = {"size": 7.2} if cell.usable else {"size": 5.6, "style": "italic"}
        text = _figure(cell.faster) if cell.usable else "unusable"
        axes.text(column, row, text, ha="center", va="center", color=ink, **style)
    axes.set_xticks(range(len(RATES)), [rate_words(rate).replace("bit/s", "") for rate in RATES])
    axes.set_yticks(range(len(WORKERS)), [f"{number:,}" for number in WORKERS])
    axes.set_title(f"{model} parameters", loc="left", size=7.6, pad=3)
    axes.set_xlabel("rate of a worker's link (bit/s)" if model in ("7 B", "70 B") else "")
    axes.set_ylabel("workers" if model in ("8 M", "7 B") else "")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
