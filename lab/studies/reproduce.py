"""The smallest version of every study, one after another, and one table of what came of them.

    python lab/studies/reproduce.py                  # within an hour on two cores
    python lab/studies/reproduce.py --only vgg16

Figures of this size say that the machinery runs, and nothing about the paper: models and data are
others, runs are a few dozen steps long. The last column is the command of the full version.
"""

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from study import RUNS, Study, chosen_parts, main, parser, place_of

STUDIES = (
    "small_cnn", "vgg16", "gpt_neo_8m", "gpt_neo_125m", "resnet50", "released_code", "slowmo_table",
    "when_it_pays",
)  # fmt: skip
Row = tuple[str, str, str, str]


def studies(names: Sequence[str]) -> Iterator[Study]:
    for name in names:
        yield import_module(name).STUDY


def rows(study: Study, words: Sequence[str]) -> Iterator[Row]:
    """A row for each claim, from the runs that are there."""
    args = parser(study).parse_args(words)
    place = place_of(study, args)
    parts = {part.name: part for part in chosen_parts(study, args)}
    for claim in study.claims:
        found = place.comparison(parts[claim.part])
        ours = "not run yet" if found is None else claim.read(found)
        yield study.name, claim.paper, ours, _command(study, claim.part)


def table(found: Sequence[Row]) -> str:
    head = ("study", "paper", "ours, at the smallest size", "the full one")
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *found)]
    return "\n".join(lines)


def _command(study: Study, part: str) -> str:
    return f"`python lab/studies/{study.name}.py --part {part} --data DIR --device cuda`"


def reproduce(words: Sequence[str] | None = None) -> int:
    own = argparse.ArgumentParser(description="the smallest version of every study")
    own.add_argument("--only", action="append", choices=STUDIES, help="this study alone")
    own.add_argument("--out", type=Path, default=RUNS / "reproduce", help="folder of the runs")
    args = own.parse_args(words)
    found: list[Row] = []
    for study in studies(args.only or STUDIES):
        tiny = ["--tiny", "--quiet", "--device", "cpu", "--out", str(args.out / study.name)]
        if code := main(study, tiny):
            return code
        found += rows(study, tiny)
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(reproduce())
