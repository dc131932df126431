"""`opt.state`: the inner optimizer's state, under which palsgd's part can be loaded.

torch's helpers that load a flattened state iterate over the entry of each parameter in `opt.state`
to find the names that they load. An entry therefore names palsgd's part when it is iterated over.
Otherwise it is the inner optimizer's.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

from torch import Tensor

from palsgd.packing import OWN
from palsgd.worker import Worker


class Entry(dict[str, Any]):
    """The entry of one parameter. What is assigned to it is assigned to the inner optimizer's."""

    def __init__(self, kept: dict[str, Any]):
        super().__init__(kept)
        self._kept = kept

    def __iter__(self) -> Iterator[str]:
        return chain(super().__iter__(), (OWN,))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._kept[name] = value


class LiveState(MutableMapping[Tensor, Any]):
    def __init__(self, worker: Worker):
        self._worker = worker

    @property
    def _inner(self) -> Any:
        return self._worker.inner.optimizer.state

    def __getitem__(self, param: Tensor) -> Any:
        kept = self._inner[param]
        return Entry(kept) if isinstance(kept, dict) else kept

    def __setitem__(self, param: Tensor, entry: Any) -> None:
        # torch leaves other values in a state alone, and so do we
        self._inner[param] = dict(entry.items()) if isinstance(entry, Mapping) else entry

    def items(self) -> Any:
        return self._inner.items()

    def values(self) -> Any:
        return self._inner.values()

    def __delitem__(self, param: Tensor) -> None:
        del self._inner[param]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def __bool__(self) -> bool:
        """Is there anything to save? An inner optimizer without a state of its own may still have
        taken steps."""
        return bool(self._inner) or self._worker.at.clock > 0
