"""The page: one HTML file that loads no other file."""

import warnings
from importlib import resources
from pathlib import Path

from palsgd.lab.atomic import atomic_write
from palsgd.lab.run_folder import Run, find_runs


def write_report(
    folders: list[Path], out: Path, *, figures: bool = True, link: str | None = None
) -> Path:
    """Write the report on all runs in the folders to `out`, its figures to `figures/` beside it.
    Seconds are projected on the link if one is given."""
    runs = find_runs(folders)
    out = Path(out)
    beside = out.parent / "figures" if figures else None
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    atomic_write(out, _page(runs, beside, link))
    return out


def _page(runs: list[Run], figures: Path | None, link: str | None) -> str:
    # These modules are slow to import, and most commands need none of them.
    import jinja2

    from palsgd.lab.report.canvas import drawing_style
    from palsgd.lab.report.section import Section
    from palsgd.lab.report.styles import THEME

    workloads = dict.fromkeys(run.workload for run in runs)
    with drawing_style(), warnings.catch_warnings():
        # The figures' font lacks some scripts in which names may be; browsers have other fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        sections = [
            Section(number, [run for run in runs if run.workload == workload], figures, link)
            for number, workload in enumerate(workloads)
        ]
    # Text from files is escaped, as every value is that the template does not mark as "safe".
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_shipped("report.html")).render(
        sections=sections,
        theme=THEME,
        css=_shipped("report.css"),
        js=_shipped("report.js"),
    )


def _shipped(name: str) -> str:
    return (resources.files("palsgd.lab.report") / name).read_text(encoding="utf-8")
