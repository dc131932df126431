"""The settings that define a run, as one flat record. A recipe is such a record under a name."""

import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from numbers import Real
from typing import Any

from palsgd import references, registry
from palsgd.checks import (
    LARGEST,
    LONGEST_ROUND,
    LONGEST_RUN,
    as_given,
    as_number,
    below,
    check_choice,
    check_flag,
    check_number,
    check_text,
    in_error,
    is_whole,
    nearest,
)
from palsgd.lab import clock_values


@dataclass(frozen=True, kw_only=True)
class Settings:
    workload: str
    method: str = "palsgd"
    workers: int = 4
    ranks_per_worker: int = 1  # processes of each worker, which average every gradient
    steps: int | None = None  # of the clock; one of steps and epochs is given
    epochs: float | None = None
    whole_rounds: bool = False  # a length in epochs is rounded to the nearest end of a round
    batch_size: int = 32  # per worker and gradient
    micro_batches: int = 1  # a gradient is the mean over this many parts of its batch
    sharding: str = "reshuffled"  # which examples a worker sees: fixed, reshuffled or dirichlet:A
    context: int | None = None  # tokens of a row, for texts; None: the most the model takes
    split: str = "test"  # what is evaluated; choose: held out of the training data, for tuning

    # H and the strength of mixing steps may change with the clock: see clock_values.py.
    sync_every: int | str = 64  # H, or "auto": from what syncs and steps are measured to cost
    mix_prob: float = 0.1  # p
    mix_rate: float | str | None = None  # eta; at most one of mix_rate and pull is given
    pull: float | str | None = None  # of a round's mixing steps; neither: the library's default
    warmup_steps: int = 0
    draws: str = "balanced"
    discard_batches: bool = False  # a mixing step uses up a batch, as in the paper's released code
    speeds: str | None = None  # with draws=paced, of each worker: 1:1:0.33; None: measured
    buffers: str = "average"
    compress: str | None = None  # what a sync sends: bf16, int8, int4 or topk:SHARE
    delay: int = 0  # steps between sending and applying a sync
    fragments: int = 1  # parts of the model that are synced one after another

    inner: str = "sgd"  # nesterov: with Nesterov's momentum
    lr: float = 0.01
    momentum: float = 0.9  # of inner SGD, of either kind
    weight_decay: float = 0.0
    max_norm: float | None = None  # clipping
    schedule: str = "constant"  # cosine: to zero at the last step; step: see the next four
    schedule_every: int | None = None  # steps after which lr is multiplied by schedule_factor
    schedule_every_epochs: float | None = None  # the same in epochs
    schedule_at: str | None = None  # shares of the run instead, not equally far apart: 0.5:0.75
    schedule_factor: float = 0.1
    lr_warmup_steps: int = 0  # linear, before the schedule
    lr_warmup_epochs: float = 0.0  # the same in epochs
    outer: str = "nesterov"
    outer_lr: float = 0.2  # for nesterov and sgd_m .1 to .7, for sgd 1, for adam and adamw 1e-3
    outer_momentum: float = 0.9  # of nesterov and sgd_m
    outer_weight_decay: float = 0.0
    outer_schedule: str = "constant"  # of outer_lr, by the clock at which a round begins

    target: float | None = None  # the quality that a run is to reach; None: what DDP ends with
    target_on: str = "loss"  # whose quality that is
    margin: float = 0.01  # the relative difference of losses that counts as none
    tuned: str | None = None  # the file of palsgd tune that these settings are from, and its hash

    precision: str = "tf32"  # of products on a GPU; fp32, or bf16 by autocast
    seed: int = 2023
    evaluate_every: int | None = None  # steps; None: twenty times in a run
    # Rounds; None: whenever the model is evaluated, or less often where a save takes seconds.
    checkpoint_every: int | None = None
    cluster: str | None = None  # cluster whose time a simulation projects: 100mbit,20ms,step=50ms

    # Settings of methods that are no fields above, by their names as settings.
    method_settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_kinds()
        self._find_own_parts()
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name, (low, high, words) in RANGES.items():
            for value in _numbers(name, getattr(self, name)):
                check_number(name, value, words, low=low, high=high)
        check_sharding(self.sharding)
        self._check_speeds()
        self._check_what_needs_torch()
        if self.mix_rate is not None and self.pull is not None:
            raise ValueError(
                f"mix_rate={shown(self.mix_rate)} and pull={shown(self.pull)} both say how "
                "strong a mixing step is; give one of them"
            )
        self._check_batches()
        self._check_discarded()
        self._check_schedules()

    def _check_kinds(self) -> None:
        """Refuse a value of another kind than its field's. Numbers of NumPy become Python's, which
        files can hold."""
        for name, kinds in _field_kinds().items():
            object.__setattr__(self, name, _of_kind(name, getattr(self, name), kinds))
        if not isinstance(self.method_settings, Mapping):
            raise ValueError(f"method_settings={in_error(self.method_settings)} must be a mapping")
        own = {name: _plain(name, value) for name, value in self.method_settings.items()}
        object.__setattr__(self, "method_settings", own)

    def _find_own_parts(self) -> None:
        """A workload or method of the user's own is named by a reference, which must mean the same
        in every process. A method is imported here, so that its settings are known."""
        object.__setattr__(self, "workload", references.absolute(self.workload))
        if self.method not in registry.names():
            object.__setattr__(self, "method", registry.row(self.method).name)

    @property
    def worker_speeds(self) -> tuple[float, ...] | None:
        """With draws=paced, of each worker: the numbers of `speeds`, or those of the cluster on
        which a simulation's time is told; None: they are measured."""
        if self.speeds is None:
            return self._cluster_speeds()
        try:
            return tuple(map(float, str(self.speeds).split(":")))
        except ValueError:
            return ()

    def _cluster_speeds(self) -> tuple[float, ...] | None:
        if self.draws != "paced" or self.cluster is None:
            return None
        from palsgd.cluster import Cluster

        return tuple(Cluster.parse(self.cluster, workers=self.workers).speeds.tolist())

    def _check_speeds(self) -> None:
        if self.speeds is None:
            return
        found = self.worker_speeds or ()
        if len(found) != self.workers or not all(0 < speed < math.inf for speed in found):
            raise ValueError(
                f"speeds={in_error(self.speeds)} must be {self.workers} numbers > 0, one for each "
                f"worker, such as speeds={':'.join(['1'] * (self.workers - 1) + ['0.5'])}"
            )
        if self.draws != "paced":
            raise ValueError(
                f"speeds={self.speeds} has no meaning with draws={self.draws}, under which workers "
                "of any speed mix alike; add draws=paced, or leave it out"
            )

    def _check_batches(self) -> None:
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of "
                f"micro_batches={self.micro_batches}; choose one that is"
            )
        parts = self.ranks_per_worker * self.micro_batches
        if self.batch_size % parts:
            raise ValueError(
                f"batch_size={self.batch_size}, of a worker, is not a multiple of {parts}, which "
                f"are ranks_per_worker={self.ranks_per_worker} times "
                f"micro_batches={self.micro_batches}; choose one that is"
            )

    def _check_discarded(self) -> None:
        """All workers mix at the same steps, and which these are is known from the settings."""
        if not self.discard_batches:
            return
        for name, needed in (("draws", "shared"), ("delay", 0), ("fragments", 1)):
            if getattr(self, name) != needed:
                raise ValueError(
                    f"discard_batches=true with {name}={getattr(self, name)}: batches are counted "
                    f"by the steps at which all workers mix; add {name}={needed}"
                )
        if isinstance(self.sync_every, str):
            raise ValueError(
                f"discard_batches=true with sync_every={self.sync_every}: rounds must have one "
                "length; give a number"
            )

    @property
    def schedule_shares(self) -> tuple[float, ...]:
        """The shares of the run after which schedule=step changes the learning rate; none where it
        does so every so many steps."""
        if self.schedule_at is None:
            return ()
        try:
            return tuple(map(float, self.schedule_at.split(":")))
        except ValueError:
            return (math.nan,)

    def _check_schedules(self) -> None:
        shares = self.schedule_shares
        if not all(0 < share < 1 for share in shares) or list(shares) != sorted(set(shares)):
            raise ValueError(
                f"schedule_at={in_error(self.schedule_at)} must be rising shares of the run, above "
                "0 and below 1, such as schedule_at=0.5:0.75:0.875"
            )
        if shares and self._every is not None:
            raise ValueError(
                f"schedule_at={self.schedule_at} and schedule_every={self._every:g} both say when "
                "the learning rate changes; give one of them"
            )
        stepped = "step" in (self.schedule, self.outer_schedule)
        if stepped and self._every is None and not shares:
            raise ValueError(
                "schedule=step needs to know after how many steps the learning rate changes; add "
                "for instance schedule_every=1000, schedule_every_epochs=30 or schedule_at=0.5:0.75"
            )
        if self.outer_schedule != "constant" and self.sync_every == "auto":
            raise ValueError(
                f"outer_schedule={self.outer_schedule} needs to know when rounds begin, which "
                "sync_every=auto finds out in training; give a number of steps, or leave it out"
            )
        for name in ("delay", "fragments"):
            if self.rounds_differ and getattr(self, name) != FIELDS[name].default:
                raise ValueError(
                    f"{name}={getattr(self, name)} needs rounds of one length, and "
                    f"sync_every={self.sync_every} changes it; leave out one of them"
                )

    @property
    def _every(self) -> float | None:
        return self.schedule_every or self.schedule_every_epochs

    @property
    def rounds_differ(self) -> bool:
        """Does sync_every say how H changes with the clock?"""
        return isinstance(self.sync_every, str) and self.sync_every != "auto"

    @property
    def processes(self) -> int:
        """How many processes a run has."""
        return self.workers * self.ranks_per_worker

    def _check_what_needs_torch(self) -> None:
        """Check the fields whose checks import torch. Importing torch takes a second, and help
        texts need this module without torch."""
        if self.compress is not None:
            from palsgd.codecs import find_codec

            find_codec(self.compress)
        if self.cluster is not None:
            from palsgd.cluster import Cluster

            Cluster.parse(self.cluster, workers=self.workers)

    def changed(self, changes: Mapping[str, Any]) -> "Settings":
        """These settings with other values, given as text or as values. Setting steps removes
        epochs, setting pull removes mix_rate, and the reverse. Setting epochs removes whole_rounds:
        who gives a length gets just that."""
        if not isinstance(changes, Mapping):
            raise ValueError(f"changes={in_error(changes)} must be a mapping of settings")
        values = {setting_name(name): parsed(name, value) for name, value in changes.items()}
        if "epochs" in values:
            values.setdefault("whole_rounds", False)
        own = {name: values.pop(name) for name in list(values) if name not in FIELDS}
        if own:
            values["method_settings"] = {**self.method_settings, **own}
        for name, other in (*_EITHER, *((other, name) for name, other in _EITHER)):
            if values.get(name, FIELDS[name].default) != FIELDS[name].default:
                values.setdefault(other, FIELDS[other].default)
        return replace(self, **values)

    def in_steps(self, examples: int) -> "Settings":
        """These settings with all that is given in epochs given in steps too."""
        found: dict[str, Any] = {"steps": self.total_steps(examples)}
        for name, in_epochs in IN_EPOCHS[1:]:
            epochs = getattr(self, in_epochs)
            if epochs and not getattr(self, name):
                found[name] = max(1, round(epochs * self._epoch_steps(examples)))
        return replace(self, **found)

    def total_steps(self, examples: int) -> int:
        """The clock at the end; an epoch is one pass over `examples` by all workers together."""
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            raise ValueError("neither steps nor epochs is given; add for instance --steps 1000")
        length = max(1, round(self.epochs * self._epoch_steps(examples)))
        return self._nearest_end_of_a_round(length) if self.whole_rounds else length

    def _epoch_steps(self, examples: int) -> int:
        if not examples:
            raise ValueError(
                "the number of examples of this workload is not known, so that epochs have no "
                "length; give --steps, or say `examples` in its class"
            )
        steps = examples // (self.workers * self.batch_size)
        if steps == 0:
            raise ValueError(
                f"an epoch of {examples} examples has no step: {self.workers} workers with "
                f"batch_size={self.batch_size} take {self.workers * self.batch_size} in each; use "
                "a smaller batch_size, fewer workers, or --steps"
            )
        return steps

    def _nearest_end_of_a_round(self, steps: int) -> int:
        """A run of less than a round keeps its length. DDP has the same length as the others,
        though it has no rounds."""
        if isinstance(self.sync_every, str) or steps < self.warmup_steps + self.sync_every:
            return steps
        rounds = round((steps - self.warmup_steps) / self.sync_every)
        return self.warmup_steps + rounds * self.sync_every

    def as_dict(self) -> dict[str, Any]:
        """The settings as a flat dict, with the methods' own settings among the others."""
        values = asdict(self)
        return values | values.pop("method_settings")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Settings":
        """The settings from a dict that `as_dict` made."""
        own = {name: value for name, value in values.items() if name not in FIELDS}
        known = {name: value for name, value in values.items() if name in FIELDS}
        return cls(**known, method_settings=own)


# Of each pair one is given, or none. Where a file has both, the epochs were given.
IN_EPOCHS = (
    ("steps", "epochs"),
    ("lr_warmup_steps", "lr_warmup_epochs"),
    ("schedule_every", "schedule_every_epochs"),
)
_EITHER = (*IN_EPOCHS, ("mix_rate", "pull"))
CHOICES = {
    "draws": ("balanced", "independent", "shared", "paced"),
    "buffers": ("average", "local", "recompute"),
    "split": ("test", "choose"),
    "target_on": ("loss", "metric", "train_loss", "train_metric"),
    "inner": ("sgd", "nesterov", "adam", "adamw"),
    "schedule": ("constant", "cosine", "step"),
    "outer": ("nesterov", "sgd", "sgd_m", "adam", "adamw"),
    "outer_schedule": ("constant", "cosine", "step"),
    "precision": ("fp32", "tf32", "bf16"),
}
# Strict limits, and the range in words
TIMEOUT_S = 300.0  # of an exchange between workers, unless the command says otherwise
_COUNT = (below(1), math.inf, "at least 1")
_NOT_NEGATIVE = (below(0), math.inf, "a number >= 0")
_POSITIVE = (0.0, math.inf, "a number > 0")
_EPOCHS = (0.0, LONGEST_RUN, f"a number > 0, and below {LONGEST_RUN}")
_SHARE = (below(0), 1.0, "in [0, 1)")
_UP_TO_ONE = (below(0), math.nextafter(1.0, 2.0), "in [0, 1]")
RANGES: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(("workers", "ranks_per_worker", "batch_size"), _COUNT),
    **dict.fromkeys(("micro_batches", "context", "schedule_every"), _COUNT),
    "steps": (below(1), LONGEST_RUN + 1, f"at least 1, and at most {LONGEST_RUN}"),
    "sync_every": (below(1), LONGEST_ROUND + 1, f"at least 1, and at most {LONGEST_ROUND}"),
    **dict.fromkeys(("evaluate_every", "checkpoint_every", "fragments"), _COUNT),
    "delay": _NOT_NEGATIVE,
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps", "seed", "weight_decay"), _NOT_NEGATIVE),
    **dict.fromkeys(("lr", "outer_lr", "mix_rate"), _NOT_NEGATIVE),
    "target": (-math.inf, math.inf, "a finite number"),
    **dict.fromkeys(("mix_prob", "momentum", "outer_momentum"), _SHARE),
    **dict.fromkeys(("epochs", "schedule_every_epochs"), _EPOCHS),
    **dict.fromkeys(("max_norm", "margin"), _POSITIVE),
    "lr_warmup_epochs": (below(0), LONGEST_RUN, f"a number from 0 to {LONGEST_RUN}"),
    "outer_weight_decay": _NOT_NEGATIVE,
    **dict.fromkeys(("pull", "schedule_factor"), _UP_TO_ONE),
}
FIELDS = {each.name: each for each in fields(Settings) if each.name != "method_settings"}
# Fields above that are a method's own where it has one of that name. Any other setting of a method
# whose name is that of a field above (a method's own lr, say) is written with this prefix.
OF_METHODS = ("mix_prob", "mix_rate", "pull")
PREFIX = "method."
OF_CLOCK = ("sync_every", "mix_rate", "pull")  # fields that may change with the clock


def check_sharding(text: str) -> float | None:
    """The A of `dirichlet:A`; None for the other ways to deal out examples."""
    check_text("sharding", text)
    kind, _, number = text.partition(":")
    if text in ("fixed", "reshuffled"):
        return None
    try:
        found = float(number) if kind == "dirichlet" else math.nan
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ValueError(
            f"sharding={as_given(text)} is unknown; use fixed, reshuffled or dirichlet:A with a "
            "number A > 0 (small: few classes for each worker), such as dirichlet:0.3"
        )
    return found


def _numbers(name: str, value: Any) -> tuple[Any, ...]:
    """The numbers that a field's value has: none, one, or those that it changes between."""
    if value is None or (name, value) == ("sync_every", "auto"):
        return ()
    if name in OF_CLOCK and isinstance(value, str):
        return clock_values.parse(name, value).values
    return (value,)


def shown(value: Any) -> str:
    """A number without needless digits, or the text that says how it changes."""
    return value if isinstance(value, str) else f"{value:g}"


def setting_name(name: str) -> str:
    """The one name of a setting, which may be given with the prefix or without."""
    check_text("the name of a setting", name)
    return method_setting(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else name


def method_setting(field: str) -> str:
    """The name under which a field of a method is set."""
    return PREFIX + field if field in FIELDS and field not in OF_METHODS else field


def parsed(name: str, value: Any) -> Any:
    """The value of a field from text such as `64`, `0.1` or `none`."""
    check_field(name)
    kinds = _kinds(name)
    if not isinstance(value, str):
        return _of_kind(name, value, kinds) if name in FIELDS else value
    if type(None) in kinds and value.lower() == "none":
        return None
    if (name, value) == ("sync_every", "auto") or (name in OF_CLOCK and ":" in value):
        return value
    kind = next(k for k in kinds if k is not type(None))
    if kind is bool:
        return _flag(name, value)
    try:
        return kind(value)
    except ValueError:
        raise ValueError(
            f"{name}={as_given(value)} is no {'whole number' if kind is int else 'number'}"
        ) from None


def _flag(name: str, text: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError(f"{name}={in_error(text)} is neither true nor false; use {name}=true")
    return words[text.lower()]


def check_kinds(values: Mapping[str, Any]) -> None:
    """Raise a ValueError for a value of another kind than its field's, as a file may have it."""
    for name, kinds in _field_kinds().items():
        if name in values:
            _of_kind(name, values[name], kinds)


def _of_kind(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """The value, if it is of one of the kinds that its field has."""
    if value is None and type(None) in kinds:
        return None
    if bool in kinds:
        return check_flag(name, value)
    if isinstance(value, str) and str in kinds:
        return check_text(name, value)
    if int in kinds or float in kinds:
        return _number(name, value, whole=float not in kinds)
    return check_text(name, value)


def _number(name: str, value: Any, *, whole: bool) -> int | float:
    if is_whole(value):
        if abs(value) > LARGEST:
            raise ValueError(f"{name}={in_error(value)} must be a number up to {LARGEST}")
        return int(value)
    if whole or not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name}={in_error(value)} must be a {'whole ' if whole else ''}number")
    return as_number(value)


def _plain(name: Any, value: Any) -> Any:
    """A setting of a method, whose kind the method itself checks, as files can hold it."""
    check_text("the name of a setting", name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    return check_text(name, value) if isinstance(value, str) else _number(name, value, whole=False)


def check_field(name: str) -> None:
    check_text("the name of a setting", name)
    if name not in FIELDS and name.removeprefix(PREFIX) not in _method_fields():
        spelt = PREFIX.__add__ if name.startswith(PREFIX) else method_setting
        known = [*FIELDS, *map(spelt, _method_fields())]
        raise ValueError(
            f"there is no setting {in_error(name)}; did you mean {nearest(name, known)!r}?"
        )


def with_alternatives(names: Iterable[str]) -> set[str]:
    """These fields, and those that say the same in another way: pull for mix_rate, for instance."""
    names = set(names)
    return names | {name for pair in _EITHER if names & set(pair) for name in pair}


def assignments(texts: list[str]) -> dict[str, str]:
    """`["lr=0.1", "seed=1"]` as a dict."""
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not value:
            raise ValueError(f"{text!r} is not of the form field=value, for instance lr=0.01")
        check_field(name)
        found[name] = value
    return found


@cache
def _field_kinds() -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(Settings)
    return {name: _parts(hints[name]) for name in FIELDS}


def _kinds(name: str) -> tuple[type, ...]:
    own = name.removeprefix(PREFIX)
    at_home = name in FIELDS or own in OF_METHODS
    return _field_kinds()[own] if at_home else _parts(_method_fields()[own])


def _parts(hint: Any) -> tuple[type, ...]:
    """The types of a hint, several where it is a union."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _method_fields() -> dict[str, Any]:
    """The fields of all methods, with their types. It is called only for names that are no field of
    Settings, as it imports torch."""
    found: dict[str, Any] = {}
    for row in registry.all_rows():
        hints = typing.get_type_hints(row.method)
        found = {name: hints[name] for name in row.settings()} | found
    return found
