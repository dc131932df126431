"""Draws the pictures of docs/concepts.md, as SVG files beside this one.

    python docs/pictures/make.py            # write them anew
    python docs/pictures/make.py --check    # say which differ; exit code 1 if any

Steps are those of `palsgd.round_plan` and distances those of the rules, so that a picture shows
what the library does. Each file has colours for light and dark pages and a ground of its own,
because the page around it may have a switch that a picture does not see.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path

import palsgd
from palsgd.methods.palsgd import step_beta

HERE = Path(__file__).resolve().parent
WIDTH = 560  # as narrow as a phone can show with letters that can be read
MARGIN = 16
RIGHT = WIDTH - MARGIN
LEFT = 84  # where the first step stands, right of the names of the workers

Point = tuple[float, float]

# The colours of each class, on light and on dark pages.
COLOURS = {
    "ground": ("#ffffff", "#161b22"),
    "text": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9aa4af"),
    "gradient": ("#0072b2", "#56b4e9"),
    "mixing": ("#d55e00", "#ff9152"),
    "sync": ("#1f2328", "#e6edf3"),
    "anchor": ("#00785a", "#2fd0a0"),
    "faint": ("#c3ccd5", "#434c56"),
}


def style() -> str:
    """The classes of a drawing: `NAME` fills with a colour, `NAME-line` draws with it."""

    def rules(index: int) -> str:
        pairs = ((name, shades[index]) for name, shades in COLOURS.items())
        return "".join(f".{n}{{fill:{c}}}.{n}-line{{stroke:{c};fill:none}}" for n, c in pairs)

    letters = "text{font:15px system-ui,sans-serif}"
    return f"{letters}{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}"


@dataclass
class Drawing:
    """Shapes one after another, and the file that they make."""

    title: str
    height: float
    shapes: list[str] = field(default_factory=list)

    def add(self, tag: str, content: str = "", **attributes: object) -> None:
        names = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        written = "".join(f' {name}="{_short(value)}"' for name, value in names.items())
        self.shapes.append(f"<{tag}{written}>{escape(content)}</{tag}>")

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.add("rect", x=x, y=y, width=width, height=height, rx=2, class_=kind)

    def frame(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A box without filling."""
        self.box(x, y, width, height, f"{kind}-line")

    def dot(self, at: Point, radius: float, kind: str) -> None:
        self.add("circle", cx=at[0], cy=at[1], r=radius, class_=kind)

    def ring(self, at: Point, kind: str) -> None:
        self.add("circle", cx=at[0], cy=at[1], r=6, class_=f"{kind}-line", stroke_width=2)

    def path(self, points: Sequence[Point], kind: str, width: float = 2, dashes: str = "0") -> None:
        places = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
        kind = f"{kind}-line"
        self.add(
            "polyline", points=places, class_=kind, stroke_width=width, stroke_dasharray=dashes
        )

    def words(self, x: float, y: float, text: str, kind: str = "text", at: str = "start") -> None:
        self.add("text", text, x=x, y=y, class_=kind, text_anchor=at)

    def svg(self) -> str:
        size = f'width="{WIDTH}" height="{self.height:g}"'
        box = f'viewBox="0 0 {WIDTH} {self.height:g}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} {size} role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{style()}</style>",
            f'<rect {size} rx="8" class="ground"/>',
            *self.shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    """A number without the digits that nobody sees."""
    return f"{round(value, 1):g}" if isinstance(value, float) else str(value)


def legend(drawing: Drawing, y: float, *names: tuple[str, str]) -> float:
    """Small boxes in a row, each with its meaning; returns where the row ends."""
    x = float(MARGIN)
    for kind, meaning in names:
        drawing.box(x, y - 11, 12, 12, kind)
        drawing.words(x + 18, y, meaning)
        x += 40 + 7.6 * len(meaning)
    return x


GRADIENT, MIXING, SYNC = ("gradient", "gradient step"), ("mixing", "mixing step"), ("sync", "sync")
DASHED = "5 4"


def steps(drawing: Drawing, x: float, y: float, plan: Sequence[bool], size: float) -> None:
    """A box for each step of a round."""
    for index, mixes in enumerate(plan):
        drawing.box(x + index * size + 1, y, size - 2, 18, "mixing" if mixes else "gradient")


# -- clock, rounds and syncs -----------------------------------------------------------------------


def clock() -> Drawing:
    """Two rounds of three workers, step by step."""
    length, size = 16, 14
    drawing = Drawing("Three workers, two rounds of 16 steps", 236)
    for worker in range(3):
        drawing.words(MARGIN, 56 + 30 * worker, f"worker {worker}")
    for round in range(2):
        start = LEFT + round * (length * size + 8)
        end = start + length * size
        for worker in range(3):
            plan = palsgd.round_plan(
                seed=5, worker=worker, round=round, sync_every=length, mix_prob=0.15,
                draws="balanced",
            )  # fmt: skip
            steps(drawing, start, 42 + 30 * worker, plan, size)
        drawing.words((start + end) / 2, 26, f"round {round}", "muted", "middle")
        drawing.box(end + 1.5, 34, 5, 100, "sync")
        drawing.words(end + 8, 152, f"sync {round + 1}", at="end")
    _axis(drawing, {0: LEFT, 16: LEFT + 16 * size + 4, 32: LEFT + 32 * size + 12})
    legend(drawing, 222, GRADIENT, MIXING, SYNC)
    return drawing


def _axis(drawing: Drawing, places: dict[int, float]) -> None:
    drawing.words(MARGIN, 177, "clock", "muted")
    drawing.path([(min(places.values()), 172), (max(places.values()), 172)], "muted", 1)
    for tick, x in places.items():
        drawing.path([(x, 168), (x, 176)], "muted", 1)
        drawing.words(x, 192, str(tick), "muted", "middle")


# -- the distance from the anchor ------------------------------------------------------------------


def distances(plan: Sequence[bool], move: float, beta: float) -> list[float]:
    """How far a worker is from the anchor after each step, if all gradients point the same way."""
    found = [0.0]
    for mixes in plan:
        found.append(found[-1] * (1 - beta) if mixes else found[-1] + move)
    return found


def anchor() -> Drawing:
    """How far a worker goes from the anchor, with mixing steps and without."""
    length, left, bottom, wide = 24, 56, 214, 9.7
    drawing = Drawing("The distance from the anchor in two rounds", 282)
    for round in range(2):
        start, end = left + round * length * wide, left + (round + 1) * length * wide
        place = partial(_place, start, bottom, wide)
        _distances_of_a_round(drawing, round, length, place)
        drawing.box(end - 2, 28, 4, bottom - 28, "sync")
        drawing.words(end, 20, f"sync {round + 1}", at="middle")
    drawing.path([(left, 34), (left, bottom), (left + 2 * length * wide + 14, bottom)], "muted", 1)
    drawing.words(left + length * wide, bottom + 24, "clock", "muted", "middle")
    turned = f"translate(32 {bottom - 6}) rotate(-90)"
    drawing.add("text", "distance from the anchor", transform=turned, class_="muted")
    drawing.path([(16, 260), (44, 260)], "gradient", 2.5)
    drawing.words(50, 265, "PALSGD, p = 0.125, pull = 0.5")
    drawing.box(284, 254, 12, 12, "mixing")
    drawing.words(302, 265, "mixing step")
    drawing.path([(398, 260), (426, 260)], "muted", 2.5, DASHED)
    drawing.words(432, 265, "without mixing")
    return drawing


def _place(start: float, bottom: float, wide: float, step: int, distance: float) -> Point:
    return start + step * wide, bottom - 7 * distance


def _distances_of_a_round(
    drawing: Drawing, round: int, length: int, place: Callable[[int, float], Point]
) -> None:
    p, pull = 0.125, 0.5
    plan = palsgd.round_plan(
        seed=2, worker=0, round=round, sync_every=length, mix_prob=p, draws="balanced"
    )
    mixed = distances(plan, 1 / (1 - p), step_beta(pull, p, length))
    plain = distances([False] * length, 1.0, 0.0)
    drawing.path([place(i, d) for i, d in enumerate(plain)], "muted", 2.5, DASHED)
    drawing.path([place(i, d) for i, d in enumerate(mixed)], "gradient", 2.5)
    for i in (i for i, mixes in enumerate(plan) if mixes):
        drawing.path([place(i, mixed[i]), place(i + 1, mixed[i + 1])], "mixing", 5)


# -- draws -----------------------------------------------------------------------------------------


def draws() -> Drawing:
    """One round of four workers under each kind of draws, and the gradients of each."""
    drawing = Drawing("A round of 20 steps under the four kinds of draws", 356)
    for index, kind in enumerate(("independent", "balanced", "shared", "paced")):
        x, y = MARGIN + 272 * (index % 2), 16 + 154 * (index // 2)
        extra = ": worker 3 is half as fast" if kind == "paced" else ""
        drawing.words(x, y + 14, f'"{kind}"{extra}')
        for worker in range(4):
            _row_of_draws(drawing, x, y + 26 + 26 * worker, kind, worker)
    end = legend(drawing, 338, GRADIENT, MIXING)
    drawing.words(end, 338, "numbers: gradients of the round", "muted")
    return drawing


def _row_of_draws(drawing: Drawing, x: float, y: float, kind: str, worker: int) -> None:
    length, size = 20, 11
    plan = palsgd.round_plan(
        seed=4, worker=worker, round=0, sync_every=length, mix_prob=0.2, draws=kind,
        speeds=(1.0, 1.0, 1.0, 0.5) if kind == "paced" else None,
    )  # fmt: skip
    steps(drawing, x, y, plan, size)
    drawing.words(x + length * size + 8, y + 14, str(plan.count(False)), "muted")


# -- the outer step --------------------------------------------------------------------------------


def outer() -> Drawing:
    """Two rounds: local models, their mean, and the anchor that Nesterov's step makes of it."""
    lr, momentum = 0.7, 0.5
    rounds = [[(178, -86), (196, -44), (154, 88)], [(150, -66), (186, -30), (168, 76)]]
    drawing = Drawing("The outer step, with lr = 0.7 and momentum = 0.5", 286)
    at, velocity = (46.0, 130.0), (0.0, 0.0)
    drawing.words(MARGIN, at[1] + 34, "anchor", "anchor")
    for moves in rounds:
        mean = (sum(x for x, _ in moves) / len(moves), sum(y for _, y in moves) / len(moves))
        velocity = _plus(mean, velocity, momentum)
        new = _plus(at, _plus(mean, velocity, momentum), lr)
        for worker, move in enumerate(moves):
            drawing.path([at, _plus(at, move)], "gradient")
            drawing.dot(_plus(at, move), 6, "gradient")
            if moves is rounds[0]:
                drawing.words(*_plus(at, (move[0] + 10, move[1] - 4)), f"x{worker}", "gradient")
        drawing.path([at, new], "anchor", 3)
        drawing.ring(_plus(at, mean), "text")
        drawing.dot(at, 8, "anchor")
        drawing.dot(new, 8, "anchor")
        at = new
    _legend_of_models(drawing, 246)
    drawing.words(MARGIN, 272, "Momentum takes the second step further beyond the mean.", "muted")
    return drawing


def _plus(one: Point, other: Point, times: float = 1.0) -> Point:
    return one[0] + times * other[0], one[1] + times * other[1]


def _legend_of_models(drawing: Drawing, y: float) -> None:
    drawing.dot((24, y - 5), 6, "gradient")
    drawing.words(36, y, "local models")
    drawing.ring((146, y - 5), "text")
    drawing.words(158, y, "their mean")
    drawing.dot((256, y - 5), 8, "anchor")
    drawing.words(270, y, "anchor: where the next round starts")


# -- delay and fragments ---------------------------------------------------------------------------


def delay() -> Drawing:
    """What a worker and its link do, with a sync that is waited for and with one that is not."""
    drawing = Drawing("A sync without and with a delay", 292)
    for y, lag in ((18, 0), (140, 5)):
        drawing.words(MARGIN, y + 12, f"delay={lag}")
        drawing.words(MARGIN, y + 42, "worker", "muted")
        drawing.words(MARGIN, y + 72, "link", "muted")
        _timeline(drawing, y, waits=lag == 0)
    drawing.box(16, 268, 12, 12, "gradient")
    drawing.words(34, 279, "step")
    drawing.frame(92, 268, 12, 12, "muted")
    drawing.words(110, 279, "waiting")
    drawing.box(190, 268, 12, 12, "anchor")
    drawing.words(208, 279, "message on its way")
    drawing.words(RIGHT, 279, "time", "muted", "end")
    return drawing


def _timeline(drawing: Drawing, y: float, *, waits: bool) -> None:
    """Rounds of 12 steps, whose messages travel for as long as 5 of them take."""
    size, length, travel = 15, 12, 5 * 15
    x, count = LEFT, 0
    while x + size <= RIGHT:
        drawing.box(x + 1, y + 28, size - 2, 18, "gradient")
        x, count = x + size, count + 1
        if count % length == 0:
            seen = min(travel, RIGHT - x)
            _message(drawing, x, y, seen, whole=seen == travel)
            if waits:
                drawing.frame(x + 1, y + 28, seen - 2, 18, "muted")
                x += travel


def _message(drawing: Drawing, x: float, y: float, seen: float, *, whole: bool) -> None:
    drawing.box(x, y + 58, seen, 18, "anchor")
    drawing.words(x, y + 96, "sent", at="middle")
    if whole:
        drawing.box(x + seen - 2, y + 24, 4, 56, "sync")
        drawing.words(x + seen, y + 96, "applied", at="middle")


def fragments() -> Drawing:
    """The messages of two rounds, whole and in four fragments."""
    drawing = Drawing("Messages of two rounds, whole and in four fragments", 254)
    wide, full = 227, 62  # of a round, and of a message with the whole model
    for bottom, parts in ((92, 1), (196, 4)):
        drawing.words(MARGIN, bottom - 50, f"F = {parts}")
        drawing.path([(LEFT, bottom), (LEFT + 2 * wide + 4, bottom)], "muted", 1)
        for sync in range(2 * parts):
            x, high = LEFT + (sync + 1) * wide / parts, full / parts
            drawing.box(x - 12, bottom - high, 12, high, "anchor")
            if parts == 1:
                drawing.words(x - 18, bottom - 24, "whole model", at="end")
            else:
                drawing.words(x - 4, bottom - high - 6, f"part {sync % parts}", at="end")
    for round, name in enumerate(("0", "H", "2 H")):
        x = LEFT + round * wide
        drawing.path([(x, 24), (x, 202)], "faint", 1, DASHED)
        drawing.words(x, 220, name, "muted", "middle")
    drawing.words(MARGIN, 220, "clock", "muted")
    drawing.words(MARGIN, 242, "The height is the size of a message.", "muted")
    return drawing


PICTURES: tuple[Callable[[], Drawing], ...] = (clock, anchor, draws, outer, delay, fragments)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    check, differing = parser.parse_args().check, []
    for picture in PICTURES:
        path, wanted = HERE / f"{picture.__name__}.svg", picture().svg()
        if not path.is_file() or path.read_text() != wanted:
            differing.append(path.name)
        if not check:
            path.write_text(wanted)
    if check and differing:
        print(f"{', '.join(differing)} differ from what make.py draws; run it without --check")
    return int(check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
