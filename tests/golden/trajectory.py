"""Small runs whose every exchange is recorded, in the exact simulator and in real processes."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pairwise import Row, name_of, rows
from torch import Tensor, nn

import palsgd
from support.inside import Exchange, watch_exchanges

FOLDER = Path(__file__).parent / "trajectories"
REWRITE = bool(os.environ.get("PALSGD_REWRITE_GOLDEN"))
WORKERS = 2
INPUTS, OUTPUTS, EXAMPLES = 10, 4, 5
LR = {"sgd": 0.05, "adamw": 0.01}
COUNTS = ("gradient_steps", "warmup_steps", "mixing_steps", "syncs", "messages", "bytes_sent")
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3}  # of norms; one rounding of bf16 is up to 4e-3 of a value


def maker() -> str:
    """Of the processor."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")]
    return named[0] if named else platform.machine()


HERE = {
    "torch": torch.__version__,
    "cpu": torch.backends.cpu.get_cpu_capability(),
    "maker": maker(),
}

Setup = dict[str, Any]  # all that a run depends on, in JSON
Load = Callable[[nn.Module, palsgd.PALSGD, int], None]  # of a worker's model and optimizer


def setups() -> dict[str, Setup]:
    """By name. What is no factor, such as the length of the last round, changes from row to row."""
    return {name_of(number, row): _setup(number, row) for number, row in enumerate(rows())}


def _setup(number: int, row: Row) -> Setup:
    every = 6 + number % 3
    warmup = 4 if row["warmup"] == "warmup" else 0
    odd_end = (0, -3, 1)[number // 3 % 3]  # 1: a delayed sync is still under way there
    return row | {
        "inner": ("sgd", "adamw")[number % 2],
        "sync_every": every,
        "warmup_steps": warmup,
        "steps": warmup + 3 * every + odd_end,
    }


# -- the problem ---------------------------------------------------------------------------------


class Affine(nn.Module):
    """A linear layer made of products and sums. The kernel of a matrix product is chosen by the
    processor's model, and its bits with it; those of products and sums are torch's own."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True):
        super().__init__()
        start = spread(inputs * outputs, first=inputs).view(outputs, inputs)
        self.weight = nn.Parameter(start / inputs**0.5)
        self.bias = nn.Parameter(spread(outputs, first=outputs) / 10) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        products = (x[:, None, :] * self.weight).sum(dim=-1)
        return products if self.bias is None else products + self.bias


def spread(count: int, *, first: int) -> Tensor:
    """Numbers between -1 and 1 by integer arithmetic, so that every host has the same."""
    places = np.arange(count, dtype=np.uint64) + np.uint64(first * 1009)
    mixed = places * np.uint64(2654435761) % np.uint64(2**32)
    mixed = (mixed ^ (mixed >> np.uint64(15))) * np.uint64(2246822519) % np.uint64(2**32)
    return torch.tensor(mixed / 2**31 - 1, dtype=torch.float32)


def build_model(setup: Setup) -> nn.Module:
    normed = setup["norm"] == "batchnorm"
    # A bias before the norm would have a gradient of rounding errors, which AdamW makes large.
    layers: list[nn.Module] = [Affine(INPUTS, 20, bias=not normed)]
    if normed:
        layers.append(nn.BatchNorm1d(20))
    layers += [nn.ReLU(), Affine(20, 14), nn.ReLU(), Affine(14, OUTPUTS)]
    return nn.Sequential(*layers).to(_dtype(setup))


def _dtype(setup: Setup) -> torch.dtype:
    return torch.bfloat16 if setup["dtype"] == "bf16" else torch.float32


def batch(setup: Setup, worker: int, index: int) -> tuple[Tensor, Tensor]:
    first = 1 + 100 * worker + index
    x = spread(EXAMPLES * INPUTS, first=first).view(EXAMPLES, INPUTS)
    y = x[:, :OUTPUTS] - x[:, OUTPUTS : 2 * OUTPUTS].abs() + 0.2 * worker
    return x.to(_dtype(setup)), y.to(_dtype(setup))


def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    return (model(pair[0]) - pair[1]).square().mean()


def build_optimizer(setup: Setup, model: nn.Module) -> palsgd.PALSGD:
    lr = LR[setup["inner"]]
    if setup["inner"] == "sgd":
        inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr)
    rules: dict[str, Any] = {"bucket_mb": 600 / 2**20 if setup["buckets"] == "manybuckets" else 1}
    if setup["method"] == "ddp":
        return palsgd.DDP(model, inner, **rules)
    rules |= {"sync_every": setup["sync_every"], "warmup_steps": setup["warmup_steps"]}
    rules |= transport_rules(setup["transport"])
    if setup["method"] == "localsgd":
        return palsgd.LocalSGD(model, inner, **rules)
    rules["outer"] = palsgd.nesterov(lr=0.7, momentum=0.5)
    if setup["method"] == "diloco":
        return palsgd.DiLoCo(model, inner, **rules)
    mixing = {"mix_prob": 0.4, "mix_rate": 0.25 * 0.4 / lr, "draws": setup["draws"], "seed": 3}
    return palsgd.PALSGD(model, inner, **rules, **mixing)


def transport_rules(transport: str) -> dict[str, Any]:
    rules = {"int8": {"compress": "int8"}, "delay": {"delay": 2}, "fragments": {"fragments": 2}}
    if transport == "all":
        return {name: value for rule in rules.values() for name, value in rule.items()}
    return dict(rules.get(transport, {}))


# -- the runs ------------------------------------------------------------------------------------


def run_exact(setup: Setup, load: Load | None = None) -> dict[str, Any]:
    """In the simulator's exact engine, from what `load` puts into model and optimizer."""
    seen: list[list[Exchange]] = [[] for _ in range(WORKERS)]
    opts: list[palsgd.PALSGD] = []

    def method(model: nn.Module) -> palsgd.PALSGD:
        opt = build_optimizer(setup, model)
        worker = len(opts)
        opts.append(opt)
        if load is not None:
            load(model, opt, worker)
        watch_exchanges(opt, seen[worker].append)
        return opt

    def data(worker: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield batch(setup, worker, opts[worker].gradient_steps)

    result = palsgd.simulate(
        workers=WORKERS,
        steps=setup["steps"],
        model=lambda: build_model(setup),
        loss=loss,
        data=data,
        method=method,
        vectorize=False,
        progress=False,
    )
    assert result.optimizers == opts
    return together([report(opt, each) for opt, each in zip(opts, seen, strict=True)])


def run_process(
    setup: Setup, load: Load | None = None, after_step: Callable[..., None] | None = None
) -> dict[str, Any]:
    """This process's part of a run in several."""
    worker = dist.get_rank()
    model = build_model(setup)
    opt = build_optimizer(setup, model)
    if load is not None:
        load(model, opt, worker)
    seen: list[Exchange] = []
    watch_exchanges(opt, seen.append)
    opt.run_until(setup["steps"])
    while opt.clock < setup["steps"]:
        loss(model, batch(setup, worker, opt.gradient_steps)).backward()
        opt.step()
        opt.zero_grad()
        if after_step is not None:
            after_step(model, opt)
    return report(opt, seen)


def report(opt: palsgd.PALSGD, seen: list[Exchange]) -> dict[str, Any]:
    """What one worker did."""
    ledger = opt.ledger
    counts = {"rounds": opt.rounds} | {name: getattr(ledger, name) for name in COUNTS}
    assert counts["gradient_steps"] == opt.gradient_steps
    counts["model"] = model_hash(opt.model)
    return {"exchanges": [asdict(exchange) for exchange in seen], "final": counts}


def model_hash(model: nn.Module) -> str:
    """Of parameters and buffers."""
    parts = [t.contiguous().reshape(-1).view(torch.uint8) for t in model.state_dict().values()]
    return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()


def together(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The exchanges, which all workers must have seen alike, and the end of each worker."""
    for worker, each in enumerate(reports):
        assert each["exchanges"] == reports[0]["exchanges"], f"workers 0 and {worker} differ"
    return {"exchanges": reports[0]["exchanges"], "final": [each["final"] for each in reports]}


# -- the files -----------------------------------------------------------------------------------


def write(path: Path, head: dict[str, Any], run: dict[str, Any]) -> None:
    """One exchange per line, so that a change reads well in a diff."""
    path.parent.mkdir(exist_ok=True)
    fields = [f'"{name}": {json.dumps(value)}' for name, value in (head | HERE).items()]
    fields += [f'"{name}": {_lines(run[name])}' for name in ("exchanges", "final")]
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def _lines(entries: list[dict[str, Any]]) -> str:
    return "[" + ",".join(f"\n{json.dumps(entry)}" for entry in entries) + "\n]"


def differences(run: dict[str, Any], golden: dict[str, Any]) -> list[str]:
    """Where a run departs from a golden one, in words. Hashes count only where torch and processor
    are the recorded ones; norms, clocks, fragments and bytes count everywhere. The maker of the
    processor matters to AdamW alone: torch takes its square roots from MKL, which has others for
    others' processors."""
    matter = HERE.keys() - ({"maker"} if golden["setup"]["inner"] == "sgd" else set())
    hashes = all(golden[name] == HERE[name] for name in matter)
    tolerance = TOLERANCE[golden["setup"]["dtype"]]
    found = []
    for part in ("exchanges", "final"):
        if len(run[part]) != len(golden[part]):
            found.append(f"{len(run[part])} {part}, recorded {len(golden[part])}")
        for number, (mine, kept) in enumerate(zip(run[part], golden[part], strict=False)):
            where = f"{part}[{number}] (clock {mine.get('clock', 'at the end')})"
            found += [f"{where}: {line}" for line in _fields(mine, kept, hashes, tolerance)]
    return found


def _fields(
    mine: dict[str, Any], kept: dict[str, Any], hashes: bool, tolerance: float
) -> Iterator[str]:
    for name in mine | kept:
        here, there = mine.get(name), kept.get(name)
        if name == "norm" and None not in (here, there):
            alike = abs(here - there) <= tolerance * abs(there)
        elif name in ("sha256", "buffers", "model") and not hashes:
            alike = (here is None) == (there is None)
        else:
            alike = here == there
        if not alike:
            yield f"{name} is {here!r}, recorded {there!r}"
