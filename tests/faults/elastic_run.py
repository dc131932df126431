"""Workers of an elastic run, which go on when one is lost, and the process that has their store."""

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

import palsgd
from faults.fault import ELASTIC_WORKERS, Fault
from faults.library_run import STEPS, SYNC_EVERY, Net, digest, gradient
from faults.notes import Notes
from faults.strikes import Strike

STORE = ELASTIC_WORKERS  # the number of the process that has the store


@dataclass(frozen=True)
class Order:
    """What the processes of a run are told."""

    notes: Path
    timeout_s: float
    port: int
    fault: Fault | None = None
    deadline_s: float | None = None  # of a sync; None: it waits for every process that is there
    leaves: tuple[int, int] | None = None  # a worker, and the round at whose beginning it ends

    def work(self, worker: int) -> None:
        if worker == STORE:
            _hold_store(self)
        else:
            _work(self, worker)


def _hold_store(order: Order) -> None:
    store = torch.distributed.TCPStore(
        "127.0.0.1", order.port, is_master=True, wait_for_workers=False
    )
    Notes(order.notes, STORE).add("listening", port=store.port)
    threading.Event().wait()


def _work(order: Order, worker: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(order.port),
        "WORLD_SIZE": str(ELASTIC_WORKERS),
        "RANK": str(worker),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    notes = Notes(order.notes, worker)
    try:
        _train(order, worker, notes)
    except Exception as error:
        notes.add("error", kind=type(error).__name__, message=str(error))
        os._exit(1)
    os._exit(0)


def _train(order: Order, worker: int, notes: Notes) -> None:
    torch.manual_seed(0)
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    transport = palsgd.ElasticTransport(timeout=order.timeout_s, deadline=order.deadline_s)
    opt = palsgd.PALSGD(
        model, inner, sync_every=SYNC_EVERY, mix_prob=0.1, compress="int8", transport=transport
    )
    strike = Strike(order.fault, worker, order.notes / "nothing", notes)
    for _ in palsgd.until([None], opt, steps=STEPS):
        if order.leaves == (worker, opt.rounds):
            os.kill(os.getpid(), signal.SIGKILL)
        strike.before(opt.gradient_steps, round=opt.rounds)
        gradient(model, worker, opt.gradient_steps)
        opt.step()
        opt.zero_grad()
    workers = [entry["workers"] for entry in opt.ledger.history]
    notes.add("done", digest=digest(model, opt), clock=opt.clock, workers=workers)
