"""The same code on a GPU. Skipped where there is none."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import palsgd
from support.cases import RULES, expected
from support.problems import batches, linear, mse, net, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def job(steps, fused=False, **rules):
    model = linear().cuda()
    inner = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, fused=fused)
    opt = palsgd.PALSGD(model, inner, outer=palsgd.nesterov(lr=0.3, momentum=0.8), **rules)
    data = [(a.cuda(), y.cuda()) for a, y in batches()]
    train(model, opt, data, steps)
    return global_vector_on_cpu(model, opt), opt.ledger.as_dict()


def global_vector_on_cpu(model, opt):
    with opt.anchor_weights():
        return (
            torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().cpu().numpy()
        )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_gpu_workers_match_algorithm_1(world, workers, fused):
    got = world.run(
        job, workers=workers, steps=35, warmup_steps=5, draws="balanced", fused=fused, **RULES
    )
    want = expected("adamw", "nesterov", workers, 35, "balanced", warmup_steps=5)
    for weights, ledger in got:
        np.testing.assert_allclose(weights, want, rtol=1e-9, atol=1e-12)
        assert ledger["gradient_s"] >= 0
        assert ledger["sync_s"] >= 0


def nccl_job():
    group = dist.new_group(backend="nccl")
    torch.manual_seed(0)
    model = net().cuda()
    opt = palsgd.PALSGD(
        model, torch.optim.SGD(model.parameters(), lr=0.01), group=group,
        sync_every=4, mix_prob=0.2, mix_rate=1.0, warmup_steps=3,
    )  # fmt: skip
    train(model, opt, [(a.float().cuda(), y.float().cuda()) for a, y in batches()], 19)
    return opt.clock, opt.rounds


def test_an_nccl_group_trains(world):
    assert world.run(nccl_job, workers=1) == [(19, 4)]


def amp_job():
    torch.manual_seed(0)
    model = net().cuda()
    opt = palsgd.PALSGD(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        sync_every=4, mix_prob=0.2, mix_rate=1.0,
    )  # fmt: skip
    scaler, skipped = torch.amp.GradScaler("cuda", init_scale=2.0**40), 0
    for a, y in palsgd.until(batches(dtype=torch.float32), opt, steps=12):
        clock, before = opt.clock, global_vector_on_cpu(model, opt)
        with torch.autocast("cuda", torch.float16):
            loss = mse(model, (a.cuda(), y.cuda()))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if opt.clock == clock:
            skipped += 1
            np.testing.assert_array_equal(before, global_vector_on_cpu(model, opt))
    return opt.clock, skipped


def test_a_step_that_gradscaler_skips_leaves_clock_and_model_untouched(world):
    for clock, skipped in world.run(amp_job, workers=2):
        assert clock == 12
        assert skipped > 0


def lag_job(steps=35, **rules):
    model = linear().cuda()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    opt = palsgd.PALSGD(
        model, inner, outer=palsgd.nesterov(lr=0.7, momentum=0.5), sync_every=6, mix_prob=0.3,
        mix_rate=2.0, seed=11, draws="independent", **rules,
    )  # fmt: skip
    train(model, opt, [(a.cuda(), y.cuda()) for a, y in batches()], steps)
    return global_vector_on_cpu(model, opt), opt.ledger.as_dict()


@pytest.mark.parametrize("compress", [None, "bf16", "int8", "int4", "topk:0.2"])
@pytest.mark.parametrize(("delay", "fragments"), [(0, 1), (4, 1), (2, 3)])
def test_gpu_workers_overlap_and_compress_as_the_simulator_does(world, delay, fragments, compress):
    rules = dict(delay=delay, fragments=fragments, compress=compress)
    one, other = world.run(lag_job, workers=2, **rules)
    np.testing.assert_array_equal(one[0], other[0])

    def method(model):
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return palsgd.PALSGD(
            model, inner, outer=palsgd.nesterov(lr=0.7, momentum=0.5), sync_every=6, mix_prob=0.3,
            mix_rate=2.0, seed=11, draws="independent", **rules,
        )  # fmt: skip

    result = palsgd.simulate(
        workers=2, steps=35, model=linear, loss=mse, data=lambda k: iter(batches(k) * 20),
        method=method, vectorize=False, device="cuda",
    )  # fmt: skip
    weights = torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])
    np.testing.assert_allclose(one[0], weights.double().cpu().numpy(), rtol=0, atol=1e-9)
    assert result.ledger.bytes_sent == one[1]["bytes_sent"]


def auto_job():
    model = net().cuda()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    opt = palsgd.DiLoCo(model, inner, sync_every=palsgd.Auto(least=4, most=16))
    train(model, opt, [(a.float().cuda(), y.float().cuda()) for a, y in batches()], 60)
    return opt.ledger.interval


def test_gpu_workers_measure_and_agree_on_an_interval(world):
    one, other = world.run(auto_job, workers=2)
    assert one == other
    assert one["step_s"] > 0
    assert one["sync_s"] > 0


def checkpoint_job(folder, fused, **rules):
    """Straight on, and from a save in the middle of a round."""
    ends, data = [], [(a.float().cuda(), y.float().cuda()) for a, y in batches()] * 8
    for resumes in (False, True):
        model = net(seed=resumes).cuda()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        opt = palsgd.DiLoCo(model, inner, sync_every=6, **rules)
        if resumes:
            loaded = palsgd.checkpoint.load(folder, model, opt)
            assert torch.equal(loaded.extra["seen"], torch.arange(3))
        for batch in data[opt.gradient_steps : 30]:
            mse(model, batch).backward()
            opt.step()
            opt.zero_grad()
            if opt.clock == 15 and not resumes:
                seen = torch.arange(3, device="cuda")
                palsgd.checkpoint.save(folder, model, opt, extra={"seen": seen})
        ends.append(global_vector_on_cpu(model, opt))
    return ends


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "rules",
    [{}, dict(compress="int8", delay=4), dict(compress="topk:0.2", delay=4), dict(offload=True)],
    ids=str,
)
def test_gpu_workers_go_on_from_a_checkpoint_bit_for_bit(world, tmp_path, fused, rules):
    for straight, resumed in world.run(
        checkpoint_job, workers=2, folder=str(tmp_path), fused=fused, **rules
    ):
        np.testing.assert_array_equal(straight, resumed)
