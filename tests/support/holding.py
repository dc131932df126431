"""Processes with a network up, to be ended in every way. They fork from one that has imported all
that is needed, so that each costs milliseconds."""

import signal
from contextlib import contextmanager

from palsgd.lab.links import Link, Network
from support.patience import patient
from support.warm import server


@contextmanager
def holder():
    """One with a network of two workers, which sleep behind delay lines."""
    ours, theirs = server().Pipe()
    process = server().Process(target=_hold, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(patient(60)), "no network in time"
        assert ours.recv() == "up"
        yield process
    finally:
        process.kill()
        process.join(timeout=patient(30))


def _hold(pipe) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in a background job's tests
    with Network(2, Link("1mbit", delay_ms=5.0)) as network:
        pipe.send("up")
        network.run(["sleep", "600"])
