"""The paper's small-CNN study: four methods, 4 to 64 workers, simulated on one device.

    python examples/small_cnn.py --data PATH_TO_CIFAR10 --out small_cnn.json

Prints test accuracy by method and number of workers. Every method sees the same data, seeds and
number of steps per worker: `--epochs` passes over the training set, shared among the workers.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import palsgd
from palsgd.lab.data import cifar10

METHODS = ("ddp", "localsgd", "diloco", "palsgd")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )  # fmt: skip


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def shard(images: Tensor, labels: Tensor, worker: int, args: Any, workers: int) -> Iterator:
    """A worker's batches, shuffled anew each epoch; equally many for every worker."""
    own = torch.arange(worker, len(labels), workers)[: len(labels) // workers]
    generator = torch.Generator().manual_seed(args.seed * 1000 + worker)
    while True:
        order = own[torch.randperm(len(own), generator=generator)].to(labels.device)
        for part in order.split(args.batch):
            if len(part) == args.batch:
                yield images[part], labels[part]


def method(name: str, args: Any) -> Callable[[nn.Module], palsgd.LocalOptimizer]:
    def build(model: nn.Module) -> palsgd.LocalOptimizer:
        inner = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        outer = palsgd.nesterov(lr=args.outer_lr)
        if name == "ddp":
            return palsgd.DDP(model, inner)
        if name == "localsgd":
            return palsgd.LocalSGD(model, inner, sync_every=args.sync_every)
        if name == "diloco":
            return palsgd.DiLoCo(model, inner, sync_every=args.sync_every, outer=outer)
        return palsgd.PALSGD(
            model, inner, sync_every=args.sync_every, outer=outer, mix_prob=args.mix_prob,
            mix_rate=args.mix_rate, seed=args.seed,
        )  # fmt: skip

    return build


def accuracy(images: Tensor, labels: Tensor) -> Callable[[nn.Module], float]:
    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            right = [
                (model(x).argmax(1) == y).sum()
                for x, y in zip(images.split(2000), labels.split(2000), strict=True)
            ]
        return float(sum(right)) / len(labels)

    return evaluate


def run(name: str, workers: int, data: Any, args: Any) -> dict[str, Any]:
    images, labels, test_images, test_labels = data
    steps = max(1, args.epochs * (len(labels) // workers // args.batch))
    start = time.perf_counter()
    result = palsgd.simulate(
        workers=workers, steps=steps, model=network, loss=loss, device=args.device,
        data=lambda k: shard(images, labels, k, args, workers), method=method(name, args),
        seed=args.seed, evaluate=accuracy(test_images, test_labels),
        evaluate_every=max(1, steps),  # at the end only
    )  # fmt: skip
    last = result.history[-1]
    return {
        "method": name,
        "workers": workers,
        "steps": steps,
        "gradient_steps": result.ledger.gradient_steps,
        "accuracy": last["metric"],
        "train_loss": last["loss"],
        "bytes_sent": result.ledger.bytes_sent,
        "engine": result.engine,
        "seconds": time.perf_counter() - start,
    }


def line(row: dict[str, Any]) -> str:
    sent = row["bytes_sent"] / 1e6
    return (
        f"K={row['workers']:<3} {row['method']:9} accuracy {row['accuracy']:.4f}, "
        f"loss {row['train_loss']:.4f}, {row['steps']} steps, {row['gradient_steps']} gradients, "
        f"{sent:.0f} MB sent, {row['seconds']:.0f} s ({row['engine']})"
    )


def arguments() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a folder with CIFAR-10")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="per worker")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--outer-lr", type=float, default=0.1)
    parser.add_argument("--sync-every", type=int, default=32)
    parser.add_argument("--mix-prob", type=float, default=0.25)
    parser.add_argument("--mix-rate", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=2023)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        train, test = (split.to(args.device) for split in cifar10.load(args.data))
    except ValueError as error:
        sys.exit(f"small_cnn: {error}")
    data = (
        cifar10.normalized(train.images), train.labels,
        cifar10.normalized(test.images), test.labels,
    )  # fmt: skip
    print(f"{len(train)} training and {len(test)} test images, {args.epochs} epochs", flush=True)
    rows: list[dict[str, Any]] = []
    for workers in args.workers:
        for name in args.methods:
            rows.append(run(name, workers, data, args))
            print(line(rows[-1]), flush=True)
            if args.out:
                settings = {k: str(v) for k, v in vars(args).items() if k not in ("out", "data")}
                args.out.write_text(
                    json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n"
                )


if __name__ == "__main__":
    main()
