"""The record of a study: what was asked, by which commit and machine, and what came of it so far.

summary.json  by part: runs done, verdicts, figures with intervals, times on links, robustness
config.json   the calls of every part
PART/         figures, and a tuned.yaml for each search that ended
runs.tar.xz   settings and evaluations of all runs that have ended: the study goes on from them
"""

import argparse
import io
import json
import math
import shutil
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calls import tuning_file
from study import Part, Place, Study

from palsgd import registry
from palsgd.lab.atomic import atomic_path
from palsgd.lab.comparison import Comparison, Final, ToTarget
from palsgd.lab.controls import Recipe, controls_beside
from palsgd.lab.groups import Group
from palsgd.lab.judging.interval import of_mean
from palsgd.lab.judging.robustness import FIELDS, robustness
from palsgd.lab.methods import plain_local, takes_outer
from palsgd.lab.programs import Program, program, settings_in
from palsgd.lab.provenance import provenance
from palsgd.lab.report import write_report
from palsgd.lab.report.heat_maps import best_of, heat_maps
from palsgd.lab.run_folder import write_json

RUNS = "runs.tar.xz"
# Settings that a record says.
GIVEN = ("workers", "inner", "outer", *FIELDS, "mix_prob", "mix_rate", "pull", "decay",
         "sharding", "buffers")  # fmt: skip
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
        "size": _size(args),
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
    if args.without_runs:
        (folder / RUNS).unlink(missing_ok=True)
    else:
        keep_runs(parts, place, folder / RUNS)
    for part in parts:
        if compared[part.name] is not None:
            _write_figures(place.compared(part), folder / part.name)
        keep_tuned(part, place, folder / part.name)


def check_record(study: Study, parts: Sequence[Part], args: argparse.Namespace) -> None:
    """Refuse a folder with the record of something else, or of parts that would be lost."""
    path = args.record / "summary.json"
    if not path.exists():
        return
    before = json.loads(path.read_text())
    for key, now in (("study", study.name), ("size", _size(args)), ("length", args.length)):
        if before.get(key) != now:
            raise ValueError(f"{path} is of {key} {before.get(key)}, not {now}; use another folder")
    lost = sorted(set(before["parts"]) - {part.name for part in parts})
    if lost:
        raise ValueError(f"{path} also has {', '.join(lost)}; name these parts too")


def _size(args: argparse.Namespace) -> str:
    return "tiny" if args.tiny else "full"


def keep_runs(parts: Sequence[Part], place: Place, path: Path) -> None:
    """The files of runs that have ended, without what is large. Of their lines those of evaluations
    are kept. Equal runs make equal archives."""
    with atomic_path(path) as whole, tarfile.open(whole, "w:xz") as packed:
        for each in (file for part in parts for file in place.small_files(part)):
            content = each.read_bytes()
            if each.name == "metrics.jsonl":
                content = _evaluations(content.decode()).encode()
            member = tarfile.TarInfo(str(each.relative_to(place.folder)))
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))


def _evaluations(lines: str) -> str:
    """Distances of the workers, which are most of a line and judge nothing, to four digits."""
    found = [line for line in map(json.loads, lines.splitlines()) if "loss" in line]
    for line in found:
        if line.get("distance") is not None:
            line["distance"] = [x if x is None else float(f"{x:.4g}") for x in line["distance"]]
    return "".join(f"{json.dumps(line)}\n" for line in found)


def unpack_runs(record: Path, place: Place) -> None:
    """Go on from the runs of a record, on a machine that has none."""
    packed = record / RUNS
    if not packed.exists() or place.folder.exists():
        return
    place.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.folder.parent) as beside:
        with tarfile.open(packed) as found:
            found.extractall(Path(beside) / "runs", filter="data")
        (Path(beside) / "runs").rename(place.folder)


def made_by(compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The machines and commits that the runs name, which may be others than those of now."""
    keys = ("device", "torch", "palsgd", "commit", "dirty")
    found = [{key: run.config.get(key) for key in keys} for each in compared for run in each.runs]
    return [each for place, each in enumerate(found) if each not in found[:place]]


def part_record(study: Study, part: Part, place: Place, found: Comparison | None) -> dict[str, Any]:
    counts = {"done": place.done(part), "planned": part.estimate().runs}
    about = {"asks": part.asks, "runs": counts | {"failed": place.failed(part)}}
    if grids := place.grids(part):
        about["grids"] = {name: _grid_record(own) for name, own in grids.items()}
    if found is None:
        return about
    beside = controls_beside(found.groups)
    return about | {
        "verdicts": found.verdicts,
        "settings": [
            _settings_record(found, row, beside.get(row.group, {})) for row in found.finals()
        ],
        "robustness": _robustness(found),
        "time": {link: _times(place.comparison(part, link)) for link in part.links or study.links},
    }


def _settings_record(
    found: Comparison, row: Final, controls: dict[Recipe, Group]
) -> dict[str, Any]:
    reached = {each.group: each for each in found.to_target()}
    return {
        "label": row.group.label,
        "method": row.group.kind,
        "given": {name: row.group.settings.get(name) for name in GIVEN},
        "seeds": row.group.seeds,
        "loss": row.loss.as_dict(),
        "metric": row.metric.as_dict(),
        "difference": None if row.difference is None else row.difference.as_dict(),
        "verdict": None if row.verdict is None else str(row.verdict.word),
        "equal": {axis: each.as_dict() for axis, each in row.equal.items()},
        "totals": row.totals,
        "to_target": _costs(reached.get(row.group)),
        "over_controls": _over_controls(found, row.group, controls),
        "over_plain": _over_its_plain(found, row.group),
    }


def _over_controls(
    found: Comparison, group: Group, controls: dict[Recipe, Group]
) -> dict[str, Any]:
    """How much a mixing method ends above each of its controls, by what is said of the control."""
    differences = {each.suffix: found.difference(group, own) for each, own in controls.items()}
    return {name: each.as_dict() for name, each in differences.items() if each is not None}


def _over_its_plain(found: Comparison, group: Group) -> dict[str, Any] | None:
    plain = _plain_twin(found, group)
    difference = None if plain is None else found.difference(group, plain)
    return None if difference is None else difference.as_dict()


def _plain_twin(found: Comparison, group: Group) -> Group | None:
    """The plain local method with the same settings; None: there is none, or it is itself."""
    own = settings_in(group.runs[0].config)
    if own is None or not takes_outer(registry.row(own.method)):
        return None
    wanted = program(own.changed({"seed": 0, "method": plain_local().name}))
    twin = next((each for each in found.groups if _program(each) == wanted), None)
    return None if twin is group else twin


def _program(group: Group) -> Program | None:
    """Of all its seeds."""
    own = settings_in(group.runs[0].config)
    return None if own is None else program(own.changed({"seed": 0}))


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


def _grid_record(found: Comparison) -> dict[str, Any]:
    """How much room each method has, where every point ended, and how much above the plain local
    method's at the same point, as a mean over the points."""
    ends = {each.label: sorted(found.final_losses(each).values()) for each in found.groups}
    return {
        "robustness": _robustness(found),
        "ends": ends,
        "over_plain": _over_plain(found),
    }


def _over_plain(found: Comparison) -> dict[str, Any]:
    """By method and pull. Points at which one of the two failed are counted, and left out."""
    above: dict[str, list[float | None]] = defaultdict(list)
    for each in found.groups:
        twin = _plain_twin(found, each)
        if twin is not None:
            difference = found.difference(each, twin)
            above[_variant(each)].append(None if difference is None else difference.value)
    return {name: _mean_over_points(values) for name, values in above.items()}


def _mean_over_points(values: list[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None and math.isfinite(value)]
    mean = of_mean(known) if known else None
    about = {"kind": f"95% t interval over {len(known)} points of a grid",
             "left_out": len(values) - len(known)}  # fmt: skip
    return ({} if mean is None else mean.as_dict()) | about


def _variant(group: Group) -> str:
    pull = group.settings.get("pull")
    return group.method if pull is None else f"{group.method}, pull {pull:g}"


def _calls(part: Part) -> list[dict[str, Any]]:
    return [{"kind": type(call).__name__.lower(), **asdict(call)} for call in part.calls]


def _write_figures(runs: Sequence[Path], folder: Path) -> None:
    """The report's figures of quality. `palsgd report` makes the page and the others from the
    runs."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        page = write_report(runs, Path(elsewhere) / "report.html")
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
