"""A sync over loopback in real gloo processes, beside the peers' and one written by hand.

    python bench/sync.py --out bench/results/sync-NAME.json
    python bench/sync.py --sizes gpt-neo-8m --processes 2 --launches 1
    pip install --target DIR --no-deps accelerate torchft-nightly    # then: --peers DIR

Models in the shapes of GPT-Neo, 8 M and 33 M parameters, 2 and 4 processes. Contenders sync in turn
in one process group (bench/sync/), so that a ratio is of two times taken within a second; a sync
takes as long as its slowest process. Of each launch of the processes the median over its repeats is
taken; figures are the median of the launches, with the least and the most of them. Peers that are
not installed are left out and named in the last line.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import SIZES, absent, add_record_options, provenance, save, summary

from palsgd.lab.links.processes import run_on_loopback

WORKER = Path(__file__).resolve().parent / "sync" / "worker.py"
PACKAGES = {"accelerate": "accelerate", "torchft": "torchft"}  # contender: what it needs
CONTENDERS = ("all-reduce", "by hand", "localsgd", "diloco", "torch", *PACKAGES)
OURS = ("localsgd", "diloco")
TIMEOUT_S = 600.0
AGREE = 1e-5  # of the largest weight: members of a family add up in other orders


def launch(size: str, processes: int, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """What one launch found: of all processes the slowest, for each repeat of each contender."""
    with tempfile.TemporaryDirectory() as folder:
        order = {"size": size, "contenders": names, "repeats": args.repeats, "out": folder}
        order["peers"] = str(args.peers)
        command = [sys.executable, str(WORKER), json.dumps(order)]
        run_on_loopback(command, processes, timeout=TIMEOUT_S)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]
    slowest = {
        name: [max(times) for times in zip(*(r["seconds"][name] for r in ranks), strict=True)]
        for name in names
    }
    return ranks[0] | {
        "seconds": slowest,
        "weights_equal": all(r["checksums"] == ranks[0]["checksums"] for r in ranks),
    }


def case(size: str, processes: int, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    launches = [launch(size, processes, names, args) for _ in range(args.launches)]
    first = launches[0]
    return {
        "size": size,
        "processes": processes,
        **{key: first[key] for key in ("tensors", "parameters", "bytes_sent")},
        "ms": {name: spread(_middle(each, name) * 1e3 for each in launches) for name in names},
        "over": {
            ours: {
                name: spread(_ratio(each, ours, name) for each in launches)
                for name in names
                if name != ours
            }
            for ours in OURS
        },
        "weights_equal": all(each["weights_equal"] for each in launches),
        "families_agree": all(max(each["off_family"].values()) < AGREE for each in launches),
        "launches": [each["seconds"] for each in launches],
    }


def _middle(launch: dict[str, Any], name: str) -> float:
    return statistics.median(launch["seconds"][name])


def _ratio(launch: dict[str, Any], ours: str, other: str) -> float:
    pairs = zip(launch["seconds"][ours], launch["seconds"][other], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def spread(values: Iterable[float]) -> dict[str, float]:
    found = sorted(values)
    return {"median": statistics.median(found), "least": found[0], "most": found[-1]}


# -- words -----------------------------------------------------------------------------------------


def markdown(rows: list[dict[str, Any]]) -> str:
    columns = ["parameters, processes", "contender", "ms (least, most)"]
    columns += ["LocalSGD over it", "DiLoCo over it"]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        where = f"{row['parameters']:,}, {row['processes']}"
        for name, ms in row["ms"].items():
            ratios = [row["over"][ours].get(name) for ours in OURS]
            lines.append([where, name, _shown(ms, ".1f"), *(_times(each) for each in ratios)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _shown(each: dict[str, float], form: str) -> str:
    return f"{each['median']:{form}} ({each['least']:{form}}, {each['most']:{form}})"


def _times(each: dict[str, float] | None) -> str:
    return "" if each is None else f"{_shown(each, '.2f')} x"


def untimed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "parameters": [row["parameters"] for row in rows],
        "bytes of a sync": [row["bytes_sent"]["diloco"] for row in rows],
        "weights equal on all processes": all(row["weights_equal"] for row in rows),
        "contenders come to the same weights": all(row["families_agree"] for row in rows),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["gpt-neo-8m", "gpt-neo-33m"])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=9, help="syncs of each, after one untimed")
    parser.add_argument("--peers", type=Path, help="a folder that peers were installed into")
    add_record_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.sizes, args.processes, args.launches, args.repeats = ["tiny"], [2], 1, 2
    return args


def main() -> None:
    args = arguments()
    if args.peers:
        sys.path.append(str(args.peers.resolve()))
        args.peers = args.peers.resolve()
    missing = absent(PACKAGES.values())
    names = [name for name in CONTENDERS if PACKAGES.get(name) not in missing]
    record = provenance("cpu", tiny=args.tiny) | {
        "launches": args.launches,
        "repeats": args.repeats,
        "not_installed": missing,
        "rows": [],
    }
    for size in args.sizes:
        for processes in args.processes:
            record["rows"].append(case(size, processes, names, args))
            record["untimed"] = untimed(record["rows"])
            save(record, args.out)
    print(markdown(record["rows"]))
    print(summary(record))


if __name__ == "__main__":
    sys.exit(main())
