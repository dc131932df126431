"""Newcomers of a run are heard by the members, whatever happens between their messages."""

import socket
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


class Stalled(Board):
    """The same notes, but this worker is held up when it is about to write one."""

    def __init__(self, board):
        self.host, self.store = board.host, board.store
        self.is_held, self.let_go = threading.Event(), threading.Event()

    def note(self, key, value):
        self.is_held.set()
        assert self.let_go.wait(patient(30))
        super().note(key, value)


def worker(board, number=None, founders=1, deadline=None, timeout=30.0):
    """One of the workers of a run that so many begin: one of these, or a newcomer."""
    start = Start(board.store, number, founders)
    return Membership(board, start, min_workers=1, deadline=deadline, timeout=patient(timeout))


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


def met_once(count, **how):
    """The workers that begin a run, and have met once."""
    board = Board(dist.HashStore())
    coming = [beside(worker, board, number, count, **how) for number in range(count)]
    workers = [come() for come in coming]
    for met in [beside(each.meet, "the sync", patient=True) for each in workers]:
        met()
    return board, *workers


def stalled_on_the_way(late, board):
    """A worker that is held before it has come to the next meeting, and the end of its call: when
    it is let go it finds that it has been left out."""
    late._board = stalled = Stalled(board)

    def come_too_late():
        with pytest.raises(LeftOutError):
            late.meet("the next", patient=True)

    left_out = beside(come_too_late)
    assert stalled.is_held.wait(patient(10))
    return stalled, left_out


def turn_off(monkeypatch, *workers):
    """From now on calls of these workers get no answer at all, as if their machine were off."""
    off, connect = {each._bell.address for each in workers}, socket.create_connection

    def call(address, timeout=None):
        if address in off:
            time.sleep(timeout)
            raise TimeoutError
        return connect(address, timeout=timeout)

    monkeypatch.setattr(socket, "create_connection", call)


def test_a_newcomer_takes_the_number_of_a_worker_whose_machine_is_off(monkeypatch):
    board, there, lost = met_once(2, timeout=0.5)
    turn_off(monkeypatch, lost)
    newcomer, joined = newcomer_for(board, 1)
    there.meet("the next", patient=True)
    assert there.members == [0], "worker 1 has been waited for, and is gone"
    there.admit()
    joined()
    assert newcomer.number == 1


def test_workers_whose_machine_is_off_are_waited_for_at_once(monkeypatch):
    _, there, *lost = met_once(8, timeout=1.0)
    turn_off(monkeypatch, *lost)
    since = time.monotonic()
    there.meet("the next", patient=True)
    assert there.members == [0]
    assert patient(1.0) < time.monotonic() - since < patient(3.0), "not for one after the other"


def test_a_worker_that_is_only_late_keeps_its_number_from_newcomers():
    board, there, late = met_once(2, deadline=patient(0.3))
    newcomer, joined = newcomer_for(board, 1)
    there.meet("the next", patient=False)
    assert there.members == [0], "worker 1 is late"
    there.admit()
    joined()
    assert newcomer.number == 2
    late._bell.close()


def test_a_worker_that_comes_too_late_says_nothing_in_the_name_of_one_that_has_its_number():
    board, there, late = met_once(2, deadline=patient(0.3))
    stalled, left_out = stalled_on_the_way(late, board)
    there.meet("the next", patient=False)
    newcomer, joined = newcomer_for(board, 1)
    there.meet("the one after", patient=False)
    there.admit()
    joined()
    assert newcomer.number == 1, "nobody has it any more"
    met = beside(newcomer.meet, "the last", patient=True)
    until = time.monotonic() + patient(10)
    while not board.count(f"came {newcomer.meeting}", 0):
        assert time.monotonic() < until
        time.sleep(0.01)
    stalled.let_go.set()
    left_out()
    there._bell.close()
    met()
    assert newcomer.members == [1], "it goes on alone"


def test_a_worker_that_comes_after_many_meetings_decides_none_of_them_again():
    board, there, late = met_once(2, deadline=patient(0.3), timeout=0.5)
    stalled, left_out = stalled_on_the_way(late, board)
    newcomer, joined = newcomer_for(board, 5)
    there.meet("the next", patient=False)
    there.admit()
    joined()
    there._bell.close()  # all whom the late one knows are gone, and their notes are forgotten
    for _ in range(membership._KEPT + 8):
        newcomer.meet("another", patient=True)
        newcomer.settle()
    stalled.let_go.set()
    left_out()
    assert board.read("latest")["meeting"] == newcomer.meeting
    assert board.read("latest")["roster"] == newcomer.roster.as_note()
