"""The settings of an optimizer, checked once, and their description."""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from palsgd.auto_interval import Auto, interval
from palsgd.checks import (
    LONGEST_ROUND,
    below,
    check_choice,
    check_flag,
    check_int,
    check_number,
    in_error,
)
from palsgd.codecs import Codec, find_codec
from palsgd.method import Method
from palsgd.pacing import Settled, as_records, checked_speeds
from palsgd.schedule import DRAWS, EVEN_DRAWS

OPTIONS = """
    Options of every optimizer:
        outer: makes the outer optimizer from the anchor's parameters, such as
            `palsgd.nesterov(lr=0.7, momentum=0.5)` or
            `lambda params: torch.optim.Adam(params, lr=1e-3)`.
        warmup_steps: steps of plain DDP before the first round.
        seed, draws: how the steps without data are drawn. "balanced": between two syncs all workers
            take equally many gradients; "independent": a coin per worker and step; "shared": one
            coin for all; "paced": for workers that are unevenly fast. A slower one takes fewer
            gradients, with a higher learning rate, so that nobody waits for it.
        speeds: with `draws="paced"`, a number for each worker, or a ledger's `speeds`, which
            repeats a run. None: speeds are measured in training.
        buffers: "average", "local" or "recompute": normalization statistics at a sync.
        max_norm: clip the gradient to this norm inside `step()`, after any averaging.
        on_nonfinite: "raise", or "skip" to leave a worker whose model has inf or nan at a sync
            out of the mean, and to skip a step of the warm-up on all workers if a gradient has.
        scheduler: an LRScheduler, or a function that makes one from the optimizer. It is stepped
            once per step of the clock, steps without data included.
        bucket_mb: the largest message, in MiB.
        compress: what a sync sends: "bf16", "int8", "int4", "topk:SHARE" or a `palsgd.Codec`.
        delay: steps between sending and applying a sync; training goes on during them.
        fragments: parts of the model that are synced one after another within a round.
        same_data: workers may compute the same. By default a sync raises a ConsensusError if two
            workers had the same first gradient or have the same local model, as then something else
            averages gradients or models, or the workers read the same data.
        blend: the share b of itself that a local model keeps at a sync, delayed or not:
            `x_k <- b x_k + (1 - b) x`. None: the local model becomes the global one, and a delayed
            sync keeps all local progress since it was sent.
        outer_scheduler: an LRScheduler of the outer learning rate, as a function that makes it from
            the outer optimizer. It is stepped once per round.
        average_state: names of the inner optimizer's tensors that are set to their mean over the
            workers at a sync, such as ("z",) for a schedule-free optimizer.
        offload: keep the anchor, the outer optimizer's state, messages and residues in host memory.
            Arithmetic stays on the device of the model, piece by piece, and gives the same weights.
        group: the process group of the workers, if they are not all ranks.
        transport: a `palsgd.Transport` instead of a process group; `palsgd.Alone()` for one worker.

    Raises:
        ValueError: a setting is out of its range, the inner optimizer does not hold the model's
            parameters, or workers were given different settings.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked settings of an optimizer."""

    method: Method
    sync_every: int  # H; where `auto` is set, the H of the first round
    auto: Auto | None
    warmup_steps: float
    draws: str
    speeds: Settled | None  # with draws="paced"; None: they are measured
    seed: int
    buffers: str
    max_norm: float | None
    on_nonfinite: str
    bucket_mb: float
    codec: Codec | None
    delay: int
    fragments: int
    same_data: bool
    blend: float | None
    average_state: tuple[str, ...] | None
    offload: bool

    @property
    def has_rounds(self) -> bool:
        """False if the warm-up never ends."""
        return self.warmup_steps != math.inf

    @property
    def paced(self) -> bool:
        """Do workers take gradients by their speeds?"""
        return self.draws == "paced"

    def as_config(self) -> dict[str, Any]:
        """The settings that must be equal on all workers, and in a saved state and its reader."""
        return {
            "sync_every": self.sync_every if self.auto is None else str(self.auto),
            "warmup_steps": self.warmup_steps,
            **self.method.settings(),
            "draws": self.draws,
            "speeds": None if self.speeds is None else as_records(self.speeds),
            "seed": self.seed,
            "buffers": self.buffers,
            "on_nonfinite": self.on_nonfinite,
            "max_norm": self.max_norm,
            "compress": None if self.codec is None else self.codec.name,
            "delay": self.delay,
            "fragments": self.fragments,
            "blend": self.blend,
            "average_state": None if self.average_state is None else list(self.average_state),
        }


def checked_options(
    *,
    method: Method,
    outer: Any,
    outer_scheduler: Any,
    sync_every: Any,
    compress: Any,
    warmup_steps: float,
    **others: Any,
) -> Options:
    """The options, or a ValueError that says which one is out of its range."""
    codec, (first, auto) = find_codec(compress), interval(sync_every)
    first = check_int("sync_every", first, least=1, most=LONGEST_ROUND)
    if not is_endless(warmup_steps):
        warmup_steps = check_int("warmup_steps", warmup_steps)
    options = Options(
        method=method,
        sync_every=first,
        auto=auto,
        codec=codec,
        warmup_steps=warmup_steps,
        **_as_kept(others),
    )
    _check_values(options)
    _check_average_state(options)
    of_syncs = _options_of_syncs(options, outer_scheduler)
    _check_refusals(method, outer=outer, **of_syncs, sync_every=auto)
    _check_lag(first, auto, options.delay, options.fragments)
    _check_names(method)
    if not options.has_rounds:
        _check_no_syncs(**of_syncs)
    return options


def _as_kept(others: dict[str, Any]) -> dict[str, Any]:
    """The options that are kept in another form than they may be given in, beside those that stay
    as they are."""
    kept = dict(others)
    for name in ("max_norm", "blend"):  # torch.load reads no NumPy numbers by default
        kept[name] = None if kept[name] is None else _plain(kept[name])
    for name, least in (("seed", 0), ("delay", 0), ("fragments", 1)):
        kept[name] = check_int(name, kept[name], least=least)
    kept["average_state"] = _checked_names(kept["average_state"])
    kept["speeds"] = checked_speeds(kept["speeds"])
    return kept


def _options_of_syncs(options: Options, outer_scheduler: Any) -> dict[str, Any]:
    """What a method may refuse, and what means nothing without syncs."""
    return {
        "outer_scheduler": outer_scheduler,
        "blend": options.blend,
        "compress": options.codec,
        "delay": options.delay,
        "fragments": options.fragments,
        "offload": options.offload,
        "draws": options.draws if options.paced else None,
    }


def _check_values(options: Options) -> None:
    check_choice("draws", options.draws, DRAWS)
    _check_speeds(options)
    check_choice("on_nonfinite", options.on_nonfinite, ("raise", "skip"))
    check_flag("offload", options.offload)
    check_flag("same_data", options.same_data)
    if options.max_norm is not None:
        check_number("max_norm", options.max_norm, "a number > 0", low=0.0)
    words = "a number > 0, of MiB, and less than 2^40"
    check_number("bucket_mb", options.bucket_mb, words, low=0.0, high=2.0**40)
    if options.blend is not None:
        words = "a number in [0, 1]: the share of itself that a local model keeps at a sync"
        check_number("blend", options.blend, words, low=below(0.0), high=math.nextafter(1, 2))


def _check_average_state(options: Options) -> None:
    if options.average_state and options.offload:
        raise ValueError(
            f"average_state={options.average_state} with offload=True: the inner state would be "
            "averaged as a whole on the device; leave one of them out"
        )
    if options.average_state and options.delay:
        raise ValueError(
            f"average_state={options.average_state} with delay={options.delay}: the inner state "
            "would lose what it changed since it was sent; use delay=0"
        )


def check_elastic(options: Options, *, sharded: bool) -> None:
    """Refuse what cannot go on when a worker leaves or comes."""
    reasons = options.method.refusals()
    refused = {
        "this method": reasons.get("elastic"),
        f"warmup_steps={options.warmup_steps}": "its steps change gradients message by message, so "
        "that none of them can be repeated; use warmup_steps=0" if options.warmup_steps else None,
        f"draws={options.draws!r}": "it counts on the speeds of the same workers in every round; "
        "use draws='balanced'" if options.draws not in EVEN_DRAWS else None,
        "sharded parameters": "the shards of a worker that has left would be lost; use a worker of "
        "one rank" if sharded else None,
    }  # fmt: skip
    for what, reason in refused.items():
        if reason is not None:
            raise ValueError(f"{what} with an ElasticTransport: {reason}")


def _check_speeds(options: Options) -> None:
    if options.speeds is not None and not options.paced:
        raise ValueError(
            f"speeds={in_error(as_records(options.speeds))} are given with "
            f"draws={options.draws!r}, under which workers of any speed mix alike; use "
            "draws='paced', or leave them out"
        )


NOTHING = {
    "delay": 0,
    "fragments": 1,
    "offload": False,
}  # what leaves an option out, where it is not None


def is_endless(warmup_steps: Any) -> bool:
    return isinstance(warmup_steps, float) and warmup_steps == math.inf


def left_out(name: str, value: Any) -> bool:
    """Is it what leaves the option out? Arrays and tensors are not asked whether they equal it."""
    nothing = NOTHING.get(name)
    return value is nothing or (isinstance(value, int) and value == nothing)


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, np.generic) else number


def _checked_names(names: Any) -> tuple[str, ...] | None:
    """The names of `average_state` as a tuple."""
    if names is None:
        return None
    listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not listed:
        raise ValueError(
            f"average_state={in_error(names)} must be names of the inner optimizer's tensors, "
            "such as ('z',)"
        )
    return tuple(names)


def _check_refusals(method: Method, **options: Any) -> None:
    """Refuse the options that the method refuses, with its reason."""
    reasons = method.refusals()
    for name, value in options.items():
        if name in reasons and not left_out(name, value):
            given = "..." if callable(value) else in_error(getattr(value, "name", value))
            raise ValueError(
                f"{name}={given} means nothing for {method}: {reasons[name]}; leave it out"
            )


def _check_lag(sync_every: int, auto: Auto | None, delay: int, fragments: int) -> None:
    most, name = (auto.most, "most") if auto else (sync_every, "sync_every")
    if fragments > most:
        raise ValueError(
            f"fragments={fragments} are more than a round has steps ({name}={most}); use fewer"
        )
    if delay * fragments > most:
        raise ValueError(
            f"delay={delay} is longer than the {most // fragments} steps until the next sync "
            f"begins ({name}={most}, fragments={fragments}); use delay <= {most // fragments}"
        )


def _check_names(method: Method) -> None:
    """Refuse a method's setting that has the name of an option of the optimizer, as the two would
    be one entry in the settings that workers and saved states compare."""
    taken = {f.name for f in fields(Options)} | {"compress", "inner", "outer", "outer_scheduler"}
    clash = next((name for name in method.settings() if name in taken), None)
    if clash is not None:
        raise ValueError(
            f"{method} has a setting {clash!r}, which is the optimizer's own; rename it, or read "
            "the optimizer's from `facts`"
        )


def _check_no_syncs(**options: Any) -> None:
    """Refuse the options of syncs for an optimizer whose warm-up never ends."""
    for name, value in options.items():
        if not left_out(name, value):
            raise ValueError(
                f"{name}={in_error(getattr(value, 'name', value))} is about syncs, and a warm-up "
                "that never ends has none; leave it out, or give a number of warmup_steps"
            )
