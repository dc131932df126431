"""Training goes on without a dead or late worker, and lets newcomers in: real processes, killed."""

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR

import palsgd
from palsgd.transports import ProcessGroupTransport
from palsgd.transports.elastic import __main__ as holder
from support.elastic import (
    SIZE,
    AwaitNewcomer,
    Company,
    DieAt,
    SaveAndDieAt,
    members_of_rounds,
    twin,
)
from support.patience import patient


@pytest.fixture
def company():
    company = Company()
    yield company
    company.close()


def first_weights(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(SIZE, 1, bias=False).double().weight.detach().view(-1).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_training_goes_on_without_a_dead_worker_and_with_it_when_it_is_back(company, victim):
    """The weights are those of a twin that leaves the same contributions out."""
    for number in range(3):
        company.start(number, 3, steps=60, at=DieAt(10) if number == victim else AwaitNewcomer(21))
    company.await_death(victim)
    company.start(victim, 3, steps=60)
    found = company.outcomes()
    assert found[victim] is None
    living = [outcome for outcome in found if outcome is not None]
    for outcome in living:
        np.testing.assert_array_equal(outcome["weights"], living[0]["weights"])
        assert outcome["clock"] == 60
    ledger = living[0]["ledger"]
    left, joined = ([c[kind] for c in ledger["changes"]] for kind in ("left", "joined"))
    assert (left, joined) == ([[victim], []], [[], [victim]])
    assert found[3]["worker"] == victim
    rounds = members_of_rounds(ledger, [0, 1, 2])
    assert [len(members) for members in rounds] == [e["workers"] for e in ledger["history"]]
    assert [len(members) for members in rounds[:3]] == [3, 3, 2]
    assert len(rounds[-1]) == 3
    expected = twin(first_weights(), rounds, lr=0.7, momentum=0.5)
    np.testing.assert_allclose(living[0]["weights"], expected, rtol=1e-12)


# -- saves -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_lost_all_its_workers_goes_on_from_the_save_that_one_made_for_all(tmp_path):
    """Worker 0, which saves for all, dies first; another one saves then."""
    for fate in ("dies", "goes on"):
        company = Company()
        for number in range(3):
            how = {"load": str(tmp_path)}
            if fate == "dies":
                how = {"at": SaveAndDieAt(10 if number == 0 else 13, str(tmp_path))}
            company.start(number, 3, steps=24, **how)
        found = company.outcomes()
        company.close()
        if fate == "dies":
            assert found == [None] * 3
            assert sorted(path.name for path in tmp_path.iterdir()) == ["step-12", "step-8"]
    expected = twin(
        first_weights(), [[0, 1, 2]] * 2 + [[1, 2]] + [[0, 1, 2]] * 3, lr=0.7, momentum=0.5
    )
    for outcome in found:
        np.testing.assert_allclose(outcome["weights"], expected, rtol=1e-12)
        assert outcome["warnings"] == []


def elastic_alone(**settings):
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    over = palsgd.ElasticTransport(store=dist.HashStore())
    return model, palsgd.LocalSGD(model, inner, sync_every=2, transport=over, **settings)


def test_workers_that_may_leave_save_right_after_a_sync_and_load_at_the_start(tmp_path):
    model, opt = elastic_alone()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        if opt.clock == 1:
            with pytest.raises(RuntimeError, match="cannot save at clock 1"):
                palsgd.checkpoint.save(tmp_path, model, opt)
    assert palsgd.checkpoint.save(tmp_path, model, opt) == tmp_path / "step-2"
    with pytest.raises(ValueError, match="is at clock 2, in the middle of a run"):
        palsgd.checkpoint.load(tmp_path, model, opt)
    again, other = elastic_alone()
    assert palsgd.checkpoint.load(tmp_path, again, other).clock == other.clock == 2
    assert torch.equal(again.weight, model.weight)


# -- the same bits as without ----------------------------------------------------------------------


SETTINGS = {
    "plain": {},
    "int8": {"compress": "int8"},
    "delayed fragments in top-k": {"compress": "topk:0.3", "delay": 1, "fragments": 2},
    "delayed in int8": {"compress": "int8", "delay": 2},
}


def both_job(settings, port):
    def trained(transport):
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 2)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        opt = palsgd.PALSGD(model, inner, sync_every=6, transport=transport, **settings)
        torch.manual_seed(dist.get_rank())
        for _ in palsgd.until([0], opt, steps=24):
            model(torch.randn(4, 300)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy()

    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    return trained(ProcessGroupTransport()), trained(palsgd.ElasticTransport(store=store))


@pytest.mark.parametrize("name", SETTINGS)
def test_two_workers_that_stay_get_the_bits_of_a_process_group(world, name):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for plain, elastic in world.run(both_job, workers=2, settings=SETTINGS[name], port=store.port):
        np.testing.assert_array_equal(plain, elastic)


def group_job():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transport = palsgd.ElasticTransport()
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = palsgd.LocalSGD(model, inner, sync_every=2, transport=transport)
    for _ in palsgd.until([0], opt, steps=4):
        (model(torch.ones(1, 2)) * (1 + transport.worker)).sum().backward()
        opt.step()
        opt.zero_grad()
    return transport.members, model.bias.item(), [str(each.message) for each in caught]


def test_the_workers_of_a_process_group_begin_a_run_and_are_told_where_its_store_may_be(world):
    (members, bias, told), other = world.run(group_job, workers=2)
    assert members == (0, 1)
    assert bias == other[1] == pytest.approx(-0.1 * 4 * 1.5)
    assert any("store of this process group may live in one of the workers" in t for t in told)


# -- lost in an exchange ---------------------------------------------------------------------------


class DieInside:
    """Kills its own process in the first exchange after a clock, before its last call."""

    def __init__(self, clock, call):
        self.clock, self.call = clock, call

    def __call__(self, opt):
        from palsgd.transports.elastic.generation import Generation

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        if opt.clock == self.clock:
            setattr(Generation, self.call, die)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "before", "settings"),
    [
        ("mean", 11, {}),
        ("gather", 11, {"compress": "int8"}),
        ("gather", 9, {"compress": "topk:0.3", "fragments": 2}),
        ("mean", 11, {"delay": 2}),
        ("gather", 11, {"compress": "int8", "delay": 2}),
    ],
)
def test_a_worker_lost_inside_an_exchange_leaves_no_trace_in_it(call, before, settings):
    """The survivors' weights, residues included, are those of a run that it left just before."""
    found = []
    for death in (DieInside(before, call), DieAt(before)):
        company = Company()
        for number in range(3):
            company.start(number, 3, steps=32, at=death if number == 2 else None, **settings)
        outcomes = company.outcomes()
        company.close()
        assert outcomes[2] is None
        np.testing.assert_array_equal(outcomes[0]["weights"], outcomes[1]["weights"])
        found.append(outcomes[0])
    for outcome in found:
        assert [c["left"] for c in outcome["ledger"]["changes"]] == [[2]]
    assert [e["workers"] for e in found[0]["ledger"]["history"]] == [
        e["workers"] for e in found[1]["ledger"]["history"]
    ]
    np.testing.assert_array_equal(found[0]["weights"], found[1]["weights"])


class LoseOnce:
    """Has one exchange fail on this worker alone, after all workers have got its result."""

    def __call__(self, opt):
        from palsgd.transports.elastic.generation import Generation

        if opt.clock != 5:
            return
        whole = Generation.mean

        def lossy(self, message):
            whole(self, message)
            Generation.mean = whole
            raise RuntimeError("the last piece is missing")

        Generation.mean = lossy


def test_nobody_applies_a_sync_that_another_worker_has_lost(company):
    for number in range(2):
        company.start(number, 2, steps=24, at=LoseOnce() if number == 1 else None)
    lossy = company.outcomes()
    expected = twin(first_weights(), [[0, 1]] * 6, lr=0.7, momentum=0.5)
    for outcome in lossy:
        np.testing.assert_allclose(outcome["weights"], expected, rtol=1e-12)
        assert outcome["ledger"]["changes"] == []


HALVED = partial(StepLR, step_size=30, gamma=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "PALSGD", "compress": "int8", "momentum": 0.9, "scheduler": HALVED},
        {"optimizer": "PALSGD", "delay": 1, "fragments": 2, "draws": "independent"},
        {"optimizer": "SCAFFOLD"},
        {"optimizer": "SlowMo", "momentum": 0.9, "delay": 4},
        {"optimizer": "EASGD"},
        {"optimizer": "FedProx", "mu": 0.1, "sync_every": "auto"},
    ],
    ids=lambda settings: settings["optimizer"],
)
def test_every_kind_of_state_reaches_a_newcomer(company, settings):
    """Anchors and the states that methods share are compared at every sync, so a newcomer that
    lacked a part of them would end the run."""
    for number in range(3):
        at = DieAt(10) if number == 1 else AwaitNewcomer(21)
        company.start(number, 3, steps=80, at=at, **settings)
    company.await_death(1)
    company.start(None, 3, steps=80, **settings)
    found = company.outcomes()
    for outcome in (found[0], found[2], found[3]):
        assert outcome.get("clock") == 80, outcome
        np.testing.assert_array_equal(outcome["anchor"], found[0]["anchor"])
        assert outcome["lr"] == found[0]["lr"]
        assert outcome["ledger"]["history"][-1]["workers"] == 3
    assert found[3]["worker"] == 1  # the lowest number that is free


class LoseWelcome(AwaitNewcomer):
    """Has the group that workers make after a welcome fail on this worker alone, once it stands, as
    where one of them is lost before all others have a connection to it."""

    def __call__(self, opt):
        from palsgd.transports.elastic.generation import Generation

        super().__call__(opt)
        if opt.clock != self.clock:
            return
        whole = Generation.__init__

        def lossy(self, store, name, place, workers, timeout):
            whole(self, store, name, place, workers, timeout)
            if workers == 3:
                Generation.__init__ = whole
                raise RuntimeError("Connection closed by peer")

        Generation.__init__ = lossy


def test_nobody_trains_on_after_a_welcome_that_another_worker_has_lost(company):
    """Otherwise one would meet newcomers again while the others are at the next sync."""
    for number, at in enumerate((AwaitNewcomer(1), LoseWelcome(1), DieAt(1))):
        company.start(number, 3, steps=16, at=at)
    company.await_death(2)
    company.start(2, 3, steps=16)
    found = company.outcomes()
    expected = twin(first_weights(), [[0, 1]] + [[0, 1, 2]] * 3, lr=0.7, momentum=0.5)
    for outcome in (found[0], found[1], found[3]):
        assert outcome.get("clock") == 16, outcome
        np.testing.assert_allclose(outcome["weights"], expected, rtol=1e-12)


# -- late workers ----------------------------------------------------------------------------------


class LateAt:
    """Comes to a clock, and goes on when the others have met without it."""

    def __init__(self, clock):
        self.clock = clock

    def __call__(self, opt):
        while opt.clock == self.clock and not self.passed(opt.transport):
            time.sleep(0.05)

    def passed(self, transport):
        return transport._board.read("latest")["meeting"] > transport._membership.meeting


@pytest.mark.slow
def test_a_worker_that_misses_the_deadline_is_left_out_and_goes_on_from_the_global_model(company):
    for number in range(3):
        at = LateAt(9) if number == 1 else AwaitNewcomer(17)
        company.start(number, 3, steps=40, at=at, transport={"deadline": patient(2.0)})
    found = company.outcomes()
    for outcome in found:
        np.testing.assert_array_equal(outcome["weights"], found[0]["weights"])
        assert outcome["clock"] == 40
    changes = found[0]["ledger"]["changes"]
    assert [(c["left"], c["joined"]) for c in changes] == [([1], []), ([], [1])]
    (line,) = found[1]["warnings"]
    assert "worker 1 came too late to the sync of round 2" in line
    assert "drops its 4 steps" in line
    rounds = members_of_rounds(found[0]["ledger"], [0, 1, 2])
    expected = twin(first_weights(), rounds, lr=0.7, momentum=0.5)
    np.testing.assert_allclose(found[0]["weights"], expected, rtol=1e-12)


# -- the end, refusals -----------------------------------------------------------------------------


def test_a_run_with_fewer_workers_than_it_needs_ends_with_one_line(company):
    over = {"min_workers": 2}
    company.start(0, 2, steps=40, transport=over)
    company.start(1, 2, steps=40, transport=over, at=DieAt(6))
    survivor, _ = company.outcomes()
    assert survivor["error"] == "SyncError"
    assert "1 of at least 2 workers are left (0)" in survivor["message"]
    assert "\n" not in survivor["message"]


class LoseStore:
    def __call__(self, opt):
        if opt.clock == 6:
            opt.transport._board.store = Gone()


class Gone:
    def __getattr__(self, name):
        raise RuntimeError("Connection reset by peer")


def test_a_run_whose_store_is_gone_ends_with_one_line(company):
    company.start(0, 1, steps=40, at=LoseStore())
    (found,) = company.outcomes()
    assert found["error"] == "SyncError"
    assert "the store of the run at 127.0.0.1 does not answer" in found["message"]
    assert "\n" not in found["message"]


def test_only_the_worker_with_other_settings_is_refused(company):
    company.start(0, 2, steps=8)
    company.start(1, 2, steps=8, momentum=0.5)
    found = company.outcomes()
    refused = [outcome for outcome in found if "error" in outcome]
    assert [outcome["error"] for outcome in refused] == ["ValueError"]
    assert "momentum of inner differs between workers" in refused[0]["message"]
    assert sum(outcome.get("clock") == 8 for outcome in found) == 1


def built(**settings):
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    transport = palsgd.ElasticTransport(store=dist.HashStore())
    method = settings.pop("method", palsgd.Method())
    return palsgd.LocalOptimizer(model, inner, method=method, transport=transport, **settings)


class Pairs(palsgd.Method):
    def weights(self, worker, round):
        return {worker: 1.0}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup_steps": 3}, "warmup_steps=3 with an ElasticTransport"),
        ({"method": Pairs()}, "its weights count on the same workers"),
    ],
)
def test_what_cannot_go_on_without_a_worker_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        built(**settings)


def test_a_transport_serves_one_optimizer():
    opt = built()
    with pytest.raises(ValueError, match="for one optimizer"):
        palsgd.LocalSGD(opt.model, torch.optim.SGD(opt.model.parameters()), transport=opt.transport)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_workers": 0}, "min_workers=0"),
        ({"deadline": 0}, "deadline=0"),
        ({"timeout": -1.0}, "timeout=-1"),
    ],
)
def test_a_bad_argument_is_named(given, words):
    with pytest.raises(ValueError, match=words):
        palsgd.ElasticTransport(store=dist.HashStore(), **given)


def test_without_a_store_the_error_says_how_to_hold_one(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=r"python -m palsgd\.transports\.elastic HOST:PORT"):
        palsgd.ElasticTransport()


# -- the process that holds a store ----------------------------------------------------------------


def test_a_process_that_holds_the_store_listens_on_its_address_alone():
    command = [sys.executable, "-m", "palsgd.transports.elastic", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            host, port = (word.split("=")[1] for word in process.stdout.readline().split())
            store = dist.TCPStore(host, int(port), is_master=False)
            store.set("key", "value")
            assert store.get("key") == b"value"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", int(port)), timeout=patient(5))
        finally:
            process.kill()


@pytest.mark.parametrize("place", ["", "29500", "host:"])
def test_a_place_that_is_none_is_named(place):
    with pytest.raises(SystemExit, match="is no HOST:PORT"):
        holder.main(place)
