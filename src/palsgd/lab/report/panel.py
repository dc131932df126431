"""A place of the page for a figure."""

from dataclasses import dataclass, field

from palsgd.lab.report.canvas import Plot


@dataclass(frozen=True)
class Panel:
    """A place for a figure, with a variant for each position of its switch."""

    title: str
    switch: str
    variants: dict[str, Plot]
    caption: str = ""
    # where the section's legend does not serve: numbers of lines, or colours, with their words
    legend: list[tuple[int, str]] = field(default_factory=list)
    colours: list[tuple[str, str]] = field(default_factory=list)
