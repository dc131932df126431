"""What a search found, as the contents of tuned.yaml and as sentences."""

import math
from collections.abc import Mapping
from typing import Any

import palsgd
from palsgd import references
from palsgd.lab import workloads
from palsgd.lab.judging.interval import of_mean
from palsgd.lab.provenance import provenance
from palsgd.lab.tuning.budget import gradient_examples
from palsgd.lab.tuning.halving import FRESH_SEEDS, RULE, SEARCH_SEEDS, Outcome, rungs
from palsgd.lab.tuning.search_space import edges, shown
from palsgd.lab.tuning.tuner import Search, Trials

# Settings that are not searched and under which those that are were chosen
CONDITIONS = ("workers", "batch_size", "inner", "sharding", "compress", "delay", "fragments")


def record_of(trials: Trials, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    search = trials.search
    base = search.base
    searched = {field: shown(v) for space in search.spaces.values() for field, v in space.items()}
    _, most = rungs(search.trials, search.seeds)[-1]
    return {
        "workload": base.workload,
        "recipe": search.recipe,
        "palsgd": palsgd.__version__,
        **provenance(),
        "split": base.split,
        "judged_on": workloads.kind(base.workload).judged_on,
        "rule": RULE,
        "trials": search.trials,
        "seeds": {
            "search": [base.seed + SEARCH_SEEDS + i for i in range(most)],
            "confirmed": [base.seed + FRESH_SEEDS + i for i in range(search.seeds)],
        },
        "gradient_examples_of_a_run": search.gradients * base.workers * base.batch_size,
        "conditions": {name: getattr(base, name) for name in CONDITIONS},
        "search": searched,
        "methods": {
            method: _of_method(trials, method, outcome) for method, outcome in outcomes.items()
        },
    }


def _of_method(trials: Trials, method: str, outcome: Outcome) -> dict[str, Any]:
    search, winner = trials.search, outcome.winner
    losses = _losses(trials, method, winner, outcome)
    summaries = {trial: trials.summary(trial) for trial in outcome.trials}
    examples = [
        gradient_examples(summary, trials.settings(trial))
        for trial, summary in summaries.items()
        if summary is not None
    ]
    return {
        "settings": chosen_settings(search, method, winner),
        "loss": _loss(losses),
        "losses": losses,
        "edges": edges(search.spaces[method], search.point(method, winner)),
        "runs": len(outcome.trials),
        "failed": len(outcome.trials) - len(examples),
        "gradient_examples": sum(examples),
        "runner_up": _runner_up(trials, method, outcome),
    }


def chosen_settings(search: Search, method: str, number: int) -> dict[str, Any]:
    """The settings of a point and its length, in the unit of the recipe."""
    steps = search.settings(method, number).steps
    assert steps is not None
    if search.base.epochs is None:
        return search.point(method, number) | {"steps": steps}
    epochs = round(search.base.epochs * steps / search.gradients, 4)
    return search.point(method, number) | {"epochs": epochs, "whole_rounds": True}


def _runner_up(trials: Trials, method: str, outcome: Outcome) -> dict[str, Any] | None:
    for number in outcome.finalists[1:]:
        loss = _loss(_losses(trials, method, number, outcome))
        return {"settings": chosen_settings(trials.search, method, number), "loss": loss}
    return None


def _losses(trials: Trials, method: str, number: int, outcome: Outcome) -> dict[int, float]:
    """By fresh seed. The workload may be judged on something else."""
    seeds = outcome.judged[number]
    return {seed: trials.figure((method, number, seed), "final_loss") for seed in seeds}


def _loss(losses: Mapping[int, float]) -> dict[str, Any]:
    """The mean with its interval, and how far seeds deviate, as a share of it."""
    mean = of_mean(list(losses.values()))
    share = mean.deviation / mean.value if mean.value else math.nan
    return mean.as_dict() | {"deviation": round(share, 4) if math.isfinite(share) else None}


def sentences(record: Mapping[str, Any]) -> list[str]:
    """What was chosen, and what may be doubted, a line for each method."""
    found = []
    for method, own in record["methods"].items():
        values = ", ".join(f"{name}={value}" for name, value in own["settings"].items())
        text = f"{references.short(method)}: {values}: loss {_shown_loss(own['loss'])}"
        if own["edges"]:
            at = ", ".join(f"{field} at the {end}" for field, end in own["edges"].items())
            text += f"; at an edge of the search, better ones may lie beyond: {at}"
        if own["failed"]:
            text += f"; {own['failed']} of {own['runs']} runs failed"
        found.append(text)
    return found


def _shown_loss(loss: Mapping[str, Any]) -> str:
    if loss["low"] is None:
        return f"{loss['value']:.4g} (one seed)"
    text = f"{loss['value']:.4g} +- {(loss['high'] - loss['low']) / 2:.2g} (n = {loss['n']}"
    if loss["deviation"] is not None:
        text += f", seeds deviate by {100 * loss['deviation']:.2g}%"
    return f"{text})"
