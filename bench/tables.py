"""The tables of README.md, of bench/README.md and of pages in docs/, made from the records behind
them.

    python bench/tables.py            # write them anew
    python bench/tables.py --check    # say which differ from their records; exit code 1 if any

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`; NAME is one of TABLES.
What the figures mean, and what was to be reached, is said in the text around them. These tables
have no record behind them and are written by hand:

    README.md         what differs between the classes; the workloads; the rules
    bench/README.md   bare all-reduces over emulated links (they were only printed)
    docs/memory.md    what each setting keeps
    docs/cluster.md   the paper's clusters (printed by `palsgd plan --paper-clusters`)
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import experiment_tables
import mixing_tables
from markdown_table import markdown

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
FILES = (
    "README.md",
    "bench/README.md",
    "docs/choosing.md",
    "docs/cluster.md",
    "docs/memory.md",
    "docs/results.md",
    "docs/skipping-and-pulling.md",
    "docs/state.md",
    "docs/times.md",
)
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
sys.path.append(str(HERE / "peers"))

NO_RECORD = "(There is no record yet.)"
PEERS = "peers-2cores"  # the record of bench/peers.py
TIMES = {"100mbit": "time-2cores", "1gbit": "time-1gbit-2cores"}  # of bench/time_to_target.py

Record = dict[str, Any]


def record(name: str) -> Record:
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise SystemExit(f"there is no record {path.name} in bench/results, which a table is of")
    return json.loads(path.read_text())


def ratio(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f} x"


def place(found: Record) -> str:
    """The machine and torch of a record, in few words."""
    where = found["machine"]
    name = re.sub(r"\(R\)| Processor", "", where["device"])
    version = ".".join(where["torch"].split(".")[:2])
    return f"{where['cores']}-core {name}, torch {version}"


# -- bench/step.py ---------------------------------------------------------------------------------

ALL_REDUCE = "a sync over the bare all-reduce of the same bytes, 4 gloo processes over loopback"


def step_summary() -> str:
    gpu, cpus = record("step-h200"), [record(name) for name in ("step-epyc2", "step-xeon16")]
    name, memory = gpu["machine"]["device"], gpu["memory"]
    rows = [
        ("a mixing step over its memory floor (read x and anchor, write x)",
         ratio(gpu["mixing"]["mixing_over_floor"]), f"{name}, GPT-Neo-125M's tensors"),
        ("a round of 64 steps, p = 0.1, over 64 steps of fused AdamW, no network",
         ratio(gpu["round"]["round_over_bare_round"], 3), "the same"),
        *((ALL_REDUCE, ratio(each["sync"]["sync_over_all_reduce"]),
           f"{place(each)}, GPT-Neo-8M's tensors") for each in cpus if "sync" in each),
        ("extra memory, in fp32 models: anchor, outer state, one bucket",
         f"{memory['extra_models']:.2f}", f"{name}, GPT-Neo-125M's tensors"),
    ]  # fmt: skip
    return markdown(("figure", "value", "machine"), rows)


def step_gpu() -> str:
    found = record("step-h200")
    mixing, round_, memory = found["mixing"], found["round"], found["memory"]
    floor = f"its memory floor: read x and anchor, write x, at the copy bandwidth measured beside \
it ({mixing['copy_gb_per_s'] / 1e3:.1f} TB/s)"
    rows = [
        ("mixing step", ratio(mixing["mixing_over_floor"]), floor, "1.3 x"),
        ("the same as a Python loop over parameters",
         ratio(mixing["python_loop_over_floor"], 1), "the floor", ""),
        ("the same on one flat buffer", ratio(mixing["flat_buffer_over_floor"]),
         "the floor (reading is a little faster than copying)", ""),
        ("a round, H = 64, p = 0.1, no network", ratio(round_["round_over_bare_round"], 3),
         "64 bare steps of fused AdamW", "1.05 x"),
        ("the same round", ratio(round_["round_over_same_gradients"]),
         "only as many bare steps as it took gradients", ""),
        ("extra peak memory", f"{memory['extra_models']:.2f}",
         "fp32 models: the anchor, the momentum of the outer optimizer, one bucket of 128 MiB "
         f"({memory['bucket_models']:.2f})", ""),
    ]  # fmt: skip
    return markdown(("figure", "value", "over", "to reach"), rows)


def step_cpu() -> str:
    return _steps("step-epyc2", "step-xeon16")


def step_2cores() -> str:
    return _steps("step-2cores")


def _steps(*names: str) -> str:
    found = [record(name) for name in names]
    figures: list[tuple[str, Callable[[Record], str], str]] = [
        ("step() without a sync over the bare SGD step of an 8 x 8 Linear, CPU time",
         lambda each: ratio(each["idle"]["step_over_bare"]), ""),
        ("mixing step over its floor",
         lambda each: ratio(each["mixing"]["mixing_over_floor"]), ""),
        ("round over 64 bare fused AdamW steps",
         lambda each: ratio(each["round"]["round_over_bare_round"]), ""),
        ("round over as many bare steps as gradients",
         lambda each: ratio(each["round"]["round_over_same_gradients"]), ""),
        ("sync over the bare all-reduce of the same bytes",
         lambda each: ratio(each["sync"]["sync_over_all_reduce"]), "1.3 x"),
        ("extra peak memory, in fp32 models (125M)",
         lambda each: f"{each['memory']['extra_models']:.2f}", ""),
    ]  # fmt: skip
    rows = [(name, *(_if_measured(show, each) for each in found), to_reach)
            for name, show, to_reach in figures]  # fmt: skip
    rows = [row for row in rows if any(row[1:-1])]
    return markdown(("figure", *(place(each) for each in found), "to reach"), rows)


def _if_measured(show: Callable[[Record], str], found: Record) -> str:
    """A record may be older, or newer, than a figure."""
    try:
        return show(found)
    except KeyError:
        return ""


def sync() -> str:
    from sync import markdown

    return markdown(record("sync-2cores")["rows"])


def against() -> str:
    names = ("step", "simulate", "cnn", "cnn-again")
    rows = [
        (row["figure"], ratio(row["ratio"], 3), f"{row['other']:.4g}", name)
        for name in names
        for row in record(f"against-{name}-h200")["rows"]
    ]
    return markdown(("figure", "this tree over 1bc0c88", "1bc0c88", "record"), rows)


# -- bench/simulate.py, bench/workloads.py, bench/exogym.py, bench/quality.py ----------------------


def simulate_cnn() -> str:
    rows = [
        (str(row["workers"]), f"{row['loop_ms']:.1f}", f"{row['vectorized_ms']:.2f}",
         f"{row['compiled_ms']:.2f}", f"{row['graphs_ms']:.2f}",
         f"{row['joint_batch_ms']:.2f} + {row['state_moved_once_ms']:.2f}",
         ratio(row["faster_than_loop"], 1), ratio(row["over_limit"]),
         f"{row['vectorized_gb']:.2f}", f"{row['compiled_gb']:.2f}")
        for row in record("simulate-h200")["cnn"]
    ]  # fmt: skip
    columns = ("workers", "loop", "vectorized", "compiled", "CUDA graphs", "joint + state",
               "faster than the loop", "over the limit", "GB", "GB compiled")  # fmt: skip
    return markdown(columns, rows)


def simulate_gpt_neo() -> str:
    rows = [
        (row["case"], f"{row['ms']:.1f}", f"{row['tokens_per_s'] / 1e6:.2f}",
         ratio(row["faster_than_loop"], 1), f"{row['gb']:.1f}" if row["gb"] else "")
        for row in record("simulate-h200")["gpt-neo"]
    ]  # fmt: skip
    columns = ("", "ms", "M tokens/s", "over the loop with Hugging Face's model", "GB")
    return markdown(columns, rows)


def simulate_many() -> str:
    rows = [
        (str(row["runs"]), f"{row['ms']:.2f}", ratio(row["over_one_run"]), f"{row['gb']:.1f}")
        for row in record("simulate-h200")["many"]
    ]
    return markdown(("runs", "ms a step", "x one run", "GB"), rows)


def workloads() -> str:
    rows = [
        (row["case"], " x ".join(str(n) for n in row["batch"]), row["precision"],
         f"{row['with_data_per_s']:,.0f} {row['unit']}", f"{row['same_batch_per_s']:,.0f}",
         f"{row['with_data_over_same_batch']:.2f}")
        for row in record("workloads-h200")["rows"]
    ]  # fmt: skip
    columns = ("workload", "batch", "precision", "with data, /s", "same batch, /s", "ratio")
    return markdown(columns, rows)


def pictures() -> str:
    rows = [
        (case, way, f"{row['pictures_per_s']:,.0f}", ratio(row["over_first"]))
        for case, ways in record("pictures-h200")["rows"].items()
        for way, row in ways.items()
    ]
    return markdown(("model", "gradients", "pictures/s", "over the first way"), rows)


def exogym() -> str:
    sides = ("exogym", "exact", "vectorized")
    rows = [
        (row["case"].replace("-", ", "), str(row["workers"]),
         *(f"{row[side]['step_ms']:.3g}" for side in sides),
         *(ratio(row[f"{side}_faster_step_ms"], 1) for side in sides[1:]),
         *(f"{row[side]['total_s']:.1f}" for side in sides),
         *(f"{row[side]['loss']:.6f}" for side in sides))
        for row in record("exogym-epyc2")["rows"]
    ]  # fmt: skip
    columns = ("case", "workers", "EXO Gym", "exact", "vectorized", "exact faster",
               "vectorized faster", "in all, s: EXO Gym", "exact", "vectorized",
               "final loss: EXO Gym", "exact", "vectorized")  # fmt: skip
    return markdown(columns, rows)


def quality() -> str:
    found = record("quality-h200")
    warmup = 64 * 4 * found["runs"][0]["parameters"]  # bytes of its steps of DDP, in fp32
    rows = [
        (row["variant"], f"{row['loss']:.4f}", f"{(row['bytes_sent'] - warmup) / 1e6:.0f}",
         *(("", "") if row["variant"] == "PALSGD" else
           (f"{100 * row['over_plain']:+.2f}%", f"{100 * row['over_plain_spread']:.3f}")))
        for row in sorted(found["table"], key=lambda row: row["variant"] != "PALSGD")
    ]  # fmt: skip
    columns = ("variant", "validation loss", "MB sent after the warm-up",
               "loss over plain PALSGD", "spread of that, points")  # fmt: skip
    return markdown(columns, rows)


def uneven_waiting() -> str:
    found = record("uneven-2cores")
    rows = [
        (row["method"], formatted(row["idle_of_fast"]), formatted(row["waited_of_fast"]),
         formatted(row["idle_of_slow"]), f"{row['speed_of_slow']:g}", f"{row['gradients_s']:.2f}")
        for row in found["waiting"]
    ]  # fmt: skip
    columns = ("method", "fast workers without work", "of it waited", "the slow worker",
               "its speed as settled", "a step of the clock, in fast gradients")  # fmt: skip
    return markdown(columns, rows)


def uneven_losses() -> str:
    found = record("uneven-2cores")
    runs = {run["method"]: run for run in found["runs"]}
    against = {row["method"]: row for row in found["against_weights"]}
    rows = [
        (row["method"], ", ".join(map(str, runs[row["method"]]["gradients"])),
         f"{row['loss']:.4f}", *_judged(row), *_judged(against[row["method"]]),
         "never" if row["arrives"] is None else formatted(row["arrives"]))
        for row in found["losses"]
    ]  # fmt: skip
    columns = ("method", "gradients of the workers", "final loss", "over PALSGD", "",
               "over steps and weights by speed", "",
               "of the time, until PALSGD's final loss")  # fmt: skip
    return markdown(columns, rows)


def uneven_raised() -> str:
    rows = [
        (f"{row['ratio']} x slower", row["method"], f"{row['loss']:.4f}", *_judged(row))
        for row in record("uneven-2cores")["raised"]
    ]
    columns = ("the last worker is", "its rate is raised", "final loss", "over the library's", "")
    return markdown(columns, rows) if rows else NO_RECORD


def formatted(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _judged(row: Record) -> tuple[str, str]:
    """A relative difference with its interval, and the word for it."""
    if not row["word"]:
        return "", ""
    bounds = (row["difference"][name] for name in ("value", "low", "high"))
    value, low, high = (f"{100 * each:+.1f}%" for each in bounds)
    return f"{value} [{low}, {high}]", row["word"]


# -- links, peers, the cluster model ---------------------------------------------------------------


def link_cases() -> list[list[Record]]:
    """The repeats of each case. The first record had nothing but cases, and one run of each."""
    found = record("link-epyc2")
    cases = found.get("cases", found).values()
    return [each if isinstance(each, list) else [each] for each in cases]


def link() -> str:
    from link import COLUMNS, rows

    return markdown(COLUMNS, [row for repeats in link_cases() for row in rows(repeats)])


def link_summary() -> str:
    cases = [repeats[0] for repeats in link_cases()]
    methods = list(cases[0]["methods"])
    rows = [
        (each["links_in_words"],
         *(ratio(each["methods"][name]["speedup_over_ddp"]) for name in methods))
        for each in cases
    ]  # fmt: skip
    return markdown(("links", *experiment_tables.titles(methods)), rows)


def link_bare() -> str:
    rows = [
        (each["links_in_words"], f"{1e3 * each['ring']['seconds']:.0f}",
         f"{1e3 * each['ring']['theory_s']:.0f}", f"{1e3 * each['compute_s']:.0f}",
         f"{each['load']:.0f}")
        for repeats in link_cases() for each in repeats
    ]  # fmt: skip
    columns = ("links", "ring all-reduce of 3.99 MB, ms", "in theory, ms",
               "gradient step without exchange, ms", "load at the start")  # fmt: skip
    return markdown(columns, rows)


def time_to_target(rate: str) -> str:
    from time_rows import COLUMNS, cells

    if not (RESULTS / f"{TIMES[rate]}.json").is_file():
        return NO_RECORD
    found = record(TIMES[rate])
    return f"{place(found)}\n\n{markdown(COLUMNS, [cells(row) for row in found['rows']])}"


def peers(table: str, *arguments: str) -> str:
    """A table of bench/peers/reporting.py."""
    import reporting

    if not (RESULTS / f"{PEERS}.json").is_file():
        return NO_RECORD
    return getattr(reporting, f"{table}_table")(record(PEERS), *arguments)


def validate_cluster() -> str:
    rows = [
        (str(row["workers"]), row["rate"], f"{row['latency_ms']:g} ms", row["method"],
         f"{row['measured_s']:.3f} s", f"{row['predicted_s']:.3f} s", f"{row['error']:+.1%}")
        for row in record("validate-cluster-2cores")["rows"]
    ]  # fmt: skip
    columns = ("K", "rate", "latency", "method", "measured", "predicted", "error")
    return markdown(columns, rows)


# -- bench/lab.py ----------------------------------------------------------------------------------

LAB_CASES = {  # what is trained, what a rate counts, and what it stands beside
    "cnn-64": ("small CNN, K = 64", "images", "over_limit"),
    "gpt-neo-8m": ("GPT-Neo-8M, K = 8, bf16", "tokens", "over_bare"),
    "gpt-neo-125m": ("GPT-Neo-125M, K = 8, bf16", "tokens", "over_loop"),
    "vgg-16": ("VGG-16, K = 4", "images", "over_faster"),
    "resnet-50": ("ResNet-50, K = 4, bf16", "images", "over_faster"),
}
BESIDE = {
    "over_limit": "the time of a step over the limit of bench/simulate.py",
    "over_bare": "the rate over that of the bare engine",
    "over_loop": "the rate over that of the loop",
    "over_faster": "the rate over that of the faster of loop and stack",
}


def lab() -> str:
    found = record("lab-h200")
    rows = []
    for name, (what, unit, beside) in LAB_CASES.items():
        row = found["cases"].get(name)
        if row is None:
            rows.append((what, "(not measured yet)", "", "", ""))
            continue
        rows.append(
            (what, f"{row['per_s']:,.0f} {unit}/s", f"{row['end_to_end_per_s']:,.0f} {unit}/s",
             f"{ratio(row[beside])}: {BESIDE[beside]}", row["commit"][:7])
        )  # fmt: skip
    sweep = found["cases"].get("sweep")
    seconds = f"{sweep['command_s']:.0f} s" if sweep else "(not measured yet)"
    rows.append(("96 runs of the 1 M GPT-Neo, K = 8, 576 steps", seconds, "", "", ""))
    columns = ("command", "once it runs", "end to end", "beside", "commit")
    return f"{place(found)}\n\n{markdown(columns, rows)}"


# -- bench/memory.py -------------------------------------------------------------------------------


def memory(name: str) -> str:
    if not (RESULTS / f"{name}.json").is_file():
        return NO_RECORD
    found = record(name)
    rows = [
        (f"`{row['setting']}`", f"{row['alive_models']:.2f}", f"{row['peak_models']:.2f}",
         ratio(row["round_over_bare"]))
        for row in found["rows"]
    ]  # fmt: skip
    columns = ("setting", "alive, in models", "peak, in models", "a round over bare steps")
    return f"{place(found)}, {found['elements']:,} elements\n\n{markdown(columns, rows)}"


# -- bench/elastic.py ------------------------------------------------------------------------------


def elastic() -> str:
    from elastic import rows  # those that the bench prints itself

    found = record("elastic-2cores")
    return f"{place(found)}\n\n{markdown(('figure', 'value', 'over'), rows(found))}"


# -- bench/checkpoint.py ---------------------------------------------------------------------------


def checkpoint(name: str) -> str:
    if not (RESULTS / f"{name}.json").is_file():
        return NO_RECORD
    found = record(name)
    rows = [
        (what, f"{found['cpu_seconds'][what]:.2f} s", ratio(found["over_sync"][what]),
         *map(ratio, found["over_plain_write"][what]))
        for what in ("save", "load")
    ]  # fmt: skip
    columns = (
        "what", "CPU time of a process", "over a sync on loopback",
        "over a plain write of its bytes", "the same in CPU time",
    )  # fmt: skip
    size = f"{found['bytes'] / 1e6:.0f} MB, {found['models']:.1f} fp32 models"
    return f"{place(found)}, tensors of {found['model']}, {size}\n\n{markdown(columns, rows)}"


TABLES: dict[str, Callable[[], str]] = {
    "step-summary": step_summary,
    "step-gpu": step_gpu,
    "step-cpu": step_cpu,
    "step-2cores": step_2cores,
    "sync": sync,
    "against": against,
    "simulate-cnn": simulate_cnn,
    "simulate-gpt-neo": simulate_gpt_neo,
    "simulate-many": simulate_many,
    "workloads": workloads,
    "pictures": pictures,
    "exogym": exogym,
    "quality": quality,
    "elastic": elastic,
    "uneven-waiting": uneven_waiting,
    "uneven-losses": uneven_losses,
    "uneven-raised": uneven_raised,
    "link": link,
    "link-summary": link_summary,
    "link-bare": link_bare,
    "time-to-target": partial(time_to_target, "100mbit"),
    "time-to-target-1gbit": partial(time_to_target, "1gbit"),
    "peers-short": partial(peers, "short"),
    "peers-summary": partial(peers, "summary"),
    "peers-ratios": partial(peers, "ratio"),
    "peers-quality": partial(peers, "quality"),
    "peers-tuning": partial(peers, "tuning"),
    "peers-10mbit": partial(peers, "pace", "10mbit"),
    "peers-100mbit": partial(peers, "pace", "100mbit"),
    "peers-loopback": partial(peers, "pace", "loopback"),
    "validate-cluster": validate_cluster,
    "lab": lab,
    "checkpoint": partial(checkpoint, "checkpoint-2cores"),
    "memory-gpu": partial(memory, "memory-h200"),
    "memory-cpu": partial(memory, "memory-2cores"),
    **experiment_tables.TABLES,
    **mixing_tables.TABLES,
}


def renewed(text: str) -> tuple[str, list[str]]:
    """The text with its tables made anew, and the names of those that change."""
    changed: list[str] = []

    def renew(match: re.Match[str]) -> str:
        head, name, end = match.groups()
        if name not in TABLES:
            raise SystemExit(f"table: {name} is unknown; use one of {', '.join(TABLES)}")
        made = f"{head}{TABLES[name]()}\n{end}"
        if made != match.group():
            changed.append(name)
        return made

    return PLACE.sub(renew, text), changed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("files", nargs="*", type=Path, default=[HERE.parent / f for f in FILES])
    args = parser.parse_args()
    differing = False
    for path in args.files:
        text, changed = renewed(path.read_text())
        for name in changed:
            differing = True
            print(f"{path.name}: table {name} differs from its record", end="")
            print("; run python bench/tables.py" if args.check else "; written anew")
        if not args.check:
            path.write_text(text)
    return int(args.check and differing)


if __name__ == "__main__":
    sys.exit(main())
