"""Kills inside saves, damage, full disks, lost disks: nothing is lost, silent or unclear."""

import errno
import os
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import palsgd
from palsgd import tensor_files
from palsgd.checkpoint import step_folders
from palsgd.transports import Alone
from support.checkpoints import advance, build, contents, load_fresh, loaded_quietly, place, same
from support.forked import KILLED, Death, forked, tree, values_of

STOPS = (3, 6, 10)  # the clocks of the saves; the third removes the first


def save_at_stops(transport, folder, disks, stops=STOPS):
    model, opt = build(transport)
    found = []
    for clock in stops:
        advance(model, opt, clock)
        palsgd.checkpoint.save(place(folder, transport.worker, disks), model, opt)
        found.append(contents(model, opt))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What each of two workers has at each stop."""
    return values_of(
        forked(save_at_stops, workers=2, folder=tmp_path_factory.mktemp("whole"), disks="one")
    )


# -- kills -----------------------------------------------------------------------------------------


class HalfFile:
    """Ends this process when half of its first large piece is in a file."""

    def __init__(self, path, mode):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._file)

    def write(self, data):
        os.write(self._file, bytes(data)[: len(data) // 2])
        os._exit(KILLED)


CALLS = {
    "message": None,
    "fsync": (os, "fsync"),
    "rename": (os, "rename"),
    "mkdir": (os, "mkdir"),
    "rmtree": (shutil, "rmtree"),
}
# Where a save is killed: before the n-th call of a function that changes a disk or talks to the
# others, or after it. A save has three exchanges of two messages.
OF_EVERY_RANK = [
    *(("message", n, after) for n in (1, 2, 3, 4, 5) for after in (False, True)),
    ("message", 6, True),
    ("fsync", 1, False),
    ("fsync", 2, False),
    ("mkdir", 2, True),
    ("half a rank's file", 1, False),
]
OF_THE_LOWEST_ON_A_DISK = [
    ("message", 1, True),
    ("message", 4, True),
    ("message", 6, False),
    ("message", 6, True),
    ("half a rank's file", 1, False),
    ("half a manifest", 1, False),
    *(("fsync", n, False) for n in (3, 4, 5)),
    *(("rename", n, after) for n in (1, 2) for after in (False, True)),
    ("rmtree", 1, False),
]


def arm(transport, point):
    call, count, after = point
    if call == "half a rank's file":
        tensor_files.open = HalfFile
    elif call == "half a manifest":
        step_folders.open = HalfFile
    else:
        Death(*(CALLS[call] or (transport, "mean")), count, after=after)


def killed_in_the_third_save(transport, folder, disks, victim, point):
    model, opt = build(transport)
    for clock in STOPS:
        advance(model, opt, clock)
        if clock == STOPS[-1] and transport.worker == victim:
            arm(transport, point)
        palsgd.checkpoint.save(place(folder, transport.worker, disks), model, opt)


def load_and_save_again(transport, folder, disks):
    model, opt = build(transport, seed=9)
    at = place(folder, transport.worker, disks)
    loaded, _ = loaded_quietly(at, model, opt)
    found = contents(model, opt)
    advance(model, opt, 14)
    palsgd.checkpoint.save(at, model, opt)
    return loaded.clock, found


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("disks", ["one", "own"])
def test_a_kill_at_any_point_of_a_save_leaves_a_save_that_all_workers_load(
    tmp_path, undisturbed, disks, victim
):
    lowest = victim == 0 or disks == "own"
    met = Counter()
    for number, point in enumerate(OF_THE_LOWEST_ON_A_DISK if lowest else OF_EVERY_RANK):
        folder = tmp_path / str(number)
        job = dict(folder=folder, disks=disks, victim=victim, point=point)
        outcomes = forked(killed_in_the_third_save, workers=2, **job)
        assert outcomes[victim].message == f"status {KILLED}", point
        assert outcomes[1 - victim].error in (None, "SyncError"), point
        got = values_of(forked(load_and_save_again, workers=2, folder=folder, disks=disks))
        [clock] = {clock for clock, _ in got}  # all the same
        assert clock in STOPS[1:], point
        for worker, (_, found) in enumerate(got):
            same(found, undisturbed[worker][STOPS.index(clock)])
            left = tree(Path(place(folder, worker, disks)))
            assert not [name for name in left if ".part" in name], point  # cleaned up
        met[clock] += 1
    assert min(met[6], met[10]) >= 2  # the second save was loaded, or the third


def test_a_save_that_was_never_whole_on_all_disks_is_passed_over_and_said(tmp_path, undisturbed):
    """Worker 1 is killed when its disk does not have the name yet, and worker 0's has."""
    job = dict(folder=tmp_path, disks="own", victim=1, point=("rename", 1, False))
    forked(killed_in_the_third_save, workers=2, **job)
    assert (tmp_path / "disk-0" / "step-10").exists()
    for worker, (loaded, found, said) in enumerate(
        values_of(forked(load_fresh, workers=2, folder=tmp_path, disks="own"))
    ):
        same(found, undisturbed[worker][1])
        assert (loaded.older, loaded.clock, loaded.path.name) == (True, 6, "step-6")
        assert said == [loaded.why]
        assert loaded.why.startswith("step-10 cannot be used by worker 1 (it is not at ")
        assert loaded.why.endswith("; step-6 is loaded")


# -- damage ----------------------------------------------------------------------------------------


def damaged(data, rng):
    """The bytes with a bit flipped, cut, or with a block of zeros in them."""
    kind, place = rng.choice(["flip", "cut", "zeros"]), rng.randrange(len(data))
    if kind == "flip":
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    if kind == "cut":
        return data[:place]
    return data[:place] + bytes(min(64, len(data) - place)) + data[place + 64 :]


def test_of_300_damages_none_is_silent_and_the_older_save_is_loaded_instead(tmp_path):
    model, opt = build(Alone())
    for clock in (3, 6):
        advance(model, opt, clock)
        palsgd.checkpoint.save(tmp_path, model, opt)
        if clock == 3:
            older = contents(model, opt)
    newest, rng, met = contents(model, opt), random.Random(5), Counter()
    step = tmp_path / "step-6"
    files = sorted(path for path in step.rglob("*") if path.is_file())
    fresh = build(Alone(), seed=9)
    for number in range(300):
        path = files[number % len(files)]
        whole = path.read_bytes()
        path.write_bytes(damaged(whole, rng))
        loaded, said = loaded_quietly(tmp_path, *fresh)
        assert loaded.older == bool(said) == (loaded.clock == 3)
        same(contents(*fresh), older if loaded.older else newest)
        met[path.name, loaded.older] += 1
        path.write_bytes(whole)
    # what changes neither a file of a rank nor the meaning of a manifest may be loaded
    assert met["rank-0.safetensors", True] >= 148
    assert met["manifest.json", True] >= 100


@pytest.mark.parametrize("name", ["worker-0/rank-0.safetensors", "manifest.json"])
def test_damage_without_an_older_save_is_a_valueerror_that_names_the_file(tmp_path, name):
    path = palsgd.checkpoint.save(tmp_path, *build(Alone()))
    rng = random.Random(1)
    whole = (path / name).read_bytes()
    for _ in range(30):
        (path / name).write_bytes(changed := damaged(whole, rng))
        if changed != whole:
            with pytest.raises(ValueError, match=name.split("/")[-1]) as error:
                palsgd.checkpoint.load(tmp_path, *build(Alone()))
            assert "\n" not in str(error.value)


def test_damage_to_an_older_save_is_not_worth_a_word(tmp_path):
    model, opt = build(Alone())
    for clock in (3, 6):
        advance(model, opt, clock)
        palsgd.checkpoint.save(tmp_path, model, opt)
    (tmp_path / "step-3" / "manifest.json").write_text("{}")
    loaded = palsgd.checkpoint.load(tmp_path, *build(Alone(), seed=9))
    assert (loaded.clock, loaded.older, loaded.why) == (6, False, "")


def test_damage_on_one_worker_takes_all_workers_to_the_same_older_save(tmp_path, undisturbed):
    values_of(forked(save_at_stops, workers=2, folder=tmp_path, disks="one"))
    file = tmp_path / "disk" / "step-10" / "worker-1" / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for worker, (loaded, found, said) in enumerate(
        values_of(forked(load_fresh, workers=2, folder=tmp_path, disks="one"))
    ):
        same(found, undisturbed[worker][1])
        assert loaded.clock == 6
        [line] = said
        assert "step-10 cannot be used by worker 1" in line
        assert "rank-0.safetensors has" in line
    assert (tmp_path / "disk" / "step-10").exists()  # a load deletes nothing


def test_a_file_of_another_save_is_no_part_of_this_one(tmp_path):
    """Worker 1's file is that of clock 3, of the same round and the same size."""
    values_of(forked(save_at_stops, workers=2, folder=tmp_path, disks="one", stops=(2, 3)))
    old, new = (tmp_path / "disk" / f"step-{n}" / "worker-1" / "rank-0.safetensors" for n in (2, 3))
    shutil.copy(old, new)
    for loaded, _, _ in values_of(forked(load_fresh, workers=2, folder=tmp_path, disks="one")):
        assert loaded.clock == 2


def test_a_lost_disk_is_named_on_every_worker(tmp_path):
    values_of(forked(save_at_stops, workers=2, folder=tmp_path, disks="own"))
    shutil.rmtree(tmp_path / "disk-1")
    for got in forked(load_fresh, workers=2, folder=tmp_path, disks="own"):
        assert got.error == "ValueError"
        assert "step-10 cannot be used by worker 1 (it is not at" in got.message
        assert "step-6 cannot be used by worker 1" in got.message


# -- disks -----------------------------------------------------------------------------------------


def save_with_a_full_disk(transport, folder, disks):
    """The disk of worker 1 is full at the second save."""
    model, opt = build(transport)
    at = place(folder, transport.worker, disks)
    said = []
    for clock in (3, 6, 7):
        advance(model, opt, clock)
        tensor_files.open = Full if clock == 6 and transport.worker == 1 else open
        try:
            palsgd.checkpoint.save(at, model, opt)
        except OSError as error:
            said.append((clock, str(error), sorted(os.listdir(at))))
    return said, sorted(os.listdir(at))


class Full(HalfFile):
    """A file on a disk on which no room is left."""

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("disks", ["one", "own"])
def test_a_full_disk_on_one_worker_is_the_same_oserror_on_all_and_costs_no_save(tmp_path, disks):
    got = values_of(forked(save_with_a_full_disk, workers=3, folder=tmp_path, disks=disks))
    for said, left in got:
        [(clock, line, then)] = said
        assert clock == 6
        assert line.startswith("worker 1 could not save, so nothing was added")
        assert "step-6" in line
        assert "worker-1/rank-0.safetensors: No space left on device" in line
        assert "\n" not in line
        assert then == ["step-3"] or (disks == "one" and "step-3" in then)  # others may still undo
        assert left == ["step-3", "step-7"]


def fill(at, model, opt):
    """Save until the disk is full. Returns what the saves at the clocks 1, 2, ... hold, and the
    error."""
    kept = []
    for clock in range(1, 50):
        advance(model, opt, clock)
        try:
            palsgd.checkpoint.save(at, model, opt, keep=50)
        except OSError as error:
            return kept, str(error)
        kept.append(contents(model, opt))
    raise AssertionError("the disk is not full")


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of limited size takes root to mount")
def test_a_file_system_that_is_full_leaves_the_last_save_whole(tmp_path):
    at = tmp_path / "small"
    at.mkdir()
    size = "size=96k"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(at)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let one mount a file system")
    try:
        model, opt = build(Alone())
        kept, said = fill(at, model, opt)
        assert "No space left on device" in said
        assert "\n" not in said
        assert len(kept) >= 2
        again = build(Alone(), seed=9)
        assert palsgd.checkpoint.load(at, *again).clock == len(kept)
        same(contents(*again), kept[-1])
    finally:
        subprocess.run(["umount", str(at)], check=True)


def test_a_disk_that_refuses_to_be_read_is_an_oserror(tmp_path, monkeypatch):
    path = palsgd.checkpoint.save(tmp_path, *build(Alone()))

    def refuse(name, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))

    monkeypatch.setattr(tensor_files, "open", refuse, raising=False)
    with pytest.raises(OSError, match=r"rank-0.safetensors: Permission denied") as error:
        palsgd.checkpoint.load(tmp_path, *build(Alone()))
    assert str(path.parent) in str(error.value)
