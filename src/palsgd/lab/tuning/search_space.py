"""The values that tuning tries: where they come from, how they are drawn, and their edges.

A workload's `SEARCH` says for each field which values there are: a list of them in order, or a pair
`(low, high)`, between which values are drawn evenly in the logarithm. A method searches the fields
that have an effect on it.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from palsgd.lab.methods import without_effect
from palsgd.lab.settings import with_alternatives

Space = Mapping[str, Sequence[Any]]
NEAR = 0.1  # of a range: nearer to its end, in the logarithm, is at the edge


def space_of(search: Space, method: str, given: Collection[str] = ()) -> dict[str, Sequence[Any]]:
    """The part of the search space that has an effect on the method, without fields that the user
    gave."""
    left_out = without_effect(method) | with_alternatives(given)
    return {field: values for field, values in search.items() if field not in left_out}


def points(space: Space, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` points. Each field takes one value from each of `count` equal parts of its values, in
    an order of its own.

    The values of a field depend on nothing but its name, the number of points and the seed. So the
    i-th points of two methods are equal in the fields that both have, and a method is neither
    luckier in its learning rates than another nor gets more points for having more fields.
    """
    columns = {field: _column(field, values, count, seed) for field, values in space.items()}
    return [{field: column[i] for field, column in columns.items()} for i in range(count)]


def _column(field: str, values: Sequence[Any], count: int, seed: int) -> list[Any]:
    rng = random.Random(f"{seed} {field}")
    parts = list(range(count))
    rng.shuffle(parts)
    return [_value_at(values, (part + rng.random()) / count) for part in parts]


def _value_at(values: Sequence[Any], place: float) -> Any:
    """The value at a place in [0, 1)."""
    if isinstance(values, list):
        return values[int(place * len(values))]
    low, high = values
    return float(f"{low * (high / low) ** place:.3g}")


def edges(space: Space, point: Mapping[str, Any]) -> dict[str, str]:
    """The fields whose value is at an end of what was searched, where better ones may lie beyond.
    Words such as constant and cosine have no order and no ends, and nothing lies below zero."""
    found = {field: _edge(values, point[field]) for field, values in space.items()}
    return {field: edge for field, edge in found.items() if edge is not None}


def _edge(values: Sequence[Any], value: Any) -> str | None:
    if any(isinstance(each, str) for each in values) or len(values) < 2 or value == 0:
        return None
    low, high = min(values), max(values)
    if isinstance(values, list):
        place = (value - low) / (high - low)
        near = 0.0
    else:
        place, near = math.log(value / low) / math.log(high / low), NEAR
    return "lowest" if place <= near else "highest" if place >= 1 - near else None


def shown(values: Sequence[Any]) -> str | list[Any]:
    """As files show it: a list, or low..high."""
    return values if isinstance(values, list) else f"{values[0]:g}..{values[1]:g}"
