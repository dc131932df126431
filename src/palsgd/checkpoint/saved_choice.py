"""Which save all workers load: the newest that is whole on each of them.

Every rank offers what it sees on its disk. The ranks then try the saves, the newest first: each
reads its own file and compares the checksum, and all hear what all have found.
"""

import hashlib
import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from palsgd import tensor_files
from palsgd.checkpoint.everyone import Everyone
from palsgd.checkpoint.step_folders import Saved, find
from palsgd.tensor_files import Written

_OWN, _ABSENT, _DAMAGED = "own", "absent", "damaged"  # what a rank finds of its part of a save


@dataclass(frozen=True)
class Choice:
    """What this rank loads."""

    path: Path
    data: Tensor  # the bytes of the file, whose checksum is right
    workers: int  # that saved it
    source: int  # the worker whose file it is
    passed: str  # which newer saves were passed over, and why; empty if none was
    joining: Collection[int] | None  # the workers that load another's; None if none may
    said: str = ""  # who loads what, if the workers are not those that saved


class _Refused(NamedTuple):
    """Why a save is not loaded."""

    why: str
    by_disk: bool = False  # did a disk refuse to be read?
    step: float = math.inf  # it may be newer than a save of an earlier step


def choose(folder: Path, everyone: Everyone, *, elastic: bool) -> Choice:
    """All ranks call this and choose the same save.

    Raises:
        ValueError, OSError: there is none. It is raised on all ranks.
    """
    found = everyone.do(lambda: _seen(folder), fails="cannot look for saves", at=folder)
    ranks = [each for worker in found for each in worker]
    offers = {offer["id"]: offer for each in ranks for offer in each["offers"]}
    refused = _unreadable(ranks, {offer["name"] for offer in offers.values()})
    for offer in sorted(offers.values(), key=lambda each: (-each["order"], each["id"])):
        attempt = _Attempt(folder, everyone, offer, ranks=len(found[0]), elastic=elastic)
        problem = attempt.problem()
        if problem is None:
            newer = [each.why for each in refused if each.step > offer["step"]]
            taken = [f"{offer['name']} is loaded"]
            return attempt.choice("; ".join(newer + taken) if newer else "")
        refused.append(problem)
    _refuse(folder, everyone, refused, old=any(each["old"] for each in ranks))


def _unreadable(ranks: list[dict[str, Any]], readable: set[str]) -> list[_Refused]:
    """The saves whose manifest no rank can read."""
    found = {name: entry for each in ranks for name, entry in each["unreadable"].items()}
    return [
        _Refused(f"{name} is damaged ({why})", step=step)
        for name, (step, why) in found.items()
        if name not in readable
    ]


def _seen(folder: Path) -> dict[str, Any]:
    """What this rank sees on its disk."""
    saves = find(folder)
    return {
        "offers": [_offer(saved) for saved in saves if saved.manifest],
        "unreadable": {
            saved.path.name: (saved.step, saved.why) for saved in saves if not saved.manifest
        },
        "old": any(folder.glob("worker-*/.metadata")),
    }


def _offer(saved: Saved) -> dict[str, Any]:
    known = ("id", "order", "step", "workers", "ranks", "at_stop")
    return {name: saved.manifest[name] for name in known} | {"name": saved.path.name}


def _refuse(folder: Path, everyone: Everyone, refused: list[_Refused], *, old: bool) -> NoReturn:
    worker = everyone.transport.worker
    if refused:
        kind = OSError if refused[0].by_disk else ValueError
        raise kind(f"no save in {folder} can be loaded: {'; '.join(each.why for each in refused)}")
    if old:
        raise ValueError(
            f"{folder} was saved by an earlier release in a form that can run code when it is "
            "read; load it with that release, keep model.state_dict() and opt.state_dict() of each "
            "worker with torch.save, and give those to load_state_dict() here"
        )
    raise ValueError(
        f"no checkpoint of worker {worker} at {folder}; give the folder that "
        "palsgd.checkpoint.save wrote, on a disk this worker can read"
    )


class _Attempt:
    """An attempt of all ranks to load one save."""

    def __init__(
        self, folder: Path, everyone: Everyone, offer: dict[str, Any], *, ranks: int, elastic: bool
    ):
        self._everyone, self._offer, self._elastic = everyone, offer, elastic
        self._worker, self._rank = everyone.rank
        self._ranks, self._workers = ranks, everyone.workers
        seen = find(folder)
        self._saved = next((each for each in seen if each.manifest.get("id") == offer["id"]), None)
        self._unreadable = {each.path.name: each.why for each in seen if not each.manifest}
        single = self._saved is not None and self._saved.path == folder
        self._path = folder if single else folder / offer["name"]
        self._data: Tensor | None = None
        self._joining: list[int] = []

    def problem(self) -> _Refused | None:
        """Why this save cannot be loaded. The files are read and kept."""
        self._check_fit()
        offer, name = self._offer, self._offer["name"]
        found = self._everyone.tell(self._read())
        usable = (_OWN, _ABSENT) if self._elastic else (_OWN,)
        for worker, answers in enumerate(found):
            for answer in answers:
                if answer["found"] not in usable:
                    why = f"{name} cannot be used by worker {worker} ({answer['why']})"
                    return _Refused(why, answer["by_disk"])
        self._joining = [
            k for k, answers in enumerate(found) if any(each["found"] != _OWN for each in answers)
        ]
        if len(self._joining) == self._workers:
            return _Refused(f"{name} has no file of the workers that load it")
        if (self._joining or offer["workers"] != self._workers) and not offer["at_stop"]:
            return _Refused(
                f"{name} was saved within a round, where only the workers that saved it can go on; "
                "save where opt.synced is True"
            )
        return self._fetch(name) if self._joining else None

    def _check_fit(self) -> None:
        saved, now = self._offer["workers"], self._workers
        if self._offer["ranks"] != self._ranks:
            raise ValueError(
                f"{self._path} was saved by workers of {self._offer['ranks']} ranks, and these "
                f"have {self._ranks}; start as many for each worker as saved it"
            )
        if saved != now and not self._elastic:
            raise ValueError(
                f"{self._path} was saved by {saved} workers, and {now} load it; pass elastic=True "
                "to go on with another number of workers"
            )

    def choice(self, passed: str) -> Choice:
        assert self._data is not None
        source = self._source if self._worker in self._joining else self._worker
        joining = self._joining if self._elastic else None
        said = "" if self._everyone.transport.elastic else self._said()
        return Choice(self._path, self._data, self._offer["workers"], source, passed, joining, said)

    # -- files -----------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        """Read the file of this rank. Returns what was found."""
        name = self._offer["name"]
        if self._worker >= self._offer["workers"]:
            return _answer(_ABSENT, "it did not save it")
        if self._saved is None and name in self._unreadable:
            return _answer(_DAMAGED, self._unreadable[name])
        if self._saved is None:
            return _answer(_ABSENT, f"it is not at {self._path}")
        try:
            self._data = self._file(self._worker, self._rank)
        except ValueError as error:
            return _answer(_DAMAGED, str(error))
        except OSError as error:
            return _answer(_DAMAGED, f"{error.filename}: {error.strerror}", by_disk=True)
        return _answer(_OWN)

    def _file(self, worker: int, rank: int) -> Tensor:
        assert self._saved is not None
        for entry in self._saved.manifest["files"]:
            if (entry["worker"], entry["rank"]) == (worker, rank):
                written = Written(entry["size"], entry["sha256"])
                return tensor_files.read(self._saved.path / entry["file"], written)
        raise ValueError(f"{self._saved.path} has no file of worker {worker}, rank {rank}")

    # -- workers that join -----------------------------------------------------------------------

    @property
    def _source(self) -> int:
        """The worker whose file those that join load."""
        return next(k for k in range(self._workers) if k not in self._joining)

    def _fetch(self, name: str) -> _Refused | None:
        """Read the file of the source on the ranks of workers that join, or have it sent where the
        disk does not have it. The ranks of a worker that hold copies all take its first rank's."""
        rank = self._rank if self._everyone.transport.sharded else 0
        given = None
        if self._saved is not None and self._worker in (self._source, *self._joining):
            with suppress(ValueError, OSError):
                given = self._file(self._source, rank)
        found = self._everyone.tell(_described(given))
        sources = found[self._source]
        if any(each is None for each in sources):
            return _Refused(f"{name} cannot be given to workers {self._joining} by all ranks")
        size, sha256 = sources[self._rank]
        if any(each is None for k in self._joining for each in found[k]):
            given = self._everyone.send(given, source=self._source, size=size)
            if self._worker in self._joining and _described(given) != [size, sha256]:
                raise ValueError(f"{name} did not arrive as worker {self._source} sent it")
        if self._worker in self._joining:
            self._data = given
        return None

    def _said(self) -> str:
        """Who loads what, if the workers are not those that saved."""
        before, now, parts = self._offer["workers"], self._workers, []
        if before != now:
            parts.append(f"{before} workers saved {self._offer['name']}, {now} go on")
        if self._joining:
            who = ", ".join(map(str, self._joining))
            parts.append(
                f"worker {who} goes on from the global model, with worker {self._source}'s inner "
                "state"
            )
        return ": ".join(parts)


def _answer(found: str, why: str = "", *, by_disk: bool = False) -> dict[str, Any]:
    return {"found": found, "why": why, "by_disk": by_disk}


def _described(data: Tensor | None) -> list[Any] | None:
    if data is None:
        return None
    return [len(data), hashlib.sha256(data.numpy().data).hexdigest()]
