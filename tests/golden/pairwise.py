"""Which settings the golden trajectories have: every pair of values of two factors occurs."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product

FACTORS = {
    "method": ("ddp", "localsgd", "diloco", "palsgd"),
    "draws": ("balanced", "independent", "shared"),
    "transport": ("plain", "int8", "delay", "fragments", "all"),
    "dtype": ("fp32", "bf16"),
    "warmup": ("nowarmup", "warmup"),
    "norm": ("nonorm", "batchnorm"),
    "buckets": ("onebucket", "manybuckets"),
}

Row = dict[str, str]  # a value for each factor
Pair = tuple[tuple[str, str], tuple[str, str]]  # (factor, value) and (factor, value)

_NO_SYNC = "DDP refuses compress, delay and fragments: it has no syncs they could apply to"
_ALL_WARMUP = "DDP is a warm-up that never ends, so it takes no warmup_steps"
_NO_DRAWS = "only PALSGD draws which steps mix; the other methods have no such setting"

IMPOSSIBLE: dict[Pair, str] = {
    **{
        (("method", "ddp"), ("transport", transport)): _NO_SYNC
        for transport in ("int8", "delay", "fragments", "all")
    },
    (("method", "ddp"), ("warmup", "warmup")): _ALL_WARMUP,
    **{
        (("method", method), ("draws", draws)): _NO_DRAWS
        for method in ("ddp", "localsgd", "diloco")
        for draws in ("independent", "shared")
    },
}

REQUIRED: list[Row] = [
    # PALSGD as it is by default, with each transport: pairs alone would let other methods, whose
    # draws are always "balanced", stand in for it.
    *(
        {"method": "palsgd", "draws": "balanced", "transport": transport}
        for transport in FACTORS["transport"]
    ),
    # Syncs of several messages: low-precision models and delayed syncs have only one.
    {"transport": "plain", "dtype": "fp32", "buckets": "manybuckets"},
    {"transport": "int8", "dtype": "fp32", "buckets": "manybuckets"},
]


def all_pairs() -> Iterator[Pair]:
    for one, other in combinations(FACTORS, 2):
        for value, second in product(FACTORS[one], FACTORS[other]):
            yield (one, value), (other, second)


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(row.items(), 2))


def rows() -> list[Row]:
    """The rows, greedily: each has the most pairs not seen before and, of those that do, values
    used least so far. Nothing is random, so the same factors give the same rows."""
    candidates = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    candidates = [row for row in candidates if not pairs_of(row) & IMPOSSIBLE.keys()]
    missing = set(all_pairs()) - IMPOSSIBLE.keys()
    chosen: list[Row] = []
    for demand in REQUIRED:
        fitting = [row for row in candidates if demand.items() <= row.items()]
        chosen.append(_best(fitting, missing, chosen))
        missing -= pairs_of(chosen[-1])
    while missing:
        chosen.append(_best(candidates, missing, chosen))
        if not pairs_of(chosen[-1]) & missing:
            raise ValueError(f"no row has {min(missing)}; list it in IMPOSSIBLE, with the reason")
        missing -= pairs_of(chosen[-1])
    return chosen


def _best(candidates: list[Row], missing: set[Pair], chosen: list[Row]) -> Row:
    uses = Counter(item for row in chosen for item in row.items())

    def worth(row: Row) -> tuple[int, int]:
        return len(pairs_of(row) & missing), -sum(uses[item] for item in row.items())

    return max(candidates, key=worth)


def name_of(number: int, row: Row) -> str:
    return f"{number:02d}-" + "-".join(row.values())
