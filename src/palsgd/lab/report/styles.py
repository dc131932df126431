"""The styles of lines: told apart by colour (safe for colour-blind eyes), dash and marker."""

from dataclasses import dataclass

from palsgd import registry
from palsgd.lab.groups import Group

# The figure files have the light theme's colours. The page replaces each colour by the CSS variable
# of the same name, so that dark mode changes it.
THEME = {
    "ink": ("#24292f", "#e6e8eb"),
    "muted": ("#6b737c", "#9aa3ad"),
    "grid": ("#e9ebee", "#2c3137"),
    "gradient": ("#a9c7e0", "#3d6685"),
    "mixing": ("#d65f04", "#ff9152"),
    "wait": ("#dfe3e8", "#343a42"),
    "sync": ("#4a5568", "#c3cbd6"),
    "evaluate": ("#d9cfe6", "#5b4d70"),
    "noise": ("#e3e6ea", "#2b3138"),
    # of heat maps, from good to bad, and the ink on them
    "heat-0": ("#12689d", "#7cc4f5"),
    "heat-1": ("#4f94bd", "#4b93c4"),
    "heat-2": ("#9cc3d9", "#356a8c"),
    "heat-3": ("#f6d9a8", "#6b5426"),
    "heat-4": ("#ecb277", "#94521f"),
    "heat-5": ("#d98a4b", "#b8601c"),
    "heat-6": ("#c9cdd2", "#41474f"),
    "on-dark": ("#fffffe", "#0f1215"),
    "on-light": ("#1c2126", "#f4f6f8"),
}

# The colours of methods that are not palsgd's own, or of another version. The rows of the others
# have theirs: Okabe and Ito's colours, darkened for white paper and lightened for black.
_OTHER_HUES = [("#a8437f", "#e79ac6"), ("#8a6d00", "#e6c84c"), ("#4b3fa8", "#a59cf5")]
_OTHER_DASHES = [(0, (6, 1.5, 1, 1.5)), (0, (3, 1.5)), (0, (8, 2, 1, 2, 1, 2))]
_MARKERS = "osD^vPX<>p*h"

Dash = str | tuple[float, tuple[float, ...]]


@dataclass(frozen=True)
class LineStyle:
    light: str
    dark: str
    dash: Dash
    marker: str


def line_styles(groups: list[Group]) -> list[LineStyle]:
    """One style per group: hue and dash say the method, shade and marker the setting."""
    methods = list(dict.fromkeys(group.method for group in groups))
    result: list[LineStyle] = []
    for group in groups:
        kin = [other for other in groups if other.method == group.method]
        light, dark, dash = _method_style(group.method, methods)
        shade = _shade(kin.index(group), len(kin))
        marker = _MARKERS[len(result) % len(_MARKERS)]
        shades = _shaded(light, shade, darkest=0.62), _shaded(dark, shade, darkest=0.4)
        result.append(LineStyle(*shades, dash, marker))
    return result


def _method_style(method: str, methods: list[str]) -> tuple[str, str, Dash]:
    row = registry.known(method)
    if row is not None and row.colours is not None:
        return *row.colours, (0, row.dashes) if row.dashes else "-"
    others = [name for name in methods if name not in registry.names()]
    at = others.index(method) % len(_OTHER_HUES)
    return *_OTHER_HUES[at], _OTHER_DASHES[at]  # type: ignore[return-value]


def _shade(index: int, number: int) -> float:
    """From -1, darkest, to 1, lightest; few lines stay near the method's own colour."""
    return 0.0 if number == 1 else (2 * index / (number - 1) - 1) * min(1.0, 0.5 + number / 10)


def _shaded(colour: str, shade: float, *, darkest: float) -> str:
    towards, share = (255, 0.48 * shade) if shade > 0 else (0, -darkest * shade)
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (towards - part) * share):02x}" for part in parts)
