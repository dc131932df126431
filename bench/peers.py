"""palsgd beside what a user would pick instead: seconds to DDP's loss, over the same links.

    sudo python bench/peers.py --out bench/results/peers-2cores.json    # about 22 minutes, 2 cores
    python bench/peers.py --tiny                                        # seconds, to see it work
    sudo python bench/peers.py --phases pace --contenders ddp,torchft,diloco --out FILE

Everybody trains the same GPT-Neo on endless stories with AdamW, clipping and a cosine of its own
length. Phases (--phases, in this order; what they find is merged into --out):

    tune     each training's grid, equally many trials for all, on a seed and on stories that the
             other phases do not use; the best is what `quality` runs                    3 minutes
    quality  loss over steps for --seeds seeds and three lengths each, in palsgd's simulator: no
             loss depends on a link                                                     12 minutes
    pace     seconds and bytes per step in processes over each link (--rates), in blocks of a round
             that take turns, so that a slow minute hits all alike                       7 minutes

Time to target is steps to target, at a training's best length, times seconds per step. Seeds are
paired and blocks too; intervals come from drawing both again with replacement. torchft and
accelerate are run, and installed into --peers in pinned versions, only if --contenders names them.
Emulated links need root on Linux; without, only --rates loopback can be had. --device cuda trains
on a GPU.
A merged record says under "made_at" which commit each phase is of.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from common import add_record_options, provenance, save
from common import summary as last_line

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from contenders import CONTENDERS, STANDARD, TRAININGS, settings_of
from installing import install, missing, versions
from reporting import report
from starting import HERE, LOOPBACK, run_workers
from task import SEED, SIZES
from training import Job, train

PHASES = ("tune", "quality", "pace")
WORKERS = 4
TUNING_SEED = SEED - 1
# Steps in a block of DDP, one of which takes seconds over 10 Mbit/s.
DDP_BLOCK = {"10mbit": 3}
TINY = {  # of --tiny, unless it is told otherwise
    "rates": (LOOPBACK,),
    "contenders": ("ddp", "post-local", "localsgd", "palsgd-int4"),
}


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.size = args, SIZES[args.size]
        self.workers = 2 if args.tiny else WORKERS
        self.trainings = [
            name for name in TRAININGS
            if any(CONTENDERS[each].training == name for each in args.contenders)
        ]  # fmt: skip
        self.record: dict = {}
        if args.out and args.out.exists():
            self.record = json.loads(args.out.read_text())
        self.record |= provenance(args.device, tiny=args.tiny) | {
            "peers": versions(args.peers),
            "not_installed": [],
            "untimed": self.record.get("untimed", {}),
            "size": dataclasses.asdict(self.size),
            "workers": self.workers,
        }

    def tune(self) -> None:
        """Each trial at the middle length; the best of each training stands under "chosen"."""
        trials = self._trained(
            self._job(name, chosen, seed=TUNING_SEED, split="tuning", steps=self._middle(name))
            for name in self.trainings for chosen in TRAININGS[name].grid
        )  # fmt: skip
        found = self.record["tuning"] = {}
        for trial in trials:
            loss = trial["curve"][-1][1]
            each = found.setdefault(trial["training"], {"steps": trial["steps"], "trials": []})
            each["trials"].append(trial["chosen"] | {"loss": loss})
            best = min(each["trials"], key=lambda one: one["loss"])
            each["chosen"] = {key: value for key, value in best.items() if key != "loss"}
        self.record["untimed"]["trials"] = sorted({len(each["trials"]) for each in found.values()})

    def quality(self) -> None:
        tuning = self.record.get("tuning", {})
        untuned = [name for name in self.trainings if name not in tuning]
        if untuned:
            raise SystemExit(
                f"{', '.join(untuned)} has no tuned settings in {self.args.out}; run the phase tune"
            )
        runs = self._trained(
            self._job(name, tuning[name]["chosen"], seed=SEED + seed, split="test", steps=steps)
            for seed in range(self.args.seeds) for name in self.trainings
            for steps in self.size.lengths_of(local=TRAININGS[name].local)
        )  # fmt: skip
        keys = ("training", "seed", "steps", "curve", "gradient_steps")
        self.record["quality"] = [{key: run[key] for key in keys} for run in runs]
        self.record["parameters"] = self.record["untimed"]["parameters"] = runs[0]["parameters"]
        self.record["untimed"]["runs"] = len(runs)

    def pace(self) -> None:
        found = self.record["pace"] = {}
        names = list(self._runnable())
        for rate in self.args.rates:
            blocks = {name: self._blocks(name, rate) for name in names}
            bare = {"adapter": "trainee.Trainee", "settings": {}, "block_steps": 8}
            order = {"contenders": blocks | {"bare": bare}, "blocks": self.args.blocks}
            order |= {"size": self.args.size, "peers": str(self.args.peers)}
            ranks = run_workers(
                "pace.py", order, workers=self.workers, rate=rate, timeout=self.args.timeout
            )
            found[rate] = {name: averaged([rank[name] for rank in ranks]) for name in ranks[0]}
            print(f"pace over {rate}: done", file=sys.stderr, flush=True)
            save(self.record, self.args.out)
        norms = {name: round(each["norm"], 3) for name, each in found[self.args.rates[-1]].items()}
        self.record["untimed"]["norms"] = norms

    def _blocks(self, name: str, rate: str) -> dict:
        contender = CONTENDERS[name]
        training, every = TRAININGS[contender.training], self.size.sync_every
        settings, steps = dict(contender.settings), min(every, DDP_BLOCK.get(rate, 8))
        if contender.local:
            settings["sync_every"] = steps = every
        if contender.adapter == "ours.Ours":
            settings = settings_of(training, training.grid[0], every) | {"method": training.method}
        return {"adapter": contender.adapter, "settings": settings, "block_steps": steps}

    def _runnable(self) -> Iterator[str]:
        """Contenders asked for, but for those whose package cannot be had."""
        for name in self.args.contenders:
            package = CONTENDERS[name].package
            reason = package and missing(package, self.args.peers)
            if reason:
                print(f"{name} does not take part: {reason}", file=sys.stderr)
                self.record["not_installed"].append(package)
            else:
                yield name

    def _middle(self, training: str) -> int:
        return self.size.lengths_of(local=TRAININGS[training].local)[1]

    def _job(self, training: str, chosen: dict, **others: object) -> Job:
        return {"training": training, "chosen": chosen, "size": self.args.size} | others | {
            "workers": self.workers, "device": self.args.device,
        }  # fmt: skip

    def _trained(self, jobs: Iterator[Job]) -> list[Job]:
        """Of a size that is worth it, the longest jobs first, as many at a time as there are
        processes; in the order they came in."""
        jobs = list(jobs)
        if self.args.processes < 2 or self.args.tiny:
            return [self._told(number, train(job), jobs) for number, job in enumerate(jobs)]
        order = sorted(range(len(jobs)), key=lambda at: -jobs[at]["steps"])
        done: dict[int, Job] = {}
        with torch.multiprocessing.get_context("spawn").Pool(self.args.processes) as pool:
            trained = pool.imap(train, [jobs[at] for at in order])
            for number, (at, run) in enumerate(zip(order, trained, strict=True)):
                done[at] = self._told(number, run, jobs)
        return [done[at] for at in range(len(jobs))]

    def _told(self, number: int, run: Job, jobs: list[Job]) -> Job:
        words = f"{run['training']}, seed {run['seed']}, {run['steps']} steps"
        loss = run["curve"][-1][1]
        print(f"{number + 1}/{len(jobs)} {words}: {loss:.4f}", file=sys.stderr, flush=True)
        return run


def averaged(ranks: list[dict]) -> dict:
    """Means over the workers, who wait for each other, block by block."""
    keys = ("step_s", "bytes_per_step", "gradient_share")
    found = {
        key: [statistics.fmean(each) for each in zip(*(r[key] for r in ranks), strict=True)]
        for key in keys
    }
    return found | {"norm": ranks[0]["norm"]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    lists = {"phases": PHASES, "rates": ("10mbit", "100mbit", LOOPBACK), "contenders": STANDARD}
    for name, default in lists.items():
        parser.add_argument(f"--{name}", help=f"default: {','.join(default)}")
    parser.add_argument("--seeds", type=int, help="default: 5")
    parser.add_argument("--blocks", type=int, help="timed, after one untimed; default: 6")
    parser.add_argument("--size", choices=SIZES, help="default: small")
    parser.add_argument("--device", default="cpu", help="where trainings run: cpu or cuda")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="for trainings")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one link")
    parser.add_argument("--peers", type=Path, help="where peers are installed")
    add_record_options(parser)
    args = parser.parse_args()
    for name, default in (lists | (TINY if args.tiny else {})).items():
        given = getattr(args, name)
        setattr(args, name, list(default) if given is None else given.split(","))
    for name, known in (("phases", PHASES), ("contenders", tuple(CONTENDERS))):
        unknown = [each for each in getattr(args, name) if each not in known]
        if unknown:
            parser.error(f"--{name}: {unknown[0]!r} is unknown; use some of {','.join(known)}")
    args.seeds, args.blocks = args.seeds or (2 if args.tiny else 5), args.blocks or 6
    args.size = args.size or ("tiny" if args.tiny else "small")
    if args.tiny:
        args.blocks = 2
    if args.peers is None:  # with --tiny: a folder without any
        args.peers = HERE if args.tiny else Path(tempfile.gettempdir(), "palsgd-peers")
    return args


def main() -> None:
    args = arguments()
    packages = {CONTENDERS[name].package for name in args.contenders} - {None}
    if not args.tiny:
        install(sorted(packages), args.peers)
    bench = Bench(args)
    for phase in PHASES:
        if phase in args.phases:
            getattr(bench, phase)()
            bench.record.setdefault("made_at", {})[phase] = bench.record["commit"]
            save(bench.record, args.out)
    print(report(bench.record))
    print(last_line(bench.record))


if __name__ == "__main__":
    sys.exit(main())
