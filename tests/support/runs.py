"""Made-up run folders that follow docs/files.md, for tests of what reads them."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import yaml

from palsgd.lab.collection import write_collection
from palsgd.lab.methods import default_names
from palsgd.lab.settings import Settings

METHODS = default_names()

# How fast and how far each method learns here: decay per thousand steps, loss at the end.
_LEARNS = {
    "ddp": (4.0, 0.20),
    "localsgd": (3.0, 0.32),
    "diloco": (4.2, 0.25),
    "palsgd": (5.6, 0.17),
}
_PARAMETERS = 120_000


def write_run(
    folder: Path,
    *,
    simulated: bool = False,
    finished: bool = True,
    floor: float | None = 0.08,
    summary: dict | None = None,
    **settings,
) -> Path:
    """A run of `steps` steps; `summary` adds to its record what only a comparison knows."""
    chosen = Settings(**{"workload": "digits", "steps": 2000, **settings})
    rng = np.random.default_rng([chosen.seed, METHODS.index(chosen.method), chosen.sync_every])
    lines, timeline = _train(chosen, rng, simulated=simulated)
    if not finished:
        lines = lines[: len(lines) // 2]
    write_files(folder, config(chosen, simulated=simulated, floor=floor), lines)
    if timeline:
        (folder / "timeline.jsonl").write_text(_jsonl(timeline))
    if finished:
        record = summary_of(chosen, lines, simulated=simulated) | (summary or {})
        (folder / "summary.json").write_text(json.dumps(record))
    return folder


def write_files(folder: Path, config: dict, lines: list[dict]) -> None:
    """What an unfinished run leaves: the same as a finished one, less summary.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    (folder / "metrics.jsonl").write_text(_jsonl(lines))


def write_comparison(folder: Path, *, methods=METHODS, **settings) -> Path:
    """As `palsgd compare` writes it."""
    chosen = {
        method: Settings(**{"workload": "digits", "steps": 2000, **settings, "method": method})
        for method in methods
    }
    for method in methods:
        write_run(folder / method, method=method, **settings)
    write_collection({m: s for m, s in chosen.items() if (folder / m / "summary.json").exists()},
                     folder)  # fmt: skip
    return folder


def write_sweep(folder: Path, *, field: str, values, seeds=(2023,), **settings) -> Path:
    """As `palsgd sweep` writes it."""
    for value in values:
        for seed in seeds:
            name = f"{field}={value},seed={seed}"
            write_run(folder / name, seed=seed, **{**settings, field: value})
    return folder


def config(settings: Settings, *, simulated: bool = False, floor: float | None = None) -> dict:
    return asdict(settings) | {
        "schema": 1,
        "palsgd": "0.2.0",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": False,
        "command": "palsgd compare digits",
        "torch": "2.11.0",
        "device": "AMD EPYC, 2 cores",
        "simulated": simulated,
        "engine": "vectorized" if simulated else "processes",
        "metric": "accuracy",
        "higher_is_better": True,
        "floor": floor,
        "parameters": _PARAMETERS,
    }


def line(step: int, *, metric: float | None = None, loss: float | None = None, **more) -> dict:
    """A line of metrics.jsonl with the simplest figures that agree with `step`."""
    plain = {
        "step": step, "gradient_steps": step, "time_s": step / 10, "bytes_sent": 1000 * step,
        "syncs": step, "train_loss": 1.0, "lr": 0.01, "distance": [0.0, 0.0], "agreement": None,
    }  # fmt: skip
    evaluated = (
        {} if metric is None else {"loss": 1 - metric if loss is None else loss, "metric": metric}
    )
    return plain | evaluated | more


def summary_of(settings: Settings, lines: list[dict], *, simulated: bool = False) -> dict:
    evaluated = [line for line in lines if line.get("metric") is not None]
    best = max(evaluated, key=lambda line: line["metric"])
    last = lines[-1]
    return {
        "method": settings.method, "workload": settings.workload,
        "workers": settings.workers, "seed": settings.seed, "simulated": simulated,
        "final_loss": evaluated[-1]["loss"], "final_metric": evaluated[-1]["metric"],
        "best_loss": best["loss"], "best_metric": best["metric"], "best_step": best["step"],
        "steps": last["step"], "gradient_steps": last["gradient_steps"], "syncs": last["syncs"],
        "bytes_sent": last["bytes_sent"], "wall_s": last["time_s"],
        "target": None, "steps_to_target": None, "gradient_steps_to_target": None,
        "time_to_target_s": None, "bytes_to_target": None,
        "metric_at_equal_gradients": None, "metric_at_equal_time": None,
        "waiting_s": 0.02 * (last["time_s"] or 0), "sync_s": 0.05 * (last["time_s"] or 0),
    }  # fmt: skip


def _train(settings: Settings, rng: np.random.Generator, *, simulated: bool):
    ddp = settings.method == "ddp"
    mixes = settings.mix_prob if settings.method == "palsgd" else 0.0
    every = max(1, settings.steps // 200) if ddp else settings.sync_every
    evaluations = {round(settings.steps * part / 20 / every) * every for part in range(1, 21)}
    speed, end = _LEARNS[settings.method]
    end += 0.02 * abs(math.log2(settings.sync_every / 64)) + 0.3 * (mixes - 0.05) ** 2
    end += 0.004 * rng.standard_normal()
    lines, gradients, time = [], 0, 0.0
    ticks = [*range(every, settings.steps + 1, every)]
    for step in ticks:
        gradients += every - int(rng.binomial(every, mixes))
        time = gradients * 0.010 + (step * 0.004 if ddp else step / every * 0.02)
        train = end + 2.1 * math.exp(-speed * step / 1000)
        away = (
            []
            if ddp
            else rng.uniform(0.8, 1.2, settings.workers) * (0.3 - 0.2 * step / settings.steps)
        )
        lines.append({
            "step": step, "gradient_steps": gradients, "time_s": round(time, 6),
            "bytes_sent": (step if ddp else step // every) * 4 * _PARAMETERS,
            "syncs": step if ddp else step // every,
            "train_loss": float(train * (1 + 0.06 * rng.standard_normal())), "lr": settings.lr,
            "distance": [0.0] * settings.workers if ddp else [float(x) for x in away],
            "agreement": None if ddp else float(0.55 + 0.3 * mixes + 0.04 * rng.standard_normal()),
        })  # fmt: skip
        if step in evaluations or step == ticks[-1]:
            loss = float(train + 0.05 + 0.004 * rng.standard_normal())
            lines[-1] |= {"loss": loss, "metric": float(math.exp(-loss / 3))}
    return lines, [] if simulated else _timeline(settings, rng, mixes)


def _timeline(settings: Settings, rng: np.random.Generator, mixes: float) -> list[dict]:
    """Two rounds, each until the last worker has arrived at the sync."""
    steps = 1 if settings.method == "ddp" else settings.sync_every
    spans, now = [], [3.0] * settings.workers
    for _ in range(2 if steps > 1 else 60):
        for worker in range(settings.workers):
            for _ in range(steps):
                mixing = rng.random() < mixes
                seconds = 2e-4 if mixing else 0.010 * rng.uniform(0.85, 1.25)
                spans.append(
                    _span(worker, "mixing" if mixing else "gradient", now[worker], seconds)
                )
                now[worker] = spans[-1]["end_s"]
        together = max(now)
        for worker in range(settings.workers):
            spans.append(_span(worker, "wait", now[worker], together - now[worker]))
            spans.append(_span(worker, "sync", together, 0.004 if steps == 1 else 0.05))
            now[worker] = spans[-1]["end_s"]
    return spans


def _span(worker: int, kind: str, start: float, seconds: float) -> dict:
    return {"worker": worker, "kind": kind, "start_s": start, "end_s": start + seconds}


def _jsonl(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
