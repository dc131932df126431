"""palsgd beside what a user would pick instead, in real processes over the same links.

    sudo python bench/peers.py --out bench/results/peers-epyc2.json
    python bench/peers.py --tiny                              # half a minute, to see it work
    python bench/peers.py --phases pace --rates 10mbit --contenders ddp,torchft,palsgd-int8
    python bench/peers.py --phases '' --out FILE.json         # its tables again

Every contender trains the same GPT-Neo of about a million parameters from the same first weights,
on the same batches per worker and step, with the same AdamW, clipping and learning-rate schedule,
in one single-threaded process per worker; the held-out stories are scored with the global model.

Phases (--phases, in this order; results are merged into --out):

    tune     final loss over each contender's small grid of settings
    quality  loss over steps, and peak memory, over loopback: no result depends on the link
    pace     seconds and bytes per step over each link, bare AdamW in the same processes beside it
    overlap  the same for PALSGD with overlap at H = 16 and 100 Mbit/s
    draws    waiting under balanced and independent draws, 8 processes that sleep
    scaling  a bare sync at K = 2, 4, 8 against a ring, modelled to 1024

What compression, overlap and draws cost in loss over several seeds is bench/quality.py's to say.
Time to target is steps to target (quality) times seconds per step (pace). Peers are installed
into --peers at run time, but not with --tiny; EXO Gym, which runs on loopback only, comes from a
checkout (--exogym). A record that is merged says under "made_at" which commit each phase is of.
Emulated links need root on Linux; without, only --rates loopback can be had.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from math import comb
from pathlib import Path

from common import add_record_options, provenance, save
from common import summary as last_line

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from contenders import CONTENDERS, Contender
from installing import install, missing, versions
from reporting import report
from starting import HERE, LOOPBACK, run_workers
from task import SEED, SIZES

import palsgd

PHASES = ("tune", "quality", "pace", "overlap", "draws", "scaling")
WORKERS = 4
EXOGYM = "exogym"
# DDP's step over 10 Mbit/s takes 5 s: a handful of them must do
DDP_ROUND = {"10mbit": 3}
OVERLAP = ("palsgd-int8", "palsgd-int4")
OVERLAP_H, OVERLAP_DELAY, OVERLAP_RATE = 16, 8, "100mbit"
TINY = {  # of --tiny, unless it is told otherwise
    "phases": ("quality",),
    "rates": (LOOPBACK,),
    "contenders": ("post-local", "accelerate", "torchft", "localsgd"),
}
PAUSE_S = 0.04  # about a gradient step of the full size, four workers on two cores


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.size = args, SIZES["tiny" if args.tiny else "full"]
        self.size_name = "tiny" if args.tiny else "full"
        self.workers = 2 if args.tiny else WORKERS
        self.found: dict = {}
        if args.out and args.out.exists():
            self.found = json.loads(args.out.read_text())
        if not args.phases:  # its tables again: the record stays what it is
            return
        self.found |= provenance("cpu", tiny=args.tiny) | {
            "peers": versions(args.peers),
            "not_installed": [],
            "untimed": {},
            "size": dataclasses.asdict(self.size),
            "workers": self.workers,
        }

    # -- training --------------------------------------------------------------------------------

    def tune(self) -> None:
        for name, contender in self._runnable("tuning"):
            for change in contender.grid:
                words = ", ".join(f"{key}={value}" for key, value in change.items())
                found = tried(partial(self._quality, contender, change))
                self._keep(found | {"settings": change}, "tuning", f"{name} {words}")

    def quality(self) -> None:
        for name, contender in self._runnable("quality"):
            found = tried(partial(self._quality, contender))
            self._keep(found, "quality", name)
            if "final_loss" in found:
                keys = ("parameters", "gradient_steps", "final_loss")
                self.found["untimed"][name] = {key: found[key] for key in keys}
        if self.args.exogym and EXOGYM in self.args.contenders:
            self._keep(tried(partial(self._exogym, self.size.steps)), "quality", EXOGYM)

    def _quality(self, contender: Contender, change: dict | None = None) -> dict:
        order = self._order(contender, self.size.sync_every, change)
        order |= {"mode": "quality", "steps": self._steps(contender)}
        ranks = self._run("worker.py", order, LOOPBACK)
        peak = max(rank["peak_bytes"] for rank in ranks)
        return ranks[0] | {"final_loss": ranks[0]["curve"][-1][1], "peak_bytes": peak}

    def pace(self) -> None:
        for rate in self.args.rates:
            for name, contender in self._runnable("pace", rate):
                found = tried(partial(self._pace, contender, rate, self.size.sync_every))
                self._keep(found, "pace", rate, name)
            if rate == LOOPBACK and self.args.exogym and EXOGYM in self.args.contenders:
                steps = (self.args.rounds + 2) * self.size.sync_every
                self._keep(tried(partial(self._exogym, steps)), "pace", rate, EXOGYM)

    def overlap(self) -> None:
        """Once as it is, all workers on this machine's cores, and once with a wait in the place of
        each gradient: then nothing but the link can be in the way."""
        for name, contender in self._runnable("overlap"):
            for kind, pause_s in (("computing", 0.0), ("waiting", PAUSE_S)):
                if name in OVERLAP:
                    pace = partial(
                        self._pace, contender, OVERLAP_RATE, OVERLAP_H, {"delay": OVERLAP_DELAY}
                    )
                    self._keep(tried(partial(pace, pause_s=pause_s)), "overlap", kind, name)

    def _pace(
        self,
        contender: Contender,
        rate: str,
        every: int,
        change: dict | None = None,
        pause_s: float = 0.0,
    ) -> dict:
        order = self._order(contender, every, change) | {"mode": "pace", "pause_s": pause_s}
        length = every if contender.local else min(every, DDP_ROUND.get(rate, 12))
        rounds = self.args.rounds * max(1, self.size.sync_every // every)
        order |= {
            "steps": length * (rounds + 2),  # the last syncs of a run hide behind nothing
            "round_steps": length,
            "rounds": rounds,
            "bare_steps": 4 if self.args.tiny else 32,
        }
        return averaged(self._run("worker.py", order, rate), length)

    def _order(self, contender: Contender, every: int, change: dict | None) -> dict:
        settings = contender.settings | ({"sync_every": every} if contender.local else {})
        if "delay" in settings:  # given for rounds of 64
            settings["delay"] = settings["delay"] * every // 64
        return {
            "class": contender.adapter,
            "settings": settings | (change or {}),
            "size": self.size_name,
            "peers": str(self.args.peers),
        }

    def _steps(self, contender: Contender) -> int:
        return self.size.steps if contender.local else self.size.ddp_steps

    def _exogym(self, steps: int) -> dict:
        order = {"source": str(self.args.exogym), "peers": str(self.args.peers)}
        order |= {"size": self.size_name, "steps": steps, "sync_every": self.size.sync_every}
        order |= {"workers": self.workers, "outer": CONTENDERS["torchft"].settings["outer"]}
        command = [sys.executable, str(HERE / "exogym_diloco.py"), json.dumps(order)]
        timeout = self.args.timeout
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        found = json.loads(done.stdout.splitlines()[-1])
        found["step_s"] = statistics.fmean(found["round_s"]) / self.size.sync_every
        return found

    # -- draws -----------------------------------------------------------------------------------

    def draws(self) -> None:
        self._keep(tried(self._draws), "draws")

    def _draws(self) -> dict:
        workers, every, p, gradient_s = 8, 64, 0.1, 0.01
        rounds = 5 if self.args.tiny else 40
        result: dict = {"workers": workers, "sync_every": every, "mix_prob": p}
        result |= {"gradient_s": gradient_s, "rounds": rounds}
        for draws in ("balanced", "independent"):
            order = {"draws": draws, "sync_every": every, "mix_prob": p}
            order |= {"gradient_s": gradient_s, "rounds": rounds}
            ranks = self._run("draws.py", order, LOOPBACK, workers)
            waiting = statistics.fmean(rank["waiting_s"] for rank in ranks)
            round_s = statistics.fmean(rank["round_s"] for rank in ranks)
            result[draws] = {"round_s": round_s, "waiting_s": waiting}
        most = expected_maximum(workers, every, 1 - p)
        result["expected_excess_steps"] = most - every * (1 - p)
        result["theory_share"] = (most - every * (1 - p)) / (every * (1 - p))
        result["drawn_share"] = drawn_excess(workers, every, p, rounds) / (every * (1 - p))
        saved = result["independent"]["waiting_s"] - result["balanced"]["waiting_s"]
        result["measured_share"] = saved / result["balanced"]["round_s"]
        return result

    # -- scaling ---------------------------------------------------------------------------------

    def scaling(self) -> None:
        self._keep(tried(self._scaling), "scaling")

    def _scaling(self) -> dict:
        from palsgd.lab.links import Link
        from palsgd.lab.links.link import modelled_ring_seconds

        rate = self.args.scaling_rate
        result: dict = {"rate": rate, "measured": {}}
        for workers in (2, 4, 8):
            order = {"size": self.size_name, "syncs": 3 if self.args.tiny else 10}
            ranks = self._run("scaling.py", order, rate, workers)
            slowest = [max(times) for times in zip(*(r["sync_s"] for r in ranks), strict=True)]
            size = result["bytes"] = ranks[0]["bytes"]
            found = {"sync_s": statistics.median(slowest)}
            if rate != LOOPBACK:
                found["ring_s"] = modelled_ring_seconds([Link(rate)] * workers, size)
            result["measured"][str(workers)] = found
        return result | fitted({int(k): each["sync_s"] for k, each in result["measured"].items()})

    # -- running and keeping ---------------------------------------------------------------------

    def _runnable(self, *where: str) -> Iterator[tuple[str, Contender]]:
        """Contenders asked for; one whose package is missing gets a row that says why."""
        for name in self.args.contenders:
            if name == EXOGYM:
                continue
            contender = CONTENDERS[name]
            reason = contender.package and missing(contender.package, self.args.peers)
            if reason:
                self._keep({"error": reason}, *where, name)
                if contender.package not in self.found["not_installed"]:
                    self.found["not_installed"].append(contender.package)
            else:
                yield name, contender

    def _run(self, script: str, order: dict, rate: str, workers: int | None = None) -> list[dict]:
        workers = workers or self.workers
        return run_workers(script, order, workers=workers, rate=rate, timeout=self.args.timeout)

    def _keep(self, found: dict, *where: str) -> None:
        place = self.found
        for key in where[:-1]:
            place = place.setdefault(key, {})
        place[where[-1]] = found
        print(f"{' '.join(where)}: {summary(found)}", file=sys.stderr, flush=True)
        save(self.found, self.args.out)


def tried(call: Callable[[], dict]) -> dict:
    """What it found, or why it could not: the others go on."""
    try:
        return call()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}


def averaged(ranks: list[dict], length: int) -> dict:
    """Means over the workers, who wait for each other; `exposed_s` is what a round takes beyond
    as many bare steps as it had gradients."""
    round_s = statistics.fmean(t for rank in ranks for t in rank["round_s"])
    gradients = statistics.fmean(g for rank in ranks for g in rank["gradient_steps"])
    bare = statistics.fmean(rank["bare_step_s"] for rank in ranks)
    return {
        "round_steps": length,
        "round_s": round_s,
        "each_round_s": [
            statistics.fmean(times) for times in zip(*(r["round_s"] for r in ranks), strict=True)
        ],
        "gradient_steps": gradients,
        "bare_step_s": bare,
        "step_s": round_s / length,
        "exposed_s": round_s - gradients * bare,
        "bytes_per_step": statistics.fmean(r["bytes_per_round"] for r in ranks) / length,
    }


def expected_maximum(workers: int, steps: int, share: float) -> float:
    """Of `workers` independent Binomial(steps, share)."""
    chances = [comb(steps, n) * share**n * (1 - share) ** (steps - n) for n in range(steps + 1)]
    below = [sum(chances[: n + 1]) for n in range(steps + 1)]
    return sum(1 - each**workers for each in below[:-1])


def drawn_excess(workers: int, every: int, mix_prob: float, rounds: int) -> float:
    """The most gradient steps of a round less their mean, in the rounds that draws.py timed."""
    plans = partial(palsgd.round_plan, sync_every=every, mix_prob=mix_prob, draws="independent")
    taken = [
        [every - sum(plans(seed=SEED, worker=worker, round=n)) for worker in range(workers)]
        for n in range(1, rounds - 1)
    ]
    return statistics.fmean(max(each) - statistics.fmean(each) for each in taken)


def fitted(seconds: dict[int, float]) -> dict:
    """A ring's two costs from the syncs measured, one of the bytes that each worker sends and one
    of each hop; and what they give for more workers."""
    import numpy as np

    from palsgd.cluster.network import ring_hops

    def terms(workers: int) -> list[float]:
        return [ring_hops(workers) / workers, ring_hops(workers)]

    table, measured = np.array([terms(k) for k in seconds]), np.array(list(seconds.values()))
    costs, *_ = np.linalg.lstsq(table, measured, rcond=None)
    if costs[1] < 0:  # hops too short to be seen
        costs = np.array([table[:, 0] @ measured / (table[:, 0] @ table[:, 0]), 0.0])
    model = {k: float(np.dot(terms(k), costs)) for k in (2, 4, 8, 16, 64, 256, 1024)}
    return {
        "model_s": float(costs[0]),
        "hop_s": float(costs[1]),
        "modelled": {str(k): value for k, value in model.items()},
        "worst_misfit": max(abs(model[k] / measured - 1) for k, measured in seconds.items()),
    }


def summary(found: dict) -> str:
    shown = ("error", "final_loss", "step_s", "exposed_s", "measured_share", "worst_misfit")
    return ", ".join(f"{key} {found[key]}" for key in shown if key in found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    everyone = [*CONTENDERS, EXOGYM]
    lists = {"phases": PHASES[1:], "rates": ("10mbit", "100mbit", LOOPBACK)}
    lists["contenders"] = tuple(everyone)
    for name, default in lists.items():
        parser.add_argument(f"--{name}", help=f"default: {','.join(default)}")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one untimed")
    parser.add_argument("--scaling-rate", default="100mbit")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    parser.add_argument("--peers", type=Path, help="where peers are installed")
    parser.add_argument("--exogym", type=Path, help="a checkout of github.com/exo-explore/gym")
    add_record_options(parser)
    args = parser.parse_args()
    for name, default in (lists | (TINY if args.tiny else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, ",".join(default))
    for name, known in (("phases", PHASES), ("contenders", everyone)):
        asked = getattr(args, name).split(",")
        unknown = [each for each in asked if each and each not in known]
        if unknown:
            parser.error(f"--{name}: {unknown[0]!r} is unknown; use some of {','.join(known)}")
        setattr(args, name, [each for each in known if each in asked])
    args.rates = args.rates.split(",")
    if args.peers is None:  # with --tiny: a folder without any
        args.peers = HERE if args.tiny else Path(tempfile.gettempdir(), "palsgd-peers")
    return args


def main() -> None:
    args = arguments()
    if not args.tiny:
        install(args.peers)
    bench = Bench(args)
    for phase in args.phases:
        bench.found.setdefault("made_at", {})[phase] = bench.found["commit"]
        getattr(bench, phase)()
    print(report(bench.found))
    if args.phases:
        print(last_line(bench.found))
        save(bench.found, args.out)


if __name__ == "__main__":
    sys.exit(main())
