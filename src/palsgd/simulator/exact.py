"""The exact engine: it runs the optimizers' own code, one worker after another."""

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from palsgd.errors import NonFiniteError, SyncError
from palsgd.events import Averaged, Synced
from palsgd.ledger import Ledger
from palsgd.optimizer import LocalOptimizer
from palsgd.simulator.batches import Batches, DryError, check_loss, moved
from palsgd.simulator.global_model import GlobalModel, global_part
from palsgd.simulator.graphed import Gradient, GraphedGradient, Graphs, Loss
from palsgd.simulator.history import Recorder
from palsgd.simulator.result import Result
from palsgd.simulator.saved import (
    cloned,
    copy_tensors,
    load_optimizer,
    optimizer_state,
    tensors_of,
)
from palsgd.simulator.stacking_checks import fastest_convolutions
from palsgd.simulator.workers_warm_start import WorkersWarmUp, WorkerWarmUp
from palsgd.transports.in_memory import SimulatedTransport, average_in_memory
from palsgd.transports.requests import Finish, Request, Start
from palsgd.transports.transport import Message, ambient

if TYPE_CHECKING:
    from palsgd.simulator.warm_start import CommonWarmUp

Randomness = dict[str, Any]  # the state of torch's generators, on a device


def built(
    method: Callable[[nn.Module], LocalOptimizer], model: nn.Module, transport: SimulatedTransport
) -> LocalOptimizer:
    with ambient(transport):
        opt = method(model)
    if not isinstance(opt, LocalOptimizer):
        raise ValueError(
            f"method(model) must return a palsgd optimizer, got {type(opt).__name__}; use "
            "lambda model: palsgd.DiLoCo(model, SGD(model.parameters(), 0.1), sync_every=32)"
        )
    if opt._worker.course.interval is not None:
        raise ValueError(
            "sync_every='auto' measures a link, and simulated workers have none; give a number, "
            "such as the one that a real run's ledger.interval shows"
        )
    pacing = opt._worker.course.pacing
    if pacing is not None and pacing.measures:
        raise ValueError(
            "draws='paced' measures the speeds of workers, and simulated ones have none; give "
            f"speeds= with {pacing.workers} numbers, or what a real run's ledger.speeds has"
        )
    check_own_step(opt)
    return opt


def check_own_step(opt: LocalOptimizer) -> None:
    """Refuse an own `step`, or a scheduler that a training loop would step, as a simulation does
    not call it."""
    if type(opt).step is not LocalOptimizer.step:
        raise ValueError(
            f"{type(opt).__name__} overrides step(), which a simulation does not call; write a "
            "palsgd.Method, or listen to palsgd.events"
        )
    scheduler = opt._worker.inner.scheduler
    for name, each in (("the optimizer", opt), ("its inner optimizer", opt.inner)):
        # torch's schedulers wrap the step of the optimizer they are bound to
        # by ==, as the optimizer's own scheduler refers to it by a proxy
        bound = scheduler is not None and getattr(scheduler, "optimizer", None) == each
        if hasattr(vars(each).get("step"), "_wrapped_by_lr_sched") and not bound:
            raise ValueError(
                f"a scheduler is bound to {name}, and nobody steps it in a simulation; give it to "
                "the palsgd optimizer as scheduler=, which steps it once per tick of the clock"
            )


class Pause:
    """A worker yields it between two steps, where its state can be saved."""


PAUSE = Pause()


class Note(NamedTuple):
    """One worker's record of an exchange. The ledger is a copy, as the first worker takes further
    steps before the last worker completes the exchange."""

    loss: float  # mean since the last exchange
    distance: float
    ledger: Ledger


class SimulatedWorker:
    """One simulated process: model, optimizer, data, and random numbers of its own."""

    def __init__(
        self,
        model: nn.Module,
        method: Callable[[nn.Module], LocalOptimizer],
        transport: SimulatedTransport,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Batches,
        rng: Randomness,
        graphs: Graphs | None = None,
    ):
        """Without `graphs`, gradients are computed anew."""
        self.opt = built(method, model, transport)
        self.model = model
        self.losses: list[Tensor] = []  # since the last exchange
        self.metrics: list[Any] = []
        self.part: list[Tensor] | None = None  # its part of the global model, at the last exchange
        self.notes: list[Note] = []  # one per exchange
        self.pauses = False  # after the step that it is in?
        self._worker, self.batches = transport.worker, batches
        self._gradient = (
            Gradient(model, loss) if graphs is None else GraphedGradient(model, loss, graphs)
        )
        self.rng = rng
        self._life: Generator[Request | Pause, int, None] | None = None

    def advance(self, steps: int, sent: int = 0) -> Request | Pause | None:
        """Run up to the next request and return it; None at the end of training."""
        with own_randomness(self.rng):
            if self._life is None:
                self._life = self._train(steps)
                return next(self._life, None)
            try:
                return self._life.send(sent)
            except StopIteration:
                return None

    def _train(self, steps: int) -> Generator[Request | Pause, int, None]:
        opt, worker = self.opt, self.opt._worker
        worker.course.end_at(steps)
        yield from torch.no_grad()(worker.prepare)()
        while opt.clock < steps:
            loss = self._gradient(moved(self.batches.next(), worker.inner.replica.device))
            self.losses.append(loss.detach().reshape(()))
            yield from opt.simulated_step()
            opt.zero_grad()
            if self.pauses:
                self.pauses = False
                yield PAUSE

    def state(self) -> dict[str, Any]:
        """Everything that training goes on from, between two steps."""
        return {
            "model": tensors_of(self.model),
            "optimizer": optimizer_state(self.opt),
            "rng": {name: self.rng[name] for name in ("cpu", "cuda")},
            "batches": self.batches.state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        copy_tensors(saved["model"], tensors_of(self.model))
        load_optimizer(self.opt, saved["optimizer"])
        self.rng.update(cloned(saved["rng"]))
        self.batches.load(saved["batches"])


class Exact:
    """One run, whose workers take their steps one after another."""

    name = "exact"

    def __init__(
        self,
        *,
        model: nn.Module,
        steps: int,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: list[Batches],
        method: Callable[[nn.Module], LocalOptimizer],
        rngs: list[Randomness],
        recorder: Recorder,
        graphs: bool = False,
        warmup: "CommonWarmUp | None" = None,
    ):
        """`warmup`: what the run shares with others."""
        self.recorders = [recorder]
        self.error: Exception | None = None
        self._shown: GlobalModel | None = None
        self._model, self._steps, self._loss, self._method = model, steps, loss, method
        self._batches, self._rngs, self._graphs = batches, rngs, graphs
        self._warmup, self._warmed_up = warmup, list[WorkerWarmUp]()
        self._begun = self._passing = False

    @cached_property
    def workers(self) -> list[SimulatedWorker]:
        """They are made when the run begins, as many runs may wait for each other."""
        models = [self._model] + [copy.deepcopy(self._model) for _ in self._batches[1:]]
        settings: list[dict[str, Any]] = []
        graphs = Graphs() if self._graphs else None
        found = []
        for k, (model, batches, rng) in enumerate(
            zip(models, self._batches, self._rngs, strict=True)
        ):
            transport = SimulatedTransport(k, len(models), settings)
            worker = SimulatedWorker(
                model, self._method, transport, self._checked_loss(k), batches, rng, graphs
            )
            found.append(worker)
            note = partial(self._note, worker)
            worker.opt.on(Averaged, note)
            worker.opt.on(Synced, note)
        first = found[0].opt
        self._shown = GlobalModel(first) if first.method.overrides("global_model") else None
        return found

    def _checked_loss(self, worker: int) -> Loss:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            found = self._loss(model, batch)
            check_loss(found, worker, self.workers[worker].opt.gradient_steps)
            return found

        return loss

    @property
    def clock(self) -> int:
        return self.workers[0].opt.clock

    @property
    def starts_warm(self) -> bool:
        """Runs of one program train one after another, so this may become true before it begins."""
        found = None if self._warmup is None else self._warmup.found
        return isinstance(found, WorkersWarmUp) and not self._begun

    def start_warm(self) -> None:
        if self.starts_warm:
            assert self._warmup is not None
            assert isinstance(self._warmup.found, WorkersWarmUp)
            self._begun = self._passing = True
            self._warmup.found.give(self)
            self._passing = False

    def advance(self) -> bool:
        """Train up to the next pause. Returns whether there was one; False: the run has ended."""
        self.start_warm()
        self._begun = True
        try:
            with self.recorders[0].watch.running(), fastest_convolutions():
                return self.error is None and self._to_pause()
        except (NonFiniteError, DryError) as error:
            self.error = error
            return False

    def _to_pause(self) -> bool:
        """All workers pause after the step with the same exchange. If the step of one of them goes
        on to another exchange, then the others follow it there, and none pauses."""
        workers, steps = self.workers, self._steps
        requests = [worker.advance(steps) for worker in workers]
        while any(request is not None for request in requests):
            paused = [request is PAUSE for request in requests]
            if all(paused):
                return True
            if any(paused):
                requests = [
                    worker.advance(steps) if request is PAUSE else request
                    for worker, request in zip(workers, requests, strict=True)
                ]
                continue
            sent = exchanged(requests, workers[0].opt.clock)  # type: ignore[arg-type]
            requests = [worker.advance(steps, sent) for worker in workers]
        return False

    def results(self) -> list[Result]:
        recorder, workers = self.recorders[0], self.workers
        recorder.end()
        if self.error is not None:
            return [
                Result(
                    model=self._model, engine=self.name, history=recorder.history, error=self.error
                )
            ]
        return [
            Result(
                model=self._global_model(),
                engine=self.name,
                history=recorder.history,
                ledgers=[worker.opt.ledger for worker in workers],
                optimizers=[worker.opt for worker in workers],
            )
        ]

    # -- states ----------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[str, Any]]:
        recorder = self.recorders[0]
        yield "run-0", {"history": recorder.state(), "seconds": recorder.watch.seconds()}
        for k, worker in enumerate(self.workers):
            yield f"worker-{k}", worker.state()

    def load(self, saved: Mapping[str, Any]) -> None:
        self._begun = True
        recorder, kept = self.recorders[0], saved["run-0"]
        recorder.load(kept["history"])
        recorder.watch.set(kept["seconds"])
        for k, worker in enumerate(self.workers):
            worker.load(saved[f"worker-{k}"])

    # -- records ---------------------------------------------------------------------------------

    def _note(self, worker: SimulatedWorker, event: Averaged | Synced) -> None:
        """Keep the note of a worker that has completed an exchange. After the last worker, add the
        exchange to the history."""
        if self._passing or (isinstance(event, Synced) and not event.completes):
            return
        recorder, workers = self.recorders[0], self.workers
        worker.pauses = recorder.wants_pause(worker.opt.clock)
        if self._shown is not None:
            self._evaluate_together(worker, self._shown)
        elif worker is workers[0]:
            worker.metrics.append(recorder.metric(worker.opt.clock, worker.opt.anchor_weights))
        loss, ledger = _mean_loss(worker), worker.opt.ledger
        worker.notes.append(Note(loss, ledger.distance, replace(ledger, history=[])))
        if worker is workers[-1]:
            notes = [each.notes.pop(0) for each in workers]
            recorder.add(
                clock=worker.opt.clock,
                round=worker.opt.rounds,
                losses=[note.loss for note in notes],
                distance=[note.distance for note in notes],
                ledger=notes[0].ledger,
                metric=workers[0].metrics.pop(0),
            )
        self._keep_warmup(worker)

    def _keep_warmup(self, worker: SimulatedWorker) -> None:
        """Leave a warm-up that ends with this step to the runs that share it, if nobody has. One
        with a skipped step is not passed on, as how many were skipped is part of what a run has
        done."""
        common, opt = self._warmup, worker.opt
        if common is None or common.found is not None or opt.clock != common.steps:
            return
        own = WorkerWarmUp.of(worker, rng_state(opt._worker.inner.replica.device))
        self._warmed_up.append(own)
        if worker is self.workers[-1] and not opt.ledger.skipped_steps:
            common.leave(WorkersWarmUp.of(self, self._warmed_up))
            self._warmed_up = []

    def _evaluate_together(self, worker: SimulatedWorker, shown: GlobalModel) -> None:
        """Evaluate a global model that is a mean over the workers. Each worker keeps its present
        part of that mean, as the first worker takes further steps before the last one completes
        the exchange."""
        clock, recorder, workers = worker.opt.clock, self.recorders[0], self.workers
        if recorder.wants_metric(clock):
            worker.part = global_part(worker.opt)
            if worker is workers[0]:
                shown.set_buffers(worker.opt)
        if worker is workers[-1]:
            if recorder.wants_metric(clock):
                shown.set_weights(workers[0].opt, [each.part for each in workers])
            workers[0].metrics.append(recorder.metric(clock, lambda: nullcontext(shown.model)))

    def _global_model(self) -> nn.Module:
        """The first worker's model, unless the method's local models differ from the global one."""
        first = self.workers[0].opt
        if self._shown is None and not first._worker.stays_apart:
            return self.workers[0].model
        shown = self._shown or GlobalModel(first)
        shown.set_weights(first, [global_part(worker.opt) for worker in self.workers])
        shown.set_buffers(first)
        return shown.model


def _mean_loss(worker: SimulatedWorker) -> float:
    """The mean loss over the gradient steps since the last exchange."""
    if not worker.losses:
        return math.nan
    losses = torch.stack(worker.losses).double().cpu()
    worker.losses.clear()
    if worker.opt.config["on_nonfinite"] == "raise":
        check_losses([losses], [worker.opt.gradient_steps], [worker.opt.transport.worker])
    return float(losses.mean())


def check_losses(losses: list[Tensor], gradient_steps: list[int], workers: list[int]) -> None:
    """Raise for a loss that is not finite, with the worker and the gradient step it came from."""
    for found, total, worker in zip(losses, gradient_steps, workers, strict=True):
        bad = (~found.isfinite()).nonzero()
        if len(bad):
            step = total - len(found) + int(bad[0])
            raise NonFiniteError(
                f"the loss of worker {worker} is {float(found[bad[0]])} at gradient step {step}; "
                "lower the learning rate or clip gradients, or pass on_nonfinite='skip'"
            )


def _message(request: Request) -> Message:
    if isinstance(request, (Start, Finish)):
        return request.message
    assert isinstance(request, Message)  # simulated workers neither leave nor come
    return request


def exchanged(requests: list[Request | None], clock: int) -> int:
    """Do what the requests of all workers ask for. Returns the bytes that each worker handed
    over."""
    absent = [k for k, request in enumerate(requests) if request is None]
    if absent:
        raise SyncError(f"worker {absent[0]} ended before the exchange at clock {clock}")
    found = [request for request in requests if request is not None]
    odd = next((k for k, r in enumerate(found) if type(r) is not type(found[0])), None)
    if odd is not None:
        raise SyncError(
            f"workers 0 and {odd} ask for a {type(found[0]).__name__} and a "
            f"{type(found[odd]).__name__} at clock {clock}; every worker must run the same method"
        )
    messages = [_message(request) for request in found]
    if isinstance(found[0], Finish):  # the messages were exchanged when they were started
        return messages[0].handed_over(len(messages))
    sizes = [m.values.numel() for m in messages]
    odd = next((k for k, size in enumerate(sizes) if size != sizes[0]), None)
    if odd is not None:
        raise SyncError(
            f"workers 0 and {odd} bring messages of {sizes[0]} and {sizes[odd]} elements to the "
            f"exchange at clock {clock}; every worker must run the same method and model"
        )
    sent = average_in_memory(messages)
    return 0 if isinstance(found[0], Start) else sent


def seeded(seed: int, device: torch.device) -> Randomness:
    """The state of torch's generators right after torch.manual_seed(seed)."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return rng_state(device)


def rng_state(device: torch.device) -> Randomness:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "device": device}


@contextmanager
def own_randomness(state: Randomness) -> Iterator[None]:
    """Inside, torch's generators have this worker's state. On leaving, the worker's state is kept
    and the state from before is restored."""
    outside = rng_state(state["device"])
    _set_rng(state)
    try:
        yield
    finally:
        state.update(rng_state(state["device"]))
        _set_rng(outside)


def _set_rng(state: Randomness) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], state["device"])
