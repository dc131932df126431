"""Newcomers of a run are heard by the members, whatever happens between their messages."""

import threading
import time

import pytest
import torch.distributed as dist

from palsgd.transports.elastic import membership
from palsgd.transports.elastic.board import Board, Start
from palsgd.transports.elastic.membership import Membership
from palsgd.transports.requests import LeftOutError, RepeatError
from support.patience import patient


class Interrupted(Board):
    """The same notes. After each message of this worker to the store, `meanwhile` is called."""

    def __init__(self, board, meanwhile):
        self.host, self.store, self.meanwhile = board.host, board.store, meanwhile

    def _do(self, call):
        found = super()._do(call)
        self.meanwhile()
        return found


def worker(board, number=None, founders=1, deadline=None):
    """One of the workers of a run that so many begin: one of these, or a newcomer."""
    start = Start(board.store, number, founders)
    return Membership(board, start, min_workers=1, deadline=deadline, timeout=patient(30))


def beside(call, *args, **more):
    """The call in a thread of its own, and what waits for its result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call(*args, **more)), daemon=True)
    thread.start()

    def result():
        thread.join(patient(30))
        assert found, "the call has not ended"
        return found[0]

    return result


def newcomer_for(board, wish, founders=2, heard=1):
    """One that would like to have this number and waits to be let in, and what it waits for."""
    found = worker(board, wish, founders)
    joined = beside(found.join, fresh=True)
    until = time.monotonic() + patient(10)
    while board.read(f"newcomer {heard}") is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found, joined


class Admitting:
    """Meets, and lets in whoever was heard. More than so many meetings are not needed."""

    def __init__(self, member, most=50):
        self.member, self.left, self.heard = member, most, 0

    def __call__(self):
        if self.heard:
            return
        assert self.left, "no meeting has heard the newcomer"
        self.left -= 1
        self.member.meet("the sync", patient=True)
        self.heard = len(self.member.roster.newcomers)
        if self.heard:
            self.member.admit()


def test_a_newcomer_is_heard_although_the_others_meet_between_its_messages():
    board = Board(dist.HashStore())
    member = worker(board)
    newcomer = worker(Interrupted(board, Admitting(member)))
    newcomer.join(fresh=True)
    assert newcomer.members == member.members == [0, 1]
    assert (newcomer.number, newcomer.meeting) == (1, member.meeting)


def test_a_newcomer_that_was_passed_over_announces_itself_again(monkeypatch):
    board = Board(dist.HashStore())
    member = worker(board)
    refused = [False]  # a link that fails once
    answers = membership.answers
    monkeypatch.setattr(membership, "answers", lambda at: refused.pop() if refused else answers(at))
    newcomer = worker(Interrupted(board, Admitting(member, most=1000)))
    newcomer.join(fresh=True)
    assert newcomer.members == [0, 1]


def test_newcomers_that_announce_themselves_at_once_are_all_heard():
    board, count = Board(dist.HashStore()), 8
    member = worker(board)
    newcomers = [worker(board) for _ in range(count)]
    threads = [
        threading.Thread(target=newcomer.join, kwargs={"fresh": True}, daemon=True)
        for newcomer in newcomers
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + patient(10)
    while board.read(f"newcomer {count}") is None:
        assert time.monotonic() < until, "two newcomers have one ticket"
        time.sleep(0.01)
    member.meet("the sync", patient=True)
    member.admit()
    for thread in threads:
        thread.join(patient(30))
    assert sorted(newcomer.number for newcomer in newcomers) == list(range(1, count + 1))


def test_a_newcomer_takes_the_place_of_a_worker_that_dies_after_the_newcomer_was_heard():
    board = Board(dist.HashStore())
    first = beside(worker, board, 0, 2)
    other, dying = worker(board, 1, 2), first()
    newcomer, joined = newcomer_for(board, 0)
    met = beside(dying.meet, "the sync", patient=True)
    other.meet("the sync", patient=True)
    met()
    assert [n.number for n in other.roster.newcomers] == [2], "its own number is still taken"
    dying._bell.close()
    with pytest.raises(RepeatError):
        other.fail()
    other.meet("the sync", patient=True)
    other.admit()
    joined()
    assert newcomer.number == 0
    assert newcomer.members == other.members == [0, 1]


def two_of_whom_one_is_late():
    """Workers 0 and 1 that have met once; from now on worker 1 comes too late."""
    board = Board(dist.HashStore())
    first = beside(worker, board, 0, 2, deadline=patient(0.3))
    late = worker(board, 1, 2)
    there = first()
    met = beside(late.meet, "the sync", patient=True)
    there.meet("the sync", patient=True)
    met()
    return board, there, late


def test_a_worker_that_is_only_late_keeps_its_number_from_newcomers():
    board, there, late = two_of_whom_one_is_late()
    newcomer, joined = newcomer_for(board, 1)
    there.meet("the sync", patient=False)
    assert there.members == [0], "worker 1 is late"
    there.admit()
    joined()
    assert newcomer.number == 2
    late._bell.close()


def test_a_worker_that_comes_too_late_says_nothing_under_a_number_that_another_has():
    board, there, late = two_of_whom_one_is_late()
    there.meet("the sync", patient=False)
    newcomer, joined = newcomer_for(board, 1)
    there.meet("the next", patient=False)
    there.admit()
    joined()
    assert newcomer.number == 1, "nobody has it any more"
    met = beside(newcomer.meet, "the one after", patient=True)
    until = time.monotonic() + patient(10)
    while board.read("come 1") != newcomer.meeting:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(LeftOutError):
        late.meet("the sync", patient=True)
    assert board.read("come 1") == newcomer.meeting
    there._bell.close()
    met()
    assert newcomer.members == [1], "it goes on alone"
