"""What makes a run wrong is told on every worker before it spreads: frozen parameters and buffers
that differ, parameters that change after the optimizer was built, inf and nan in the warm-up."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import palsgd
from palsgd.untrained import contents_digest
from support.problems import mse
from support.stepping import take_step


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr)


def data(worker, step, width=4):
    generator = torch.Generator().manual_seed(100 * worker + step)
    return torch.randn(8, width, generator=generator), torch.randn(8, 3, generator=generator)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# -- frozen parameters and buffers ---------------------------------------------------------------


class Parts(nn.Module):
    """A frozen layer, a trained one, and buffers that the forward pass leaves alone."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4), nn.Linear(4, 3)
        self.frozen.to(dtype).requires_grad_(False)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("steps", torch.tensor([3, 4]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.trained(self.frozen(x.to(self.frozen.weight.dtype)).to(x.dtype))


def change(model, what):
    with torch.no_grad():
        if what == "frozen":
            model.frozen.weight[0, 1] += 1
        if what == "order of frozen":
            model.frozen.weight.copy_(model.frozen.weight[[1, 0, 2, 3]])
        if what == "buffer":
            model.table[2] += 1
        if what == "integer buffer":
            model.steps[0] = 9
        if what == "order of a buffer":
            model.steps.copy_(model.steps.flip(0))
        if what == "scratch":
            model.scratch[0] = 7


def untrained_job(kind, what, warmup, wrapped=False, dtype=torch.float32, then=None):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Parts(dtype)
    shown = DistributedDataParallel(model, init_sync=False) if wrapped else model
    if rank == 1:
        change(model, what)
    rules = dict(sync_every=4, warmup_steps=warmup) if kind is palsgd.DiLoCo else {}
    opt = kind(shown, torch.optim.SGD(model.trained.parameters(), lr=0.05), **rules)
    if then is not None:
        model.load_state_dict(then)
    for step in range(9):
        mse(shown, data(rank, step)).backward()
        opt.step()
        opt.zero_grad()
    return opt.clock


WRONG = {
    "frozen": "frozen parameters",
    "order of frozen": "frozen parameters",
    "buffer": "buffers",
    "integer buffer": "buffers",
    "order of a buffer": "buffers",
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize(
    ("kind", "warmup"), [(palsgd.DiLoCo, 0), (palsgd.DiLoCo, 2), (palsgd.DDP, math.inf)]
)
def test_what_is_not_trained_is_compared_with_the_first_message(world, kind, warmup, what):
    where = "the first step (clock 0)" if warmup else "the start of the local phase (clock 0)"
    for got in world.outcomes(untrained_job, workers=3, kind=kind, what=what, warmup=warmup):
        assert got.error == "ConsensusError", got.trace
        assert f"worker 1 of 3 has other {WRONG[what]} than the rest at {where}" in got.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_frozen_parameters_of_another_precision_are_compared(world, dtype):
    job = dict(kind=palsgd.DiLoCo, what="frozen", warmup=0, dtype=dtype)
    for got in world.outcomes(untrained_job, workers=2, **job):
        assert got.error == "ConsensusError", got.trace


def test_a_wrapped_model_that_was_not_made_equal_is_told_when_the_local_phase_starts(world):
    job = dict(kind=palsgd.DiLoCo, what="frozen", warmup=2, wrapped=True)
    for got in world.outcomes(untrained_job, workers=2, **job):
        assert got.error == "ConsensusError", got.trace
        assert "frozen parameters than the rest at the start of the local phase (clock 2)" in (
            got.message
        )


def test_buffers_that_are_not_saved_may_differ(world):
    job = dict(kind=palsgd.DiLoCo, what="scratch", warmup=2)
    assert world.run(untrained_job, workers=2, **job) == [9, 9]


@pytest.mark.parametrize("what", ["frozen", "buffer"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_values_that_are_loaded_after_the_optimizer_was_built_are_the_ones_that_count(
    world, what, warmup
):
    torch.manual_seed(5)
    job = dict(kind=palsgd.DiLoCo, what=what, warmup=warmup, then=Parts().state_dict())
    assert world.run(untrained_job, workers=2, **job) == [9, 9]


def test_a_digest_sees_every_byte_and_its_place():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        x = (torch.randn(3, 7) * 9).to(dtype)
        whole = contents_digest([x])
        assert contents_digest([x.clone()]) == whole == contents_digest([x.t().contiguous().t()])
        for i in range(21):
            other = x.clone()
            other.view(-1)[i] = not bool(other.view(-1)[i]) if dtype == torch.bool else 77
            assert contents_digest([other]) != whole
    x = torch.randn(5, 2)
    assert contents_digest([x]) != contents_digest([x[[1, 0, 2, 3, 4]]])
    assert contents_digest([x, x + 1]) != contents_digest([x + 1, x])
    assert contents_digest([x.view(-1)[1:5]]) == contents_digest(
        [x.view(-1)[1:5].clone()]
    )  # at an odd place
    long = torch.arange(3 << 20, dtype=torch.float64)
    assert contents_digest([long]) != contents_digest(
        [long.roll(1 << 20)]
    )  # pieces that change places
    assert contents_digest([None, torch.empty(0), torch.empty(2, device="meta")]) == 0


# -- parameters that change after the optimizer was built ----------------------------------------


def later(what, model, inner):
    if what == "unfrozen":
        model[0].requires_grad_(True)
    if what == "frozen":
        model[2].bias.requires_grad_(False)
    if what == "added":
        model[0].requires_grad_(True)
        inner.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
    if what == "double":
        model.double()
    if what == "half":
        model.half()
    if what == "replaced":
        model[2] = nn.Linear(4, 3)


LATER = {
    "unfrozen": "2 parameter(s) were unfrozen or added to inner after the optimizer was built",
    "frozen": "1 parameter(s) were frozen or taken out of inner (2.bias) after",
    "added": "2 parameter(s) were unfrozen or added to inner after the optimizer was built",
    "double": "parameter 2.weight became torch.float64 on cpu after the optimizer was built",
    "half": "parameter 2.weight became torch.float16 on cpu after the optimizer was built",
    "replaced": "parameter 2.weight is no longer the model's: it was replaced after the optimizer",
}


def later_job(what, rules, wrapped=False, steps=8):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    shown = DistributedDataParallel(model) if wrapped else model
    held = model[2].parameters() if what == "added" else model.parameters()
    inner = torch.optim.SGD(held, lr=0.05)
    opt = palsgd.DiLoCo(shown, inner, sync_every=4, **rules) if rules else palsgd.DDP(shown, inner)
    for step in range(steps):
        if step == 2:
            before = opt.clock, flat(model)
            later(what, model, inner)
        x, y = (t.to(next(model.parameters())) for t in data(rank, step))
        nn.functional.mse_loss(model(x), y).backward()
        try:
            opt.step()
        except ValueError as error:
            return str(error), opt.clock, before[0], torch.equal(flat(model).float(), before[1])
        opt.zero_grad()
    return "", opt.clock, 0, True


@pytest.mark.parametrize("what", [name for name in LATER if name != "replaced"])
@pytest.mark.parametrize("rules", [dict(warmup_steps=5), {}], ids=["warm-up", "DDP"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_late_change_is_told_in_the_warm_up_before_a_step_is_taken(world, what, rules, wrapped):
    job = dict(what=what, rules=rules, wrapped=wrapped)
    for said, clock, before, same in world.run(later_job, workers=2, **job):
        assert LATER[what] in said
        assert clock == before == 2
        assert same or what == "half"  # which rounds


@pytest.mark.parametrize("what", LATER)
def test_a_late_change_is_told_at_the_next_sync_before_anything_is_sent(world, what):
    rules = dict(warmup_steps=0)
    for said, clock, _, _ in world.run(later_job, workers=2, what=what, rules=rules):
        assert LATER[what] in said
        assert clock == (2 if what == "added" else 4)


def test_a_group_that_is_added_late_is_told_before_a_step_that_mixes():
    """Its tensors have no anchor to be pulled to."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    inner = torch.optim.SGD(model[1].parameters(), lr=0.05)
    opt = palsgd.PALSGD(model, inner, sync_every=8, mix_prob=0.5, transport=palsgd.Alone())
    take_step(model, opt, data(0, 0))
    later("added", model, inner)
    clock = opt.clock
    with pytest.raises(ValueError, match=r"2 parameter\(s\) were unfrozen or added to inner"):
        take_step(model, opt, data(0, 1))
    assert opt.clock == clock


def test_a_change_before_the_first_step_is_told_by_the_first_step(world):
    model = nn.Linear(4, 3)
    opt = palsgd.LocalSGD(model, sgd(model), sync_every=4, transport=palsgd.Alone())
    model.double()
    with pytest.raises(ValueError, match=r"became torch\.float64 on cpu"):
        opt.run_until(8)


# -- inf and nan in the warm-up ------------------------------------------------------------------


class Cube(nn.Module):
    """Its gradient is nan at a weight of 0, where its loss is finite."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.linear(x))


def nan_job(policy, kind, wrapped, bad, broken=math.nan, bucket_mb=128.0, **rules):
    """Train with a gradient that is not finite on worker 1 in the `bad` steps."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Cube()
    shown = DistributedDataParallel(model) if wrapped else model
    if kind is palsgd.DiLoCo:
        rules = dict(sync_every=4, warmup_steps=6) | rules
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    opt = kind(shown, inner, on_nonfinite=policy, bucket_mb=bucket_mb, **rules)
    events, seen = [], []
    opt.on(palsgd.events.Averaged, lambda event: events.append((event.clock, event.skipped)))
    for step in range(12):
        x, y = data(rank, step)
        loss = mse(shown, (x, y))
        loss = loss * broken if step in bad and rank == 1 else loss
        loss.backward()
        try:
            opt.step()
        except palsgd.NonFiniteError as error:
            return str(error), opt.clock, flat(model), seen
        opt.zero_grad()
        seen.append(flat(model))
    counts = opt.ledger.gradient_steps, opt.ledger.skipped_steps, opt.ledger.warmup_steps
    return counts, opt.clock, seen, events


KINDS = [(palsgd.DDP, False), (palsgd.DDP, True), (palsgd.DiLoCo, False), (palsgd.DiLoCo, True)]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize(("kind", "wrapped"), KINDS)
def test_a_nan_gradient_is_told_on_all_workers_before_the_step(world, kind, wrapped, broken):
    job = dict(policy="raise", kind=kind, wrapped=wrapped, bad=[2], broken=broken)
    for said, clock, weights, seen in world.run(nan_job, workers=2, **job):
        whose = "averaged gradient of all workers" if wrapped else "gradient of worker 1 of 2"
        assert f"the {whose} has inf or nan at " in said
        assert "(clock 2); no worker took the step" in said
        assert clock == 2
        assert torch.equal(weights, seen[-1])
        assert bool(weights.isfinite().all())


@pytest.mark.parametrize("bucket_mb", [128.0, 8 / 2**20])
@pytest.mark.parametrize(("kind", "wrapped"), KINDS)
def test_a_skipped_step_is_skipped_by_all_workers_and_the_clock_ticks(
    world, kind, wrapped, bucket_mb
):
    bad = [0, 2]
    job = dict(policy="skip", kind=kind, wrapped=wrapped, bad=bad, bucket_mb=bucket_mb)
    (first, second) = world.run(nan_job, workers=2, **job)
    warm = 6 if kind is palsgd.DiLoCo else 12
    for counts, clock, seen, events in (first, second):
        assert clock == 12
        assert counts == (12, 2, warm)
        assert events == [(step + 1, step in bad) for step in range(warm)]
        assert torch.equal(seen[1 + 1], seen[1])
        assert bool(torch.stack(seen).isfinite().all())
    for mine, theirs in zip(first[2][:warm], second[2][:warm], strict=True):
        assert torch.equal(mine, theirs)


def test_a_skipped_step_leaves_the_rest_as_a_run_without_that_step(world):
    """The twin never sees the skipped batches: it has the same weights after the same steps."""
    job = dict(kind=palsgd.DDP, wrapped=False)
    [(_, _, seen, _), _] = world.run(nan_job, workers=2, policy="skip", bad=[2], **job)
    torch.manual_seed(0)
    model = Cube()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in (0, 1, 3, 4):
        for worker in (0, 1):
            (mse(model, data(worker, step)) / 2).backward()
        inner.step()
        inner.zero_grad()
    torch.testing.assert_close(flat(model), seen[4], rtol=1e-5, atol=1e-6)


def test_both_engines_skip_the_same_steps(world):
    def shard(worker):
        found = [data(worker, step) for step in range(8)]
        if worker == 1:
            found[2] = (found[2][0] * math.nan, found[2][1])  # which reach the statistics too
        return found

    def run(vectorize, bucket_mb=8 / 2**20):
        return palsgd.simulate(
            workers=2, steps=12, model=Cube, loss=mse, data=shard, vectorize=vectorize,
            method=lambda model: palsgd.DiLoCo(
                model, sgd(model), sync_every=4, warmup_steps=6, on_nonfinite="skip",
                bucket_mb=bucket_mb,
            ),
        )  # fmt: skip

    exact, stacked = run(False), run(True)
    assert stacked.engine == "vectorized"
    for a, b in zip(exact.model.state_dict().values(), stacked.model.state_dict().values()):  # noqa: B905
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a, b)
    for mine, theirs in zip(exact.ledgers, stacked.ledgers, strict=True):
        assert mine.skipped_steps == theirs.skipped_steps == 1
        assert mine.bytes_sent == theirs.bytes_sent
        assert mine.gradient_steps == theirs.gradient_steps


@pytest.mark.parametrize("vectorize", [False, True])
def test_both_engines_refuse_a_nan_gradient_of_a_finite_loss(vectorize):
    def root(model, batch):
        return (model(batch[0]) * batch[1]).abs().sqrt().sum()  # its slope at 0 is inf

    def shard(worker):
        return [(torch.ones(2, 4), torch.full((2, 3), float(worker != 1)))]

    with pytest.raises(palsgd.NonFiniteError, match=r"gradient of .* has inf or nan at .*clock 0"):
        palsgd.simulate(
            workers=2, steps=4, model=lambda: nn.Linear(4, 3), loss=root, data=shard,
            vectorize=vectorize, method=lambda model: palsgd.DDP(model, sgd(model)),
        )  # fmt: skip


def nan_buffer_job(policy):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Cube()
    opt = palsgd.DDP(model, sgd(model), on_nonfinite=policy)
    for step in range(3):
        mse(model, data(rank, step)).backward()
        if step == 1 and rank == 1:
            model.norm.running_var[1] = math.nan
        opt.step()
        opt.zero_grad()
    return opt.ledger.skipped_steps, model.norm.running_var.clone()


def test_a_buffer_that_becomes_nan_in_the_warm_up_is_named(world):
    for got in world.outcomes(nan_buffer_job, workers=2, policy="raise"):
        assert got.error == "NonFiniteError"
        assert "the buffer 'norm.running_var' of worker 1 of 2 has inf or nan" in got.message


def test_a_skipped_step_leaves_the_broken_buffers_out_of_their_mean(world):
    (one, first), (two, second) = world.run(nan_buffer_job, workers=2, policy="skip")
    assert one == two == 1
    assert bool(first.isfinite().all())
    assert torch.equal(first, second)


# -- masks ---------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("unset", torch.full((2,), math.nan))

    def forward(self, x):
        return self.norm(self.linear(x)) @ self.mask.softmax(dim=-1)


def masked_job(warmup, wrapped, bad=False, changes=False):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Masked()
    shown = DistributedDataParallel(model) if wrapped else model
    opt = palsgd.LocalSGD(shown, sgd(model), sync_every=2, warmup_steps=warmup)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(6):
            mse(shown, data(rank, step)).backward()
            if bad and step == 3 and rank == 1:
                model.norm.running_mean[0] = math.inf
            if changes and step == 3:
                model.unset.fill_(1.0 + rank)
            opt.step()
            opt.zero_grad()
    said = [str(each.message) for each in told if "taken for a mask" in str(each.message)]
    return {name: b.clone() for name, b in model.named_buffers()}, opt.rounds, said


@pytest.mark.parametrize(("warmup", "wrapped"), [(0, False), (2, False), (2, True)])
def test_masks_with_inf_and_nan_are_left_alone_and_statistics_are_averaged(world, warmup, wrapped):
    (first, rounds, said), (second, *_) = world.run(
        masked_job, workers=2, warmup=warmup, wrapped=wrapped
    )
    assert rounds == (6 - warmup) // 2
    assert said == []
    assert torch.equal(first["mask"], Masked().mask)
    assert bool(first["unset"].isnan().all())
    for name in ("norm.running_mean", "norm.running_var"):
        assert torch.equal(first[name], second[name])


def test_a_statistic_that_becomes_inf_is_named_on_every_worker(world):
    for got in world.outcomes(masked_job, workers=2, warmup=0, wrapped=False, bad=True):
        assert got.error == "NonFiniteError"
        assert "the buffer 'norm.running_mean' of worker 1 of 2 has inf or nan at" in got.message


def test_a_mask_that_changes_warns_once(world):
    for buffers, _, said in world.run(masked_job, workers=2, warmup=0, wrapped=False, changes=True):
        assert len(said) == 1
        assert "'unset'" in said[0]
        assert buffers["unset"].tolist() in ([1.0, 1.0], [2.0, 2.0])


@pytest.mark.parametrize("warmup", [0, 3])
def test_both_engines_leave_masks_alone(warmup):
    def run(vectorize):
        return palsgd.simulate(
            workers=2, steps=8, model=Masked, loss=mse, vectorize=vectorize,
            data=lambda worker: [data(worker, step) for step in range(8)],
            method=lambda model: palsgd.LocalSGD(
                model, sgd(model), sync_every=4, warmup_steps=warmup
            ),
        )  # fmt: skip

    exact, stacked = run(False), run(True)
    assert stacked.engine == "vectorized"
    for a, b in zip(exact.model.state_dict().values(), stacked.model.state_dict().values()):  # noqa: B905
        torch.testing.assert_close(a, b, equal_nan=True)
    for mine, theirs in zip(exact.ledgers, stacked.ledgers, strict=True):
        assert mine.bytes_sent == theirs.bytes_sent


# -- statistics of a wrapped warm-up -------------------------------------------------------------


def statistics_job(policy):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Cube()
    shown = DistributedDataParallel(model)
    opt = palsgd.DiLoCo(shown, sgd(model), sync_every=4, warmup_steps=3, buffers=policy)
    own = None
    for step in range(5):
        mse(shown, data(rank, step)).backward()
        if step == 2:
            own = model.norm.running_mean.clone()
        opt.step()
        opt.zero_grad()
        if step == 2:
            with opt.anchor_weights():
                shown_mean = model.norm.running_mean.clone()
            local = model.norm.running_mean.clone()
    return own, shown_mean, local


def test_statistics_are_averaged_once_when_the_local_phase_opens_after_a_wrapped_warm_up(world):
    found = world.run(statistics_job, workers=2, policy="average")
    own = [each[0] for each in found]
    assert not torch.equal(own[0], own[1])
    mean = (own[0] + own[1]) / 2
    for _, shown, local in found:
        torch.testing.assert_close(shown, mean)
        assert torch.equal(shown, local)


def test_statistics_stay_local_under_the_policy_local(world):
    for own, _, local in world.run(statistics_job, workers=2, policy="local"):
        assert torch.equal(own, local)


# -- recomputed statistics -----------------------------------------------------------------------


def frozen_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    model[1].eval().requires_grad_(False)
    model[1].running_mean.fill_(5.0)
    return model


@pytest.mark.parametrize("evaluating", [False, True])
def test_recompute_keeps_every_mode_and_the_statistics_of_frozen_norms(evaluating):
    model = frozen_norm()
    opt = palsgd.LocalSGD(
        model, sgd(model), sync_every=1, buffers="recompute", transport=palsgd.Alone()
    )
    mse(model, data(0, 0)).backward()
    opt.step()
    if evaluating:
        model.eval()
    else:
        model[2].eval()
    modes = [m.training for m in model.modules()]
    opt.recompute_buffers([data(0, step)[0] for step in range(3)])
    assert [m.training for m in model.modules()] == modes
    with opt.anchor_weights():
        assert model[1].running_mean.tolist() == [5.0] * 3
        inputs = [model[1].eval()(model[0](data(0, step)[0])) for step in range(3)]
        if not evaluating:  # no dropout: the plain mean over the batches
            mean = torch.stack([x.mean(dim=0) for x in inputs]).mean(dim=0)
            torch.testing.assert_close(model[3].running_mean, mean.detach())


# -- numbers of a method -------------------------------------------------------------------------


class Weighted(palsgd.Method):
    """Local SGD in which one worker's weight is not finite."""

    bad = "weight"

    def payload(self, w):
        nan = torch.where(torch.as_tensor(w.worker) == 1, math.nan, 1.0).double()
        nan = nan if nan.dim() else float(nan)
        part = palsgd.Part("model", reduction="weighted")
        if self.bad == "weight":
            return palsgd.Payload(parts=(part,), weight=nan)
        return palsgd.Payload(parts=(part,), scalars={"loss": nan})


class Scalared(Weighted):
    bad = "scalar"


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("method", [Weighted, Scalared])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_nan_weight_or_scalar_is_seen_at_the_sync_that_sends_it(method, vectorize, policy):
    def run():
        return palsgd.simulate(
            workers=2, steps=4, model=lambda: nn.Linear(4, 3), loss=mse, vectorize=vectorize,
            data=lambda worker: [data(worker, step) for step in range(4)],
            method=lambda model: palsgd.LocalOptimizer(
                model, sgd(model), method=method(), sync_every=4, on_nonfinite=policy
            ),
        )  # fmt: skip

    if policy == "raise":
        with pytest.raises(palsgd.NonFiniteError, match=r"worker 1 of 2 has inf or nan .*round 0"):
            run()
    else:
        assert all(bool(p.isfinite().all()) for p in run().model.parameters())
