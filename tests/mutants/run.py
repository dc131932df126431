"""Puts single-line bugs into the core, one at a time, and counts how many the tests find.

    make mutants                       60 bugs by a fixed seed, and some by name
    python tests/mutants/run.py --only sync.py --count 20 --seed 3

A bug counts as found when a test fails that passes without it, or runs into its time limit. The
tests that concern the file run first, then all fast ones, then the slow ones of the library.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutation import Mutant, chosen

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "palsgd"
RECORD = Path(__file__).parent / "record.json"
# The core: what decides the weights that a training run ends with, and what is sent.
CORE = [
    "anchor.py", "assembly.py", "auto_interval.py", "buffers.py", "composed.py", "course.py",
    "flat.py", "guard.py", "inner.py", "local_optimizer.py", "loop.py", "meetings.py", "memory.py",
    "method.py", "method_state.py", "method_view.py", "outer.py", "outgoing.py", "parts.py",
    "passes.py", "payload.py", "replica.py", "schedule.py", "state.py", "steps.py", "sync.py",
    "sync_changes.py", "sync_tail.py", "tensors.py", "warmup.py", "worker.py",
    "codecs/*.py", "methods/*.py", "transports/*.py",
]  # fmt: skip
# Tests that are about a file although neither its name nor its folder says so.
CONCERNS = {
    "schedule.py": ["test_draws", "test_clock", "test_lag"],
    "sync.py": ["test_lag", "test_algorithm", "test_passes"],
    "outgoing.py": ["test_lag", "test_algorithm", "test_passes"],
    "sync_tail.py": ["test_sync", "test_guards"],
    "sync_changes.py": ["test_lag", "test_algorithm", "test_blend"],
    "worker.py": ["test_algorithm", "test_clock", "test_interval"],
    "course.py": ["test_clock", "test_interval", "test_paced", "test_loading"],
    "steps.py": ["test_algorithm", "test_clock"],
    "meetings.py": ["test_elastic", "test_joining"],
    "guard.py": ["test_failing_runs", "test_nonfinite_workers", "test_sync"],
    "flat.py": ["test_tensors"],
    "replica.py": ["test_bad_input"],
    "inner.py": ["test_joined"],
    "local_optimizer.py": ["test_algorithm", "test_bad_input", "test_events"],
}
LIMIT = 900.0  # seconds for one run of tests


def core_files() -> list[Path]:
    found = [path for pattern in CORE for path in sorted(SOURCE.glob(pattern))]
    return [path for path in found if path.name != "__init__.py"]


def named_mutants() -> list[Mutant]:
    """Bugs that tests once missed, by the line they change."""
    found = []
    for entry in json.loads((Path(__file__).parent / "named.json").read_text()):
        lines = (SOURCE / entry["file"]).read_text().splitlines()
        at = [n for n, line in enumerate(lines, start=1) if line.strip() == entry["line"]]
        if len(at) != entry.get("times", 1):
            raise SystemExit(
                f"named.json: {entry['line']!r} stands {len(at)} times in {entry['file']}; write "
                "the line as it is now, and how many times it stands there"
            )
        found += [_instead_of_line(entry, lines[n - 1], n) for n in at]
    return found


def _instead_of_line(entry: dict[str, Any], line: str, number: int) -> Mutant:
    start = len(line) - len(line.lstrip())
    return Mutant(
        entry["file"], number, start, len(line), entry["becomes"], f"{entry['becomes']} (named)"
    )


def stages(file: str) -> list[list[str]]:
    """The arguments of pytest for each stage, the nearest tests first."""
    stem = Path(file).stem
    names = [stem, *CONCERNS.get(Path(file).name, [])]
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    near = [p for p in tests if any(name.removeprefix("test_") in p.stem for name in names)]
    folder = ROOT / "tests" / Path(file).parts[0]
    near += sorted(folder.glob("test_*.py")) if len(Path(file).parts) > 1 else []
    quick = ["library", "methods", "codecs", "transports", "simulator", "golden"]
    folders = [f"tests/{name}" for name in quick]
    return [
        *([["-m", "not slow", *map(str, near)]] if near else []),
        ["-m", "not slow", *folders],
        *([["-m", "slow", *map(str, near)]] if near else []),
        ["-m", "slow", "tests/library", "tests/methods", "tests/simulator", "tests/golden"],
    ]


def judge(mutant: Mutant) -> dict[str, Any]:
    """Whether the tests find the bug, and which one first."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "palsgd" / mutant.file
        path.write_text(mutant.applied(path.read_text()))
        killer = next(filter(None, (tested(args, source) for args in stages(mutant.file))), None)
    return {
        "file": mutant.file, "line": mutant.line, "becomes": mutant.what,
        "found_by": killer, "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def tested(arguments: list[str], source: Path) -> str | None:
    """The first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: this run's processes only
        process.wait()
        return f"no end after {LIMIT:.0f} s"
    if process.returncode in (0, 5):  # 5: no test of this kind
        return None
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0] if lines else f"exit code {process.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--least", type=int, default=54, help="exit 1 if fewer are found")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--named", action="store_true", help="only those of named.json")
    parser.add_argument("--list", action="store_true", help="show the bugs, run nothing")
    parser.add_argument("--record", action="store_true", help="write record.json")
    given = parser.parse_args()
    files = [path for path in core_files() if given.only in str(path.relative_to(SOURCE))]
    drawn = [] if given.named else chosen(files, SOURCE, count=given.count, seed=given.seed)
    mutants = drawn + ([] if given.only else named_mutants())
    if given.list:
        print("\n".join(f"{m.file}:{m.line}: {m.what}" for m in mutants))
        return 0
    results = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for result in pool.map(judge, mutants):
            results.append(result)
            print("found   " if result["found_by"] else "SURVIVED", end=" ")
            print(f"{result['file']}:{result['line']}: {result['becomes']}", flush=True)
    return report(results, drawn=len(drawn), given=given)


def report(results: list[dict[str, Any]], *, drawn: int, given: argparse.Namespace) -> int:
    found = sum(1 for result in results[:drawn] if result["found_by"])
    lost = [result for result in results[drawn:] if not result["found_by"]]
    print(
        f"{found} of {drawn} drawn bugs found, {len(results) - drawn - len(lost)} of "
        f"{len(results) - drawn} named ones"
    )
    if given.record:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
        RECORD.write_text(
            json.dumps(
                {
                    "commit": commit,
                    "seed": given.seed,
                    "found": found,
                    "drawn": drawn,
                    "mutants": results,
                },
                indent=1,
            )
            + "\n"
        )
    return int(found < min(given.least, drawn) or bool(lost))


if __name__ == "__main__":
    sys.exit(main())
