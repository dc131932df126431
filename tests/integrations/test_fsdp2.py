"""Workers of two processes that hold shards of the model, in a loop as torchtitan has it and under
accelerate, against workers of one process that hold it whole."""

import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import palsgd
from support.launched import launched
from support.namespaces import bytes_so_far, needs_namespaces, world_alone
from support.pages import code_blocks, executed, section

pytestmark = pytest.mark.slow
PAGE = "docs/integrations.md"
RULES = dict(sync_every=8, mix_prob=0.25, seed=3)
STEPS = 24
# Sums over the ranks of a worker are added up in another order than those over a joint batch.
CLOSE = dict(rtol=1e-9, atol=1e-11)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 3)
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def network(seed=0, width=6):
    torch.manual_seed(seed)
    return Net(width)


def rows(count=40, width=6):
    draw = torch.Generator().manual_seed(5)
    return torch.randn(count, width, generator=draw, dtype=torch.float64)


def loss_of(model, batch):
    return (model(batch) - batch[:, :3]).square().mean()


def batches_of(rank, ranks=4, width=6):
    """As accelerate deals batches of two rows out to its processes."""
    return rows(width=width).split(2)[rank::ranks]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def vector(model):
    return torch.cat([whole(p.detach()).reshape(-1) for p in model.parameters()]).numpy()


# -- workers of one process --------------------------------------------------------------------


def unsharded(accumulate=1, max_norm=1.0, wrapped=False, **rules):
    """The end, and the global model after each gradient step. A wrapped model has its gradients
    averaged in the warm-up before they are clipped."""
    worker = dist.get_rank()
    pairs = zip(batches_of(2 * worker), batches_of(2 * worker + 1), strict=True)
    model, seen = DistributedDataParallel(network()) if wrapped else network(), {}
    opt = palsgd.PALSGD(model, adamw(model), **(RULES | rules))
    for place, batch in enumerate(palsgd.until([*map(torch.cat, pairs)], opt, steps=STEPS)):
        (loss_of(model, batch) / accumulate).backward()
        if (place + 1) % accumulate == 0:
            clip_grad_norm_(model.parameters(), max_norm)
            opt.step()
            opt.zero_grad()
            with opt.anchor_weights():
                seen[opt.gradient_steps] = vector(model)
    return vector(model), (opt.clock, opt.gradient_steps, opt.synced), seen


def check_equal(got, want):
    """`got` has a row for each of four ranks, `want` one for each of two workers."""
    for rank, (weights, stands) in enumerate(got):
        twin, theirs, _ = want[rank // 2]
        np.testing.assert_allclose(weights, twin, **CLOSE)
        np.testing.assert_array_equal(weights, got[0][0])  # synced
        assert stands == theirs


# -- a loop of one's own -----------------------------------------------------------------------


def of_the_page():
    (own, by_accelerate) = code_blocks(section(PAGE, "FSDP2"))
    return executed(PAGE, own), by_accelerate


def in_shards(seed=0, width=6, **rules):
    """The model, its optimizer and the mesh, as the page makes them."""
    found, _ = of_the_page()
    start = network(seed, width).state_dict()
    return found["in_shards"](lambda: Net(width), start, 2, **(RULES | rules))


def page_job(**rules):
    model, opt, _ = in_shards(**rules)
    found, _ = of_the_page()
    found["train_shards"](model, opt, batches_of(dist.get_rank()), loss_of, STEPS)
    return vector(model), (opt.clock, opt.gradient_steps, opt.synced)


@pytest.mark.parametrize("rules", [{}, dict(delay=2), dict(warmup_steps=5)], ids=str)
def test_the_loop_of_the_page_ends_at_the_weights_of_unsharded_workers(world, rules):
    got = world.run(page_job, workers=4, **rules)
    check_equal(got, world.run(unsharded, workers=2, **rules))


def train(model, opt, *, stop=None):
    """To the end, or until so many gradient steps are taken."""
    own = batches_of(dist.get_rank())
    feed = [own[(opt.gradient_steps + i) % len(own)] for i in range(STEPS)]
    for batch in palsgd.until(feed, opt, steps=STEPS):
        loss_of(model, batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if opt.gradient_steps == stop:
            return


def by_palsgd(folder, model, opt, mesh, *, load=False):
    act = palsgd.checkpoint.load if load else palsgd.checkpoint.save
    act(folder, model, opt)


def by_torch(folder, model, opt, mesh, *, load=False):
    """As torchtitan saves: torch's files, here of each worker by itself."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, state = get_state_dict(model, opt)
    found = {"model": weights, "optimizer": state}
    place = dict(
        checkpoint_id=f"{folder}/worker-{opt.transport.worker}",
        process_group=mesh["inside"].get_group(),
    )
    if not load:
        dcp.save(found, **place)
        return
    dcp.load(found, **place)
    set_state_dict(model, opt, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


WAYS = {"palsgd": by_palsgd, "torch": by_torch}


def resumed_job(folder, way):
    """A run that is saved within a round and goes on in new objects, and one that just goes on.
    Also the global model at that moment, and as a file has it."""
    model, opt, mesh = in_shards()
    train(model, opt, stop=10)
    assert not opt.synced
    WAYS[way](folder, model, opt, mesh)
    file = palsgd.checkpoint.save_model(folder, opt)
    dist.barrier()
    train(model, opt)
    again, other, mesh = in_shards(seed=9)
    WAYS[way](folder, again, other, mesh, load=True)
    assert other.gradient_steps == 10
    train(again, other)
    return vector(model), vector(again), (opt.clock, other.clock), saved_in(file, model)


def saved_in(file, model):
    from safetensors.torch import load_file

    found = load_file(file)
    return torch.cat([found[name].reshape(-1) for name, _ in model.named_parameters()]).numpy()


@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_loop_goes_on_within_a_round_and_its_model_file_is_the_global_model(
    world, tmp_path, way
):
    pytest.importorskip("safetensors")
    got = world.run(resumed_job, workers=4, folder=str(tmp_path), way=way)
    *_, seen = world.run(unsharded, workers=2)[0]
    for one, other, clocks, saved in got:
        np.testing.assert_array_equal(one, other)
        assert clocks == (STEPS, STEPS)
        np.testing.assert_allclose(saved, seen[10], **CLOSE)


# -- what is exchanged ---------------------------------------------------------------------------

WIDTH = 256


def sent(how):
    """The kernel's count of 16 steps, and the ledger's. `alone`: the workers know nothing of
    each other. `averaged`: they are copies that average every gradient."""
    if how == "palsgd":
        model, opt, _ = in_shards(width=WIDTH, mix_prob=0.0)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "inside"))
        model = network(width=WIDTH)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["inside"] if how == "alone" else mesh)
        opt = adamw(model)
    dist.barrier()
    began = bytes_so_far()
    for batch in batches_of(dist.get_rank(), width=WIDTH)[:4] * 4:
        loss_of(model, batch).backward()
        opt.step()
        opt.zero_grad()
    dist.barrier()
    by_kernel = bytes_so_far() - began
    own = torch.tensor([float(opt.ledger.bytes_on_the_wire) if how == "palsgd" else 0.0])
    dist.all_reduce(own)
    return by_kernel, own.item()


@needs_namespaces
def test_between_workers_in_shards_there_are_the_bytes_of_the_syncs_alone():
    with world_alone(workers=4) as alone:
        counts = {
            how: alone.run(sent, workers=4, how=how)[0] for how in ("palsgd", "alone", "averaged")
        }
    between = counts["palsgd"][0] - counts["alone"][0]
    assert between == pytest.approx(counts["palsgd"][1], rel=0.1)
    assert between < (counts["averaged"][0] - counts["alone"][0]) / 4


# -- accelerate ----------------------------------------------------------------------------------


@contextmanager
def sharding_allowed():
    """accelerate shards on accelerators alone. Inside, a CPU passes for one."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    with launched():
        warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)  # accelerate does
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        yield


def prepared(seed=0, accumulate=1, workers=2, **rules):
    """What the page makes: the accelerator, and what palsgd has prepared with it."""
    from palsgd.integrations.accelerate import prepare

    _, block = of_the_page()
    accelerator = executed(PAGE, block)["sharding_accelerator"](
        workers, 4 // workers, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"], cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    accelerator.gradient_accumulation_steps = accumulate
    model, loader = network(seed), torch.utils.data.DataLoader(rows(), batch_size=2)
    inner = adamw(model)
    return accelerator, *prepare(accelerator, model, inner, loader, **(RULES | rules))


def train_with_accelerate(accelerator, model, opt, loader, max_norm=1.0, on_step=None):
    for batch in palsgd.until(loader, opt, steps=STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            opt.step()
            opt.zero_grad()
        if on_step is not None:
            on_step()


def accelerate_job(accumulate=1, max_norm=1.0, **rules):
    with sharding_allowed():
        found = prepared(accumulate=accumulate, **rules)
        train_with_accelerate(*found, max_norm=max_norm)
        opt = found[2].optimizer
        assert all(isinstance(p, DTensor) for p in found[1].parameters())
        return vector(found[1]), (opt.clock, opt.gradient_steps, opt.synced)


@pytest.mark.parametrize(
    "how", [{}, dict(accumulate=5, max_norm=0.05), dict(warmup_steps=5), dict(delay=2)], ids=str
)
def test_accelerates_shards_end_at_the_weights_of_unsharded_workers(world, how):
    pytest.importorskip("accelerate")
    got = world.run(accelerate_job, workers=4, **how)
    check_equal(got, world.run(unsharded, workers=2, wrapped=True, **how))


def resumed_by_accelerate(folder):
    """Saved within a round; ten iterations are two passes over the data."""
    from accelerate.utils import merge_fsdp_weights

    folder, local = Path(folder), {}
    with sharding_allowed():
        accelerator, model, opt, loader = prepared()

        def save():
            if opt.optimizer.gradient_steps == 10 and not local:
                local["synced"], local["before"] = opt.optimizer.synced, vector(model)
                accelerator.save_state(folder)
                local["after"] = vector(model)

        train_with_accelerate(accelerator, model, opt, loader, on_step=save)
    with sharding_allowed():
        found = prepared(seed=9)
        found[0].load_state(folder)
        assert found[2].optimizer.gradient_steps == 10
        train_with_accelerate(*found)
        merge_fsdp_weights(str(folder / "pytorch_model_fsdp_0"), str(folder / "merged"))
    names = sorted(path.name for path in folder.iterdir() if "optim" in path.name)
    merged = saved_in(folder / "merged" / "model.safetensors", model)
    return vector(model), vector(found[1]), local, merged, names


def test_accelerates_shards_go_on_within_a_round_and_their_files_are_the_global_model(
    world, tmp_path
):
    pytest.importorskip("accelerate")
    got = world.run(resumed_by_accelerate, workers=4, folder=str(tmp_path))
    *_, seen = world.run(unsharded, workers=2)[0]
    for one, other, local, merged, names in got:
        np.testing.assert_array_equal(one, other)
        assert not local["synced"]
        np.testing.assert_array_equal(local["before"], local["after"])
        np.testing.assert_allclose(merged, seen[10], **CLOSE)
        assert names == []


def refused(kind):
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from palsgd.integrations.accelerate import prepare

    with launched() if kind == "on CPUs" else sharding_allowed():
        version = 1 if kind == "FSDP 1" else 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # accelerate's, of its first version
            plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = network()
        prepare(accelerator, model, adamw(model), **RULES)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("one model", "ParallelismConfig(dp_replicate_size=WORKERS"),
        ("FSDP 1", "fsdp_version=2"),
        ("on CPUs", "leave out fsdp_plugin"),
    ],
)
def test_shards_that_palsgd_cannot_train_are_refused_with_the_remedy(world, kind, said):
    pytest.importorskip("accelerate")
    for outcome in world.outcomes(refused, workers=2, kind=kind):
        assert outcome.error == "ValueError", outcome.trace
        assert said in outcome.message
