"""What the loss of workers costs a run over palsgd.ElasticTransport.

    python bench/elastic.py --out bench/results/elastic-2cores.json    # three minutes

kills: a worker is killed at a sync every few rounds and another process takes its place. How long
after the kill have the others synced, how long does a newcomer wait, and what is the loss at the
end, beside that of a run that nobody leaves? calm: a sync of workers that stay, beside one over a
process group.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from common import add_record_options, provenance, save, summary, table
from sklearn.datasets import load_digits
from torch import nn

import palsgd
from palsgd.lab.judging.interval import relative_difference

H = 16
WAIT_S = 600.0  # for anything that a worker says


@dataclass(frozen=True)
class Order:
    """What a worker is to do."""

    number: int
    workers: int
    port: int
    steps: int
    seed: int
    width: int = 64
    elastic: bool = True
    step_s: float = 0.0  # of sleep, as of a larger model
    every: int | None = None  # in every so many rounds a worker dies, each in its turn

    def dies_at(self, clock: int) -> int | None:
        """The clock of the next sync that this worker comes to and does not survive. Nobody dies in
        the last rounds."""
        if self.every is None:
            return None
        rounds = range(
            (self.number + 1) * self.every, self.steps // H - 8, self.workers * self.every
        )
        return next((H * r for r in rounds if H * r > clock + H), None)


# -- a worker --------------------------------------------------------------------------------------


def stand_by(pipe: Any) -> None:
    """Import everything, which takes longer than many rounds, and wait for an order."""
    load_digits()
    order = pipe.recv()
    try:
        work(order, pipe)
    except palsgd.SyncError:  # the run was over before it let this worker in
        if order.every is None:
            raise


def work(order: Order, pipe: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(order.port)}
    os.environ |= {"RANK": str(order.number), "WORLD_SIZE": str(order.workers)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    model, images, labels = task(order)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began = time.monotonic()
    opt = palsgd.PALSGD(model, inner, sync_every=H, transport=transport(order))
    pipe.send(("began", opt.transport.worker, opt.clock, time.monotonic() - began))
    sync_s, dies_at = [], order.dies_at(opt.clock)
    # At once, as a worker that is killed tells nothing at its end.
    opt.on(palsgd.events.Synced, lambda event: pipe.send(("synced", time.monotonic())))
    own = torch.arange(opt.transport.worker, len(labels), order.workers)
    drawn = torch.Generator().manual_seed(order.seed * 1000 + opt.clock * 10 + order.number)
    for _ in palsgd.until([0], opt, steps=order.steps):
        full = opt.transport.workers == order.workers  # the last one that died has been replaced
        if dies_at is not None and opt.clock >= dies_at - 2 and full:
            pipe.send(("dies", order.number, time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(order.step_s)
        batch = own[torch.randint(len(own), (32,), generator=drawn)]
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        start = time.perf_counter()
        opt.step()
        if opt.synced:
            sync_s.append(time.perf_counter() - start)
        opt.zero_grad()
    with opt.anchor_weights(), torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(images), labels))
    pipe.send(("ends", End(loss, sync_s, opt.ledger.changes)))


@dataclass(frozen=True)
class End:
    """What a worker has to tell when its run is over."""

    loss: float
    sync_s: list[float]
    changes: list[dict[str, Any]]


def task(order: Order) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    found, labels = load_digits(return_X_y=True)
    images = torch.tensor(found, dtype=torch.float32) / 16
    torch.manual_seed(order.seed)  # the same weights on every worker
    width = order.width
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    return model, images, torch.tensor(labels)


def transport(order: Order) -> palsgd.Transport | None:
    if order.elastic:
        return palsgd.ElasticTransport(timeout=60.0)
    store = dist.TCPStore("127.0.0.1", order.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=order.number, world_size=order.workers)
    return None


# -- runs ------------------------------------------------------------------------------------------


class Run:
    """Workers in processes of their own, and the store in which they meet."""

    def __init__(self, **known: Any):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch._dynamo", "palsgd.optimizer", "sklearn"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._known = known | {"port": self._store.port}
        self._open: dict[Any, Any] = {}  # processes by their pipes
        self._idle = [self._new() for _ in range(known["workers"] + 1)]

    def _new(self) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=stand_by, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def start(self, number: int) -> None:
        """Give a number to a process that stands by, and start another one."""
        pipe, process = self._idle.pop(0)
        pipe.send(Order(number=number, **self._known))
        self._open[pipe] = process
        self._idle.append(self._new())

    def close(self) -> None:
        for _, process in self._idle:
            process.kill()

    def said(self) -> Any:
        """What a worker says next; None when all have ended."""
        while self._open:
            ready = wait(list(self._open), timeout=WAIT_S)
            if not ready:
                raise SystemExit(f"no worker has said anything for {WAIT_S:.0f} s")
            try:
                return ready[0].recv()
            except EOFError:
                process = self._open.pop(ready[0])
                process.join()
                if process.exitcode > 0:
                    raise SystemExit("a worker has failed") from None
        return None


def run(*, workers: int, every: int | None = None, **known: Any) -> dict[str, Any]:
    """A run in which a worker dies every so many rounds and is replaced."""
    run = Run(workers=workers, every=every, **known)
    for number in range(workers):
        run.start(number)
    deaths, waits, synced = [], [], []
    ends: list[End] = []
    while (said := run.said()) is not None:
        kind, *rest = said
        if kind == "dies":
            deaths.append(rest[1])
            run.start(rest[0])
        elif kind == "synced":
            synced.append(rest[0])
        elif kind == "ends":
            ends.append(rest[0])
        elif rest[1]:  # a newcomer, which has waited for a sync
            waits.append(rest[2])
    run.close()
    return {
        "loss": ends[0].loss,
        "deaths": len(deaths),
        "next_sync_s": [next_sync(death, synced) for death in deaths],
        "newcomers_waited_s": waits,
        "fewest_workers": min((c["workers"] for e in ends for c in e.changes), default=workers),
        "sync_s": statistics.median(s for end in ends for s in end.sync_s),
        "round_s": (max(synced) - min(synced)) * H / known["steps"],
    }


def next_sync(death: float, synced: list[float]) -> float:
    """The seconds from a death to the next sync of anybody."""
    return min(at for at in synced if at > death) - death


def kills(seeds: int, *, tiny: bool) -> dict[str, Any]:
    workers, rounds, every = (2, 20, 10) if tiny else (3, 150, 6)
    known: dict[str, Any] = {"workers": workers, "steps": rounds * H, "step_s": 0.005}
    found: dict[str, Any] = known | {"sync_every": H, "every": every}
    for seed in range(1 if tiny else seeds):
        undisturbed, killed = (run(seed=seed, every=each, **known) for each in (None, every))
        found[f"seed {seed}"] = {"undisturbed": undisturbed, "killed": killed}
    pairs = [value for name, value in found.items() if name.startswith("seed")]
    after = [s for pair in pairs for s in pair["killed"]["next_sync_s"]]
    killed, undisturbed = (
        {seed: pair[which]["loss"] for seed, pair in enumerate(pairs)}
        for which in ("killed", "undisturbed")
    )
    return found | {
        "deaths": len(after),
        "next_sync_s": {"median": statistics.median(after), "longest": max(after)},
        "loss_over_undisturbed": relative_difference(killed, undisturbed).as_dict(),
    }


def calm(*, tiny: bool) -> dict[str, Any]:
    """The seconds of a sync between workers that stay, in turn with a process group's."""
    found: dict[str, Any] = {}
    for width in (64,) if tiny else (64, 16384):
        known = {"workers": 2, "steps": (2 if tiny else 40) * H, "seed": 0, "width": width}
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(1 if tiny else 3):
            for elastic in times:
                times[elastic].append(run(elastic=elastic, **known)["sync_s"])
        elastic_s, group_s = (statistics.median(times[elastic]) for elastic in (True, False))
        parameters = 64 * width + width + 10 * width + 10
        found[str(parameters)] = {"elastic_s": elastic_s, "process_group_s": group_s}
    return found


# -- the record ------------------------------------------------------------------------------------


def rows(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    killed = record["kills"]
    after, loss = killed["next_sync_s"], killed["loss_over_undisturbed"]
    found = [
        ("from a kill to the next sync, median", f"{after['median']:.3f} s", ""),
        ("from a kill to the next sync, longest", f"{after['longest']:.3f} s", "1 s"),
        (
            f"loss at the end with {killed['deaths']} deaths, {loss['n']} paired seeds",
            percent(loss),
            "undisturbed",
        ),
    ]
    for parameters, each in record["calm"].items():
        name = f"sync of {int(parameters):,} parameters, K = 2"
        found.append(
            (name, f"{1e3 * each['elastic_s']:.2f} ms", f"{1e3 * each['process_group_s']:.2f} ms")
        )
    return found


def percent(found: dict[str, Any]) -> str:
    """A share with its interval, if there is one."""
    value, low, high = (found[name] for name in ("value", "low", "high"))
    bounds = "" if low is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{100 * value:+.1f}%{bounds}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_record_options(parser)
    parser.add_argument("--seeds", type=int, default=3, help="pairs of runs, half a minute each")
    args = parser.parse_args()
    record = provenance("cpu", tiny=args.tiny)
    record["kills"] = kills(args.seeds, tiny=args.tiny)
    save(record, args.out)
    record["calm"] = calm(tiny=args.tiny)
    record["untimed"] = {"deaths": record["kills"]["deaths"], "sizes": len(record["calm"])}
    save(record, args.out)
    print(table(rows(record)))
    print(summary(record))


if __name__ == "__main__":
    main()
