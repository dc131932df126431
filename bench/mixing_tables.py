"""Tables of docs/skipping-and-pulling.md, from lab/records; `tables.py` puts them into the page."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median, mode
from typing import Any

from experiment_tables import Record, experiment, loss_of, share
from markdown_table import markdown

from palsgd.lab.judging.interval import of_mean
from palsgd.lab.judging.robustness import FIELDS, NEAR, TRAINS


def pull_map(name: str, part: str, digits: int) -> str:
    """What PALSGD ends above DiLoCo, by H, p and pull, and by learning rate where it varies."""
    rows: dict[tuple[float, ...], dict[str, str]] = {}
    for row in experiment(name)["parts"][part]["settings"]:
        if row["over_plain"] is not None:
            pull = f"pull {row['given']['pull']:g}"
            rows.setdefault(_mixed(row), {})[pull] = share(row["over_plain"], digits)
    return _by_mixing(rows)


def controls_map(name: str, part: str, digits: int) -> str:
    """What PALSGD ends above DiLoCo with as many gradients in as many rounds, by H, p and pull; and
    what it ends without a pull above DiLoCo at the raised learning rate, which skips nothing."""
    rows: dict[tuple[float, ...], dict[str, str]] = {}
    for row in experiment(name)["parts"][part]["settings"]:
        pull, over = row["given"]["pull"], row["over_controls"]
        if "equal-gradients" not in over:
            continue
        own = rows.setdefault(_mixed(row), {})
        own[f"pull {pull:g}, equal gradients"] = share(over["equal-gradients"], digits)
        if pull == 0:
            own["pull 0 over the raised learning rate"] = share(over["raised-lr"], digits)
    return _by_mixing(rows)


def _mixed(row: Record) -> tuple[float, ...]:
    return tuple(row["given"][key] for key in ("sync_every", "lr", "mix_prob"))


def _by_mixing(rows: dict[tuple[float, ...], dict[str, str]]) -> str:
    """Cells by H, learning rate and p. A learning rate that all have is not shown."""
    shown = [0, 2] if len({lr for _, lr, _ in rows}) == 1 else [0, 1, 2]
    columns = sorted({column for own in rows.values() for column in own})
    cells = [(*(f"{place[i]:g}" for i in shown), *(own.get(column, "") for column in columns))
             for place, own in sorted(rows.items())]  # fmt: skip
    return markdown((*(("H", "lr", "p")[i] for i in shown), *columns), cells)


def optimizers_map(name: str, part: str) -> str:
    """The lowest mean loss of each pair of optimizers, with the learning rates that it has them
    at."""
    tried: dict[str, dict[str, list[Record]]] = {}
    for row in experiment(name)["parts"][part]["settings"]:
        given = row["given"]
        tried.setdefault(given["inner"], {}).setdefault(given["outer"], []).append(row)
    outers = list(next(iter(tried.values())))
    rows = [(inner, *(_best(own[outer]) for outer in outers)) for inner, own in tried.items()]
    return markdown(("inner", *(f"outer {outer}" for outer in outers)), rows)


def _best(rows: list[Record]) -> str:
    row = min(rows, key=lambda each: each["loss"]["value"])
    return f"{loss_of(row['loss'])} at {row['given']['lr']:g}, {row['given']['outer_lr']:g}"


def room_map(name: str, *parts: str) -> str:
    """How many points of a grid train well, and how far above DiLoCo they end."""
    rows = []
    for part in parts:
        (grid,) = experiment(name)["parts"][part]["grids"].values()
        for label, own in grid["robustness"].items():
            if own["points"] == max(each["points"] for each in grid["robustness"].values()):
                variant = label.replace(" pull=", ", pull ")
                above = grid["over_plain"].get(variant)
                rows.append((part.rpartition("-")[2][1:], variant, f"{own['best']:.4f}",
                             f"{own['near_own']} of {own['points']}",
                             share(above, 1)))  # fmt: skip
    columns = ("H", "method", "best loss", "points within 3% of it", "over DiLoCo, mean of points")
    return markdown(columns, rows)


def grid_map(name: str, part: str) -> str:
    """Of one grid for all methods, by H: how many of its points train well, and how far above
    DiLoCo a method ends where DiLoCo trains."""
    cells = []
    for h, rows in _by_interval(name, part).items():
        best, trains = min(map(_loss, rows)), _diloco_trains(rows)
        for variant in dict.fromkeys(map(_variant, rows)):
            own = [row for row in rows if _variant(row) == variant]
            losses = list(map(_loss, own))
            near = sum(loss <= (1 + NEAR) * best < math.inf for loss in losses)
            trained = sum(loss < TRAINS * best for loss in losses)
            above = [_over_plain(row) for row in own
                     if row["over_plain"] is not None and _point(row) in trains]  # fmt: skip
            over = (_mean(above), _percent(median(above)), _percent(max(above))) if above else ()
            cells.append((str(h), variant, f"{min(losses):.4f}", f"{near} of {len(own)}",
                          f"{trained} of {len(own)}", *(over or ("", "", ""))))  # fmt: skip
    columns = ("H", "method", "best loss", f"within {NEAR:.0%} of the best of all", "train",
               "over DiLoCo, mean of points", "median", "worst")  # fmt: skip
    return markdown(columns, cells)


def _over_plain(row: Record) -> float:
    value = row["over_plain"]["value"]
    return math.inf if value is None else value


def _percent(value: float) -> str:
    if not math.isfinite(value):
        return "diverged"
    return f"{value:+.1%}" if value < 1 else f"{1 + value:.1f} x"


def stronger_pulls(name: str, part: str) -> str:
    """What each pull ends above the next weaker one at the same point, as a mean over the points of
    a grid at which DiLoCo trains."""
    of_all: dict[tuple[float, float], list[float]] = {}
    cells = []
    for h, rows in _by_interval(name, part).items():
        mixing = [row for row in rows if row["given"]["pull"] is not None]
        losses = {(row["given"]["pull"], _point(row)): _loss(row) for row in mixing}
        assert len(losses) == len(mixing), "pulls alone vary at a point"
        pulls = sorted({pull for pull, _ in losses})
        above = {(weak, strong): [_over(losses[strong, point], losses[weak, point])
                                  for point in _diloco_trains(rows)]
                 for weak, strong in pairwise(pulls)}  # fmt: skip
        cells.append((str(h), *map(_mean, above.values())))
        for step, own in above.items():
            of_all.setdefault(step, []).extend(own)
    cells.append(("all", *map(_mean, of_all.values())))
    heads = (f"pull {strong:g} over {weak:g}" for weak, strong in of_all)
    return markdown(("H", *heads), cells)


def outer_steps(name: str, part: str) -> str:
    """How far above the best outer step at the same H and learning rate a method ends with each of
    the outer steps of a grid: the median over learning rates, and the worst."""
    cells, heads = [], []
    for h, rows in _by_interval(name, part).items():
        stepping = [row for row in rows if row["given"]["outer_lr"] is not None]
        steps = sorted(set(map(_outer_step, stepping)))
        heads = [f"{lr:g}, {momentum:g}" for lr, momentum in steps]
        for variant in dict.fromkeys(map(_variant, stepping)):
            own = [row for row in stepping if _variant(row) == variant]
            losses = {(row["given"]["lr"], _outer_step(row)): _loss(row) for row in own}
            assert len(losses) == len(own), "outer steps alone vary at a learning rate"
            least = {lr: min(losses[lr, step] for step in steps) for lr, _ in losses}
            above = [[_over(losses[lr, step], low) for lr, low in least.items() if low < math.inf]
                     for step in steps]  # fmt: skip
            cells.append((str(h), variant, *map(_median_and_worst, above)))
    return markdown(("H", "method", *heads), cells)


def _median_and_worst(above: list[float]) -> str:
    return f"{_percent(median(above))}, {_percent(max(above))}" if above else "diverged"


def _outer_step(row: Record) -> tuple[float, float]:
    return row["given"]["outer_lr"], row["given"]["outer_momentum"]


def _over(loss: float, other: float) -> float:
    """nan where there is nothing to compare with."""
    return loss / other - 1 if math.isfinite(other) else math.nan


def _by_interval(name: str, part: str) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for row in experiment(name)["parts"][part]["settings"]:
        found.setdefault(row["given"]["sync_every"], []).append(row)
    return dict(sorted(found.items()))


def _diloco_trains(rows: list[Record]) -> list[tuple[float, ...]]:
    """The points at which DiLoCo ends below TRAINS times the best of all."""
    limit = TRAINS * min(map(_loss, rows))
    return [_point(row) for row in rows if row["method"] == "diloco" and _loss(row) < limit]


def _mean(shares: list[float]) -> str:
    """With the interval over the points of a grid, and the number of those that have no share."""
    known = [each for each in shares if math.isfinite(each)]
    text = share(of_mean(known).as_dict(), 1) if known else ""
    without = len(shares) - len(known)
    return f"{text}, without {without} diverged".lstrip(", ") if without else text


def _variant(row: Record) -> str:
    """The method with what makes it strong."""
    given = row["given"]
    strength = [f"{key} {given[key]:g}" for key in ("pull", "decay") if given.get(key) is not None]
    return ", ".join([row["method"], *strength])


def _loss(row: Record) -> float:
    """Infinite where a seed did not end with a finite loss."""
    value = row["loss"]["value"]
    return math.inf if value is None else value


def _point(row: Record) -> tuple[float, ...]:
    return tuple(row["given"][field] for field in FIELDS)


def published_map(name: str, part: str, varied: str) -> str:
    """What PALSGD ends above DiLoCo against eta at one p, or against p at one eta, by learning rate
    and H."""
    other, head = {"mix_rate": ("mix_prob", "eta"), "mix_prob": ("mix_rate", "p")}[varied]
    found = [row for row in experiment(name)["parts"][part]["settings"]
             if row["over_plain"] is not None]  # fmt: skip
    fixed = mode(row["given"][other] for row in found)
    columns: dict[tuple[float, int], dict[float, str]] = {}
    for given, over in ((row["given"], row["over_plain"]) for row in found):
        if given[other] == fixed:
            own = columns.setdefault((given["lr"], given["sync_every"]), {})
            own[given[varied]] = share(over, 1)
    columns = {place: own for place, own in sorted(columns.items()) if len(own) > 1}
    values = sorted({value for own in columns.values() for value in own})
    rows = [(f"{value:g}", *(own.get(value, "") for own in columns.values())) for value in values]
    return markdown((head, *(f"lr {lr:g}, H = {h}" for lr, h in columns)), rows)


def at_their_best(name: str, *parts: str) -> str:
    """Final losses over DDP's with the settings that a grid chose, by H."""
    found = {part: {row["method"]: row for row in experiment(name)["parts"][part]["settings"]}
             for part in parts}  # fmt: skip
    methods = list(dict.fromkeys(method for rows in found.values() for method in rows))
    rows = [
        (method, *(_over_ddp(rows.get(method)) for rows in found.values())) for method in methods
    ]
    return markdown(("method", *(f"H = {part.rpartition('-')[2][1:]}" for part in parts)), rows)


def best_beside_controls(name: str, *parts: str) -> str:
    """What PALSGD at its best ends above DiLoCo at its best, and above each control, by H."""
    cells = []
    for part in parts:
        rows = experiment(name)["parts"][part]["settings"]
        (own,) = (row for row in rows if row["method"] == "palsgd")
        given = own["given"]
        chosen = (f"{given[key]:g}" for key in ("lr", "outer_lr", "outer_momentum", "pull"))
        # Without a pull the control that has none is the same program.
        over = own["over_controls"] | ({} if given["pull"] else {"no-pull": None})
        beside = (over[key] for key in ("equal-gradients", "raised-lr", "no-pull"))
        cells.append((str(given["sync_every"]), ", ".join(chosen), share(own["over_plain"], 1),
                      *(share(each, 1) for each in beside)))  # fmt: skip
    columns = ("H", "lr, outer lr, momentum, pull", "over DiLoCo", "at equal gradients and syncs",
               "over the raised learning rate", "over no pull")  # fmt: skip
    return markdown(columns, cells)


def _over_ddp(row: Record | None) -> str:
    if row is None:
        return ""
    loss = f"{row['loss']['value']:.4f}"
    return loss if row["difference"] is None else f"{loss}, {share(row['difference'])}"


def shards_map(name: str, part: str) -> str:
    """What pulling methods end above DiLoCo where shards differ, by H and learning rate."""
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in experiment(name)["parts"][part]["settings"]:
        own, given = row["method"], row["given"]
        place = rows.setdefault((given["sharding"], given["sync_every"], given["lr"]), {})
        if own == "diloco":
            place[own] = f"{row['loss']['value']:.4f}"
        elif row["over_plain"] is not None:
            place[own if own != "palsgd" else f"pull {given['pull']:g}"] = share(
                row["over_plain"], 1
            )
    columns = ("pull 0", "pull 0.25", "pull 0.5", "anchordecay")
    order = sorted(rows, key=lambda place: (SHARDS.index(place[0]), *place[1:]))
    cells = [(sharding, str(h), f"{lr:g}", rows[sharding, h, lr]["diloco"],
              *(rows[sharding, h, lr][each] for each in columns))
             for sharding, h, lr in order]  # fmt: skip
    head = ("shards", "H", "lr", "DiLoCo's loss", *(f"PALSGD, {each}" for each in columns[:3]))
    return markdown((*head, "AnchorDecay"), cells)


def outer_map(name: str, part: str) -> str:
    """What PALSGD ends above DiLoCo with the same outer step, by H, learning rates and pull; and
    DiLoCo's loss with the raised learning rate of PALSGD's gradient steps."""
    found = experiment(name)["parts"][part]["settings"]
    (p,) = {row["given"]["mix_prob"] for row in found if row["method"] == "palsgd"}
    rates = {row["given"]["lr"] for row in found if row["method"] == "palsgd"}
    base = {round(lr / (1 - p), 6): lr for lr in rates}
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in found:
        given, loss = row["given"], f"{row['loss']['value']:.4f}"
        lr = base.get(given["lr"], given["lr"])
        place = rows.setdefault((given["sync_every"], lr, given["outer_lr"]), {})
        if row["method"] == "palsgd":
            place[f"PALSGD, pull {given['pull']:g}"] = share(row["over_plain"], 1)
        else:
            place["DiLoCo's loss" if lr == given["lr"] else "at lr / (1 - p)"] = loss
    columns = ("DiLoCo's loss", "at lr / (1 - p)",
               *(f"PALSGD, pull {pull}" for pull in ("0", "0.25", "0.5", "0.75")))  # fmt: skip
    cells = [(f"{h}", f"{lr:g}", f"{outer:g}", *(own[each] for each in columns))
             for (h, lr, outer), own in sorted(rows.items())]  # fmt: skip
    return markdown(("H", "lr", "outer lr", *columns), cells)


DIGITS, SETTINGS = "2026-11-18-digits-controls", "2026-11-19-digits-settings"
PAYS, PAYS_DIGITS = "2026-11-16-when-it-pays", "2026-11-16-when-it-pays-digits"
BEST = "2026-11-19-digits-best"
BEST_PARTS = ("digits-best-H8", "digits-best-H32", "digits-best-H128")
SHARDS = ("reshuffled", "dirichlet:1", "dirichlet:0.1")  # from alike to unlike
INTERVALS = ("H16", "H64", "H256")
TABLES: dict[str, Callable[[], str]] = {
    "pull-map": partial(pull_map, PAYS, "strength", 2),
    "pull-map-digits": partial(pull_map, PAYS_DIGITS, "digits-strength", 1),
    "controls-digits": partial(controls_map, DIGITS, "digits-strength", 1),
    "optimizers-digits": partial(optimizers_map, DIGITS, "digits-optimizers"),
    "room-digits": partial(grid_map, SETTINGS, "digits-room"),
    "outer-steps-digits": partial(outer_steps, SETTINGS, "digits-room"),
    "stronger-pulls-digits": partial(stronger_pulls, SETTINGS, "digits-room"),
    "eta-digits": partial(published_map, SETTINGS, "digits-eta", "mix_rate"),
    "p-digits": partial(published_map, SETTINGS, "digits-eta", "mix_prob"),
    "decided-digits": partial(pull_map, SETTINGS, "digits-decided", 1),
    "decided-controls-digits": partial(controls_map, SETTINGS, "digits-decided", 1),
    "room": partial(room_map, PAYS, *INTERVALS),
    "at-their-best": partial(at_their_best, PAYS, *INTERVALS),
    "at-their-best-digits": partial(at_their_best, BEST, *BEST_PARTS),
    "best-beside-controls-digits": partial(best_beside_controls, BEST, *BEST_PARTS),
    "shards-digits": partial(shards_map, "2026-11-17-digits-shards", "digits-shards"),
    "outer-digits": partial(outer_map, "2026-11-18-digits-outer", "digits-outer"),
}
