"""A worker that is gone is told from one that computes, is stopped, or has forked."""

import multiprocessing
import os
import signal
import time

import pytest

from palsgd.transports.elastic.doorbell import Doorbell, Lookout, answers
from support.patience import patient


def ring(pipe, forks):
    bell = Doorbell("127.0.0.1")
    if forks and os.fork() == 0:
        time.sleep(patient(20))
        os._exit(0)
    pipe.send(bell.address)
    pipe.recv()


@pytest.fixture
def ringing(request):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=ring, args=(theirs, getattr(request, "param", False)))
    process.start()
    yield process, ours.recv()
    process.kill()
    process.join()
    ours.close()
    theirs.close()


def gone_soon(lookout):
    until = time.monotonic() + patient(10)
    while not lookout.gone([7]) and time.monotonic() < until:
        time.sleep(0.01)
    return lookout.gone([7])


@pytest.mark.parametrize("ringing", [False, True], indirect=True, ids=["alone", "with a child"])
def test_a_process_that_was_killed_is_gone_although_its_child_lives(ringing):
    process, address = ringing
    with Lookout({7: address}, 30) as lookout:
        assert not lookout.gone([7])
        os.kill(process.pid, signal.SIGSTOP)
        assert not lookout.gone([7])  # stopped
        os.kill(process.pid, signal.SIGKILL)
        assert gone_soon(lookout)
    assert answers(address) is False


def test_a_call_outlasts_the_answer_of_a_worker_that_is_waited_for():
    bell = Doorbell("127.0.0.1")
    with Lookout({7: bell.address}, 30) as lookout:
        assert not lookout.gone([7])
        bell.answer()
        assert not lookout.gone([7])
        bell.close()
        assert gone_soon(lookout)


def test_calls_that_are_over_are_dropped():
    bell = Doorbell("127.0.0.1")
    for _ in range(5):
        assert answers(bell.address)
    until = time.monotonic() + patient(10)
    while time.monotonic() < until:
        bell.answer()
        if not bell._calls:
            break
    assert bell._calls == []
    bell.close()
