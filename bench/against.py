"""This tree against another commit of it, on one machine and in one run.

    git worktree add FOLDER COMMIT
    python bench/against.py --other FOLDER --commit COMMIT --out bench/results/against-NAME.json
    python bench/against.py --other FOLDER --commit COMMIT --part step

step      bench/step.py of this tree with either library, in turn: a round over bare steps, a mixing
          step over its floor, extra peak memory.
simulate  bench/simulate.py of either tree with its own library: milliseconds of every row.

Figures are those of this tree over the other's: below 1 this tree is faster or smaller.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import REPOSITORY, add_record_options, provenance, save, summary, table

STEP = {  # what it is, and where it stands in a record of bench/step.py
    "a round over bare steps": ("round", "round_over_bare_round"),
    "a mixing step over its floor": ("mixing", "mixing_over_floor"),
    "extra peak memory in models": ("memory", "extra_models"),
}
TIMED = {"cnn": ("loop_ms", "vectorized_ms", "compiled_ms", "graphs_ms"), "many": ("ms",)}
TIMED["gpt-neo"] = ("ms",)
NAMES = {"cnn": "workers", "many": "runs", "gpt-neo": "case"}  # what tells rows apart


def record_of(script: Path, library: Path, words: list[str]) -> dict[str, Any]:
    """The record that a script writes with the library of a tree."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, str(script), *words, "--out", str(out)]
        environment = os.environ | {"PYTHONPATH": str(library / "src")}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def step(other: Path, turns: int, words: list[str]) -> list[dict[str, Any]]:
    """Medians over turns in which either library is measured once."""
    script, found = REPOSITORY / "bench" / "step.py", {"this": [], "other": []}
    for _ in range(turns):
        for who, tree in (("other", other), ("this", REPOSITORY)):
            found[who].append(record_of(script, tree, words))
    rows = []
    for name, (part, figure) in STEP.items():
        this, that = (
            statistics.median(record[part][figure] for record in found[who])
            for who in ("this", "other")
        )
        ratio = this / that if that else float("nan")
        rows.append({"figure": name, "this": this, "other": that, "ratio": ratio})
    return rows


def simulate(other: Path, words: list[str]) -> list[dict[str, Any]]:
    """Every row of bench/simulate.py."""
    records = [
        record_of(tree / "bench" / "simulate.py", tree, words) for tree in (other, REPOSITORY)
    ]
    rows = []
    for part, figures in TIMED.items():
        for that, this in zip(*(record.get(part, []) for record in records), strict=True):
            for figure in figures:
                if figure in this and figure in that:
                    name = f"{part}, {NAMES[part]} {this[NAMES[part]]}, {figure}"
                    rows.append(
                        {
                            "figure": name,
                            "this": this[figure],
                            "other": that[figure],
                            "ratio": this[figure] / that[figure],
                        }
                    )
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--other", type=Path, help="a folder with the other commit's files")
    parser.add_argument("--commit", default="unknown", help="which commit that is")
    parser.add_argument("--part", nargs="+", choices=("step", "simulate"), default=["step"])
    parser.add_argument("--rows", nargs="+", choices=list(TIMED), default=list(TIMED))
    parser.add_argument("--turns", type=int, default=3, help="of bench/step.py")
    parser.add_argument("--words", default="", help="more words for bench/simulate.py")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    add_record_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.other, args.turns, args.part = args.other or REPOSITORY, 1, ["step"]
    if args.other is None or not (args.other / "src" / "palsgd").is_dir():
        parser.error(f"--other {args.other}: no src/palsgd there; give a checkout of a commit")
    args.other = args.other.resolve()
    return args


def main() -> None:
    args = arguments()
    device = ["--device", args.device] if args.device else []
    import torch

    measured = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    record = provenance(measured, tiny=args.tiny) | {"other_commit": args.commit, "rows": []}
    if "step" in args.part:
        words = ["--tiny"] if args.tiny else [*device, "--launches", "1"]
        record["rows"] += step(args.other, args.turns, words)
        save(record, args.out)
    if "simulate" in args.part:
        words = [*device, "--part", *args.rows, *args.words.split()]
        record["rows"] += simulate(args.other, words)
    record["untimed"] = {"figures": len(record["rows"])}
    print(
        table(
            [
                (row["figure"], f"{row['ratio']:.3f} x", f"{row['other']:.4g} ({args.commit[:7]})")
                for row in record["rows"]
            ]
        )
    )
    print(summary(record))
    save(record, args.out)


if __name__ == "__main__":
    main()
