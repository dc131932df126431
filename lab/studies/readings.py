"""What is read from the runs of a part to stand beside a published figure.

Every number comes from `palsgd.lab.comparison`, which also judges them.
"""

from collections.abc import Callable
from statistics import fmean, variance

from palsgd.lab.comparison import Comparison, ToTarget
from palsgd.lab.groups import Group, shown

Reading = Callable[[Comparison], str]


def ends(*methods: str) -> Reading:
    """The judged quality at the end of the best setting of each method, as a mean over seeds."""

    def read(found: Comparison) -> str:
        best = [_best(found, _named(found, method)) for method in methods]
        return _joined(f"{each.label} {_end(found, each)}" for each in best if each is not None)

    return read


def mean_and_variance(*methods: str) -> Reading:
    """In the form of the paper's table of seeds."""

    def read(found: Comparison) -> str:
        texts = []
        for method in methods:
            each = _best(found, _named(found, method))
            losses = [] if each is None else list(found.final_losses(each).values())
            if len(losses) > 1 and each is not None:
                texts.append(f"{each.label} {found.quality.sign * fmean(losses):.4f} "
                             f"({variance(losses):.1e})")  # fmt: skip
        return _joined(texts)

    return read


def to_target(*methods: str, axis: str = "step") -> Reading:
    """How much less of an axis a method needs to reach the target than the baseline does."""

    def read(found: Comparison) -> str:
        rows = {row.group: row for row in found.to_target()}
        texts = []
        for method in methods:
            each = _best(found, _named(found, method))
            if each is None or each not in rows:
                continue
            texts.append(f"{each.label} {_arrival(rows[each], axis)}")
        return _joined(texts)

    return read


def _arrival(row: ToTarget, axis: str) -> str:
    ratio = row.speed_ups.get(axis)
    if not row.reached:
        return "misses the target"
    if row.in_warmup:
        return "arrives in its warm-up, which says nothing"
    if ratio is None:
        return "arrives, which the baseline does not"
    return f"{100 * (1 - 1 / ratio.value):.1f}% fewer"


def along(field: str, *methods: str, **where: object) -> Reading:
    """The judged quality of each method for each value of a setting, of runs that have the settings
    in `where`."""

    def read(found: Comparison) -> str:
        texts = []
        for method in methods:
            groups = [g for g in _named(found, method) if where.items() <= g.settings.items()]
            values = sorted({g.settings[field] for g in groups if field in g.settings}, key=_key)
            best = {value: _best(found, [g for g in groups if g.settings.get(field) == value])
                    for value in values}  # fmt: skip
            ends = [f"{shown(v)}: {_end(found, g)}" for v, g in best.items() if g is not None]
            texts += [f"{method} {', '.join(ends)}"] if ends else []
        return _joined(texts)

    return read


def _named(found: Comparison, method: str) -> list[Group]:
    """The settings of a method, or those of a control by its name."""
    own = [each for each in found.groups if each.given_name and each.kind == method]
    return own or [
        each
        for each in found.groups
        if each.given_name is None and each.method.rpartition(":")[2] == method
    ]


def _best(found: Comparison, groups: list[Group]) -> Group | None:
    ended = {each: found.final_losses(each) for each in groups}
    known = {each: fmean(losses.values()) for each, losses in ended.items() if losses}
    return min(known, key=lambda each: known[each]) if known else None


def _end(found: Comparison, each: Group) -> str:
    value = found.quality.sign * fmean(found.final_losses(each).values())
    percent = found.quality.name == "accuracy"
    return f"{100 * value:.2f}%" if percent else f"{value:.4f}"


def _key(value: object) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, str(value)  # type: ignore[arg-type]


def _joined(texts: object) -> str:
    return "; ".join(texts) or "not run yet"  # type: ignore[call-overload]
