"""The store through which elastic workers find each other, and which must outlive all of them."""

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore

from palsgd.checks import warn
from palsgd.errors import SyncError

_Found = TypeVar("_Found")


class Start(NamedTuple):
    """How this process comes to a run."""

    store: Store
    number: int | None  # the number that this worker would like to have
    founders: int | None  # how many workers begin the run; None: as many as it needs at least


def find_start(group: ProcessGroup | None, store: Store | None) -> Start:
    """The store and the place of this process: those given, those of the process group, or those
    that a launcher has put into the environment."""
    if store is None and dist.is_available() and dist.is_initialized():
        return _start_of_group(group)
    number, founders = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    found = store or _store_of_environment()
    return Start(
        found,
        None if number is None else int(number),
        None if founders is None else int(founders),
    )


def _start_of_group(group: ProcessGroup | None) -> Start:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):  # a newcomer knows none of the prefixes
        store = store.underlying_store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and dist.get_rank() == 0:
        warn(
            "the store of this process group may live in one of the workers, and the run ends with "
            "that worker; hold it in another process (python -m palsgd.transports.elastic "
            "HOST:PORT) and leave out init_process_group()"
        )
    return Start(store, dist.get_rank(group), dist.get_world_size(group))


def _store_of_environment() -> Store:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        raise ValueError(
            "an ElasticTransport needs the store of the run; set MASTER_ADDR and MASTER_PORT to "
            "where python -m palsgd.transports.elastic HOST:PORT holds one, or pass store="
        )
    return TCPStore(host, int(port), is_master=False)


class Board:
    """Notes of the workers in the store. Every key is written once, or by one worker alone, or
    decided by the first who proposes a value."""

    _made: ClassVar[Counter[str]] = Counter()  # boards of this process, by their stores

    def __init__(self, store: Store):
        self.host = getattr(store, "host", "127.0.0.1")  # where the store is
        # Several transports of a program have parts of the store of their own, in the order in
        # which the program makes them. So have the attempts of torchrun.
        where = f"{self.host} {getattr(store, 'port', id(store))}"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"palsgd {attempt} {self._made[where]}", store)
        self._made[where] += 1

    def note(self, key: str, value: Any) -> None:
        self._do(lambda: self.store.set(key, json.dumps(value)))

    def read(self, key: str) -> Any:
        """The value of a key; None if it has none."""
        return self._do(lambda: json.loads(self.store.get(key)) if self._has(key) else None)

    def _has(self, key: str) -> bool:
        return self.store.check([key])

    def decide(self, key: str, proposal: Any) -> Any:
        """The first proposal that any worker made for this key."""
        return self._do(lambda: json.loads(self.store.compare_set(key, "", json.dumps(proposal))))

    def count(self, key: str, more: int = 1) -> int:
        return self._do(lambda: self.store.add(key, more))

    def forget(self, *keys: str) -> None:
        for key in keys:
            self._do(lambda key=key: self.store.delete_key(key))  # type: ignore[misc]

    def _do(self, call: Callable[[], _Found]) -> _Found:
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise SyncError(
                f"the store of the run at {self.host} does not answer ({reason}), so the workers "
                "cannot agree who is there; start it and all workers again, from a checkpoint"
            ) from None
