"""K simulated workers on one device: the vectorized engine against the loop and the limit.

    python bench/simulate.py --out bench/results/simulate-h200.json
    python bench/simulate.py --device cpu --workers 4 8

The paper's small CNN (conv5x5 3-32, conv5x5 32-64, fc 4096-1024-10) under PALSGD with momentum SGD,
H = 32, p = 0.25. Per number of workers, in one run: a step of the exact engine (workers one after
another), of the vectorized engine as it is and compiled, and the limit: the joint batch forward
and backward through one model, plus the stacked weights, gradients and momenta moved once.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from common import machine, seconds, settle
from torch import nn

import palsgd
from palsgd.simulator.batches import Batches
from palsgd.simulator.exact import run_exact
from palsgd.simulator.program import fastest_convolutions
from palsgd.simulator.record import Recorder
from palsgd.simulator.vectorized import Vectorized

H, P = 32, 0.25


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )  # fmt: skip


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def method(model):
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return palsgd.PALSGD(model, inner, sync_every=H, mix_prob=P, mix_rate=1.0)


def batches(worker, size, device):
    generator = torch.Generator().manual_seed(worker)
    return [
        (
            torch.randn(size, 3, 32, 32, generator=generator).to(device),
            torch.randint(10, (size,), generator=generator).to(device),
        )
        for _ in range(4)
    ]


def vectorized_step(workers, size, device, compiled, rounds):
    """Seconds per tick of the clock over whole rounds, sync and mixing included."""
    torch.manual_seed(0)
    data = {k: batches(k, size, device) for k in range(workers)}
    sources = [Batches(data.__getitem__, k) for k in range(workers)]
    engine = Vectorized(small_cnn().to(device), workers, loss, sources, method, compiled)
    recorder = Recorder(None, 1, progress=False)
    recorder.begin(10**9)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with fastest_convolutions():
        engine.train(2 * H, recorder)  # compiles, chooses algorithms
        times, gradients = [], engine.ledgers[0].gradient_steps
        for r in range(rounds):
            settle(device)
            start = time.perf_counter()
            engine.train((3 + r) * H, recorder)
            settle(device)
            times.append(time.perf_counter() - start)
    taken = engine.ledgers[0].gradient_steps - gradients
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return sum(times) / taken, peak


def exact_step(workers, size, device):
    """Seconds per gradient step of all workers, one after another, over one round."""
    torch.manual_seed(0)
    data = {k: batches(k, size, device) for k in range(workers)}

    def run(steps):
        models = [small_cnn().to(device) for _ in range(workers)]
        for m in models[1:]:
            m.load_state_dict(models[0].state_dict())
        settle(device)
        start = time.perf_counter()
        result = run_exact(
            models=models, steps=steps, loss=loss, method=method, seed=0,
            batches=[Batches(data.__getitem__, k) for k in range(workers)],
            recorder=Recorder(None, 1, progress=False),
        )  # fmt: skip
        settle(device)
        return time.perf_counter() - start, result.ledger.gradient_steps

    (short, few), (long, many) = run(H), run(2 * H)
    return (long - short) / (many - few)


def limit(workers, size, device, repeats):
    """The joint batch through one model, and the time to move the stacked state once."""
    model = small_cnn().to(device)
    joint = [
        torch.cat(parts)
        for parts in zip(*(batches(k, size, device)[0] for k in range(workers)), strict=True)
    ]
    params = list(model.parameters())
    elements = workers * sum(p.numel() for p in params)
    # SGD with momentum reads weights, momenta and gradients and writes weights and momenta
    source, target = torch.zeros(2, elements, device=device)
    with fastest_convolutions():
        one = seconds(lambda: torch.autograd.grad(loss(model, joint), params), device, repeats)
    copy = seconds(lambda: target.copy_(source), device, repeats)
    return one, 2.5 * copy


def measure(workers, size, device, rounds, compiled):
    one, moved = limit(workers, size, device, 20)
    eager, peak = vectorized_step(workers, size, device, False, rounds)
    row = {
        "workers": workers,
        "batch": size,
        "loop_ms": exact_step(workers, size, device) * 1e3,
        "vectorized_ms": eager * 1e3,
        "joint_batch_ms": one * 1e3,
        "state_moved_once_ms": moved * 1e3,
        "peak_gb": peak / 1e9,
    }
    best = eager
    if compiled:
        fast, _ = vectorized_step(workers, size, device, True, rounds)
        row["compiled_ms"] = fast * 1e3
        best = min(best, fast)
    row["faster_than_loop"] = row["loop_ms"] / (best * 1e3)
    row["over_limit"] = best / (one + moved)
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(f"{machine(args.device)['device']}, torch {torch.__version__}, batch {args.batch}, TF32")
    columns = "workers, loop ms, vectorized ms, compiled ms, joint + state ms, x loop, x limit, GB"
    print(f"| {columns.replace(', ', ' | ')} |\n{'|---' * 8}|")
    rows = []
    for workers in args.workers:
        row = measure(workers, args.batch, args.device, args.rounds, not args.no_compile)
        rows.append(row)
        print(
            f"| {workers} | {row['loop_ms']:.1f} | {row['vectorized_ms']:.2f} | "
            f"{row.get('compiled_ms', float('nan')):.2f} | "
            f"{row['joint_batch_ms']:.2f} + {row['state_moved_once_ms']:.2f} | "
            f"{row['faster_than_loop']:.1f} | {row['over_limit']:.2f} | {row['peak_gb']:.2f} |",
            flush=True,
        )
        if args.out:
            args.out.write_text(
                json.dumps({"machine": machine(args.device), "rows": rows}, indent=2) + "\n"
            )


if __name__ == "__main__":
    sys.exit(main())
