"""The timelines of the workers as bars."""

from collections.abc import Iterator

from palsgd.lab.run_folder import Line

KINDS = ("gradient", "mixing", "wait", "sync", "evaluate")

Bar = tuple[str, float, float]  # kind, start, end


def bars(spans: list[Line]) -> dict[int, list[Bar]]:
    """The bars of each worker; time starts at zero."""
    zero = min(span["start_s"] for span in spans)
    length = max(span["end_s"] for span in spans) - zero
    return {
        worker: [
            (kind, start - zero, end - zero)
            for kind, start, end in _merged(
                [span for span in spans if span["worker"] == worker], gap=length / 1500
            )
        ]
        for worker in sorted({span["worker"] for span in spans})
    }


def _merged(spans: list[Line], *, gap: float) -> Iterator[Bar]:
    """Neighbours of one kind as one bar, as thousands of separate steps would be too thin to
    see."""
    last: Bar | None = None
    for span in sorted(spans, key=lambda span: span["start_s"]):
        kind, start, end = span["kind"], span["start_s"], span["end_s"]
        if last and last[0] == kind and start - last[2] < gap:
            last = kind, last[1], max(end, last[2])
            continue
        if last:
            yield last
        last = kind, start, end
    if last:
        yield last
