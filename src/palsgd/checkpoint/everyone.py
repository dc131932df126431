"""All ranks of a run, which do the stages of a save or a load together and fail together; and
workers that may leave and come, of which one saves for all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from palsgd.errors import NonFiniteError
from palsgd.local_optimizer import LocalOptimizer
from palsgd.transports.byte_means import sent_from
from palsgd.transports.json_exchange import Reader, announced

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (OSError, ValueError, NonFiniteError)
}


class Everyone:
    """`of` is what they do, for the error of those who lose another."""

    def __init__(self, opt: LocalOptimizer, of: str):
        self._driver, self.transport, self._of = opt._driver, opt.transport, of
        self._device = opt._worker.inner.replica.device

    @property
    def rank(self) -> tuple[int, int]:
        """The numbers of this worker and of this rank among its ranks."""
        return self.transport.worker, self.transport.rank_inside

    @property
    def workers(self) -> int:
        return self.transport.workers

    def tell(self, value: Any, read: Reader | None = None) -> list[list[Any]]:
        """The values of all ranks, those of each worker in a list. Values are those of JSON. `read`
        raises if one is not what the caller expects."""
        found: list[list[Any]] = []

        def exchange() -> Any:
            found.extend((yield from announced(self.transport, value, self._device, read)))

        self._driver.run(exchange(), self._of)
        return found

    def send(self, data: Tensor | None, *, source: int, size: int) -> Tensor:
        """The bytes that the ranks of worker `source` give."""
        found: list[Tensor] = []

        def exchange() -> Any:
            sent = yield from sent_from(self.transport, source, data, size, self._device)
            found.append(sent)

        self._driver.run(exchange(), self._of)
        return found[0]

    def do(
        self,
        job: Callable[[], Any],
        *,
        fails: str,
        at: Path,
        undo: Callable[[], None] = lambda: None,
    ) -> list[list[Any]]:
        """What `job` returns on each rank. If it fails on one, `undo` runs and the same error is
        raised on all: it says which worker `fails`, `at` which path, and why."""
        error: Exception | None = None
        said: dict[str, Any]
        try:
            said = {"value": job()}
        except Exception as raised:  # the other ranks wait to hear of it, whatever it is
            error = raised
            said = {"kind": _kind(raised), "why": _described(raised, at)}
        found = self.tell(said, _answer)
        for worker, ranks in enumerate(found):
            for answer in ranks:
                if "why" in answer:
                    undo()
                    _raise(answer, f"worker {worker} {fails}", error)
        return [[answer["value"] for answer in ranks] for ranks in found]


class OneForAll(Everyone):
    """Workers that may leave and come. Right after a sync they have the same global model, so one
    of them saves it for all, and each loads it by itself: a message would wait for a newcomer, who
    was let in after that sync and saves nothing."""

    @property
    def rank(self) -> tuple[int, int]:
        return 0, 0

    @property
    def workers(self) -> int:
        return 1

    def tell(self, value: Any, read: Reader | None = None) -> list[list[Any]]:
        heard = json.loads(json.dumps(value))
        return [[heard if read is None else read(heard)]]


def everyone_of(opt: LocalOptimizer, of: str) -> Everyone:
    return (OneForAll if opt.transport.elastic else Everyone)(opt, of)


def speaks_for_all(opt: LocalOptimizer) -> bool:
    """Is this the lowest of the workers that took part in the last sync? Newcomers did not."""
    return opt.transport.worker == min(took_part(opt), default=None)


def took_part(opt: LocalOptimizer) -> list[int]:
    """The workers that took part in the sync at this clock."""
    changes = [change for change in opt.ledger.changes if change["clock"] == opt.clock]
    came = {number for change in changes for number in change["joined"]}
    if opt.joined_at == opt.clock:
        came.add(opt.transport.worker)
    return [number for number in opt.transport.members if number not in came]


def _answer(found: Any) -> dict[str, Any]:
    """What a rank says of its job: what it returned, or why it failed."""
    if "why" in found:
        return {"kind": str(found["kind"]), "why": str(found["why"])}
    return {"value": found["value"]}


def _kind(error: Exception) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")


def _described(error: Exception, at: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or at}: {error.strerror}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _raise(answer: dict[str, str], who: str, error: Exception | None) -> NoReturn:
    kind = _KINDS.get(answer["kind"], RuntimeError)
    raise kind(f"{who}: {answer['why']}") from error
