"""The command line as a user meets it: in this process where nothing is started, else apart."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from palsgd.lab import cli
from palsgd.lab.run_folder import RunFolder
from support.patience import patient
from support.places import SOURCE
from support.warm import WarmProcess


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line that bad input gets."""
        assert "Traceback" not in self.err, self.err
        (line,) = self.err.splitlines()
        return line


def palsgd(*words) -> Said:
    """`palsgd WORDS` in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = ["palsgd", *map(str, words)]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


def environment(**more: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    path = os.pathsep.join(part for part in (str(SOURCE), os.environ.get("PYTHONPATH")) if part)
    return found | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"} | more


@contextmanager
def running(*program, fresh: bool = False, before: tuple[str, ...] = ()):
    """`python PROGRAM` in a process group of its own, which is gone afterwards. Tests about the
    start of an interpreter need a fresh one, as do those with a `sitecustomize`; others have one
    that has imported torch."""
    words = list(map(str, program))
    if fresh or before or sys.platform != "linux" or has_sitecustomize():
        process = _executed([*before, sys.executable, *words])
    else:
        process = WarmProcess(words, environment())
    try:
        yield process
    finally:
        if members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=patient(30))
        if isinstance(process, WarmProcess):
            process.close()


def has_sitecustomize() -> bool:
    path = environment()["PYTHONPATH"].split(os.pathsep)
    return any((Path(folder) / "sitecustomize.py").exists() for folder in path)


def _executed(command: list[str]) -> subprocess.Popen[str]:
    with interruptible():
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment(), start_new_session=True,
        )  # fmt: skip


@contextmanager
def interruptible():
    """Ctrl-C ends processes that are started inside, also where the tests themselves ignore it, as
    those of a background job do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def started(*words, module: str = "palsgd", **how):
    """`python -m MODULE WORDS`, while the test goes on."""
    return running("-m", module, *words, **how)


def ran(*program, timeout: float = 120, **how) -> Said:
    """`python PROGRAM`, until it has ended."""
    with running(*program, **how) as process:
        out, err = process.communicate(timeout=patient(timeout))
    return Said(process.returncode, out, err)


def apart(*words, module: str = "palsgd", **how) -> Said:
    """`python -m MODULE WORDS`, until it has ended."""
    return ran("-m", module, *words, **how)


def members(group: int) -> list[int]:
    """Processes of this group that are still running."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and int(of) == group and state != "Z":
            found.append(int(entry.name))
    return found


def children(parent: int) -> list[int]:
    """The processes that this one has started, in their order: of a launcher, its workers."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and int(of) == parent:
            found.append(int(entry.name))
    return sorted(found)


def alive(processes: list[int]) -> list[int]:
    """Those that are still running."""
    found = []
    for process in processes:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(process)
    return found


def wait_for(condition, *, process, timeout: float = 90) -> None:
    """Until `condition()` holds; the process must not end before."""
    deadline = time.monotonic() + patient(timeout)
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def saved_step(folder: Path) -> int:
    """Where the last checkpoint of a run stands."""
    return max(RunFolder(folder).saved_steps, default=0)


def summary(folder: Path) -> dict:
    return strict_json((folder / "summary.json").read_text())


def records(folder: Path) -> dict:
    """Of a collection: the settings' records, without the target and the verdicts."""
    found = summary(folder)
    return {name: found[name] for name in found if name not in ("target", "verdicts")}


def lines(folder: Path, name: str = "metrics") -> list[dict]:
    return [strict_json(text) for text in (folder / f"{name}.jsonl").read_text().splitlines()]


def assert_same_run(one: Path, other: Path) -> None:
    """Every line but for its seconds, and every tensor, bit for bit."""
    a, b = ([{**line, "time_s": 0} for line in lines(folder)] for folder in (one, other))
    assert a == b
    kept = [RunFolder(folder).best() for folder in (one, other)]
    assert kept[0]["step"] == kept[1]["step"]
    for mine, theirs in zip(kept[0]["model"].values(), kept[1]["model"].values(), strict=True):
        assert torch.equal(mine, theirs)


def strict_json(text: str):
    """NaN and Infinity, which Python writes and reads, are not JSON."""
    return json.loads(text, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
