"""The record of a study: what was asked, by which commit and machine, and what came of it so far.

summary.json  by part: runs done, verdicts, figures with intervals, times on links, robustness
config.json   the calls of every part
PART/         figures, and a tuned.yaml for each search that ended
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calls import tuning_file
from study import Part, Place, Study

from palsgd.lab.comparison import Comparison, Final, ToTarget
from palsgd.lab.judging.robustness import robustness
from palsgd.lab.provenance import provenance
from palsgd.lab.report import write_report
from palsgd.lab.report.heat_maps import best_of, heat_maps
from palsgd.lab.run_folder import write_json

# Figures that say how runs went, not how they ended; and axes that repeat another one's.
LEFT_OUT, LEFT_OUT_AXES = ("agreement", "distance", "train_loss"), ("examples", "bytes_sent")


def write_record(
    study: Study, parts: Sequence[Part], place: Place, args: argparse.Namespace
) -> None:
    folder: Path = args.record
    folder.mkdir(parents=True, exist_ok=True)
    compared = {part.name: place.comparison(part) for part in parts}
    summary = {
        "study": study.name,
        "title": study.title,
        "size": "tiny" if args.tiny else "full",
        "length": args.length,
        **provenance(),
        "made_by": made_by([each for each in compared.values() if each is not None]),
        "links": list(study.links),
        "parts": {
            part.name: part_record(study, part, place, compared[part.name]) for part in parts
        },
        "claims": [
            {"paper": claim.paper, "part": claim.part, "ours": claim.read(found)}
            for claim in study.claims
            if (found := compared.get(claim.part)) is not None
        ],
    }
    write_json(folder / "summary.json", summary)
    write_json(folder / "config.json", {part.name: _calls(part) for part in parts})
    for part in parts:
        if compared[part.name] is not None:
            _write_figures(place.runs(part), folder / part.name)
        keep_tuned(part, place, folder / part.name)


def made_by(compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The machines and commits that the runs name, which may be others than those of now."""
    keys = ("device", "torch", "palsgd", "commit", "dirty")
    found = [{key: run.config.get(key) for key in keys} for each in compared for run in each.runs]
    return [each for place, each in enumerate(found) if each not in found[:place]]


def part_record(study: Study, part: Part, place: Place, found: Comparison | None) -> dict[str, Any]:
    about = {"asks": part.asks, "runs": {"done": place.done(part), "planned": part.estimate().runs}}
    if found is None:
        return about
    return about | {
        "verdicts": found.verdicts,
        "settings": [_settings_record(found, row) for row in found.finals()],
        "robustness": _robustness(found),
        "time": {link: _times(place.comparison(part, link)) for link in study.links},
    }


def _settings_record(found: Comparison, row: Final) -> dict[str, Any]:
    reached = {each.group: each for each in found.to_target()}
    return {
        "label": row.group.label,
        "workers": row.group.settings.get("workers"),
        "seeds": row.group.seeds,
        "loss": row.loss.as_dict(),
        "metric": row.metric.as_dict(),
        "difference": None if row.difference is None else row.difference.as_dict(),
        "verdict": None if row.verdict is None else str(row.verdict.word),
        "equal": {axis: each.as_dict() for axis, each in row.equal.items()},
        "totals": row.totals,
        "to_target": _costs(reached.get(row.group)),
    }


def _costs(row: ToTarget | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "target": row.target.as_dict(),
        "shortfall": row.shortfall.as_dict(),
        "costs": {axis: each.cost.as_dict() for axis, each in row.costs.items()},
        "speed_ups": {axis: each.as_dict() for axis, each in row.speed_ups.items()},
    }


def _times(found: Comparison | None) -> dict[str, Any]:
    """By setting, the seconds to the target on a link, and how many times faster than the
    baseline that is."""
    rows = [] if found is None else found.to_target()
    return {
        row.group.label: {
            "seconds": row.costs["time_s"].cost.value if "time_s" in row.costs else None,
            "speed_up": row.speed_ups["time_s"].as_dict() if "time_s" in row.speed_ups else None,
        }
        for row in rows
    }


def _robustness(found: Comparison) -> dict[str, Any]:
    """Of each method that was run over a grid."""
    maps = heat_maps(found.groups)
    return {each.label: asdict(robustness(each.points, best_of(maps))) for each in maps}


def _calls(part: Part) -> list[dict[str, Any]]:
    return [{"kind": type(call).__name__.lower(), **asdict(call)} for call in part.calls]


def _write_figures(runs: Path, folder: Path) -> None:
    """The report's figures of quality. `palsgd report` makes the page and the others from the
    runs."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        page = write_report([runs], Path(elsewhere) / "report.html")
        for path in sorted((page.parent / "figures").glob("*.svg")):
            if not path.stem.startswith(LEFT_OUT) and not path.stem.endswith(LEFT_OUT_AXES):
                shutil.copy(path, folder / path.name)


def keep_tuned(part: Part, place: Place, folder: Path) -> None:
    """Copy what the searches of a part chose."""
    for call in part.calls:
        path = tuning_file(place.tuning(part), call.name)
        if path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / f"{call.name}.yaml")
