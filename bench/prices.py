"""What methods, intervals, delays and codes cost in steps: the table that `palsgd plan` reads.

    python bench/prices.py --device cuda --seeds 4 --out prices.json     # five minutes on an H200
    cp prices.json src/palsgd/lab/plan/prices.json                       # what the plan then knows

Eight simulated workers train the tiny GPT-Neo of `stories` on endless text. All cases of a seed
begin with the same weights and read the same stories. The price of a case is the share of steps
that it needs beyond DDP's: DDP is trained at several lengths, each with a whole schedule, and
DDP's steps to the loss that a case ends with are read off between them. Learning rates are chosen
before, with other seeds and other text, by equally many trials for each method.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from common import add_record_options, provenance, save, summary
from torch import Tensor, nn
from torch.func import functional_call

import palsgd
from palsgd.lab.factory import build_optimizer, low_precision
from palsgd.lab.settings import Settings
from palsgd.lab.workloads.stories import Stories

MIX_PROB, PULL, OUTER_MOMENTUM = 0.1, 0.5, 0.9
STEPS, SHORT = 1920, 480  # of the study, and of the one that shows what fewer rounds cost
LENGTHS = (0.125, 0.1875, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5)  # DDP's, as shares of STEPS
INTERVALS = (16, 32, 64, 128)
DELAYS = (0.125, 0.25, 0.5, 0.75)  # as shares of a round
CODES = (None, "bf16", "int8", "int4")
DELAYED_CODES = (None, "int8")
ACCUMULATED = (4, 16, 64)  # gradients in a step of DDP
LOCAL = ("localsgd", "diloco", "palsgd")
TUNED_AT = 32  # H
TUNING_SEEDS = (101, 102)
# Six trials for every method. Local SGD and DDP have no outer step to choose.
RATES = (1e-3, 2e-3, 4e-3, 6e-3, 8e-3, 12e-3)
FEW_RATES, OUTER_RATES = (2e-3, 4e-3, 8e-3), (0.4, 0.8)
BLOCK = 256  # batches that are drawn at once
STACKED = 2048  # stories in one step of a stacked program, which bounds its memory

# The t distribution's 97.5 % point, by the number of seeds. A machine with a GPU may lack scipy.
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 10: 2.262}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, the seed excepted."""

    method: str
    steps: int  # gradients that accumulate count as steps
    sync_every: int | None = None
    delay_share: float = 0.0
    compress: str | None = None
    accumulate: int = 1
    gradients: str = "fp32"  # in which DDP sends them
    lr: float = 0.0
    outer_lr: float = 0.0

    @property
    def program(self) -> tuple[Any, ...]:
        """Equal for cases that can be stacked."""
        return self.steps, self.sync_every, self.delay_share, self.accumulate, self.gradients

    def settings(self, plan: "Plan", seed: int) -> Settings:
        H, steps = self.sync_every or 1, self.steps // self.accumulate
        return Settings(
            workload="stories", method=self.method, workers=plan.workers, steps=steps,
            batch_size=plan.batch * self.accumulate, sync_every=H, mix_prob=MIX_PROB, pull=PULL,
            compress=self.compress, delay=round(self.delay_share * H), inner="adamw", lr=self.lr,
            max_norm=1.0, schedule="cosine", lr_warmup_steps=steps // 20, outer_lr=self.outer_lr,
            outer_momentum=OUTER_MOMENTUM, precision="tf32", seed=seed,
        )  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Runs of one stacked program."""

    runs: list[tuple[Case, int]]
    device: str
    until: float  # no program begins after this instant
    tuning: bool = False


@dataclass(frozen=True)
class Plan:
    """The cases of the study; --tiny has fewer and shorter ones."""

    workers: int = 8
    batch: int = 4  # stories of a worker and gradient
    steps: int = STEPS
    short: int = SHORT
    lengths: tuple[float, ...] = LENGTHS
    intervals: tuple[int, ...] = INTERVALS
    delays: tuple[float, ...] = DELAYS
    codes: tuple[str | None, ...] = CODES
    delayed_codes: tuple[str | None, ...] = DELAYED_CODES
    accumulated: tuple[int, ...] = ACCUMULATED
    tuned_at: int = TUNED_AT
    rates: tuple[float, ...] = RATES
    few_rates: tuple[float, ...] = FEW_RATES
    outer_rates: tuple[float, ...] = OUTER_RATES
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    stories: int = 1024  # that the loss is taken over

    def trials(self) -> Iterator[Case]:
        half = self.steps // 2
        ddp = Case(method="ddp", steps=half)
        for many in (1, *self.accumulated):
            yield from (replace(ddp, accumulate=many, lr=lr) for lr in self.rates)
        local = Case(method="localsgd", steps=half, sync_every=self.tuned_at)
        yield from (replace(local, lr=lr) for lr in self.rates)
        for method in ("diloco", "palsgd"):
            for lr in self.few_rates:
                for outer in self.outer_rates:
                    yield replace(local, method=method, lr=lr, outer_lr=outer)

    def cases(self) -> Iterator[Case]:
        """In the order of their worth, as the last ones may find no time."""
        ddp = Case(method="ddp", steps=self.steps)
        for share in self.lengths:
            yield replace(ddp, steps=round(share * self.steps))
        yield replace(ddp, gradients="bf16")
        for kind in ("fp32", "bf16"):
            yield from (replace(ddp, accumulate=many, gradients=kind) for many in self.accumulated)
        yield from self._local(self.steps, self.codes, (0.0,))
        yield from self._local(self.short, (None,), (0.0,))
        for share in self.delays:
            yield from self._local(self.steps, self.delayed_codes, (share,))

    def _local(
        self, steps: int, codes: Iterable[str | None], shares: Iterable[float]
    ) -> Iterator[Case]:
        for H in self.intervals:
            for share in shares:
                for code in codes:
                    for method in LOCAL:
                        yield Case(
                            method=method, steps=steps, sync_every=H, delay_share=share,
                            compress=code,
                        )  # fmt: skip


TINY = Plan(
    workers=2, batch=1, steps=8, short=4, lengths=(0.5, 1.0), intervals=(2,), delays=(0.5,),
    codes=(None, "int8"), delayed_codes=(None,), accumulated=(2,), tuned_at=2, rates=(2e-3,),
    few_rates=(2e-3,), outer_rates=(0.4,), tuning_seeds=(101,), stories=8,
)  # fmt: skip


# -- training --------------------------------------------------------------------------------------


class RoundedGradients(nn.Module):
    """A model whose gradients are rounded to bf16, as those that DDP's hook sends. The sum of a
    ring is rounded once more, which this leaves out."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        values = {}
        for name, param in self.model.named_parameters():
            rounded = param.to(torch.bfloat16).to(param.dtype)  # so are the gradients through it
            values[name] = param.detach() + (rounded - rounded.detach())
        return functional_call(self.model, values, batch)


def batches_of(plan: Plan, seed: int, device: str, size: int) -> Callable[[int], Iterator[Any]]:
    def batches(worker: int) -> Iterator[Any]:
        block = 0
        while True:
            inputs, targets = drawn(seed, device, worker, BLOCK * plan.batch, block)
            yield from zip(inputs.split(size), targets.split(size), strict=True)
            block += 1

    return batches


@cache
def drawn(seed: int, device: str, worker: int, count: int, block: int) -> tuple[Tensor, Tensor]:
    """Stories of a worker. They are kept, as every case of a seed reads the same ones."""
    return task(seed, device).batch(worker=worker, workers=1, size=count, index=block)


@cache
def task(seed: int, device: str) -> Stories:
    return Stories(device=device, seed=seed)


def held_out(model: nn.Module, device: str, stories: int, *, tuning: bool) -> float:
    """The loss on stories that nobody trains on, as no run has this seed. Tuning has others."""
    inputs, targets = drawn(0, device, int(tuning), stories, 0)
    total, words = 0.0, 0
    with torch.no_grad():
        for some, wanted in zip(inputs.split(256), targets.split(256), strict=True):
            count = int((wanted >= 0).sum())
            total += float(model(some, wanted)) * count
            words += count
    return total / words


def run(job: Job, plan: Plan) -> list[dict[str, Any]]:
    """The final losses of a job's runs. There are none if it came too late."""
    if time.time() > job.until:
        return []
    first, began = job.runs[0][0], time.time()
    settings = first.settings(plan, 0)
    low_precision(settings, torch.device(job.device))
    plain = task(0, job.device).model
    results = palsgd.simulate_many(
        [
            {
                "method": partial(build_optimizer, case.settings(plan, seed), settings.steps),
                "seed": seed,
                "data": batches_of(plan, seed, job.device, settings.batch_size),
            }
            for case, seed in job.runs
        ],
        workers=plan.workers,
        steps=settings.steps,
        model=plain if first.gradients == "fp32" else lambda: RoundedGradients(plain()),
        loss=lambda model, batch: model(*batch),
        device=job.device,
        evaluate=lambda model: held_out(model, job.device, plan.stories, tuning=job.tuning),
        evaluate_every=lambda clock: False,  # at the end
        progress=False,
        compile=False,
        at_once=max(1, STACKED // (plan.workers * settings.batch_size)),
    )
    took = time.time() - began
    return [
        asdict(case)
        | {
            "seed": seed,
            "loss": None if result.error else result.history[-1]["metric"],
            "program_s": took,
        }
        for (case, seed), result in zip(job.runs, results, strict=True)
    ]


def jobs_of(
    cases: Iterable[Case], seeds: Iterable[int], args: argparse.Namespace, *, tuning: bool
) -> list[Job]:
    programs: dict[tuple, list[Case]] = {}
    for case in cases:
        programs.setdefault(case.program, []).append(case)
    return [
        Job([(case, seed) for seed in seeds for case in some], args.device, args.until, tuning)
        for some in programs.values()
    ]


def done(jobs: list[Job], plan: Plan, args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The runs of each job, as jobs end. On a GPU several programs run beside each other, as none
    fills it."""
    if args.processes == 1:
        yield from _told(run(job, plan) for job in jobs)
        return
    with torch.multiprocessing.get_context("spawn").Pool(args.processes, set_threads) as pool:
        yield from _told(pool.imap_unordered(partial(run, plan=plan), jobs))


def set_threads() -> None:
    torch.set_num_threads(1)


def _told(found: Iterable[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
    for rows in found:
        if rows:
            took = rows[0]["program_s"]
            print(f"{len(rows)} runs in {took:.0f} s: {Case(**_case(rows[0])).program}", flush=True)
        yield rows


def _case(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in Case.__dataclass_fields__}


# -- choosing learning rates -----------------------------------------------------------------------


def chosen(trials: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, float]]:
    """The rates with the least mean loss, for each method and number of accumulated gradients."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    by_case: dict[Case, list[float]] = {}
    for row in trials:
        by_case.setdefault(Case(**_case(row)), []).append(
            math.inf if row["loss"] is None else row["loss"]
        )
    for case in sorted(by_case, key=lambda case: statistics.fmean(by_case[case])):
        found.setdefault((case.method, case.accumulate), {"lr": case.lr, "outer_lr": case.outer_lr})
    return found


# -- prices ----------------------------------------------------------------------------------------


def ddp_curves(rows: list[dict[str, Any]]) -> dict[int, list[tuple[int, float]]]:
    """Steps and loss of plain DDP, for each seed. A longer run that by chance ends higher counts
    as no worse than the shorter one."""
    found: dict[int, dict[int, float]] = {}
    for row in rows:
        plain = row["method"] == "ddp" and row["accumulate"] == 1 and row["gradients"] == "fp32"
        if plain and row["loss"] is not None:
            found.setdefault(row["seed"], {})[row["steps"]] = row["loss"]
    curves = {}
    for seed, curve in found.items():
        least, points = math.inf, []
        for steps in sorted(curve):
            least = min(least, curve[steps])
            points.append((steps, least))
        curves[seed] = points
    return curves


def steps_to(curve: list[tuple[int, float]], loss: float) -> float | None:
    """The steps of DDP to a loss, between two lengths by their logarithm. A loss below all of them
    counts as that of the longest, which flatters nobody but DDP. None: it is above all."""
    if loss > curve[0][1]:
        return None
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low < loss <= high:
            share = (high - loss) / (high - low)
            return before * (after / before) ** share
    return float(curve[-1][0])


def interval(values: list[float]) -> dict[str, float]:
    """The mean and its 95 % interval."""
    mean = statistics.fmean(values)
    half = T_975[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def prices(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per case: loss and extra steps against DDP's of the same seed."""
    curves = ddp_curves(rows)
    by_case: dict[Case, dict[int, float | None]] = {}
    for row in rows:
        by_case.setdefault(Case(**_case(row)), {})[row["seed"]] = row["loss"]
    return [_price(case, losses, curves) for case, losses in by_case.items()]


def _price(
    case: Case, losses: dict[int, float | None], curves: dict[int, list[tuple[int, float]]]
) -> dict[str, Any]:
    """`extra_steps` is None where a seed ended above DDP's shortest run, or failed: the price is
    then more than `at_least`."""
    entry: dict[str, Any] = {k: v for k, v in asdict(case).items() if k not in ("lr", "outer_lr")}
    entry |= {"seeds": sorted(losses), "losses": [losses[seed] for seed in sorted(losses)]}
    ended = {seed: loss for seed, loss in losses.items() if loss is not None and seed in curves}
    extra = [_extra(case, curves[seed], loss) for seed, loss in ended.items()]
    ratios = [
        loss / dict(curves[seed])[case.steps] - 1
        for seed, loss in ended.items()
        if case.steps in dict(curves[seed])
    ]
    entry["loss_over_ddp"] = interval(ratios) if len(ratios) == len(losses) else None
    known = [value for value in extra if value is not None]
    entry["extra_steps"] = interval(known) if len(known) == len(losses) else None
    if entry["extra_steps"] is None:
        shortest = min((curve[0][0] for curve in curves.values()), default=case.steps)
        entry["at_least"] = case.steps / shortest - 1
    return entry


def _extra(case: Case, curve: list[tuple[int, float]], loss: float) -> float | None:
    steps = steps_to(curve, loss)
    return None if steps is None else case.steps / steps - 1


# -- the record ------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=4, choices=tuple(T_975))
    parser.add_argument("--processes", type=int, help="programs beside each other; 4 on a GPU")
    parser.add_argument("--minutes", type=float, default=5.0, help="no program begins after them")
    add_record_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.seeds, args.device = 2, "cpu"
    if args.processes is None:
        args.processes = 4 if args.device == "cuda" else 1
    args.until = time.time() + 60 * args.minutes
    return args


def conditions(plan: Plan) -> dict[str, Any]:
    """What was trained: prices elsewhere may be others."""
    model = task(0, "cpu").model()
    return {
        "workload": "stories",
        "parameters": sum(p.numel() for p in model.parameters()),
        "workers": plan.workers,
        "batch": plan.batch,
        "steps": plan.steps,
        "mix_prob": MIX_PROB,
        "pull": PULL,
        "inner": "adamw",
        "schedule": "cosine",
        "outer_momentum": OUTER_MOMENTUM,
        "held_out_stories": plan.stories,
    }


def study(plan: Plan, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The record after each program."""
    record: dict[str, Any] = provenance(args.device, tiny=args.tiny)
    record["conditions"] = conditions(plan)
    jobs = jobs_of(plan.trials(), plan.tuning_seeds, args, tuning=True)
    trials = [row for rows in done(jobs, plan, args) for row in rows]
    rates = chosen(trials)
    record["chosen_rates"] = [
        {"method": method, "accumulate": many} | found for (method, many), found in rates.items()
    ]
    cases = [
        replace(case, **rates[case.method, case.accumulate])
        for case in plan.cases()
        if (case.method, case.accumulate) in rates
    ]
    runs: list[dict[str, Any]] = []
    for rows in done(jobs_of(cases, range(1, args.seeds + 1), args, tuning=False), plan, args):
        runs += rows
        record["prices"] = prices(runs)
        record["missing"] = len(cases) - len(record["prices"])
        record["untimed"] = {
            "trials": len(trials),
            "cases": len(record["prices"]),
            "runs": len(runs),
            "failed": sum(row["loss"] is None for row in runs),
        }
        yield record


def main() -> None:
    args = arguments()
    record: dict[str, Any] = {}
    for record in study(TINY if args.tiny else Plan(), args):
        save(record, args.out)
    for entry in record["prices"]:
        print(_words(entry))
    print(summary(record))


def _words(entry: dict[str, Any]) -> str:
    names = ("method", "steps", "sync_every", "delay_share", "compress", "accumulate", "gradients")
    what = " ".join(f"{name}={entry[name]}" for name in names)
    extra = entry["extra_steps"]
    if extra is None:
        return f"{what}: more than {entry['at_least']:.0%} extra steps"
    return f"{what}: {extra['mean']:+.1%} [{extra['low']:+.1%}, {extra['high']:+.1%}] extra steps"


if __name__ == "__main__":
    main()
