"""What compression, overlap and fragments cost in loss: simulated workers, several seeds.

    python bench/quality.py --device cuda --processes 4 --data DIR --out quality.json

Four workers train GPT-Neo-8M on TinyStories, with every variant from the same first weights and on
the same batches of each seed. Figures are losses on the validation set and their ratio to plain
PALSGD's with the same seed; the spread is over seeds. With --tiny they train the tiny GPT-Neo of
`stories`, for which no data is needed.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from common import add_record_options, provenance, save, summary
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd.lab.workloads.stories import Stories
from palsgd.lab.workloads.tinystories_gptneo_8m import TinyStoriesGPTNeo8M

WORKERS, RISE = 4, 64
TINY = dict(warmup_steps=8, sync_every=8)
OUTER = dict(outer_lr=0.7, outer_momentum=0.5, warmup_steps=64)
PALSGD = dict(method="PALSGD", mix_prob=0.1, mix_rate=16.0, **OUTER)

VARIANTS: dict[str, dict[str, Any]] = {
    "DDP": dict(method="DDP"),
    "Local SGD": dict(method="LocalSGD", warmup_steps=64),
    "DiLoCo": dict(method="DiLoCo", **OUTER),
    "PALSGD": PALSGD,
    "independent draws": PALSGD | dict(draws="independent"),
    "bf16": PALSGD | dict(compress="bf16"),
    "int8": PALSGD | dict(compress="int8"),
    "int4": PALSGD | dict(compress="int4"),
    "topk:0.03": PALSGD | dict(compress="topk:0.03"),
    "delay 16": PALSGD | dict(delay=16),
    "delay 32": PALSGD | dict(delay=32),
    "4 fragments": PALSGD | dict(fragments=4),
    "4 fragments, delay 16": PALSGD | dict(fragments=4, delay=16),
    "int8, delay 16": PALSGD | dict(compress="int8", delay=16),
    "int4, delay 16": PALSGD | dict(compress="int4", delay=16),
    "int4, 4 fragments, delay 16": PALSGD | dict(compress="int4", fragments=4, delay=16),
}


def factor(steps: int, clock: int) -> float:
    """Of the learning rate: a linear rise, then half a cosine to zero."""
    if clock < RISE:
        return (clock + 1) / RISE
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (clock - RISE) / (steps - RISE))))


def optimizer(
    model: nn.Module, *, settings: dict[str, Any], steps: int, lr: float, seed: int
) -> Any:
    rules = dict(settings)
    kind = getattr(palsgd, rules.pop("method"))
    lr = rules.pop("lr", lr)
    if kind is not palsgd.DDP:
        rules.setdefault("sync_every", 32)
    if "outer_lr" in rules:
        rules["outer"] = palsgd.nesterov(rules.pop("outer_lr"), rules.pop("outer_momentum", 0.9))
    if kind is palsgd.PALSGD:
        rules["seed"] = seed
    inner = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    schedule = partial(LambdaLR, lr_lambda=partial(factor, steps))
    return kind(model, inner, max_norm=1.0, scheduler=schedule, **rules)


def run(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    workload = Stories if job["tiny"] else TinyStoriesGPTNeo8M
    task = workload(data=job["data"], device=job["device"], seed=job["seed"])

    def batches(worker: int) -> Any:
        index = 0
        while True:
            yield task.batch(worker=worker, workers=WORKERS, size=job["batch"], index=index)
            index += 1

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(torch.device(job["device"]).type, torch.bfloat16):
            return task.loss(model, batch)

    chosen = {name: job[name] for name in ("settings", "steps", "lr", "seed")}
    result = palsgd.simulate(
        workers=WORKERS,
        steps=job["steps"],
        model=task.model,
        loss=loss,
        data=batches,
        method=partial(optimizer, **chosen),
        vectorize=False,
        device=job["device"],
        seed=job["seed"],
        evaluate=lambda model: task.score(task.totals(model))[0],
        evaluate_every=lambda clock: clock >= job["steps"],
        progress=False,
    )
    losses = [line["metric"] for line in result.history if "metric" in line]
    return {
        "variant": job["variant"],
        "seed": job["seed"],
        "loss": losses[-1],
        "bytes_sent": result.ledger.bytes_sent,
        "syncs": result.ledger.syncs,
        "parameters": sum(p.numel() for p in result.model.parameters()),
    }


def table(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_variant: dict[str, dict[int, dict]] = {}
    for each in found:
        by_variant.setdefault(each["variant"], {})[each["seed"]] = each
    plain = by_variant.get("PALSGD", next(iter(by_variant.values())))
    rows = []
    for name, runs in by_variant.items():
        losses = [run["loss"] for run in runs.values()]
        ratios = [run["loss"] / plain[s]["loss"] - 1 for s, run in runs.items() if s in plain]
        rows.append(
            {
                "variant": name,
                "loss": statistics.mean(losses),
                "spread": statistics.stdev(losses) if len(losses) > 1 else 0.0,
                "over_plain": statistics.mean(ratios) if ratios else math.nan,
                "over_plain_spread": statistics.stdev(ratios) if len(ratios) > 1 else 0.0,
                "bytes_sent": next(iter(runs.values()))["bytes_sent"],
            }
        )
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", help="folder with TinyStories, or its tokens")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--variants", help="names separated by ';'; all if not given")
    parser.add_argument("--extra", help="more variants, as JSON: {name: settings}")
    add_record_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.batch, args.seeds, args.variants = 24, 1, 1, "PALSGD;int8"
    elif args.data is None:
        parser.error("--data is needed, a folder with TinyStories; --tiny does without")
    return args


def jobs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    variants = VARIANTS | json.loads(args.extra or "{}")
    names = args.variants.split(";") if args.variants else list(variants)
    if args.tiny:
        variants = {name: settings | TINY for name, settings in variants.items()}
    return [
        dict(variant=name, settings=variants[name], seed=seed, steps=args.steps, lr=args.lr,
             batch=args.batch, device=args.device, data=args.data, tiny=args.tiny)
        for seed in range(1, args.seeds + 1)
        for name in names
    ]  # fmt: skip


def results(jobs: list[dict[str, Any]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """As they come; those of --tiny are too short to be worth processes of their own."""
    if args.tiny:
        yield from map(run, jobs)
        return
    with torch.multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        yield from pool.imap_unordered(run, jobs)


def main() -> None:
    args = arguments()
    jobs = jobs_of(args)
    record = provenance(args.device, tiny=args.tiny) | {
        "workers": WORKERS,
        "steps": args.steps,
        "batch": args.batch,
        "lr": args.lr,
        "runs": [],
        "untimed": {},
    }
    for each in results(jobs, args):
        record["runs"].append(each)
        print(
            f"{len(record['runs'])}/{len(jobs)} {each['variant']}: {each['loss']:.4f}", flush=True
        )
        record["table"] = table(record["runs"])
        name = f"{each['variant']}, seed {each['seed']}"
        record["untimed"][name] = {key: each[key] for key in ("loss", "bytes_sent", "syncs")}
        save(record, args.out)
    for row in record["table"]:
        print(
            f"{row['variant']:32} {row['loss']:.4f} +- {row['spread']:.4f}   "
            f"{100 * row['over_plain']:+.2f}% +- {100 * row['over_plain_spread']:.2f}   "
            f"{row['bytes_sent'] / 1e6:.2f} MB"
        )
    print(summary(record))


if __name__ == "__main__":
    main()
