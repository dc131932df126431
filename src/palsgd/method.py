"""The contract of a method: everything that one low-communication method may state.

A method is one file in `palsgd/methods`. It overrides the slots in which it differs from Local SGD;
the defaults are Local SGD. Its rules work on lists of tensors, elementwise, so the same file runs
for one worker, for K stacked workers (tensors with a leading worker axis) and on shards. A method
never sees a message, a process or a device.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from palsgd.schedule import StepPace, round_pace, round_plan

if TYPE_CHECKING:
    from palsgd.tensors import Reduced, WorkerTensors

Rate = Any  # a float, or a float64 tensor on the CPU with one entry per stacked worker
Rates = Sequence[Rate]  # one for each parameter group


class Scalar(NamedTuple):
    """An entry of `local_state` or `global_state` that is a number, not tensors like the model.

    Args:
        name: the attribute of `w` that holds the number. A rule changes the number by assigning to
            it.
        initial: its value before the first round.

    Example:
        >>> import palsgd
        >>> palsgd.Scalar("agreement", 1.0)
        Scalar(name='agreement', initial=1.0)
    """

    name: str
    initial: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that are equal on all workers when a round begins.

    Attributes:
        sync_every: H as given to the constructor, or as chosen by an interval rule.
        workers: how many there are.
        seed, draws: how the steps without data are drawn.
        stops: offsets within the round at which something is sent or applied.
        speeds: of each worker, with `draws="paced"`.
        rates: the learning rates of the parameter groups.
        initial_rates: each group's `initial_lr`, or its learning rate when it was built.
        scalars: the reduced scalars of the last sync's payload.

    Example:
        >>> import palsgd
        >>> palsgd.Method().length(0, palsgd.Facts(sync_every=64))
        64
    """

    sync_every: int  # as given to the constructor, or chosen by an interval rule
    workers: int = 1
    seed: int = 0
    draws: str = "balanced"
    stops: tuple[int, ...] = ()  # offsets at which something is sent or applied
    speeds: tuple[float, ...] = ()  # of each worker, with draws="paced"
    rates: tuple[float, ...] = ()  # the learning rates of the parameter groups
    initial_rates: tuple[float, ...] = ()  # each group's `initial_lr`, or its lr when built
    scalars: Mapping[str, float] = field(default_factory=dict)  # reduced, of the last sync

    def drawn(self, worker: int, round: int, length: int, mix_prob: float) -> list[bool]:
        """A worker's steps of a round, as `palsgd.round_plan` draws them."""
        speeds = self.speeds if self.draws == "paced" else None
        drawn = self._drawn_from(worker, round, length, mix_prob)
        return round_plan(**drawn, draws=self.draws, speeds=speeds)

    def pace(
        self, worker: int, round: int, length: int, mix_prob: float
    ) -> Sequence[StepPace] | None:
        """What each step of such a round counts for. None if all steps count alike: with draws
        that know no speeds, and with equal speeds, where paced draws are balanced ones."""
        if self.draws != "paced" or len(set(self.speeds)) == 1:
            return None
        drawn = self._drawn_from(worker, round, length, mix_prob)
        return round_pace(**drawn, speeds=self.speeds)

    def _drawn_from(self, worker: int, round: int, length: int, mix_prob: float) -> dict[str, Any]:
        """What the draws of a worker's round depend on, beside the kind of draws and speeds."""
        return {
            "seed": self.seed,
            "worker": worker,
            "round": round,
            "sync_every": length,
            "mix_prob": mix_prob,
            "stops": self.stops,
        }


@dataclass(frozen=True)
class Part:
    """One list of tensors, shaped like the model's, that is sent at a sync.

    Args:
        name: `reduced[name]` is the part after the sync.
        tensors: one for each tensor of `w.local`; None: the displacement, anchor minus local model.
        reduction: "mean", "weighted" (by `Payload.weight`) or "gather" (all workers' values).
        coded: may `compress` apply to it?
        every: the part is sent in every `every`-th round.

    Example:
        >>> import palsgd
        >>> palsgd.Part("model", reduction="gather").coded
        True
    """

    name: str
    tensors: Sequence[Tensor] | None = None  # None: the displacement, anchor minus local model
    reduction: str = "mean"  # "mean", "weighted" (by `Payload.weight`) or "gather"
    coded: bool = True  # may compress= apply to it?
    every: int = 1  # the part is sent in every so many rounds


@dataclass(frozen=True)
class Payload:
    """What a worker sends at a sync.

    Args:
        parts: the lists of tensors that are sent; by default the displacement, as "model".
        scalars: numbers by name; they are sent without loss and reduced to their mean.
        weight: the weight of this worker in parts whose reduction is "weighted".

    Example:
        >>> import palsgd
        >>> palsgd.Payload(scalars={"steps": 3}).parts[0].name
        'model'
    """

    parts: tuple[Part, ...] = (Part("model"),)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    weight: Any = 1.0  # of this worker, in parts whose reduction is "weighted"


REDUCTIONS = ("mean", "weighted", "gather")


@dataclass(frozen=True, kw_only=True)
class Method:
    """The rules of a method. Without overrides it is Local SGD with the outer optimizer that is
    given.

    Subclasses are frozen dataclasses whose fields are the method's own settings; `sync_every`,
    `warmup_steps`, `seed` and `draws` belong to the optimizer that is built from it. In the slots
    `w` offers (see `palsgd.tensors.WorkerTensors`):

    - `w.local`, `w.anchor`, `w.grad`: lists of tensors, the same tensor at the same index;
    - each name in `local_state` and `global_state` as an attribute (`w.control`);
    - `w.inner[name]`: the inner optimizer's tensors of that name;
    - `w.groups`: the indices of the tensors of each parameter group;
    - `w.gradient_steps` and `w.rate_sums`: the worker's steps, and the sums of their rates, since
      these tensors' last sync;
    - `w.rates`: the learning rate of each tensor in the last step before the sync;
    - `w.clock` and `w.length`: steps so far, and H of the round, between syncs.

    Example:
        >>> import torch, palsgd
        >>> class Halfway(palsgd.Method):
        ...     "The local model goes half of the way to the anchor at a sync."
        ...     def restart(self, w):
        ...         torch._foreach_lerp_(w.local, w.anchor, 0.5)
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.LocalOptimizer(
        ...     model, inner, method=Halfway(), sync_every=4, transport=palsgd.Alone()
        ... )
    """

    local_state: ClassVar[tuple[str | Scalar, ...]] = ()  #: each worker's own; saved and resumed
    global_state: ClassVar[tuple[str | Scalar, ...]] = ()  #: equal on all workers; saved, compared
    only_when_mixing: ClassVar[bool] = (
        False  # after_gradient is called only with steps of that kind
    )
    # option of the optimizer -> why the method refuses it
    refuses: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for old, new in _RENAMED.items():
            if old in vars(cls):
                raise ValueError(f"{cls.__name__}.{old} is of palsgd 0.1; {new}")

    # -- rounds --------------------------------------------------------------------------------

    def length(self, round: int, facts: Facts) -> int:
        """The number of steps of a round, H, from facts that all workers share."""
        return facts.sync_every

    def plan(self, worker: int, round: int, length: int, facts: Facts) -> list[bool]:
        """The steps of a round: True where a step needs no data, False for a gradient step.

        A step without data pulls the local model towards the anchor. At the head of a round, where
        the local model is equal to the anchor, such steps are counted but not run.

        By default every step takes a gradient, but with `draws="paced"`: there a slower worker
        leaves out some steps.
        """
        return facts.drawn(worker, round, length, 0.0)

    def pace(self, worker: int, round: int, length: int, facts: Facts) -> Sequence[StepPace] | None:
        """With `draws="paced"`, what each step of the plan counts for: a gradient step's rate is
        divided by `share`, and of a mixing step `w.pull_powers` has `power`. None: the rates are
        divided by `gradient_share`, and all powers are 1. A method with an own `plan` states its
        own, or refuses such draws."""
        return facts.pace(worker, round, length, 0.0)

    @property
    def gradient_share(self) -> float:
        """The share of the steps that take a gradient; their learning rate is divided by it."""
        return 1.0

    def check(self, rates: Sequence[float]) -> None:
        """Raise a ValueError for learning rates this method cannot work with."""

    def check_step(self, rates: Sequence[float], clock: int, length: int) -> None:
        """Raise a ValueError if the step without data that begins at this clock cannot be taken
        with these learning rates, in a round of `length` steps. It is asked before the clock counts
        the step."""

    @property
    def foreseeable(self) -> bool:
        """May `check_step` refuse later steps that can be known when a run begins, from the
        schedule of the learning rates or from the clock?"""
        return False

    def doubts(self, rates: Sequence[float], length: int) -> list[str]:
        """What is odd about the settings, a sentence each, of which the optimizer warns when it is
        built. `rates` are the highest that are known then, `length` is H."""
        return []

    def check_run(self, inner: Optimizer, workers: int) -> None:
        """Raise a ValueError for an inner optimizer, or a number of workers, that this method
        cannot work with."""

    # -- between syncs -------------------------------------------------------------------------

    def before_gradient(self, w: "WorkerTensors") -> None:
        """Change `w.grad` before the inner step. Lists hold the tensors that have a gradient."""

    def after_gradient(
        self, w: "WorkerTensors", rate: Rates | None, mixing: Sequence[Rates]
    ) -> tuple[Rate, Rate] | None:
        """Change `w.local` after a gradient step and the steps without data that follow it.

        `rate` has the learning rates of the gradient step, undivided. It is None if no gradient
        step precedes the steps without data since the last sync. `mixing` has one row of rates per
        step without data. Returns the range of the mixing weights, for the ledger, or None.
        """
        return None

    # -- a sync --------------------------------------------------------------------------------

    def payload(self, w: "WorkerTensors") -> Payload:
        """What is sent at a sync; by default the displacement of the local model, as "model"."""
        return Payload()

    def apply(self, w: "WorkerTensors", reduced: "Reduced", outer: Optimizer) -> None:
        """Set `w.anchor` and the states from the reduced payload.

        `reduced["model"]` is the mean displacement; `outer`'s parameters are the anchor's tensors
        and carry it as their gradient, so that the default is one outer step. `w.local` is the
        local model as it was sent.
        """
        outer.step()

    def restart(self, w: "WorkerTensors") -> None:
        """Set `w.local` after a sync. By default `w.local` becomes the anchor, plus the change of
        the local model since it was sent if the sync is delayed. A method that overrides this
        refuses `delay` and `blend`."""
        raise NotImplementedError("the library does this unless a method overrides it")

    def join(self, w: "WorkerTensors") -> None:
        """Set the local states of a worker that was left out of a sync. Its local model has been
        set to the anchor, and its local states to zero."""

    # -- other means than one over all ---------------------------------------------------------

    def weights(self, worker: int, round: int) -> Mapping[int, float] | None:
        """The weights by worker with which this worker adds up payloads; None: the mean over all
        workers."""
        return None

    def global_model(self, w: "WorkerTensors") -> Sequence[Tensor] | None:
        """Tensors whose mean over the workers is the global model, to be evaluated and saved. That
        mean takes a message, so all workers must ask for it. None: the anchor is the global
        model."""
        return None

    # -- what the library asks -----------------------------------------------------------------

    def overrides(self, slot: str) -> bool:
        """Does this method override the slot?"""
        return getattr(type(self), slot) is not getattr(Method, slot)

    def acts_after_gradient(self, mixing: Sequence[Any]) -> bool:
        """Must `after_gradient` be called, with these steps without data?"""
        return self.overrides("after_gradient") and (bool(mixing) or not self.only_when_mixing)

    @property
    def shares_anchor(self) -> bool:
        """Do all workers hold the same anchor, so that it can be compared at every sync?"""
        return not (self.overrides("weights") or self.overrides("global_model"))

    @property
    def varies_length(self) -> bool:
        return self.overrides("length")

    def __str__(self) -> str:
        return type(self).__name__.removesuffix("Method") or "LocalSGD"

    def settings(self) -> dict[str, Any]:
        """The method's own settings, which are compared between workers and with saved states."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def refusals(self) -> dict[str, str]:
        """The options of the optimizer that the method refuses, each with the reason."""
        found = dict(self.refuses)
        if self.overrides("restart"):
            found.setdefault("delay", "the method says itself where the local model goes on")
            found.setdefault("blend", "the method says itself where the local model goes on")
        if self.varies_length:
            found.setdefault("delay", "rounds of varying length may end before a sync arrives")
            found.setdefault("fragments", "rounds of varying length have no fixed places for them")
            found.setdefault("sync_every", "its own length() says how long a round is")
        if self.overrides("plan") and not self.overrides("pace"):
            found.setdefault("draws", "its own plan() says what a step is, and it has no pace()")
        whole = [slot for slot in _NEED_ALL if self.overrides(slot)]
        if whole or state_scalars((*self.local_state, *self.global_state)):
            seen = f"its {whole[0]}()" if whole else "its state"
            found.setdefault("offload", f"{seen} needs all tensors at once, not piece by piece")
        if self.overrides("weights"):
            found.setdefault("compress", "codes are averaged over all workers, not over some")
            found.setdefault("delay", "every worker's own mean would arrive late")
            found.setdefault("elastic", "its weights count on the same workers in every round")
        if self.overrides("global_model"):
            found.setdefault("elastic", "its global model is a mean over the same workers")
        return found


def state_names(entries: Sequence[str | Scalar]) -> list[str]:
    """The names of the states that are tensors of the model's shapes."""
    return [entry for entry in entries if isinstance(entry, str)]


def state_scalars(entries: Sequence[str | Scalar]) -> dict[str, float]:
    """The states that are numbers, with their initial values."""
    return {entry.name: entry.initial for entry in entries if isinstance(entry, Scalar)}


# slots that are not called piece by piece when the anchor is kept in host memory
_NEED_ALL = ("payload", "restart", "join", "weights", "global_model")

_RENAMED = {
    "local_rule": "write after_gradient(w, rate, mixing) instead",
    "global_rule": "write apply(w, reduced, outer) instead",
}
