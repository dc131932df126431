"""Saved state: what it holds, and that training resumed from it goes on bit for bit."""

import copy
import io
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd.replica import unwrapped
from support.core_access import (
    anchor_of,
    anchor_views,
    fields_of,
    global_buffers,
    with_fields,
)
from support.problems import batches, linear, mse, net, train, vector

WARMUP, H = 3, 5
STEPS = WARMUP + 3 * H + 2  # the last round is cut short
RULES = dict(
    sync_every=H, mix_prob=0.3, mix_rate=2.0, warmup_steps=WARMUP, seed=4, draws="balanced"
)
OUTER = palsgd.nesterov(lr=0.3, momentum=0.8)


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


MODELS = {"net": net, "mlp": mlp}


def decay(t):
    return 1 / (1 + 0.1 * t)


def build(model, method=palsgd.PALSGD, **changes):
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    rules = dict(outer=OUTER, scheduler=partial(LambdaLR, lr_lambda=decay)) | RULES | changes
    return method(model, inner, **rules)


def train_on(model, opt, steps=STEPS, on_step=None):
    """Like problems.train, with the batches a worker would see next after a resume."""
    data = batches(opt.transport.worker, dtype=torch.float32)
    feed = [data[(opt.gradient_steps + i) % len(data)] for i in range(steps)]
    for batch in palsgd.until(feed, opt, steps=steps):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        if on_step:
            on_step()


def state_tensors(optimizer):
    state = optimizer.state_dict()["state"]
    return {
        f"{i}.{name}": value.detach().double().numpy().copy()
        for i, entry in state.items()
        for name, value in entry.items()
        if isinstance(value, torch.Tensor)
    }


TIMES = ("exchange_s", "waiting_s")


def fingerprint(model, opt, counts=True):
    """All that decides how training goes on, and what the ledger has counted."""
    ledger = {k: v for k, v in opt.ledger.as_dict().items() if not k.endswith("_s")}
    history = ledger.pop("history")
    found = dict(
        weights=vector(model),
        buffers=[b.double().numpy().copy() for b in unwrapped(model).buffers()],
        kept_buffers=[b.double().numpy().copy() for b in global_buffers(opt)],
        inner=state_tensors(opt.inner),
        outer=state_tensors(opt.outer),
        anchor=anchor_of(opt).numpy().copy(),
        rates=[group["lr"] for group in opt.param_groups],
        clock=(opt.clock, opt.gradient_steps, opt.rounds, opt.synced),
    )
    if counts:
        found["ledger"] = ledger
        found["history"] = [{k: v for k, v in e.items() if k not in TIMES} for e in history]
    return found


def same(a, b):
    np.testing.assert_equal(a, b)  # nested, exact, and nan equals nan


def to_bytes(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_bytes(blob):
    return torch.load(io.BytesIO(blob))  # with weights_only, torch's safe default


# -- what is saved -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2, WARMUP + 2, STEPS])
def test_a_state_holds_the_keys_of_the_design(steps):
    model = mlp()
    opt = build(model, transport=palsgd.Alone())
    for _ in range(steps):
        mse(model, batches(0, torch.float32)[0]).backward()
        opt.step()
        opt.zero_grad()
    state = opt.state_dict()
    assert set(state) == {"state", "param_groups"}
    assert [g["params"] for g in state["param_groups"]] == [[0, 1, 2, 3]]
    fields = fields_of(opt, state)
    assert {"outer", "anchor", "clock", "config", "worker"} <= set(fields)
    assert fields["clock"] == opt.clock
    assert RULES.items() <= fields["config"].items()
    for p, entry in zip(model.parameters(), state["state"].values(), strict=True):
        assert entry["palsgd"]["anchor"].shape == p.shape


def test_a_state_is_a_snapshot_that_training_on_does_not_change():
    model = net()
    opt = build(model, transport=palsgd.Alone())
    train_on(model, opt, steps=WARMUP + 2 * H)
    state = opt.state_dict()
    with opt.anchor_weights():
        for p, entry in zip(model.parameters(), state["state"].values(), strict=True):
            assert torch.equal(entry["palsgd"]["anchor"], p)
            assert {"exp_avg", "exp_avg_sq", "step", "palsgd"} == set(entry)
            assert "outer/tensors/momentum_buffer" in entry["palsgd"]
    kept = copy.deepcopy(state)
    train_on(model, opt, steps=WARMUP + 4 * H)
    same(
        [t.numpy() if isinstance(t, torch.Tensor) else t for t in leaves(state)],
        [t.numpy() if isinstance(t, torch.Tensor) else t for t in leaves(kept)],
    )
    anchors = [entry["palsgd"]["anchor"] for entry in state["state"].values()]
    assert any(not torch.equal(a, view) for a, view in zip(anchors, anchor_views(opt), strict=True))


def leaves(value):
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in leaves(v)]
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in leaves(v)]
    return [value]


# -- resume ------------------------------------------------------------------------------------


def restore(order, saved, kind):
    """A new model and optimizer, as a new process would build them, and the saved state."""
    model = MODELS[kind](seed=9)  # other weights than the run began with
    if order == "model first":
        model.load_state_dict(saved["model"])
        opt = build(model)
        opt.load_state_dict(saved["opt"])
    elif order == "model last":
        opt = build(model)
        opt.load_state_dict(saved["opt"])
        model.load_state_dict(saved["model"])
    else:
        opt = build(model)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
    return model, opt


def resume_everywhere(order, kind):
    """One run, saved after every step; then a run from each of those states."""
    model, saved, at = MODELS[kind](), [], []
    opt = build(model)

    def save():
        saved.append(to_bytes({"model": model.state_dict(), "opt": opt.state_dict()}))
        at.append((opt.clock, opt.synced, vector(model), fingerprint(model, opt)))

    train_on(model, opt, on_step=save)
    whole, resumed, restored = fingerprint(model, opt), [], []
    for blob in saved:
        model, opt = restore(order, from_bytes(blob), kind)
        restored.append(fingerprint(model, opt))
        train_on(model, opt)
        resumed.append(fingerprint(model, opt))
    return at, restored, whole, resumed


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("order", ["model first", "model last", "between"])
def test_a_resumed_run_equals_the_uninterrupted_one_at_every_clock(world, order, kind):
    got = world.run(resume_everywhere, workers=2, order=order, kind=kind)
    for at, restored, whole, resumed in got:
        assert len(resumed) >= 8
        for one, back in zip(at, restored, strict=True):
            if one[0] >= WARMUP:  # before that there is no anchor yet
                same(back, one[3])
        for one in resumed:
            same(one, whole)
    one, other = got[0][0], got[1][0]
    apart = [not np.array_equal(a[2], b[2]) for a, b in zip(one, other, strict=True)]
    assert sum(apart) >= 4  # mid-round, where workers differ
    assert any(a[0] < WARMUP for a in one)  # and inside the warm-up


def resume_as(first, second, kind="mlp"):
    """Saved by a run whose model is wrapped or plain, resumed by one that is `second`."""

    def wrapped(model, how):
        return DistributedDataParallel(model) if how == "wrapped" else model

    model, saved = wrapped(MODELS[kind](), first), []
    opt = build(model)

    def save():
        saved.append(to_bytes({"model": unwrapped(model).state_dict(), "opt": opt.state_dict()}))

    train_on(model, opt, on_step=save)
    whole, resumed = fingerprint(model, opt, counts=False), []
    for blob in saved:
        state = from_bytes(blob)
        model = wrapped(MODELS[kind](seed=9), second)
        opt = build(model)
        unwrapped(model).load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        train_on(model, opt)
        resumed.append(fingerprint(model, opt, counts=False))
    return whole, resumed


@pytest.mark.parametrize(
    ("first", "second"), [("wrapped", "wrapped"), ("wrapped", "plain"), ("plain", "wrapped")]
)
def test_wrapped_and_plain_models_resume_each_other(world, first, second):
    for whole, resumed in world.run(resume_as, workers=2, first=first, second=second):
        assert len(resumed) >= 8
        for one in resumed:
            same(one, whole)


def test_recomputed_buffers_survive_a_resume():
    data = batches(0, torch.float32)
    model = net()
    opt = build(model, transport=palsgd.Alone(), buffers="recompute")
    train_on(model, opt, steps=WARMUP + H)
    opt.recompute_buffers([a for a, _ in data])
    with opt.anchor_weights():
        want = [b.clone() for b in model.buffers()]
    saved = from_bytes(to_bytes({"model": model.state_dict(), "opt": opt.state_dict()}))
    model = net(seed=9)
    opt = build(model, transport=palsgd.Alone(), buffers="recompute")
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    with opt.anchor_weights():  # a warning that they were not recomputed would be an error
        got = [b.clone() for b in model.buffers()]
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


# -- other settings ----------------------------------------------------------------------------


SAVED_AT = WARMUP + H + 2


def saved_state(steps=SAVED_AT, **changes):
    model = mlp()
    opt = build(model, transport=palsgd.Alone(), **changes)
    train_on(model, opt, steps=steps)
    return opt.state_dict()


OTHER = {
    "sync_every": (H, 7),
    "warmup_steps": (WARMUP, 6),
    "mix_prob": (0.3, 0.25),
    "mix_rate": (2.0, 1.5),
    "draws": ("balanced", "shared"),
    "seed": (4, 5),
    "buffers": ("average", "local"),
    "on_nonfinite": ("raise", "skip"),
    "max_norm": (None, 1.5),
}


@pytest.mark.parametrize("setting", OTHER)
def test_loading_under_another_setting_names_it_with_both_values(setting):
    before, now = OTHER[setting]
    model = mlp()
    opt = build(model, transport=palsgd.Alone(), **{setting: now})
    with pytest.raises(ValueError, match="other settings") as caught:
        opt.load_state_dict(saved_state())
    message = str(caught.value)
    assert setting in message
    assert repr(before) in message
    assert repr(now) in message
    assert "\n" not in message
    for other in set(OTHER) - {setting}:
        assert other not in message
    assert opt.clock == 0  # nothing was loaded
    assert not opt.inner.state


def test_loading_under_several_other_settings_names_each():
    opt = build(
        mlp(), transport=palsgd.Alone(), sync_every=7, seed=5, outer=palsgd.nesterov(lr=0.125)
    )
    with pytest.raises(ValueError, match="sync_every") as caught:
        opt.load_state_dict(saved_state())
    for text in ("seed", "outer", "lr=0.3", "lr=0.125"):
        assert text in str(caught.value)


def test_loading_the_state_of_another_method_names_both():
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    opt = palsgd.DiLoCo(model, inner, sync_every=H, transport=palsgd.Alone())
    with pytest.raises(ValueError, match=r"'PALSGD'.*'DiLoCo'"):
        opt.load_state_dict(saved_state())


def test_loading_the_state_of_another_inner_optimizer_names_both():
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    opt = palsgd.PALSGD(model, inner, outer=OUTER, transport=palsgd.Alone(), **RULES)
    with pytest.raises(ValueError, match=r"'AdamW'.*'SGD'"):
        opt.load_state_dict(saved_state())


def renamed(seed=0):
    model = mlp(seed)
    return nn.Sequential(
        *[m for pair in zip(model, [nn.Identity()] * 3, strict=True) for m in pair]
    )


def test_loading_the_state_of_another_model_names_a_parameter_that_does_not_fit():
    opt = build(renamed(), transport=palsgd.Alone())
    with pytest.raises(ValueError, match=r"2\.|4\."):
        opt.load_state_dict(saved_state())


@pytest.mark.parametrize("setting", OTHER)
def test_strict_false_goes_on_under_the_new_setting(setting):
    now = OTHER[setting][1]
    model = mlp()
    opt = build(model, transport=palsgd.Alone(), **{setting: now})
    clock = SAVED_AT
    opt.load_state_dict(saved_state(), strict=False)
    assert opt.clock == clock
    assert opt.config[setting] == now
    train_on(model, opt, steps=clock + 2 * 7)
    assert math.isfinite(vector(model).sum())
    assert fields_of(opt)["config"][setting] == now


def test_strict_false_changes_the_length_of_the_rounds_that_follow():
    model = mlp()
    opt = build(model, transport=palsgd.Alone(), sync_every=7)
    opt.load_state_dict(saved_state(), strict=False)
    train_on(model, opt, steps=WARMUP + 4 * 7)
    clocks = [entry["clock"] for entry in opt.ledger.history]
    assert clocks[0] == WARMUP + H  # before the change
    assert clocks[-3:] == [WARMUP + 2 * 7, WARMUP + 3 * 7, WARMUP + 4 * 7]


def test_strict_false_goes_on_with_the_new_outer_learning_rate():
    """The message of a strict load says: pass strict=False to go on under the new ones."""
    opt = build(mlp(), transport=palsgd.Alone(), outer=palsgd.nesterov(lr=0.125, momentum=0.5))
    opt.load_state_dict(saved_state(), strict=False)
    assert opt.outer.param_groups[0]["lr"] == 0.125
    assert opt.outer.param_groups[0]["momentum"] == 0.5


def test_strict_false_can_finish_a_palsgd_run_with_ddp():
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    opt = palsgd.DDP(model, inner, transport=palsgd.Alone())
    with pytest.warns(UserWarning, match="training goes on from this worker's model"):
        opt.load_state_dict(saved_state(), strict=False)
    assert opt.clock == SAVED_AT
    train_on(model, opt, steps=SAVED_AT + 3)
    assert opt.clock == SAVED_AT + 3


# -- palsgd.checkpoint -------------------------------------------------------------------------


def checkpoint_everywhere(folder, kind):
    model, at = MODELS[kind](), []
    opt = build(model)

    def save():
        palsgd.checkpoint.save(f"{folder}/{len(at)}", model, opt)
        at.append((opt.clock, vector(model)))

    train_on(model, opt, on_step=save)
    whole, resumed = fingerprint(model, opt), []
    for i, (clock, _) in enumerate(at):
        model = MODELS[kind](seed=9)
        opt = build(model)
        palsgd.checkpoint.load(f"{folder}/{i}", model, opt)
        assert opt.clock == clock
        train_on(model, opt)
        resumed.append(fingerprint(model, opt))
    return at, whole, resumed


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_run_resumed_from_a_checkpoint_folder_equals_the_uninterrupted_one(world, tmp_path, kind):
    got = world.run(checkpoint_everywhere, workers=2, folder=str(tmp_path), kind=kind)
    for _, whole, resumed in got:
        assert len(resumed) >= 8
        for one in resumed:
            same(one, whole)
    pairs = zip(got[0][0], got[1][0], strict=True)
    assert sum(not np.array_equal(a[1], b[1]) for a, b in pairs) >= 4  # workers differ


def save_over(folder):
    model = net()
    opt = build(model)
    train_on(model, opt, steps=WARMUP + H + 2)
    palsgd.checkpoint.save(folder, model, opt)
    train_on(model, opt, steps=WARMUP + 2 * H + 2)
    palsgd.checkpoint.save(folder, model, opt)
    want = fingerprint(model, opt)
    model = net(seed=9)
    opt = build(model)
    palsgd.checkpoint.load(folder, model, opt)
    return want, fingerprint(model, opt)


def test_a_checkpoint_written_over_an_older_one_is_the_newer(world, tmp_path):
    for want, got in world.run(save_over, workers=2, folder=str(tmp_path)):
        same(got, want)


def load_missing(folder):
    model = mlp()
    palsgd.checkpoint.load(folder, model, build(model))


def test_a_missing_checkpoint_is_one_line_that_names_the_folder(world, tmp_path):
    folder = str(tmp_path / "nowhere")
    for rank, got in enumerate(world.outcomes(load_missing, workers=2, folder=folder)):
        assert got.error == "ValueError"
        assert folder in got.message
        assert f"worker {rank}" in got.message
        assert "\n" not in got.message


def load_checkpoint_under(folder, strict):
    model = mlp()
    opt = build(model)
    train_on(model, opt, steps=WARMUP + H + 2)
    palsgd.checkpoint.save(folder, model, opt)
    clock = opt.clock
    model = mlp(seed=9)
    opt = build(model, sync_every=7)
    try:
        palsgd.checkpoint.load(folder, model, opt, strict=strict)
    except ValueError as error:
        return str(error)
    dist.barrier()
    return opt.clock == clock


def test_a_checkpoint_loaded_under_other_settings_names_them(world, tmp_path):
    for got in world.run(load_checkpoint_under, workers=2, folder=str(tmp_path), strict=True):
        assert "sync_every: saved 5, here 7" in got
    for got in world.run(load_checkpoint_under, workers=2, folder=str(tmp_path), strict=False):
        assert got is True


class Interrupted(palsgd.Alone):
    """A lone worker's transport that is stopped once, in the middle of its n-th exchange."""

    def __init__(self, stop_at):
        self.left = stop_at

    def mean(self, message):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return 0


def test_a_sync_that_was_interrupted_is_made_up_for_after_a_resume():
    def build(stop_at):
        model = linear()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, palsgd.DiLoCo(
            model, inner, sync_every=4, outer=palsgd.nesterov(0.5), transport=Interrupted(stop_at)
        )

    data = batches(0) * 4
    whole, opt = build(0)
    train(whole, opt, data, 8)
    model, first = build(2)  # the second exchange: the first opens the local phase
    with pytest.raises(KeyboardInterrupt):
        train(model, first, data, 8)
    assert (first.clock, first.rounds) == (4, 0)
    resumed, second = build(0)
    resumed.load_state_dict(model.state_dict())
    second.load_state_dict(first.state_dict())
    train(resumed, second, data[first.gradient_steps :], 8)
    assert (second.clock, second.rounds) == (8, 2)
    assert torch.equal(resumed.weight, whole.weight)


def test_a_state_from_the_warmup_loaded_into_a_used_optimizer_empties_the_outer_one():
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = palsgd.DiLoCo(model, inner, sync_every=2, warmup_steps=3, transport=palsgd.Alone())
    with pytest.warns(UserWarning, match="the warm-up lasts 3 steps and the run 2"):
        train(model, opt, batches(0), 2)
    early = copy.deepcopy(opt.state_dict())
    train(model, opt, batches(0), 9)
    assert opt.outer.state
    opt.load_state_dict(early)
    assert not opt.outer.state
    assert opt.clock == 2


class Shuffler(list):
    """A loader whose sampler writes down the epochs it is told."""

    def __init__(self, items):
        super().__init__(items)
        self.sampler, self.told = self, []

    def set_epoch(self, epoch):
        self.told.append(epoch)


def test_the_epoch_that_samplers_are_told_goes_on_after_a_resume():
    def build():
        model = linear()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, palsgd.LocalSGD(model, inner, sync_every=4, transport=palsgd.Alone())

    model, opt = build()
    first = Shuffler(batches(0))
    train(model, opt, first, 12)
    assert first.told == [0, 1, 2]
    again, resumed = build()
    resumed.load_state_dict(opt.state_dict())
    second = Shuffler(batches(0))
    train(again, resumed, second, 16)
    assert second.told == [2]


def alone(model):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, palsgd.DiLoCo(model, inner, sync_every=4, transport=palsgd.Alone())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda fields: fields | {"version": 99}, "version 99, and this release reads version"),
        (lambda fields: {k: v for k, v in fields.items() if k != "ledger"}, "lacks ledger"),
    ],
)
def test_what_is_no_state_of_this_release_is_refused_and_changes_nothing(changed, message):
    model, opt = alone(linear())
    state = opt.state_dict()
    state = with_fields(opt, state, changed(fields_of(opt, state)))
    train(model, opt, batches(0), 4)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(state)
    assert opt.clock == 4


def test_the_state_of_another_model_is_refused_and_changes_nothing():
    model, opt = alone(linear())
    train(model, opt, batches(0), 4)
    _, other = alone(mlp())
    with pytest.raises(ValueError, match="parameter group"):
        other.load_state_dict(opt.state_dict())
    assert other.clock == 0
