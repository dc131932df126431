"""One of three workers is three times slower: who waits, and what is learned in equal time.

    python bench/uneven.py --out bench/results/uneven-2cores.json

Seconds and losses are measured apart, as no loss depends on a link. Seconds come from three gloo
processes whose gradients are sleeps, one of them three times as long; the methods take turns in
blocks. The library measures the speeds there, and rounds count after they are settled. Losses come
from the simulator with the same plans (speeds 1, 1 and 1/3): a small GPT-Neo on the stories of the
lab, with AdamW, clipping and a cosine. Every method has equally much time: as many steps as the
gradients of the slow worker allow, or, where nobody waits for it, those of the fast ones. Stated
before the runs: the margin is 1% of the loss, over five paired seeds; nothing is tuned. A second
table has what the raised learning rate of the slow worker does, at the ratios 3 and 10.
`--phases times` (or losses, or raised) does one part and adds it to the record.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import add_record_options, provenance, save, summary
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd.lab.data.stories import GRAMMAR
from palsgd.lab.judging.interval import relative_difference
from palsgd.lab.judging.verdict import judge
from palsgd.lab.models.gpt_neo import GPTNeo
from palsgd.lab.workloads.stories import Stories
from palsgd.methods.palsgd import PALSGDMethod
from palsgd.schedule import StepPace

WORKERS, P, LR, MARGIN = 3, 0.1, 3e-3, 0.01
H, TIMED_H = 16, 32  # of the runs whose loss is measured, and of those whose seconds are
SLOWNESS = 3  # of the last worker's gradients
SETTLED = (
    4  # the first round of a block that counts, if speeds are measured before; else the second
)
OUTER = palsgd.nesterov(0.7, 0.5)


@dataclass(frozen=True, kw_only=True)
class Weighted(palsgd.Method):
    """DiLoCo whose workers take steps in proportion to their speeds, at one learning rate, and are
    weighted by them (the dynamic local updates of asynchronous DiLoCo)."""

    def pace(self, worker: int, round: int, length: int, facts: palsgd.Facts) -> None:
        return None

    def payload(self, w: Any) -> palsgd.Payload:
        part = palsgd.Part("model", reduction="weighted")
        return palsgd.Payload(parts=(part,), weight=w.gradient_steps)


@dataclass(frozen=True, kw_only=True)
class Raised(PALSGDMethod):
    """PALSGD whose slower workers have another bound on their learning rate than the library's."""

    most: float = 1.0  # times the rate of the fastest worker

    def pace(
        self, worker: int, round: int, length: int, facts: palsgd.Facts
    ) -> Sequence[StepPace] | None:
        steps = super().pace(worker, round, length, facts)
        if steps is None:
            return None
        taken = self.plan(worker, round, length, facts).count(False) / length
        share = max(taken, self.gradient_share / self.most)
        return [step._replace(share=share) for step in steps]


@dataclass(frozen=True)
class How:
    """A way to train uneven workers."""

    build: Callable[..., Any]
    paced: bool = False
    gradient_share: float = 1.0  # of the fastest worker's steps

    def rules(self, sync_every: int, **rules: Any) -> dict[str, Any]:
        """Of its optimizer; DDP has none."""
        if self.build is palsgd.DDP:
            return {}
        return {"sync_every": sync_every, "draws": "paced" if self.paced else "balanced", **rules}

    def fast_steps(self, slowness: float) -> float:
        """The seconds of a step of the clock, in gradients of a fast worker."""
        return self.gradient_share * (1.0 if self.paced else slowness)


def rounds(model: nn.Module, inner: Any, *, method: palsgd.Method, **rules: Any) -> Any:
    return palsgd.LocalOptimizer(model, inner, method, OUTER, **rules)


PALSGD = partial(rounds, method=PALSGDMethod(mix_prob=P))
DILOCO = partial(rounds, method=palsgd.Method())
HOW = {
    "DDP": How(palsgd.DDP),
    "DiLoCo": How(DILOCO),
    "PALSGD": How(PALSGD, gradient_share=1 - P),
    "DiLoCo, steps and weights by speed": How(partial(rounds, method=Weighted()), paced=True),
    "DiLoCo, paced": How(DILOCO, paced=True),
    "PALSGD, paced": How(PALSGD, paced=True, gradient_share=1 - P),
}
RAISED = {
    "as the library does, at most 3 x": How(PALSGD, paced=True, gradient_share=1 - P),
    "not at all": How(partial(rounds, method=Raised(mix_prob=P)), True, 1 - P),
    "without a bound": How(partial(rounds, method=Raised(mix_prob=P, most=1e9)), True, 1 - P),
}


# -- seconds ---------------------------------------------------------------------------------------


def timed(how: How, seconds: float, counted: int, seed: int) -> dict[str, float]:
    """One block of one method: the seconds of a step in the rounds that are counted, and the share
    of them in which this worker computed no gradient."""
    torch.manual_seed(seed)
    model = SmallStories.model_of()
    inner = torch.optim.AdamW(model.parameters(), lr=LR)
    opt = how.build(model, inner, **how.rules(TIMED_H))
    noise = [torch.randn_like(p) for p in model.parameters()]
    before = SETTLED if how.paced else 1
    steps, first, began, computing = (before + counted) * TIMED_H, before * TIMED_H, 0.0, 0.0
    for _ in palsgd.until([0], opt, steps=steps):
        now = time.perf_counter()
        if not began and opt.clock >= first:
            began, computing, first = now, 0.0, opt.clock
        time.sleep(seconds)
        for p, grad in zip(model.parameters(), noise, strict=True):
            p.grad = grad * (1 + 0.1 * dist.get_rank())
        computing += time.perf_counter() - now
        opt.step()
    passed = time.perf_counter() - began
    return {
        "step_s": passed / (steps - first),
        "idle": 1 - computing / passed,
        "speed": (opt.ledger.speeds or [{"speeds": [1.0] * WORKERS}])[-1]["speeds"][-1],
    }


def timing_process(rank: int, store: str, args: argparse.Namespace, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=Path(store).as_uri(), rank=rank, world_size=WORKERS,
        timeout=timedelta(minutes=5),
    )  # fmt: skip
    seconds = args.gradient * (SLOWNESS if rank == WORKERS - 1 else 1)
    for block in range(args.blocks):
        for name, how in HOW.items():
            found = timed(how, seconds, args.rounds, seed=block)
            out.put({"rank": rank, "method": name, "block": block, **found})
    dist.destroy_process_group()


def times(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The blocks of all processes."""
    context = torch.multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        processes = [
            context.Process(target=timing_process, args=(rank, store, args, out))
            for rank in range(WORKERS)
        ]
        for process in processes:
            process.start()
        found = [out.get() for _ in range(WORKERS * args.blocks * len(HOW))]
        for process in processes:
            process.join()
    return found


def waiting_rows(blocks: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in HOW:
        fast = [b for b in blocks if b["method"] == name and b["rank"] < WORKERS - 1]
        slow = [b for b in blocks if b["method"] == name and b["rank"] == WORKERS - 1]
        idle = sorted(b["idle"] for b in fast)
        rows.append(
            {
                "method": name,
                "idle_of_fast": statistics.median(idle),
                "idle_of_fast_range": [idle[0], idle[-1]],
                "idle_of_slow": statistics.median(b["idle"] for b in slow),
                "step_s": statistics.median(b["step_s"] for b in fast),
                "gradients_s": statistics.median(b["step_s"] for b in fast) / args.gradient,
                "speed_of_slow": statistics.median(b["speed"] for b in slow),
            }
        )
    return rows


# -- losses ----------------------------------------------------------------------------------------


class SmallStories(Stories):
    """The stories, cut to their first words, and a model that two cores train."""

    words = 32

    @staticmethod
    def model_of() -> nn.Module:
        vocabulary = len(GRAMMAR.vocabulary)
        return GPTNeo(vocab=vocabulary, positions=GRAMMAR.longest, hidden=32, heads=2, layers=1)

    def model(self) -> nn.Module:
        return self.model_of()

    def batch(self, *, worker: int, workers: int, size: int, index: int) -> Any:
        found = super().batch(worker=worker, workers=workers, size=size, index=index)
        return tuple(rows[:, : self.words].contiguous() for rows in found)

    def validation(self, part: int, parts: int) -> Iterator[Any]:
        for found in super().validation(part, parts):
            yield tuple(rows[:, : self.words].contiguous() for rows in found)


def factor(steps: int, clock: int) -> float:
    """Of the learning rate: a rise over a twentieth of the run, then half a cosine to zero."""
    rise = max(1, steps // 20)
    if clock < rise:
        return (clock + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (clock - rise) / (steps - rise))))


def loss_run(how: How, args: argparse.Namespace, seed: int, slowness: int) -> dict[str, Any]:
    """One simulated run of as many steps as the time allows, and its losses on the way."""
    steps = max(H, round(args.time / how.fast_steps(slowness) / H) * H)
    task = SmallStories(device="cpu", seed=seed)
    rules = how.rules(H, seed=seed)
    if how.paced:
        rules["speeds"] = [1.0] * (WORKERS - 1) + [1 / slowness]

    def method(model: nn.Module) -> Any:
        inner = torch.optim.AdamW(model.parameters(), lr=LR)
        scheduler = partial(LambdaLR, lr_lambda=partial(factor, steps))
        return how.build(model, inner, max_norm=1.0, scheduler=scheduler, **rules)

    def batches(worker: int) -> Iterator[Any]:
        index = 0
        while True:
            yield task.batch(worker=worker, workers=WORKERS, size=args.batch, index=index)
            index += 1

    marks = {round(steps * k / args.evaluations / H) * H for k in range(1, args.evaluations)}
    result = palsgd.simulate(
        workers=WORKERS, steps=steps, model=task.model, loss=task.loss, data=batches,
        method=method, vectorize=True, seed=seed, progress=False,
        evaluate=lambda model: task.score(task.totals(model))[0],
        evaluate_every=lambda clock: clock in marks or clock >= steps,
    )  # fmt: skip
    curve = [(line["clock"], line["metric"]) for line in result.history if "metric" in line]
    return {
        "seed": seed,
        "slowness": slowness,
        "steps": steps,
        "loss": curve[-1][1],
        "time": [clock * how.fast_steps(slowness) for clock, _ in curve],
        "losses": [loss for _, loss in curve],
        "gradients": [ledger.gradient_steps for ledger in result.ledgers],
    }


def loss_rows(runs: list[dict[str, Any]], opponent: str) -> list[dict[str, Any]]:
    """The final losses of each method, and how they differ from the opponent's, seed by seed."""
    by_method: dict[str, dict[int, float]] = {}
    for run in runs:
        by_method.setdefault(run["method"], {})[run["seed"]] = run["loss"]
    rows = []
    for name, losses in by_method.items():
        difference = relative_difference(losses, by_method[opponent])
        rows.append(
            {
                "method": name,
                "loss": statistics.fmean(losses.values()),
                "over": opponent,
                "difference": difference.as_dict(),
                "word": "" if name == opponent else str(judge(difference, MARGIN).word),
                "arrives": arrival(runs, name, opponent),
            }
        )
    return rows


def arrival(runs: list[dict[str, Any]], name: str, opponent: str) -> float | None:
    """The share of the time after which the mean over seeds is where the opponent's ends."""
    level = statistics.fmean(run["loss"] for run in runs if run["method"] == opponent)
    own = [run for run in runs if run["method"] == name]
    times_, end = own[0]["time"], max(run["time"][-1] for run in runs)
    means = [statistics.fmean(each) for each in zip(*(run["losses"] for run in own), strict=True)]
    for place, mean in enumerate(means):
        if mean <= level:
            if place == 0:
                return times_[0] / end
            above = means[place - 1]
            part = (above - level) / (above - mean)
            return (times_[place - 1] + part * (times_[place] - times_[place - 1])) / end
    return None


# -- the record ------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gradient", type=float, default=0.15, help="seconds of a fast gradient")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of a block that are counted")
    parser.add_argument("--time", type=int, default=432, help="of a run, in fast gradients")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--raised-seeds", type=int, default=3, help="of the raised rate")
    parser.add_argument("--evaluations", type=int, default=6, help="of a run")
    parser.add_argument("--ratios", type=int, nargs="*", default=[3, 10], help="of slowness there")
    parser.add_argument("--phases", nargs="*", default=["times", "losses", "raised"])
    add_record_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.gradient, args.blocks, args.rounds, args.time = 0.001, 1, 1, 96
        args.batch, args.seeds, args.raised_seeds, args.evaluations, args.ratios = 1, 2, 2, 2, [3]
    return args


def runs_of(
    hows: dict[str, How], args: argparse.Namespace, slowness: int, record: dict[str, Any], key: str
) -> list[dict[str, Any]]:
    """All seeds of all methods, saved as they come."""
    torch.set_num_threads(1)
    found = record.setdefault(key, [])
    for seed in range(1, (args.seeds if key == "runs" else args.raised_seeds) + 1):
        for name, how in hows.items():
            run = {"method": name, **loss_run(how, args, seed, slowness)}
            print(f"{name}, ratio {slowness}, seed {seed}: {run['loss']:.4f}", flush=True)
            found.append(run)
            keep(record, args.out)
    return [run for run in found if run["slowness"] == slowness]


def keep(record: dict[str, Any], out: Path | None) -> None:
    """Write the record, beside the phases that earlier commands have written."""
    if out is not None and out.is_file():
        before = json.loads(out.read_text())
        record["untimed"] = before["untimed"] | record["untimed"]
        record = before | record
    save(record, out)


def main() -> None:
    args = arguments()
    record: dict[str, Any] = {
        **provenance("cpu", tiny=args.tiny),
        "stated before": {"margin": MARGIN, "seeds": args.seeds}
        | {"seeds of the raised rate": args.raised_seeds, "slowness": SLOWNESS},
        "settings": {"workers": WORKERS, "sync_every": H, "mix_prob": P, "lr": LR}
        | {"sync_every of the timed runs": TIMED_H}
        | {name: getattr(args, name) for name in ("gradient", "blocks", "rounds", "time", "batch")},
        "untimed": {},
    }
    if "times" in args.phases:
        record["waiting"] = waiting_rows(times(args), args)
        keep(record, args.out)
    if "losses" in args.phases:
        runs = runs_of(HOW, args, SLOWNESS, record, "runs")
        record["losses"] = loss_rows(runs, "PALSGD")
        record["against_weights"] = loss_rows(runs, "DiLoCo, steps and weights by speed")
        first = [run for run in runs if run["seed"] == 1]
        record["untimed"]["gradients"] = {run["method"]: run["gradients"] for run in first}
    if "raised" in args.phases:
        record["raised"] = []
        for ratio in args.ratios:
            runs = runs_of(RAISED, args, ratio, record, "raised_runs")
            rows = loss_rows(runs, next(iter(RAISED)))
            record["raised"] += [{"ratio": ratio, **row} for row in rows]
    keep(record, args.out)
    for key in ("waiting", "losses", "against_weights", "raised"):
        for row in record.get(key, []):
            print(key, row)
    print(summary(record))


if __name__ == "__main__":
    main()
