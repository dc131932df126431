"""What the library does where torch is older or a part of the machine is missing: each probe is
forced to say no, and the results are the same."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import palsgd
from palsgd import sync, warmup
from palsgd.sharding import is_sharded, local_tensor
from support.problems import batches, linear, mse


def trained(model, opt, worker, steps=12):
    for step, batch in enumerate(palsgd.until(batches(worker) * 3, opt, steps=steps)):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        assert step < steps
    with opt.anchor_weights():
        return torch.cat([_whole(p.detach()).reshape(-1) for p in model.parameters()])


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# -- HSDP of an older torch ----------------------------------------------------------------------


def hsdp_job(older):
    """torch up to 2.11 keeps one parameter group in a sharded module's state, later ones a list."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    asked = []
    for module in model.modules() if older is not None else ():
        if hasattr(module, "_get_fsdp_state"):
            _show_as(module, asked, older=older)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = palsgd.DiLoCo(model, inner, sync_every=4, warmup_steps=4)
    for module in model.modules():
        vars(module).pop("_get_fsdp_state", None)
    how = type(opt._worker.warmup.gradient_sync).__name__
    return trained(model, opt, dist.get_rank() // 2), how, len(asked)


def _show_as(module, asked, *, older):
    """Have palsgd see a module's state as another torch has it."""
    state = module._get_fsdp_state()
    one = getattr(state, "_fsdp_param_group", None)
    groups = getattr(state, "_fsdp_param_groups", [one] if one else [])
    shown = dict(_fsdp_param_group=groups[0] if groups else None)
    shown = shown if older else dict(_fsdp_param_groups=groups)

    def get():
        asked.append(module)
        return SimpleNamespace(**shown)

    module._get_fsdp_state = get


@pytest.mark.slow
def test_replicated_shards_are_found_in_the_state_of_an_older_and_of_a_newer_torch(world):
    want = world.run(hsdp_job, workers=4, older=None)
    for older in (True, False):
        for (weights, how, _), (found, same, asked) in zip(
            want, world.run(hsdp_job, workers=4, older=older), strict=True
        ):
            assert how == same == "Hybrid"
            assert asked > 0
            assert torch.equal(weights, found)


# -- programs that never import a part of torch --------------------------------------------------


@pytest.mark.parametrize("module", ["torch.distributed.tensor", "torch.distributed.fsdp"])
def test_a_program_that_has_not_imported_a_part_of_torch_trains_alike(monkeypatch, module):
    def run():
        model = linear()
        opt = palsgd.DiLoCo(
            model, torch.optim.SGD(model.parameters(), lr=0.05), sync_every=4, warmup_steps=2,
            transport=palsgd.Alone(),
        )  # fmt: skip
        assert not is_sharded(model.weight)
        assert local_tensor(model.weight) is model.weight
        return trained(model, opt, 0)

    want = run()
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert list(warmup._replicated_meshes(linear())) == []
    assert torch.equal(run(), want)


# -- an outer step that cannot divide ------------------------------------------------------------


def divide_job(probe, **rules):
    before = sync.can_divide
    sync.can_divide = before if probe else lambda outer: False
    try:
        model = linear()
        opt = palsgd.DiLoCo(
            model, torch.optim.SGD(model.parameters(), lr=0.05), sync_every=4, **rules
        )
        return trained(model, opt, dist.get_rank())
    finally:
        sync.can_divide = before


@pytest.mark.parametrize("rules", [{}, dict(delay=2), dict(fragments=2)], ids=str)
def test_an_outer_step_that_does_not_divide_gives_the_same_bits(world, rules):
    """Fused SGD divides the sum itself; an older torch, or a hook, would not allow that."""
    want = world.run(divide_job, workers=3, probe=True, **rules)
    for mine, other in zip(want, world.run(divide_job, workers=3, probe=False, **rules)):  # noqa: B905
        assert torch.equal(mine, other)


# -- no compiler ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_simulation_runs_uncompiled_where_there_is_no_compiler(caplog):
    import torch._inductor.config as inductor

    def run(compile):
        return palsgd.simulate(
            workers=2, steps=8, model=linear, loss=mse, data=batches, vectorize=True,
            compile=compile,
            method=lambda model: palsgd.DiLoCo(
                model, torch.optim.SGD(model.parameters(), lr=0.05), sync_every=4, warmup_steps=2
            ),
        )  # fmt: skip

    torch._dynamo.reset()
    with (
        caplog.at_level(logging.WARNING, logger="palsgd"),
        inductor.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}),
    ):
        found = run(compile=True)
    torch._dynamo.reset()
    assert "not compiled, because" in caplog.text
    assert found.engine == "vectorized"
    for mine, theirs in zip(
        found.model.parameters(), run(compile=False).model.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def normed():
    return nn.Sequential(linear(), nn.BatchNorm1d(3).double())


@pytest.mark.parametrize("fails_at", ["shared", "own"])
def test_a_program_that_cannot_be_compiled_while_training_leaves_nothing_behind(
    monkeypatch, caplog, fails_at
):
    """Neither in the weights nor in the statistics of BatchNorm, which it has changed already."""

    def run(compile):
        return palsgd.simulate(
            workers=2, steps=8, model=normed, loss=mse, data=batches, vectorize=True,
            compile=compile,
            method=lambda model: palsgd.DiLoCo(
                model, torch.optim.SGD(model.parameters(), lr=0.05), sync_every=4, warmup_steps=2
            ),
        )  # fmt: skip

    def cannot(call, mode=None, dynamic=None):
        asked.append(dynamic)

        def program(params, buffers, batch):
            losses = call(params, buffers, batch)
            if losses.dim() == (2 if fails_at == "shared" else 1):
                raise RuntimeError("no kernel for it")
            return losses

        return program

    asked: list[bool | None] = []
    plain = run(compile=False)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, logger="palsgd"):
        patched.setattr(torch, "compile", cannot)
        patched.setattr(
            "palsgd.simulator.stacked_optimizers.compiled_update", lambda update: update
        )
        found = run(compile=True)
    assert caplog.text.count("not compiled, because no kernel for it") == 1
    assert asked == [False, False], "a program is compiled for one number of workers"
    ours, theirs = found.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
