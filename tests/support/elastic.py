"""Workers in processes of their own, which may be killed and started again, and their store."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from support.patience import patient
from support.warm import server

H, LR, SIZE = 4, 0.1, 6


class Company:
    """Starts workers that train `palsgd.LocalOptimizer`s over a store that this process holds."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = server()
        self._all: list[tuple[Any, Any]] = []

    def start(self, number: int | None, founders: int, **settings: Any) -> int:
        """Start a worker. Returns its place in `outcomes`."""
        ours, theirs = self._context.Pipe()
        place = (self._store.port, number, founders)
        process = self._context.Process(target=_serve, args=(theirs, place, settings), daemon=True)
        process.start()
        theirs.close()
        self._all.append((process, ours))
        return len(self._all) - 1

    def await_death(self, place: int) -> None:
        self._all[place][0].join(patient(100))

    def lose_the_store(self) -> None:
        self._store = None

    def outcomes(self, timeout: float = 100) -> list[Any]:
        """What each worker returned or raised; None for one that was killed."""
        until = time.monotonic() + patient(timeout)
        return [_last(pipe, until) for _, pipe in self._all]

    def close(self) -> None:
        for process, pipe in self._all:
            process.kill()
            process.join()
            pipe.close()


def _last(pipe: Any, until: float) -> Any:
    try:
        if pipe.poll(max(0.0, until - time.monotonic())):
            return pipe.recv()
    except (EOFError, OSError):
        return None
    raise AssertionError("a worker hangs")


def _serve(pipe: Any, place: tuple[int, int | None, int], settings: dict[str, Any]) -> None:
    import torch

    port, number, founders = place
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(founders)}
    if number is not None:
        os.environ["RANK"] = str(number)
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = train(**settings)
        except Exception as error:
            found = {"error": type(error).__name__, "message": str(error)}
    found["warnings"] = [str(w.message) for w in caught if "worker" in str(w.message)]
    pipe.send(found)
    pipe.close()


def target(worker: int) -> np.ndarray:
    """Where the loss of a worker is least."""
    return np.random.default_rng(worker).normal(size=SIZE)


def train(
    *,
    steps: int,
    optimizer: str = "DiLoCo",
    step_s: float = 0.0,
    at: Callable[[Any], None] | None = None,
    transport: dict[str, Any] | None = None,
    seed: int = 0,
    momentum: float = 0.0,
    load: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """One worker's run: its loss is |x - target|^2 / 2. `at(opt)` is called before each step. It
    begins from the newest save in the folder `load`, if that is given."""
    import torch

    import palsgd

    torch.manual_seed(seed)
    model = torch.nn.Linear(SIZE, 1, bias=False).double()
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    over = palsgd.ElasticTransport(**(transport or {}))
    kind = getattr(palsgd, optimizer, None) or getattr(palsgd.methods, optimizer)
    opt = kind(model, inner, **({"sync_every": H, "transport": over} | settings))
    if load is not None:
        palsgd.checkpoint.load(load, model, opt)
    goal = torch.tensor(target(over.worker))[None]
    for _ in palsgd.until([0], opt, steps=steps):
        if at is not None:
            at(opt)
        time.sleep(step_s)
        (0.5 * (model.weight - goal).square().sum()).backward()
        opt.step()
        opt.zero_grad()
    with opt.anchor_weights():
        anchor = model.weight.detach().view(-1).numpy().copy()
    return {
        "worker": over.worker,
        "anchor": anchor,
        "weights": model.weight.detach().view(-1).numpy().copy(),
        "ledger": opt.ledger.as_dict(),
        "clock": opt.clock,
        "lr": opt.param_groups[0]["lr"],
    }


class DieAt:
    """Kills its own process at a clock."""

    def __init__(self, clock: int):
        self.clock = clock

    def __call__(self, opt: Any) -> None:
        if opt.clock >= self.clock:
            os.kill(os.getpid(), signal.SIGKILL)


class SaveAndDieAt(DieAt):
    """Saves at every sync until then."""

    def __init__(self, clock: int, folder: str):
        super().__init__(clock)
        self.folder = folder

    def __call__(self, opt: Any) -> None:
        import palsgd

        if opt.synced:
            palsgd.checkpoint.save(self.folder, opt.model, opt)
        super().__call__(opt)


class AwaitNewcomer:
    """Goes on from a clock when a newcomer has announced itself."""

    def __init__(self, clock: int):
        self.clock = clock

    def __call__(self, opt: Any) -> None:
        while opt.clock == self.clock and opt.transport._board.read("newcomer 1") is None:
            time.sleep(0.01)


def members_of_rounds(ledger: dict[str, Any], first: list[int]) -> list[list[int]]:
    """The workers of each sync in a ledger, from those at the start and the changes. One that has
    come after a sync takes part in the next."""
    changes, now, found = list(ledger["changes"]), set(first), []
    for entry in ledger["history"]:
        while changes and changes[0]["clock"] <= entry["clock"] and not changes[0]["joined"]:
            now -= set(changes.pop(0)["left"])
        found.append(sorted(now))
        while changes and changes[0]["clock"] <= entry["clock"]:
            change = changes.pop(0)
            now = (now - set(change["left"])) | set(change["joined"])
    return found


def twin(x0: np.ndarray, rounds: list[list[int]], *, lr: float, momentum: float) -> np.ndarray:
    """DiLoCo in plain NumPy, in whose rounds some workers take part."""
    anchor, velocity = x0.copy(), np.zeros_like(x0)
    for members in rounds:
        ends = []
        for worker in members:
            local = anchor.copy()
            for _ in range(H):
                local = local - LR * (local - target(worker))
            ends.append(local)
        delta = np.mean([anchor - local for local in ends], axis=0)
        velocity = momentum * velocity + delta
        anchor = anchor - lr * (delta + momentum * velocity)
    return anchor
