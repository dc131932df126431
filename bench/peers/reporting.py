"""Tables of what bench/peers.py found: steps, seconds and ratios, each with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from contenders import CONTENDERS, TRAININGS

from palsgd.lab.judging.interval import Interval, of_mean
from palsgd.lab.judging.quality_curve import DRAWS, QualityCurve, bounds, crossing, resampled

WITHIN = 1.01  # the target: DDP's mean final loss at its middle length, give or take 1%
NOT_REACHED = "not reached"
# What is divided by what, and what that tells: seconds of the second over seconds of the first.
RATIOS = (
    ("palsgd", "diloco", "the method, neither coded nor overlapped"),
    ("palsgd-int4", "diloco-int4", "the method, both coded and overlapped"),
    ("diloco-int4", "diloco", "codec and overlap, for DiLoCo"),
    ("palsgd-int4", "palsgd", "codec and overlap, for PALSGD"),
    ("palsgd", "palsgd-no-pull", "the pull"),
    ("palsgd-int4", "ddp", "all of it against DDP"),
    ("palsgd-int4", "ddp-bf16", "all of it against DDP with its bf16 hook"),
    ("diloco-int4", "ddp-bf16", "the same for DiLoCo"),
)


@dataclass(frozen=True)
class Drawn:
    """A figure, and what it would have been with seeds and blocks drawn again. Draws are in the
    same order for all figures of a record, so that ratios are of paired draws. What is not reached
    takes infinitely long."""

    value: float
    draws: np.ndarray

    def __truediv__(self, other: "Drawn") -> "Drawn":
        with np.errstate(invalid="ignore"):  # nan where neither is reached
            draws = self.draws / other.draws
        return Drawn(math.nan if math.isinf(self.value) else self.value / other.value, draws)

    def __mul__(self, other: "Drawn") -> "Drawn":
        return Drawn(self.value * other.value, self.draws * other.draws)

    def words(self, form: str) -> str:
        """The value and its 95% interval; a draw that says nothing may lie at either end."""
        if not math.isfinite(self.value) or self.value == 0:
            return NOT_REACHED
        low, _ = bounds(np.where(np.isnan(self.draws), 0.0, self.draws))
        _, high = bounds(self.draws)
        value, low, high = (_written(each, form) for each in (self.value, low, high))
        return f"{value} [{low}, {high}]"


def _written(value: float, form: str) -> str:
    """Large numbers are written out: 2,160 and not 2.16e+03."""
    text = f"{value:{form}}"
    return f"{float(text):,.0f}" if "e+" in text else text


# -- steps to target -------------------------------------------------------------------------------


def curves(record: dict, training: str) -> dict[int, QualityCurve]:
    """Of each length."""
    found: dict[int, dict[int, list]] = {}
    for run in record["quality"]:
        if run["training"] == training:
            found.setdefault(run["steps"], {})[run["seed"]] = run["curve"]
    return {
        steps: QualityCurve(
            tuple(runs), np.array([[loss for _, loss in curve] for curve in runs.values()]),
            {"steps": np.array([clock for clock, _ in next(iter(runs.values()))], dtype=float)},
        )
        for steps, runs in sorted(found.items())
    }  # fmt: skip


def target(ddp_losses: np.ndarray) -> float:
    return WITHIN * float(ddp_losses.mean())


def ddp_losses(record: dict) -> np.ndarray:
    """DDP's final losses at its middle length, one for each seed."""
    ddp = curves(record, "ddp")
    return ddp[sorted(ddp)[len(ddp) // 2]].values[:, -1]


@dataclass(frozen=True)
class Steps:
    """The fewest steps to the target over a training's lengths, and with which of them."""

    length: int
    steps: Drawn
    resolution: float  # the distance of the evaluations between which it was reached


def steps_to_target(record: dict, training: str) -> Steps:
    """The target is a mean over seeds itself, so it is drawn again with them."""
    of_lengths, losses = curves(record, training), ddp_losses(record)
    found = {length: _crossed(each, target(losses)) for length, each in of_lengths.items()}
    length = min(found, key=lambda each: found[each])
    curve = of_lengths[length]
    draws = resampled(len(curve.seeds), DRAWS)
    drawn = np.array([_crossed(curve, target(losses[rows]), rows) for rows in draws])
    places = curve.costs["steps"]
    after = min(int(np.searchsorted(places, found[length])), len(places) - 1)
    resolution = float(places[after] - places[after - 1]) if after else math.nan
    return Steps(length, Drawn(found[length], drawn), resolution)


def _crossed(curve: QualityCurve, level: float, rows: np.ndarray | None = None) -> float:
    """Between two evaluations by a straight line; infinite if it never is."""
    found = crossing(curve.mean(rows), curve.costs["steps"], np.array([level]))[0]
    return math.inf if math.isnan(found) else float(found)


# -- seconds ---------------------------------------------------------------------------------------


def step_seconds(record: dict, rate: str, name: str) -> Drawn:
    blocks = np.array(record["pace"][rate][name]["step_s"])
    # Not the stream that seeds are drawn from: with as many blocks as seeds they would go together.
    random = np.random.default_rng([1, len(blocks)])
    chosen = random.integers(0, len(blocks), (DRAWS, len(blocks)))
    return Drawn(float(blocks.mean()), blocks[chosen].mean(axis=1))


def time_to_target(record: dict, rate: str, name: str) -> Drawn:
    return steps_to_target(record, CONTENDERS[name].training).steps * step_seconds(
        record, rate, name
    )


def taking_part(record: dict) -> list[str]:
    """Contenders with figures of both kinds."""
    trained = {run["training"] for run in record.get("quality", [])}
    timed = [set(each) for each in record.get("pace", {}).values()]
    there = set.intersection(*timed) if timed else set()
    return [name for name in CONTENDERS if name in there and CONTENDERS[name].training in trained]


# -- tables ----------------------------------------------------------------------------------------


def report(record: dict) -> str:
    parts = []
    if "tuning" in record:
        parts.append(tuning_table(record))
    if "quality" in record:
        parts.append(quality_table(record))
    if taking_part(record):
        parts += [summary_table(record), ratio_table(record)]
        parts += [pace_table(record, rate) for rate in record["pace"]]
    return "\n\n".join(parts)


# The README's rows: what a user would pick instead, and the best of ours.
SHORT = ("ddp", "ddp-bf16", "post-local", "torchft", "diloco", "palsgd", "palsgd-int4")


def short_table(record: dict) -> str:
    return summary_table(record, SHORT)


def summary_table(record: dict, wanted: Sequence[str] = tuple(CONTENDERS)) -> str:
    """Seconds to target over each link."""
    rates = list(record["pace"])
    names = [name for name in taking_part(record) if name in wanted]
    rows = [
        [
            CONTENDERS[name].label,
            *(time_to_target(record, rate, name).words(".3g") for rate in rates),
        ]
        for name in names
    ]  # fmt: skip
    head = f"seconds to {WITHIN:g} x DDP's loss, {seeds(record)} seeds, 95% intervals"
    return markdown([head, *rates], rows)


def ratio_table(record: dict) -> str:
    """Who is how many times as fast, and what that tells."""
    rates, there = list(record["pace"]), taking_part(record)
    rows = [
        [f"{CONTENDERS[own].label} against {CONTENDERS[other].label}", tells,
         *((time_to_target(record, rate, other) / time_to_target(record, rate, own)).words(".2f")
           for rate in rates)]
        for own, other, tells in RATIOS if own in there and other in there
    ]  # fmt: skip
    return markdown(["times as fast", "what it tells", *rates], rows)


def quality_table(record: dict) -> str:
    rows = []
    for name in TRAININGS:
        for length, curve in curves(record, name).items():
            final = of_mean(curve.values[:, -1].tolist())
            best = steps_to_target(record, name)
            steps = f"{best.steps.words('.0f')}; evaluated every {best.resolution:.0f}"
            chosen = best.length == length
            rows.append([name, str(length), _interval(final), steps if chosen else ""])
    columns = ["training", "length", f"final loss, {seeds(record)} seeds", "steps to target"]
    return f"target {target(ddp_losses(record)):.4f}\n\n" + markdown(columns, rows)


def tuning_table(record: dict) -> str:
    """All trials; the chosen one first."""
    rows = []
    for name, each in record["tuning"].items():
        for trial in sorted(each["trials"], key=lambda one: one["loss"]):
            words = ", ".join(f"{key}={value}" for key, value in trial.items() if key != "loss")
            rows.append([name, words, f"{trial['loss']:.4f}"])
    return markdown(["training", "tried", "loss on the stories for tuning"], rows)


def pace_table(record: dict, rate: str) -> str:
    bare, rows = step_seconds(record, rate, "bare").value, []
    for name in taking_part(record):
        each, seconds = record["pace"][rate][name], step_seconds(record, rate, name)
        computing = bare * float(np.mean(each["gradient_share"]))
        rows.append([
            CONTENDERS[name].label,
            Drawn(1e3 * seconds.value, 1e3 * seconds.draws).words(".3g"),
            f"{max(0.0, 1 - computing / seconds.value):.0%}",
            f"{np.mean(each['bytes_per_step']) / 1e3:.1f}",
        ])  # fmt: skip
    return markdown([f"over {rate}", "ms/step", "of it not computing", "kB/step"], rows)


def seeds(record: dict) -> int:
    return len({run["seed"] for run in record["quality"]})


def _interval(found: Interval) -> str:
    bounds = f" [{found.low:.4f}, {found.high:.4f}]" if found.known else ""
    return f"{found.value:.4f}{bounds}"


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
