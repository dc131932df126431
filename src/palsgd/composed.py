"""Several methods as one: their hooks run in order, and their payloads are joined."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from palsgd.method import Facts, Method, Part, Payload, Rate, Rates, Scalar
from palsgd.schedule import StepPace
from palsgd.tensors import Reduced, WorkerTensors, highest, lowest

ONCE = ("plan", "length", "gradient_share", "apply", "restart", "weights", "global_model")


def composed(method: Any) -> Method:
    """One method from a method or a list of methods."""
    if isinstance(method, type) and issubclass(method, Method):
        raise ValueError(f"method={method.__name__} is a class; give an instance of it")
    if isinstance(method, Method):
        return _with_plain_numbers(method)
    if not isinstance(method, Sequence) or not all(isinstance(m, Method) for m in method):
        raise ValueError(f"method={method!r} must be a palsgd.Method, or a list of them")
    if not method:
        raise ValueError("method=[] has no rules; give palsgd.Method() for Local SGD")
    method = [_with_plain_numbers(each) for each in method]
    if len(method) == 1:
        return method[0]
    for slot in ONCE:
        users = [m for m in method if m.overrides(slot)]
        if len(users) > 1:
            raise ValueError(
                f"{users[0]} and {users[1]} both override {slot}, which one method alone decides; "
                "use one of them"
            )
    found = Composed(methods=tuple(method))
    _check_names(found)
    return found


def _with_plain_numbers(method: Method) -> Method:
    """The method with Python's numbers in place of NumPy's among its settings. They are saved, and
    torch.load reads no NumPy numbers unless it is told to trust the file."""
    found = {k: v.item() for k, v in method.settings().items() if isinstance(v, np.generic)}
    return dataclasses.replace(method, **found) if found else method


def _check_names(method: "Composed") -> None:
    """Refuse two states of one name, as two methods would write the same tensors."""
    entries = [*method.local_state, *method.global_state]
    names = [entry.name if isinstance(entry, Scalar) else entry for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two methods of {method} keep a state called {twice!r}; rename one")


def _check_joined(
    method: "Composed", parts: dict[str, Part], scalars: dict[str, Any], payload: Payload
) -> None:
    """Refuse names that two payloads share, except that of the displacement, which is sent once for
    all methods."""
    one = [p.name for p in payload.parts if p.name in parts and _different(p, parts[p.name])]
    twice = next(iter([*one, *(name for name in payload.scalars if name in scalars)]), None)
    if twice is not None:
        raise ValueError(f"two methods of {method} send {twice!r}; rename one")


def _different(part: Part, other: Part) -> bool:
    return part.tensors is not None or other.tensors is not None or part != other


@dataclass(frozen=True, kw_only=True)
class Composed(Method):
    methods: tuple[Method, ...]

    def _user(self, slot: str) -> Method:
        return next((m for m in self.methods if m.overrides(slot)), Method())

    def overrides(self, slot: str) -> bool:
        return any(m.overrides(slot) for m in self.methods)

    def __str__(self) -> str:
        return " + ".join(map(str, self.methods))

    def settings(self) -> dict[str, Any]:
        titles = [str(method) for method in self.methods]
        return {
            f"{title}{titles[:place].count(title) + 1 if title in titles[:place] else ''}.{name}": v
            for place, (title, method) in enumerate(zip(titles, self.methods, strict=True))
            for name, v in method.settings().items()
        }

    @property
    def local_state(self) -> tuple[Any, ...]:  # type: ignore[override]
        return tuple(entry for m in self.methods for entry in m.local_state)

    @property
    def global_state(self) -> tuple[Any, ...]:  # type: ignore[override]
        return tuple(entry for m in self.methods for entry in m.global_state)

    @property
    def only_when_mixing(self) -> bool:  # type: ignore[override]
        return all(m.only_when_mixing for m in self.methods if m.overrides("after_gradient"))

    def refusals(self) -> dict[str, str]:
        return {k: v for method in reversed(self.methods) for k, v in method.refusals().items()}

    @property
    def gradient_share(self) -> float:
        return self._user("gradient_share").gradient_share

    def length(self, round: int, facts: Facts) -> int:
        return self._user("length").length(round, facts)

    def plan(self, worker: int, round: int, length: int, facts: Facts) -> list[bool]:
        return self._user("plan").plan(worker, round, length, facts)

    def pace(self, worker: int, round: int, length: int, facts: Facts) -> Sequence[StepPace] | None:
        return self._user("plan").pace(worker, round, length, facts)

    def check(self, rates: Sequence[float]) -> None:
        for method in self.methods:
            method.check(rates)

    def check_step(self, rates: Sequence[float], clock: int, length: int) -> None:
        for method in self.methods:
            method.check_step(rates, clock, length)

    @property
    def foreseeable(self) -> bool:
        return any(method.foreseeable for method in self.methods)

    def doubts(self, rates: Sequence[float], length: int) -> list[str]:
        return [doubt for method in self.methods for doubt in method.doubts(rates, length)]

    def check_run(self, inner: Optimizer, workers: int) -> None:
        for method in self.methods:
            method.check_run(inner, workers)

    def before_gradient(self, w: WorkerTensors) -> None:
        for method in self.methods:
            method.before_gradient(w)

    def after_gradient(
        self, w: WorkerTensors, rate: Rates | None, mixing: Sequence[Rates]
    ) -> tuple[Rate, Rate] | None:
        acting = [method for method in self.methods if method.acts_after_gradient(mixing)]
        ranges = [method.after_gradient(w, rate, mixing) for method in acting]
        found = [r for r in ranges if r is not None]
        if not found:
            return None
        return lowest([low for low, _ in found]), highest([high for _, high in found])

    def payload(self, w: WorkerTensors) -> Payload:
        payloads = [m.payload(w) for m in self.methods if m.overrides("payload")] or [Payload()]
        parts: dict[str, Part] = {}
        scalars: dict[str, Any] = {}
        for payload in payloads:
            _check_joined(self, parts, scalars, payload)
            parts |= {part.name: part for part in payload.parts}
            scalars |= payload.scalars
        weight: Any = 1.0
        for payload in payloads:
            weight = weight * payload.weight
        return Payload(tuple(parts.values()), scalars, weight)

    def apply(self, w: WorkerTensors, reduced: Reduced, outer: Optimizer) -> None:
        self._user("apply").apply(w, reduced, outer)

    def restart(self, w: WorkerTensors) -> None:
        self._user("restart").restart(w)

    def join(self, w: WorkerTensors) -> None:
        for method in self.methods:
            method.join(w)

    def weights(self, worker: int, round: int) -> Any:
        return self._user("weights").weights(worker, round)

    def global_model(self, w: WorkerTensors) -> Sequence[Tensor] | None:
        return self._user("global_model").global_model(w)
