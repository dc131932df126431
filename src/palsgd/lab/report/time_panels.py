"""Where the time goes: by method, and by worker."""

from collections.abc import Callable

from palsgd.lab.comparison import Comparison
from palsgd.lab.groups import Group
from palsgd.lab.report.bars import PART_COLOURS, draw_spent, draw_timelines
from palsgd.lab.report.canvas import Plot
from palsgd.lab.report.panel import Panel
from palsgd.lab.report.timelines import KINDS, Bar, bars
from palsgd.lab.run_folder import Line
from palsgd.lab.timing import record
from palsgd.lab.timing.pace import PARTS
from palsgd.lab.timing.paces import timed_at
from palsgd.lab.timing.shares import STEPS, shares

TIMELINES, WORKERS = 6, 4  # that are shown

Drawing = Callable[..., Plot]  # of a function of `bars`, a name and what is drawn


def spent(comparison: Comparison, plot: Drawing) -> Panel | None:
    """A stacked bar for each method. None where nobody told the parts apart."""
    known = {
        each: pace
        for each, pace in comparison.paces.items()
        if pace is not None and any(run.lines for run in each.runs)
    }
    seconds = {each.label: shares(each, pace) for each, pace in known.items()}
    told = [part for part in PARTS if any(parts[part] for parts in seconds.values())]
    if len(told) < 2:
        return None
    title = f"Seconds of {STEPS:,} steps"
    sources = dict.fromkeys(f"{pace.kind} {pace.source}" for pace in known.values())
    return Panel(
        title, "", {"": plot(draw_spent, "spent", title, seconds)},
        f"Of a worker, {'; '.join(sources)}.",
        colours=[(PART_COLOURS[part], part) for part in told],
    )  # fmt: skip


def timelines(groups: list[Group], plot: Drawing) -> Panel | None:
    """Of each group what was recorded while its steps were timed, or by the first run that recorded
    something. All were recorded over the same link, the one over which most groups were: seconds
    over different links would say nothing."""
    recorded = [_recorded(each) for each in groups]
    links = [link for known in recorded for link in known]
    if not links:
        return None
    link = max(links, key=lambda each: (links.count(each), each is not None))
    found: dict[str, dict[int, list[Bar]]] = {}
    for each, known in zip(groups, recorded, strict=True):
        if link in known and len(found) < TIMELINES:
            shown = dict(list(bars(known[link]).items())[:WORKERS])
            found[_named(each, known[link])] = shown
    title = "What each worker did"
    kinds = {bar[0] for workers in found.values() for each in workers.values() for bar in each}
    return Panel(
        title, "", {"": plot(draw_timelines, "timelines", title, found)},
        f"Some steps or rounds of up to {TIMELINES} settings, up to {WORKERS} workers each, on one "
        f"axis{'' if link is None else f', over a link of {link}'}.",
        colours=[(kind, kind) for kind in KINDS if kind in kinds],
    )  # fmt: skip


def _recorded(group: Group) -> dict[str | None, list[Line]]:
    """Spans by the link that they were recorded over."""
    found: dict[str | None, list[Line]] = {
        run.config.get("link"): spans
        for run in reversed(group.runs)
        if (spans := run.folder.timeline())
    }
    place = timed_at(group.runs[0])
    session = record.session_of(place)
    timed = None if session is None else session.program(place.name)
    if session is not None and timed is not None and timed.spans:
        found[session.link] = timed.spans
    return found


def _named(group: Group, spans: list[Line]) -> str:
    """The label, and how often it exchanged something."""
    first = min(span["worker"] for span in spans)
    count = sum(span["kind"] == "sync" and span["worker"] == first for span in spans)
    interval = group.settings.get("sync_every")
    if interval is None:
        return f"{group.label}: {count} steps, an exchange at each"
    return f"{group.label}: {count} syncs, {interval} steps apart"
