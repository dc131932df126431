"""The transport over torch.distributed: real processes over gloo."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from palsgd.sharding import is_sharded, local_tensor
from palsgd.transports import Message, ProcessGroupTransport, find_transport
from support.exchanges import CODECS, arrays, brought, codec_of, rounds_in_memory, rounds_over


def rounds_job(name):
    return rounds_over(ProcessGroupTransport(), name)


@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, workers) for name in CODECS for workers in (2, 3)] + [("none", 2)],
)
def test_processes_get_the_bits_that_workers_in_memory_get(world, name, workers):
    """Residues of two earlier rounds included. Plain means of three workers are added up in an
    order that gloo chooses, so only those of two are the same bits."""
    expected, sent = rounds_in_memory(name, workers)
    got = world.run(rounds_job, workers=workers, name=name)
    for message, (*found, nbytes) in zip(expected, got, strict=True):
        for mine, theirs in zip(arrays(message), found, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert nbytes == sent


def background_job(name):
    transport = ProcessGroupTransport()
    transport.prepare(torch.device("cpu"))
    codec = codec_of(name)
    now, later = (Message(brought(transport.worker, 0), 7, codec) for _ in range(2))
    transport.start(later)
    sent = transport.exchange(now)  # meanwhile, on the group of the main thread
    assert transport.finish(later) == transport.finish(later) == sent
    return arrays(now), arrays(later)


@pytest.mark.parametrize("name", ["none", "int8", "topk"])
def test_an_exchange_in_the_background_has_the_bits_of_one_at_once(world, name):
    for now, later in world.run(background_job, workers=2, name=name):
        for mine, theirs in zip(now, later, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def gather_job():
    transport = ProcessGroupTransport()
    message = Message(torch.full((3,), 1.0 + transport.worker), gather=True)
    return transport.exchange(message), message.values.tolist(), message.rows.tolist()


def test_a_gather_collects_the_values_of_all_processes(world):
    rows = [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert world.run(gather_job, workers=3) == [(12, row, rows) for row in rows]


def agree_job():
    ProcessGroupTransport().agree({"sync_every": 64 + dist.get_rank()})


def test_a_setting_that_differs_is_named_with_both_values(world):
    for outcome in world.outcomes(agree_job, workers=2):
        assert outcome.error == "ValueError"
        assert "sync_every differs between workers: rank 1 has 65, rank 0 has 64" in outcome.message


def start_job():
    ProcessGroupTransport().start(Message(torch.ones(1)))


def test_a_start_that_was_not_prepared_is_refused_with_the_remedy(world):
    (outcome,) = world.outcomes(start_job, workers=1)
    assert "call prepare(device) on every rank" in outcome.message


def shards_job():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    param = distribute_tensor(torch.arange(4.0), mesh, [Replicate(), Shard(0)])
    transport = find_transport([param], None)
    row, norm = torch.tensor([dist.get_rank()]), torch.tensor([0.5])
    rows = transport.gather_inside(row).tolist()
    transport.sum_over_shards(norm)
    return (
        (is_sharded(param), is_sharded(torch.ones(1)), local_tensor(param).tolist()),
        (transport.worker, transport.workers, transport.rank_inside, rows, float(norm)),
    )


def test_ranks_of_a_sharded_model_are_one_worker_and_add_up_over_its_shards(world):
    got = world.run(shards_job, workers=2)
    assert got[0] == ((True, False, [0.0, 1.0]), (0, 1, 0, [[0], [1]], 1.0))
    assert got[1] == ((True, False, [2.0, 3.0]), (0, 1, 1, [[0], [1]], 1.0))


def parts_job(takes_sum, length):
    ranks = 2
    inside, across = (
        [dist.new_group(group) for group in groups]
        for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    )
    worker, rank = divmod(dist.get_rank(), ranks)
    transport = ProcessGroupTransport(across[rank], inside[worker])
    message = Message(torch.arange(float(length)) + 10 * worker, takes_sum=takes_sum)
    sent = transport.exchange(message)
    message.divide()
    transport.sum_over_shards(message.values)  # copies are not added up
    return message.values.tolist(), sent


@pytest.mark.parametrize("takes_sum", [True, False])
@pytest.mark.parametrize("length", [1, 7])
def test_ranks_that_hold_copies_exchange_one_part_each(world, takes_sum, length):
    got = world.run(parts_job, workers=4, takes_sum=takes_sum, length=length)
    assert all(values == [5.0 + i for i in range(length)] for values, _ in got)
    first = (length + 1) // 2
    assert [sent for _, sent in got] == [4 * first, 4 * (length - first)] * 2


def test_without_a_process_group_the_remedy_is_named():
    with pytest.raises(ValueError, match="init_process_group"):
        find_transport([torch.ones(1)], None)
