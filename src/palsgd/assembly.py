"""Builds a worker from its parts, as the options of its optimizer say."""

from torch import nn
from torch.optim import Optimizer

from palsgd.anchor import Anchor
from palsgd.auto_interval import AutoInterval
from palsgd.averaged_state import AveragedState
from palsgd.buffers import Buffers
from palsgd.checks import in_error
from palsgd.course import Course
from palsgd.events import Listeners
from palsgd.guard import Guard
from palsgd.inner import InnerStep
from palsgd.ledger import Ledger
from palsgd.memory import MessageMemory
from palsgd.meter import Meter
from palsgd.method import Facts
from palsgd.method_state import MethodState
from palsgd.method_view import MethodView
from palsgd.offload import MESSAGE, Home, check_elementwise
from palsgd.options import Options
from palsgd.outer import OuterFactory, OuterScheduler, bound_scheduler
from palsgd.outgoing import Outgoing
from palsgd.pacing import Pacing
from palsgd.replica import Replica
from palsgd.schedule import Schedule
from palsgd.sync import Syncer
from palsgd.sync_changes import SyncChanges
from palsgd.transports.transport import Transport
from palsgd.untrained import Untrained
from palsgd.warmup import Warmup, gradient_sync
from palsgd.worker import Worker


def build_worker(
    model: nn.Module,
    inner: Optimizer,
    replica: Replica,
    transport: Transport,
    outer: OuterFactory,
    outer_scheduler: OuterScheduler | None,
    options: Options,
) -> Worker:
    """A worker that has not taken a step. A worker without rounds (DDP) has no anchor and no
    syncer."""
    meter = Meter(Ledger(), replica.device)
    buffers = Buffers(model, options.buffers, transport)
    untrained = Untrained(model, replica, transport)
    guard = Guard(
        transport,
        with_costs=options.auto is not None or options.paced,
        compares=options.method.shares_anchor,
        skip_nonfinite=options.on_nonfinite == "skip",
        same_data=options.same_data,
        buffers=list(buffers.statistics),
    )
    tail = guard.header.size + len(replica.params) + untrained.size + buffers.encoded_size
    memory = _memory(replica, Home(replica.device), tail, options)
    syncer = None
    if options.has_rounds:
        view = _view(replica, transport, options)
        # The warm-up averages gradients on the device. Syncs use the same memory, unless their
        # messages are kept in host memory.
        own = _memory(replica, view.anchor.home, tail, options) if options.offload else memory
        syncer = _syncer(view, guard, buffers, own, meter, outer, outer_scheduler, options)
    step = InnerStep(inner, replica, options.max_norm)
    return Worker(
        course=_course(step, transport, options),
        inner=step,
        warmup=Warmup(
            gradient_sync(model, transport), replica, memory, guard, buffers, meter, untrained
        ),
        syncer=syncer,
        meter=meter,
        listeners=Listeners(),
    )


def _view(replica: Replica, transport: Transport, options: Options) -> MethodView:
    anchor = _anchor(replica, options.fragments, offload=options.offload)
    states = MethodState(options.method, replica, anchor, options.average_state or ())
    return MethodView(replica, anchor, states, replica.inner, transport)


def _syncer(
    view: MethodView,
    guard: Guard,
    buffers: Buffers,
    memory: MessageMemory,
    meter: Meter,
    outer: OuterFactory,
    outer_scheduler: OuterScheduler | None,
    options: Options,
) -> Syncer:
    inner, names = view.replica.inner, options.average_state or ()
    built = _outer_optimizer(outer, view.anchor)
    averaged = AveragedState(names, inner, view.replica, view.states) if names else None
    outgoing = Outgoing(
        method=options.method,
        view=view,
        buffers=buffers,
        guard=guard,
        memory=memory,
        meter=meter,
        codec=options.codec,
        averaged=averaged,
        delayed=options.delay > 0,
        blends=options.blend is not None,
    )
    changes = SyncChanges(
        method=options.method,
        view=view,
        guard=guard,
        inner=inner,
        outer=built,
        outer_scheduler=bound_scheduler(outer_scheduler, built),
        averaged=averaged,
        blend=options.blend,
    )
    return Syncer(outgoing, changes, buffers, meter)


def _course(inner: InnerStep, transport: Transport, options: Options) -> Course:
    return Course(
        method=options.method,
        facts=_facts(inner.replica, transport, options),
        schedule=_schedule(options),
        number=transport.worker,
        inner=inner,
        interval=_interval(options),
        pacing=_pacing(transport, options),
    )


def _memory(replica: Replica, home: Home, tail: int, options: Options) -> MessageMemory:
    size = max(1, int(options.bucket_mb * 2**20) // replica.dtype.itemsize)
    return MessageMemory(
        replica,
        home,
        bucket_size=min(size, MESSAGE) if options.offload else size,
        tail=tail,
        keeps_all=options.fragments > 1 or options.delay > 0 or options.offload,
    )


def _facts(replica: Replica, transport: Transport, options: Options) -> Facts:
    return Facts(
        sync_every=options.sync_every,
        workers=transport.workers,
        seed=options.seed,
        draws=options.draws,
        initial_rates=tuple(replica.initial_rates),
    )


def _schedule(options: Options) -> Schedule:
    return Schedule.fixed(
        sync_every=options.sync_every,
        warmup=options.warmup_steps,
        fragments=options.fragments,
        delay=0 if options.auto else options.delay,  # a sync that is measured is not overlapped
    )


def _interval(options: Options) -> AutoInterval | None:
    if options.auto is None:
        return None
    return AutoInterval(options.auto, fragments=options.fragments, delay=options.delay)


def _pacing(transport: Transport, options: Options) -> Pacing | None:
    if not options.paced:
        return None
    return Pacing(workers=transport.workers, fragments=options.fragments, given=options.speeds)


def _anchor(replica: Replica, fragments: int, *, offload: bool) -> Anchor:
    if fragments > 1 and replica.sharded:
        raise ValueError(
            f"fragments={fragments} cut through tensors, which sharded parameters cannot bear; use "
            "fragments=1, with delay= to overlap"
        )
    return Anchor(replica, fragments, offload=offload)


def _outer_optimizer(outer: OuterFactory, anchor: Anchor) -> Optimizer:
    if not callable(outer):
        is_one = isinstance(outer, Optimizer)
        given = f"an {type(outer).__name__} object" if is_one else in_error(outer)
        raise ValueError(
            f"outer={given} is not a function that makes an optimizer from parameters; use "
            "palsgd.nesterov(lr=0.7) or lambda params: torch.optim.SGD(params, lr=0.7)"
        )
    built = outer(anchor.params)
    if not isinstance(built, Optimizer):
        raise ValueError(
            f"outer must be a callable that makes a torch optimizer from parameters, but gave "
            f"{type(built).__name__}; use palsgd.nesterov(lr=0.7) or "
            "lambda params: torch.optim.Adam(params, lr=1e-3)"
        )
    if anchor.home.offloaded:
        check_elementwise(built)
    return built
