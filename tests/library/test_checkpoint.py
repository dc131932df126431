"""Saves that appear whole or not at all: what they hold, and what a load makes of them."""

import json
import math
import os
import pickle
import subprocess
from collections import Counter

import numpy as np
import pytest
import torch

import palsgd
from palsgd import ledger as ledger_module
from palsgd.checkpoint import step_folders
from palsgd.transports import Alone
from support.checkpoints import H, advance, build, contents, load_fresh, place, same
from support.forked import forked, tree, values_of

# -- what a save holds -----------------------------------------------------------------------------


def save_twice(transport, folder, disks, stops):
    """Save at each stop, and return what was there then."""
    model, opt = build(transport)
    found = []
    for clock in stops:
        advance(model, opt, clock)
        at = place(folder, transport.worker, disks)
        extra = {"best": 0.25, "rng": torch.arange(3 + transport.worker), "clocks": (clock, None)}
        path = palsgd.checkpoint.save(at, model, opt, extra=extra)
        found.append((str(path), contents(model, opt)))
    return found


@pytest.mark.parametrize("disks", ["one", "own"])
def test_workers_go_on_from_the_newest_save_on_one_disk_and_on_disks_of_their_own(tmp_path, disks):
    saved = values_of(forked(save_twice, workers=3, folder=tmp_path, disks=disks, stops=(3, 6, 10)))
    for worker, (loaded, found, said) in enumerate(
        values_of(forked(load_fresh, workers=3, folder=tmp_path, disks=disks))
    ):
        path, want = saved[worker][-1]
        same(found, want)
        assert str(loaded.path) == path
        assert (loaded.path.name, loaded.clock, loaded.workers) == ("step-10", 10, 3)
        assert (loaded.older, loaded.why, loaded.source, said) == (False, "", worker, [])
        assert loaded.extra["best"] == 0.25
        assert loaded.extra["clocks"] == (10, None)
        assert loaded.extra["rng"].tolist() == list(range(3 + worker))
        at = step_folders.Path(place(tmp_path, worker, disks))
        assert sorted(each.name for each in at.iterdir()) == ["step-10", "step-6"]  # keep=2
    own = tree(tmp_path / "disk-2" / "step-10") if disks == "own" else None
    assert own in (None, {"manifest.json", "worker-2", "worker-2/rank-0.safetensors"})


def test_older_ones_than_keep_says_are_removed_and_nothing_else(tmp_path):
    model, opt = build(Alone())
    (tmp_path / "notes.txt").write_text("mine")
    for clock in range(1, 6):
        advance(model, opt, clock)
        palsgd.checkpoint.save(tmp_path, model, opt, keep=3)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "notes.txt", "step-3", "step-4", "step-5",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="keep=0 must be a whole number >= 1"):
        palsgd.checkpoint.save(tmp_path, model, opt, keep=0)


def test_the_save_made_last_is_loaded_also_where_an_older_run_got_further(tmp_path):
    model, opt = build(Alone())
    advance(model, opt, 9)
    palsgd.checkpoint.save(tmp_path, model, opt)
    model, opt = build(Alone(), seed=1)
    advance(model, opt, 5)
    path = palsgd.checkpoint.save(tmp_path, model, opt)
    assert palsgd.checkpoint.load(tmp_path, *build(Alone())).path == path
    assert [saved.step for saved in palsgd.checkpoint.find(tmp_path)] == [5, 9]
    assert palsgd.checkpoint.load(tmp_path / "step-9", *build(Alone())).clock == 9


def test_a_second_save_at_one_clock_leaves_the_first_alone(tmp_path):
    model, opt = build(Alone())
    advance(model, opt, 5)
    first = palsgd.checkpoint.save(tmp_path, model, opt, extra={"n": 1})
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    second = palsgd.checkpoint.save(tmp_path, model, opt, extra={"n": 2})
    assert (first.name, second.name) == ("step-5", "step-5-2")
    assert before == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    assert palsgd.checkpoint.load(tmp_path, *build(Alone())).extra == {"n": 2}


def test_extra_comes_back_in_its_own_types_and_precision(tmp_path):
    model, opt = build(Alone())
    kinds = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.uint8]
    kinds += [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2")]
    extra = {
        "tensors": [torch.arange(5).to(kind) for kind in kinds],
        "number": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "turned": torch.arange(6.0).view(2, 3).T,
        "counts": Counter({"a": 2}),
        1: ("x", {"palsgd type": "mine"}, [math.inf, True]),
        "a/b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
    }
    palsgd.checkpoint.save(tmp_path, model, opt, extra=extra)
    found = palsgd.checkpoint.load(tmp_path, *build(Alone())).extra
    for got, want in zip(found.pop("tensors"), extra.pop("tensors"), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    for name in ("number", "none", "turned", "a/b"):
        want = extra.pop(name)
        got = found.pop(name)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert torch.equal(got, want)
    assert found.pop("a")["b"].item() == extra.pop("a")["b"].item() == 0
    assert found == extra
    assert isinstance(found["counts"], Counter)


@pytest.mark.parametrize("odd", [object(), torch.zeros(2).to_sparse()], ids=["object", "sparse"])
def test_extra_that_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path, odd):
    model, opt = build(Alone())
    with pytest.raises(ValueError, match="cannot be saved"):
        palsgd.checkpoint.save(tmp_path, model, opt, extra={"odd": odd})
    assert list(tmp_path.iterdir()) == []


def save_oddly(transport, folder):
    model, opt = build(transport)
    extra = {"x": object()} if transport.worker == 1 else None
    palsgd.checkpoint.save(folder, model, opt, extra=extra)


def test_what_one_worker_cannot_save_is_said_on_all(tmp_path):
    for got in forked(save_oddly, workers=3, folder=tmp_path):
        assert got.error == "ValueError"
        assert got.message.startswith("worker 1 could not save")
        assert "a object, which cannot be saved" in got.message


# -- the model alone -------------------------------------------------------------------------------


def test_the_global_model_alone_is_a_file_that_safetensors_reads(tmp_path):
    reader = pytest.importorskip("safetensors.torch")
    model, opt = build(Alone())
    advance(model, opt, 2 * H + 1)
    with opt.anchor_weights():
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = palsgd.checkpoint.save_model(tmp_path / "out", opt)
    got = reader.load_file(path)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not torch.equal(got["0.weight"], model[0].weight)  # the local model is another one
    assert [each.name for each in path.parent.iterdir()] == ["model.safetensors"]


def test_the_files_of_ranks_are_read_by_safetensors_too(tmp_path):
    reader = pytest.importorskip("safetensors.torch")
    model, opt = build(Alone())
    advance(model, opt, 6)
    path = palsgd.checkpoint.save(tmp_path, model, opt, extra={"x": torch.ones(3).bfloat16()})
    found = reader.load_file(path / "worker-0" / "rank-0.safetensors")
    assert torch.equal(found["model/0.weight"], model[0].weight)
    assert torch.equal(found["extra/x"], torch.ones(3).bfloat16())


def test_sha256_of_a_file_is_that_of_the_manifest(tmp_path):
    model, opt = build(Alone())
    path = palsgd.checkpoint.save(tmp_path, model, opt)
    manifest = json.loads((path / "manifest.json").read_text())
    [entry] = manifest["files"]
    said = subprocess.run(["sha256sum", path / entry["file"]], capture_output=True, check=True)
    assert said.stdout.decode().split()[0] == entry["sha256"]
    assert manifest["workers"] == 1
    assert manifest["settings"]["sync_every"] == H
    assert "torch" in manifest["versions"]


# -- nothing is run, and nothing parsed unseen ---------------------------------------------------


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def rogue(mark):
    return pickle.dumps(Evil(mark))


def with_checksums(folder, name, data):
    """A file whose manifest was forged to fit."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    for entry in manifest["files"]:
        if entry["file"] == name:
            entry |= {"size": len(data), "sha256": step_folders.hashlib.sha256(data).hexdigest()}
    (folder / name).write_bytes(data)
    path.write_text(json.dumps(manifest | {"sha256": step_folders._checksum(manifest)}))


@pytest.mark.parametrize("forged", [False, True], ids=["damaged", "forged"])
@pytest.mark.parametrize("what", ["pickle", "torch.save", "deep", "header"])
def test_a_file_with_code_in_it_is_refused_and_runs_nothing(tmp_path, what, forged):
    mark = tmp_path / "ran"
    model, opt = build(Alone())
    path = palsgd.checkpoint.save(tmp_path / "saves", model, opt)
    name = "worker-0/rank-0.safetensors"
    torch.save(Evil(mark), tmp_path / "evil.pt")
    deep = b"[" * 200_000
    data = {
        "pickle": rogue(mark),
        "torch.save": (tmp_path / "evil.pt").read_bytes(),
        "deep": len(deep).to_bytes(8, "little") + deep,
        "header": (2**62).to_bytes(8, "little") + b"{}",
    }[what]
    if forged:
        with_checksums(path, name, data)
    else:
        (path / name).write_bytes(data)
    with pytest.raises(
        ValueError, match=r"rank-0.safetensors has|laid out as safetensors"
    ) as error:
        palsgd.checkpoint.load(tmp_path / "saves", *build(Alone()))
    assert "\n" not in str(error.value)
    assert not mark.exists()


def test_a_folder_of_an_earlier_release_is_refused_with_the_way_and_not_read(tmp_path):
    mark = tmp_path / "ran"
    old = tmp_path / "old" / "worker-0"
    old.mkdir(parents=True)
    (old / ".metadata").write_bytes(rogue(mark))
    (old / "__0_0.distcp").write_bytes(rogue(mark))
    with pytest.raises(ValueError, match=r"by an earlier release.*load_state_dict") as error:
        palsgd.checkpoint.load(tmp_path / "old", *build(Alone()))
    assert "\n" not in str(error.value)
    assert not mark.exists()


def test_a_folder_without_manifest_is_no_save(tmp_path):
    model, opt = build(Alone())
    path = palsgd.checkpoint.save(tmp_path, model, opt)
    (path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"step-0 is damaged \(.*manifest.json is missing"):
        palsgd.checkpoint.load(tmp_path, *build(Alone()))
    [found] = palsgd.checkpoint.find(tmp_path)
    assert (found.step, found.whole, found.workers) == (0, False, 0)


# -- errors --------------------------------------------------------------------------------------


def test_another_model_is_one_line(tmp_path):
    palsgd.checkpoint.save(tmp_path, *build(Alone()))
    model = torch.nn.Linear(2, 2)
    opt = palsgd.DiLoCo(
        model, torch.optim.AdamW(model.parameters()), sync_every=H, transport=Alone()
    )
    with pytest.raises(ValueError, match="step-0 is of another model") as error:
        palsgd.checkpoint.load(tmp_path, model, opt)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_made_is_an_oserror_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"worker 0 could not save.*file/saves: Not a directory"):
        palsgd.checkpoint.save(tmp_path / "file" / "saves", *build(Alone()))


def test_the_file_stays_as_large_however_many_syncs_there_were(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "HISTORY", 50)
    model, opt = build(Alone(), sync_every=1)
    sizes = []
    for clock in (150, 450):
        advance(model, opt, clock)
        path = palsgd.checkpoint.save(tmp_path, model, opt)
        sizes.append((path / "worker-0" / "rank-0.safetensors").stat().st_size)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)
    ledger = opt.ledger
    assert (ledger.syncs, ledger.recorded, len(ledger.history)) == (450, 450, 50)
    assert ledger.history[0]["clock"] == 401
    assert "450 syncs, the last 50 of them in ledger.history" in str(ledger)
    again = build(Alone(), sync_every=1)
    palsgd.checkpoint.load(tmp_path, *again)
    np.testing.assert_equal(again[1].ledger.as_dict(), ledger.as_dict())
