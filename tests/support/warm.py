"""Python programs in processes that begin with torch imported.

A new interpreter imports torch, and what the first optimizer needs, for three seconds, and a run of
two workers does so three times. Here a server that has imported all of that forks, wherever an
interpreter would be executed: for the program that a test starts, for the processes that this one
starts, and so on. They are processes like others: with an environment, signals, children and an
exit code of their own, and modules of this repository are imported anew. What only a new
interpreter has (imports that take long, `sitecustomize`, an own seed of hashes, what /proc says of
its environment) is not tested by them.
"""

import _posixsubprocess
import atexit
import gc
import io
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing import process as processes
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from support.patience import patient

_CONTEXT = multiprocessing.get_context("forkserver")
# The first optimizer that is built imports torch._dynamo, the first command the others.
_CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo", "torch.distributed.run", "sklearn.datasets", "yaml", "typer", "rich.table",
        "palsgd.optimizer", "palsgd.lab.launcher", "palsgd.lab.links",
    ]
)  # fmt: skip
# torch reads both when it is imported; the launcher sets the second for its workers.
_IMPORTED_WITH = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# An environment may lie over another one, whose packages it sees.
_BELOW = (path for path in sys.path if Path(path).name == "site-packages")
_INSTALLED = tuple({sys.prefix, sys.base_prefix, *_BELOW})


def server() -> ForkServerContext:
    """Its processes are forked from one that has imported torch and palsgd."""
    with mock.patch.dict(os.environ, _IMPORTED_WITH):
        forkserver.ensure_running()
    return _CONTEXT


class WarmProcess:
    """`python WORDS` in a session of its own, with what tests use of `subprocess.Popen`. Ctrl-C
    ends it, also where the tests themselves ignore it."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]):
        self.stdout, self.stderr = (tempfile.NamedTemporaryFile("a+") for _ in range(2))  # noqa: SIM115
        said = (self.stdout.name, self.stderr.name)
        command = [sys.executable, *words]
        self._process = server().Process(
            target=_begin, args=(command, dict(env), os.getcwd(), said), daemon=False
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._await_session()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            said = " | ".join(text[-2000:] for text in self._said())
            raise subprocess.TimeoutExpired(f"process {self.pid} ({said})", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self._said()

    def _said(self) -> tuple[str, str]:
        """So far."""
        for file in (self.stdout, self.stderr):
            file.seek(0)
        return self.stdout.read(), self.stderr.read()

    def close(self) -> None:
        """Close the files of what it said."""
        for file in (self.stdout, self.stderr):
            file.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _await_session(self) -> None:
        """Until the process leads a group, which a test may then send signals to."""
        deadline = time.monotonic() + patient(60)
        with suppress(ProcessLookupError):  # it may have ended already
            while os.getpgid(self.pid) != self.pid:
                assert time.monotonic() < deadline, "the process did not begin"
                time.sleep(0.001)


# -- what an interpreter runs --------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """What an interpreter is asked to run."""

    way: str  # "-c", "-m", or "" for a script
    name: str
    arguments: list[str]
    unbuffered: bool

    @classmethod
    def of(cls, command: Sequence[Any]) -> "Program | None":
        """None if the command is not this interpreter's."""
        words = [os.fsdecode(word) for word in command]
        if words[0] != sys.executable:
            return None
        place = 1
        while words[place] in ("-u", "-S", "-E", "-B"):
            place += 1
        unbuffered, way = "-u" in words[1:place], words[place]
        if way in ("-c", "-m"):
            return cls(way, words[place + 1], words[place + 2 :], unbuffered)
        return None if way.startswith("-") else cls("", way, words[place + 1 :], unbuffered)

    def run(self) -> None:
        """As `__main__`."""
        sys.argv = [self.way or self.name, *self.arguments]
        _find_modules(
            os.path.dirname(os.path.abspath(self.name)) if self.way == "" else os.getcwd()
        )
        main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
        if self.way == "-m":
            runpy._run_module_as_main(self.name)  # type: ignore[attr-defined]
        elif self.way == "-c":
            exec(self.name, main.__dict__)
        else:
            main.__file__ = self.name
            exec(compile(Path(self.name).read_bytes(), self.name, "exec"), main.__dict__)


def _find_modules(first: str) -> None:
    """Where a new interpreter finds them."""
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *own, *(path for path in sys.path if path.startswith(_INSTALLED))]


# -- in a forked process -------------------------------------------------------------------------

_FILTERS = list(warnings.filters)
_kept: list[Any] = []  # what a new interpreter would not have, and must not be closed


def _begin(command: list[str], env: dict[str, str], folder: str, said: tuple[str, str]) -> NoReturn:
    """In a process of the server."""
    os.setsid()
    for number, name in enumerate(said, start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _posixsubprocess.fork_exec = subprocess._fork_exec = _fork_program
    os.execvp = _execute_program
    program = Program.of(command)
    assert program is not None, command
    _hand_on(set())
    _become(program, env, folder)


_fork_exec, _execvp = _posixsubprocess.fork_exec, os.execvp


def _fork_program(
    command: Sequence[Any], executables: Any, close_fds: bool, keep: tuple[int, ...],
    folder: Any, env: Any, *rest: Any,
) -> int:  # fmt: skip
    """In place of the function with which `subprocess` and `multiprocessing` start processes."""
    program = Program.of(command)
    if program is None:
        return _fork_exec(command, executables, close_fds, keep, folder, env, *rest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, of which torch has some
        child = os.fork()
    if child:
        return child
    try:
        _begin_child(program, keep, folder, env, *rest)
    finally:
        os._exit(255)


def _begin_child(
    program: Program, keep: tuple[int, ...], folder: Any, env: Any, *rest: Any
) -> NoReturn:
    """With what the parent has asked for: ends of pipes, of which every second is its own, other
    files, a folder and variables. One end is closed when the program begins."""
    (stdin, _, _, stdout, _, stderr, _, begun, _, new_session, *_) = rest
    for number, end in enumerate((stdin, stdout, stderr)):
        if end != -1:
            os.dup2(end, number)
    if new_session:
        os.setsid()
    _hand_on(set(keep) - {begun})
    variables = os.environ.copy()
    if env is not None:
        variables = dict(os.fsdecode(pair).split("=", 1) for pair in env)
    _become(program, variables, folder or os.getcwd())


def _hand_on(files: set[int]) -> None:
    """To the program, beside its three streams, and no others."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the file with which they were listed is closed already
            os.set_inheritable(number, number <= 2 or number in files)


def _execute_program(file: str, command: Sequence[str]) -> NoReturn:
    """In place of `os.execvp`."""
    program = Program.of(command)
    if program is None:
        _execvp(file, command)
    _become(program, os.environ.copy(), os.getcwd())


def _become(program: Program, env: Mapping[str, str], folder: Any) -> NoReturn:
    """Run the program to its end, in a state like that of a new interpreter."""
    gc.freeze()  # a collection would copy all memory that is shared with the parent
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if number > 2 and not os.get_inheritable(number):
                os.close(number)
    _reset_signals()
    _open_streams(unbuffered=program.unbuffered)
    _forget()
    _run(program)


def _reset_signals() -> None:
    """As when a program is executed: handlers are gone, what is ignored stays so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _open_streams(*, unbuffered: bool) -> None:
    """The parent's may hold text that it has not written yet."""
    _kept.append((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    out = open(1, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    err = open(2, "wb", 0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, "utf-8", write_through=unbuffered)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        err, "utf-8", "backslashreplace", line_buffering=True, write_through=True
    )


def _forget() -> None:
    """What the parent has set up: its modules, loggers, warnings, processes, and what it does at
    its end."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith(_INSTALLED):
            _kept.append(sys.modules.pop(name))
    loggers = logging.root.manager.loggerDict
    for name in [name for name in loggers if name.partition(".")[0] == "palsgd"]:
        _kept.append(loggers.pop(name))
    warnings.filters[:] = _FILTERS  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    processes._children.clear()
    util._finalizer_registry.clear()
    multiprocessing.set_start_method(None, force=True)
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    forkserver._forkserver.__init__()
    # The parent will tidy up itself what is its own, such as its temporary folders.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(util._exit_function)


def _run(program: Program) -> NoReturn:
    try:
        program.run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
