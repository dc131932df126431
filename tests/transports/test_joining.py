"""Ranks that are started again agree on a part of the store that dead ones know nothing of."""

import json
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from palsgd.process_groups import _agreed_prefix, device_and_backend
from support.patience import patient


def prefixes(store, ranks, world, seed):
    """What each rank agrees on, each started at an instant of its own."""
    found, rng = {}, random.Random(seed)
    delays = {rank: rng.uniform(0, 0.2) for rank in ranks}

    def join(rank):
        time.sleep(delays[rank])
        found[rank] = _agreed_prefix(store, rank, world, patient(30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_agree_and_on_another_name_each_time_they_are_started(seed):
    store, names = dist.HashStore(), []
    for attempt in range(3):
        found = prefixes(store, range(3), 3, seed + 10 * attempt)
        assert len(set(found.values())) == 1
        names.append(found[0])
    assert len(set(names)) == 3


def test_a_rank_does_not_join_dead_ones_and_names_those_that_did_not_come():
    store = dist.HashStore()
    prefixes(store, range(3), 3, seed=0)  # they died since
    with pytest.raises(RuntimeError, match=r"^rank 1, 2 of 3 did not come within 0.3 s"):
        _agreed_prefix(store, 0, 3, 0.3)


@pytest.mark.parametrize("text", ["", "[", json.dumps(["a"]), "{}", "[" * 100_000, "\ud83d"])
def test_what_somebody_else_wrote_into_the_store_is_passed_over(text):
    store = dist.HashStore()
    store.set("palsgd/join/1", text.encode("utf-8", "surrogatepass"))
    assert len(set(prefixes(store, range(2), 2, seed=0).values())) == 1


def test_ranks_that_chose_different_backends_are_told_so_on_all_of_them():
    store, said = dist.HashStore(), {}

    def join(rank, backend):
        with pytest.raises(ValueError, match="give join") as error:
            _agreed_prefix(store, rank, 2, patient(30), backend)
        said[rank] = str(error.value)

    threads = [threading.Thread(target=join, args=each) for each in enumerate(["nccl", "gloo"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[0] == said[1]
    assert said[0].startswith("rank 1 uses gloo, and rank 0 uses nccl; ")


@pytest.mark.parametrize(
    ("place", "ranks", "gpus", "wanted"),
    [
        (0, 2, 0, ("cpu", "gloo")),
        (1, 2, 1, ("cuda:0", "gloo")),  # two processes share a GPU
        (1, 2, 2, ("cuda:1", "nccl")),
        (2, 3, 8, ("cuda:2", "nccl")),
    ],
)
def test_nccl_is_for_processes_that_have_a_gpu_each(monkeypatch, place, ranks, gpus, wanted):
    chosen = []
    monkeypatch.setenv("LOCAL_RANK", str(place))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device, backend = device_and_backend()
    assert (str(device), backend) == wanted
    assert chosen == ([device] if gpus else [])
