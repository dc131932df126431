"""Public functions and classes, called with arguments of which some are wrong."""

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fuzz_values import any_value, shown, text_value
from torch import nn

import palsgd
from palsgd import registry
from palsgd.cluster import Cluster, Work
from palsgd.lab.links import Link
from palsgd.lab.settings import FIELDS, Settings
from support.stepping import sgd

Case = tuple[str, Callable[[], str | None]]
BASE = Settings(workload="digits", steps=20)


# -- settings --------------------------------------------------------------------------------------


def settings_case(rng: random.Random, folder: Path) -> Case:
    names = [*FIELDS, "method_settings", "mu", "method.lr", "rate", "nothing"]
    as_text = rng.random() < 0.4
    value = text_value if as_text else any_value
    given = {rng.choice(names): value(rng) for _ in range(rng.choice((1, 1, 2, 3)))}
    how = rng.choice(("changed", "changed", "built", "read"))
    if rng.random() < 0.02:
        given = any_value(rng)
        how = "changed"

    def call() -> None:
        if how == "changed":
            found = BASE.changed(given)
        elif how == "built":
            found = Settings(**{"workload": "digits", **given})
        else:
            found = Settings.from_dict(BASE.as_dict() | given)
        Settings.from_dict(found.as_dict())

    return f"settings {how} {shown(given)}", call


# -- calls -----------------------------------------------------------------------------------------


def model() -> nn.Module:
    return nn.Linear(3, 2)


def loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return net(batch).square().mean()


def data(worker: int) -> list[torch.Tensor]:
    return [torch.ones(2, 3) * (1 + worker)]


def stepped(opt: Any) -> None:
    """A few steps, should the optimizer have been built."""
    net = opt.model
    for batch in palsgd.until(data(0), opt, steps=4):
        loss(net, batch).backward()
        opt.step()
        opt.zero_grad()
    opt.load_state_dict(opt.state_dict())


def optimizer(build: Callable, **given: Any) -> None:
    net = given.pop("model", model())
    right = sgd(net if isinstance(net, nn.Module) else model())
    inner = given.pop("inner", right)
    stepped(build(net, inner, **{"transport": palsgd.Alone(), **given}))


def built() -> Any:
    net = model()
    return palsgd.PALSGD(net, sgd(net), sync_every=2, transport=palsgd.Alone())


def method(net: nn.Module) -> Any:
    return palsgd.DiLoCo(net, sgd(net), sync_every=2)


def simulated(**given: Any) -> None:
    palsgd.simulate(**given)


def iterated(**given: Any) -> None:
    opt = given.pop("opt", built())
    for _, batch in zip(range(3), palsgd.until(opt=opt, **given), strict=False):
        if isinstance(batch, torch.Tensor) and batch.dim() == 2:
            loss(opt.model, batch).backward()
        opt.step()
        opt.zero_grad()


def made(**given: Any) -> None:
    palsgd.nesterov(**given)([nn.Parameter(torch.zeros(2))])


def projected(**given: Any) -> None:
    cluster = Cluster(workers=2, step=0.01, rate="1gbit")
    cluster.project(Work(parameters=100, sync_every=4), **given)


def loaded(**given: Any) -> None:
    opt = built()
    state = opt.state_dict()
    if "state_dict" in given:
        state = given["state_dict"]
    elif "name" in given:
        state = {**state, shown(given["name"]): given["value"]}
    opt.load_state_dict(state)


def listened(**given: Any) -> None:
    built().on(**given)


def attached(**given: Any) -> None:
    built().attach(**given)


def named(name: str) -> Callable:
    return lambda **given: optimizer(getattr(palsgd, name), **given)


def family(title: str) -> Callable:
    return lambda **given: optimizer(getattr(palsgd.methods, title), **given)


def lab(name: str) -> Callable:
    """A function of the lab up to where it would train."""

    def call(**given: Any) -> None:
        from palsgd.lab import run_set

        with (
            mock.patch.object(run_set, "_simulate", side_effect=Begun),
            mock.patch.object(run_set, "_launch", side_effect=Begun),
            mock.patch("urllib.request.urlopen", side_effect=OSError("no network")),
        ):
            try:
                getattr(palsgd.lab, name)(**given)
            except Begun:
                return

    return call


class Begun(BaseException):
    """Training would begin."""


PLAN = dict(seed=0, worker=1, round=2, sync_every=8, mix_prob=0.25, draws="balanced", stops=(2,))
SIMULATE = dict(
    workers=2, steps=4, model=model, loss=loss, data=data, method=method, vectorize="auto",
    device=None, seed=0, evaluate=None, evaluate_every=1, progress=False, compile=None,
    cluster=None, checkpoint=None,
)  # fmt: skip
CLUSTER = dict(
    workers=2, step="50ms", rate="100mbit", latency="1ms", slow_rate=None, spread="constant",
    cv=0.1, tail=2.5, straggler=1.0, stragglers=1, per_node=1, ranks_per_worker=1,
    node_rate="1gbit", node_latency="1us", all_reduce="auto", overlap=0.5, sync=0.0, mix=0.0,
)  # fmt: skip
OPTIONS = [
    name
    for name in inspect.signature(palsgd.PALSGD).parameters
    if name not in ("self", "model", "inner", "group", "transport")
]
LAB = dict(workload="digits", methods="ddp,palsgd", workers=2, seeds=1, steps=8)
WORK = dict(parameters=1000, sync_every=8, mix_prob=0.1, draws="balanced", warmup_steps=0,
            compress=None, delay=0, fragments=1, buffers=0, coding=0.0, gradient_bytes=4,
            sent_share=1.0, bucket_mb=25.0, accumulate=1)  # fmt: skip
# A function, its right arguments, and the names of others that may be given.
CALLS: dict[str, tuple[Callable, dict[str, Any], list[str]]] = {
    **{name: (named(name), {}, OPTIONS) for name in ("PALSGD", "DiLoCo", "LocalSGD", "DDP")},
    "LocalOptimizer": (
        named("LocalOptimizer"), {"sync_every": 2, "method": palsgd.Method()}, OPTIONS
    ),
    **{
        row.title: (family(row.title), {"sync_every": 2}, [*OPTIONS, *row.settings()])
        for row in registry.rows()
        if row.rounds
    },
    "round_plan": (palsgd.round_plan, PLAN, ["speeds"]),
    "until": (iterated, {"loader": data(0), "steps": 3}, ["epochs", "opt"]),
    "nesterov": (made, {"lr": 0.7, "momentum": 0.5}, []),
    "simulate": (simulated, SIMULATE, []),
    "simulate_many": (
        palsgd.simulate_many, SIMULATE | {"runs": [{}, {"seed": 1}], "steps": 2}, ["at_once"]
    ),
    "Auto": (palsgd.Auto, {"share": 0.05, "least": 8, "most": 64, "rounds": 4}, []),
    "Cluster": (Cluster, CLUSTER, []),
    "Cluster.parse": (Cluster.parse, {"text": "100mbit,20ms,step=50ms", "workers": 2}, []),
    "Cluster.from_fields": (Cluster.from_fields, {"fields": CLUSTER}, []),
    "Cluster.project": (projected, {"steps": 8, "seed": 0, "watched": (0,)}, ["until_s"]),
    "Work": (Work, WORK, []),
    "Link": (Link, {"rate": "100mbit", "delay_ms": 20, "loss": 0.01}, []),
    "Link.parse": (Link.parse, {"text": "100mbit,20ms"}, []),
    "worker_groups": (palsgd.worker_groups, {"ranks_per_worker": 1}, []),
    "load_state_dict": (loaded, {}, ["state_dict"]),
    "load_state_dict of changes": (loaded, {"name": "state", "value": {}}, []),
    "on": (listened, {"event": palsgd.events.Synced, "listener": print}, []),
    "attach": (attached, {"model": model()}, []),
    "lab.compare": (lab("compare"), LAB, ["tuned", "controls", "out", "options", "lr", "simulate"]),
    "lab.sweep": (
        lab("sweep"),
        {"workload": "digits", "lr": [0.1, 0.2], "steps": 8},
        ["method", "seed", "seeds", "out", "options", "sync_every"],
    ),
    "lab.tune": (lab("tune"), LAB | {"trials": 2}, ["out", "options", "lr", "simulate"]),
}  # fmt: skip


def calls_case(rng: random.Random, folder: Path) -> Case:
    name = rng.choice(list(CALLS))
    function, right, others = CALLS[name]
    given = dict(right)
    wrong = {}
    for _ in range(rng.choice((1, 1, 1, 2))):
        wrong[rng.choice([*right, *others, "model", "inner"][: len(right) + len(others) or 2])] = (
            text_value(rng) if rng.random() < 0.2 else any_value(rng)
        )
    if rng.random() < 0.03:
        wrong = {"nothing_of_the_kind": any_value(rng)}
    if given and rng.random() < 0.03:
        del given[rng.choice(list(given))]
    given |= wrong
    for option in ("out", "checkpoint"):
        if isinstance(given.get(option), str | Path):  # nothing is written elsewhere
            given[option] = (
                folder / "out" / str(given[option])[:40].replace("/", "_").replace("\0", "_")
            )
    return f"{name} {shown(wrong)}", lambda: function(**given) and None


KINDS: dict[str, Callable] = {"settings": settings_case, "calls": calls_case}
