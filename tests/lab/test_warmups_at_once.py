"""Warm-ups that programs at once have in common: one process computes them, others wait for that
and no longer, and nobody sees it in what they compute."""

from dataclasses import replace

import pytest

from palsgd.lab import at_once, sweep
from palsgd.lab.at_once import Share
from palsgd.lab.run_folder import RunFolder
from palsgd.lab.run_set import simulate
from palsgd.lab.settings import Settings
from palsgd.lab.simulated_program import Group
from palsgd.lab.warmups import given_up, warmup_name
from support.simulated_runs import assert_same_runs, config, noisy_workload, runs_in

HOT = dict(workers=2, steps=16, warmup_steps=8, batch_size=4, evaluate_every=2, lr=0.3,
           inner="adamw", schedule="cosine")  # fmt: skip


def swept(workload, out, count, vectorize, **more):
    """By so many processes at once."""
    options = {"at_once": count, "vectorize": vectorize, "quiet": True, "resume": True}
    settings = {**HOT, "sync_every": [2, 4], **more}
    sweep(workload, out=out, simulate=True, options=options, **settings)
    return out


@pytest.mark.parametrize("vectorize", [True, False])
def test_runs_go_on_from_the_warm_up_of_another_process_bit_for_bit(vectorize, tmp_path):
    """With statistics of each worker's own, random numbers, an optimizer that counts, and the best
    model in the warm-up."""
    workload = noisy_workload(tmp_path)
    one, two = (swept(workload, tmp_path / f"by-{count}", count, vectorize) for count in (1, 2))
    assert_same_runs(two, one)
    assert config(two / "sync_every=4")["warmup_computed_by"] == "sync_every=2"
    assert 0 < RunFolder(two / "sync_every=4").best()["step"] <= HOT["warmup_steps"]


def test_a_run_that_diverges_in_its_warm_up_leaves_word_that_it_leaves_none(tmp_path):
    """Else others would wait for the end of all that is stacked with it."""
    runs = {str(lr): Settings(workload="digits", workers=2, steps=16, warmup_steps=8, batch_size=4,
                              evaluate_every=4, sync_every=4, inner="sgd", lr=lr)
            for lr in (0.01, 1e30)}  # fmt: skip
    (tmp_path / ".warmups").mkdir()
    files = [tmp_path / ".warmups" / f"{warmup_name(run)}.pt" for run in runs.values()]
    share = Share(runs=runs, waiting=list(runs), groups=[Group(list(runs), True)], out=tmp_path,
                  data=None, download=False, device="cpu", quiet=True, until=None,
                  warmups=files)  # fmt: skip
    simulate(share)
    assert [path.exists() for path in files] == [True, False]
    assert [given_up(path).exists() for path in files] == [False, True]


def test_runs_that_are_resumed_in_their_warm_up_still_share_it(tmp_path):
    """Two that had begun when the command was killed, and have no checkpoint."""
    out = swept("digits", tmp_path / "out", 1, False, lr=0.002)
    for name in runs_in(out):
        for file in ("summary.json", "best.safetensors"):
            (out / name / file).unlink()
    swept("digits", out, 2, False, lr=0.002)
    found = [config(out / name).get("warmup_computed_by") for name in runs_in(out)]
    assert found == [None, "sync_every=2"]


# -- who waits for whom ----------------------------------------------------------------------------


def share_of(warmups, workload="digits"):
    """Of a program for each entry, whose runs have the warm-ups of these seeds."""
    groups = [[f"{number},{seed}" for seed in seeds] for number, seeds in enumerate(warmups)]
    runs = {
        name: Settings(workload=workload, steps=20, warmup_steps=6, seed=int(name.split(",")[1]))
        for names in groups
        for name in names
    }
    return Share(
        runs=runs, waiting=list(runs), groups=[Group(names, "auto") for names in groups], out="",
        data=None, download=False, device="cpu", quiet=True, until=None,
    )  # fmt: skip


class FakeProcess(at_once._Process):
    def __init__(self):
        self.share, self._past = None, set()


@pytest.fixture
def pool(tmp_path):
    """Of these warm-ups, two at a time; its processes do nothing."""

    def made(*warmups):
        shares = at_once._with_files(share_of(warmups).parts(), tmp_path)
        found = at_once._Pool(shares, 2, tmp_path, quiet=True)
        found._processes = [FakeProcess(), FakeProcess()]
        return found

    return made


def begun(pool):
    """The number of the program that may begin now, and begins; None: none may."""
    share = pool._next()
    if share is None:
        return None
    pool._left.remove(share)
    next(each for each in pool._processes if each.share is None).share = share
    return int(share.waiting[0][0])


def test_a_program_waits_while_another_computes_its_warm_up_and_those_behind_it_go_first(pool):
    found = pool([1], [1, 2], [3], [2])
    assert [begun(found) for _ in range(3)] == [0, 2, None]  # two at a time
    found._busy[1].share = None
    assert begun(found) is None  # 1 waits for 0, and 3 for 1, as in one process
    (path,) = found._busy[0].share.warmups
    path.touch()
    assert [begun(found), begun(found)] == [1, None]


def test_a_warm_up_that_a_process_has_not_left_is_computed_by_the_next(pool):
    found = pool([1], [1], [1])
    assert [begun(found), begun(found)] == [0, None]
    (path,) = found._busy[0].share.warmups
    given_up(path).touch()
    assert begun(found) == 1
    found._busy[1].share = None  # it has ended without a word
    assert begun(found) == 2


def test_a_word_that_no_warm_up_is_left_is_of_the_process_that_computes_it(pool):
    found = pool([1], [1], [1])
    begun(found)
    (path,) = found._busy[0].share.warmups
    for _ in range(2):
        given_up(path).touch()
        assert not found._busy[-1].may_leave()
        begun(found)
    first, second = found._busy
    given_up(path).touch()
    assert (first.may_leave(), second.may_leave()) == (set(), set())


def test_a_warm_up_is_deleted_when_no_share_needs_it(pool):
    found = pool([1], [1], [2])
    begun(found)
    (path,) = found._busy[0].share.warmups
    path.touch()
    first = found._busy[0].share
    begun(found)
    found._busy[0].share = None
    found._drop_warmups(first)
    assert path.exists()
    second = found._busy[0].share
    found._busy[0].share = None
    found._drop_warmups(second)
    assert not path.exists()


@pytest.mark.parametrize(("step", "count"), [(4, 1), (8, 0)])
def test_a_run_that_is_resumed_after_its_warm_up_is_not_waited_for(step, count, tmp_path):
    runs = {"a": Settings(workload="digits", steps=20, warmup_steps=6)}
    (tmp_path / "a" / "checkpoints" / f"step-{step}").mkdir(parents=True)
    share = replace(share_of([[1]]), runs=runs, waiting=["a"], out=tmp_path,
                    groups=[Group(["a"], True, resumed=True)])  # fmt: skip
    assert len(share.warmup_names()) == count


def test_warm_ups_of_one_process_alone_have_no_file(pool):
    assert [len(share.warmups) for share in pool([1, 2], [2, 3], [4])._left] == [1, 1, 0]


def test_what_a_killed_command_has_left_of_warm_ups_is_gone(tmp_path):
    (tmp_path / "out" / ".warmups").mkdir(parents=True)
    swept("digits", tmp_path / "out", 1, True, lr=0.002)
    assert not (tmp_path / "out" / ".warmups").exists()


def test_seeds_of_workers_in_turn_are_programs_of_their_own():
    """Else others would wait for the whole training of the first seed."""
    share = replace(share_of([[1, 2]]), groups=[Group(["0,1", "0,2"], False)])
    assert [part.waiting for part in share.parts()] == [["0,1"], ["0,2"]]
    assert len(share_of([[1, 2]]).parts()) == 1


def test_a_share_is_the_same_when_it_is_read_again(tmp_path):
    share = replace(share_of([[1], [1, 2]]), warmups=[tmp_path / "a.pt"])
    share.write(tmp_path / "share.json", ["palsgd", "sweep"])
    found, command = Share.read(tmp_path / "share.json")
    assert (found.runs, found.groups, command) == (share.runs, share.groups, ["palsgd", "sweep"])
    assert found.warmups == share.warmups
