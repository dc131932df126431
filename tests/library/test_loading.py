"""Loading a state of another worker, of a plain optimizer, of another sync, and under other
settings."""

import copy
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import palsgd
from support.core_access import (
    anchor_of,
    outer_state,
    pending_sync,
    residues_of,
    shares_group,
)
from support.problems import batches, linear, mse, vector

ALONE = dict(transport=palsgd.Alone())


def take_steps(model, opt, steps, data=None, on_step=lambda: None):
    data = data or batches(opt.transport.worker)
    for _ in range(steps):
        mse(model, data[opt.gradient_steps % len(data)]).backward()
        opt.step()
        opt.zero_grad()
        on_step()


def train_until(model, opt, clock, on_step=lambda: None):
    data = batches(opt.transport.worker)
    for _ in palsgd.until([None] * 100, opt, steps=clock):
        take_steps(model, opt, 1, data)
        on_step()


def momentum(model, lr=0.05, beta=0.9):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=beta)


def diloco(lr=0.05, beta=0.9, **rules):
    model = linear()
    rules = dict(outer=palsgd.nesterov(0.5, 0.8), sync_every=4) | rules
    return model, palsgd.DiLoCo(model, momentum(model, lr, beta), **rules)


def saved(model, opt):
    return copy.deepcopy((model.state_dict(), opt.state_dict()))


# -- another worker's --------------------------------------------------------------------------


def load_rank_0s(steps):
    """What frameworks do: rank 0's model and optimizer are given to all."""
    model, opt = diloco()
    take_steps(model, opt, steps)
    found = [saved(model, opt) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    weights, state = found[0]
    model, opt = diloco()
    model.load_state_dict(weights)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        opt.load_state_dict(state)
    start = vector(model), anchor_of(opt).numpy().copy()
    take_steps(model, opt, 8)
    with opt.anchor_weights():
        end = vector(model)
    return [str(w.message) for w in seen], start, end, opt.clock, vector(model)


def test_workers_that_load_rank_0s_state_within_a_round_go_on_from_its_global_model(world):
    (none, first, end0, clock0, _), (said, second, end1, clock1, _) = world.run(
        load_rank_0s, workers=2, steps=6
    )
    assert none == []
    assert len(said) == 1
    assert "worker 1 loads the state of worker 0" in said[0]
    assert not np.array_equal(first[0], first[1])  # its own progress
    np.testing.assert_array_equal(second[0], second[1])  # the anchor
    np.testing.assert_array_equal(end0, end1)
    assert clock0 == clock1 == 14


# -- a plain optimizer's -----------------------------------------------------------------------


def test_a_plain_optimizers_state_goes_on_with_clock_0_and_its_moments():
    """Against torch alone: the first round of DiLoCo is the inner optimizer's steps."""
    data = batches(0)
    model = linear()
    inner = momentum(model)
    for batch in data[:3]:
        mse(model, batch).backward()
        inner.step()
        inner.zero_grad()
    twin, opt = diloco(sync_every=8, **ALONE)
    twin.load_state_dict(model.state_dict())
    opt.load_state_dict(inner.state_dict())
    assert (opt.clock, opt.rounds) == (0, 0)
    for batch in data[:3]:
        for each, step in ((model, inner), (twin, opt)):
            mse(each, batch).backward()
            step.step()
            step.zero_grad()
    np.testing.assert_array_equal(vector(twin), vector(model))
    assert opt.clock == 3


def test_a_palsgd_state_in_a_plain_optimizer_is_told_when_it_is_wrapped():
    model, opt = diloco(**ALONE)
    take_steps(model, opt, 3)
    inner = momentum(model)
    inner.load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match="state of a palsgd optimizer") as caught:
        palsgd.DiLoCo(model, inner, sync_every=4, **ALONE)
    assert "load that state into the palsgd optimizer" in str(caught.value)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_ddp_run_goes_on_as_diloco_with_any_fragments(fragments):
    model = linear()
    first = palsgd.DDP(model, momentum(model), **ALONE)
    take_steps(model, first, 5)
    again, opt = diloco(fragments=fragments, sync_every=16, **ALONE)
    again.load_state_dict(model.state_dict())
    opt.load_state_dict(first.state_dict(), strict=False)
    assert opt.clock == 5
    take_steps(again, opt, 1)
    with opt.anchor_weights():
        np.testing.assert_array_equal(vector(again), vector(model))


# -- other settings ----------------------------------------------------------------------------


def saved_diloco(steps, **rules):
    model, opt = diloco(**(ALONE | rules))
    take_steps(model, opt, steps)
    return saved(model, opt)


def load(state, match=None, **rules):
    model, opt = diloco(**(ALONE | rules))
    model.load_state_dict(state[0])
    if match is None:
        opt.load_state_dict(state[1], strict=False)  # a warning would be an error
    else:
        with pytest.warns(UserWarning, match=match):
            opt.load_state_dict(state[1], strict=False)
    return model, opt


def test_a_longer_warm_up_goes_on_from_the_model_without_anchor_and_outer_state():
    state = saved_diloco(7, warmup_steps=2, sync_every=3)
    model, opt = load(state, "lies in the warm-up of 100 steps", warmup_steps=100, sync_every=3)
    with opt.anchor_weights():
        torch.testing.assert_close(dict(model.state_dict()), dict(state[0]), rtol=0, atol=0)
    assert not opt.outer.state
    take_steps(model, opt, 93)
    assert (opt.clock, opt.rounds, len(opt.ledger.history)) == (100, 1, 1)


def back_in_step(ddp):
    """Within a round, where the workers' models, moments and statistics differ."""

    def built(kind, **rules):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        return model, kind(model, torch.optim.AdamW(model.parameters(), lr=0.01), **rules)

    def steps(model, opt, number):
        data = batches(dist.get_rank(), torch.float32)
        take_steps(model, opt, number, data)

    model, opt = built(palsgd.DiLoCo, sync_every=8)
    steps(model, opt, 13)
    other = (palsgd.DDP, {}) if ddp else (palsgd.DiLoCo, dict(sync_every=8, warmup_steps=32))
    again, resumed = built(other[0], **other[1])
    again.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        resumed.load_state_dict(opt.state_dict(), strict=False)
    loaded = [t.numpy().copy() for t in again.state_dict().values()]
    steps(again, resumed, 18)
    averaged = vector(again)
    steps(again, resumed, 2)
    return loaded, averaged, [str(w.message) for w in seen], resumed.clock


@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "warm-up"])
def test_workers_that_leave_their_rounds_are_equal_and_stay_so_while_gradients_are_averaged(
    world, ddp
):
    one, other = world.run(back_in_step, workers=2, ddp=ddp)
    for mine, theirs in zip(one[0], other[0], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(one[1], other[1])
    for _, _, said, clock in (one, other):
        assert len(said) == 1
        assert "the outer state and each worker's inner state are left out" in said[0]
        assert clock == 33


def test_inner_settings_are_the_new_ones_as_the_outer_ones_are():
    _, opt = load(saved_diloco(3, lr=0.1), lr=0.01, beta=0.5, outer=palsgd.nesterov(0.7, 0.5))
    assert opt.inner.param_groups[0]["lr"] == pytest.approx(0.01)
    assert opt.inner.param_groups[0]["momentum"] == 0.5
    assert opt.outer.param_groups[0]["lr"] == 0.7
    strict = diloco(lr=0.01, **ALONE)[1]
    with pytest.raises(ValueError, match=r"inner_settings.*0\.1.*0\.01"):
        strict.load_state_dict(saved_diloco(3, lr=0.1)[1])


def test_auto_measures_although_the_state_had_a_fixed_h():
    model, opt = load(saved_diloco(6), sync_every=palsgd.Auto(least=2, most=4, rounds=3))
    take_steps(model, opt, 12)
    assert opt.ledger.interval is not None


def test_a_sync_under_way_is_applied_first_under_a_shorter_delay():
    state = saved_diloco(9, sync_every=8, delay=8)
    model, opt = load(state, sync_every=2, delay=2)
    assert pending_sync(opt)
    before = anchor_of(opt).clone()
    take_steps(model, opt, 1)
    assert opt.ledger.history[0]["clock"] == 9
    assert not torch.equal(anchor_of(opt), before)


def test_the_state_of_another_kind_of_outer_optimizer_is_dropped_by_name():
    def adam(params):
        return torch.optim.Adam(params, lr=0.01)

    for before, after in ((palsgd.nesterov(0.5, 0.8), adam), (adam, palsgd.nesterov(0.5, 0.8))):
        model, opt = diloco(outer=before, **ALONE)
        take_steps(model, opt, 6)
        weights, state = saved(model, opt)
        model, opt = diloco(outer=after, **ALONE)
        model.load_state_dict(weights)
        with pytest.warns(UserWarning, match="the outer state does not fit outer="):
            opt.load_state_dict(state, strict=False)
        assert not opt.outer.state
        take_steps(model, opt, 6)
        assert opt.rounds == 3


@pytest.mark.parametrize("fragments", [1, 3])
def test_the_outer_state_is_cut_anew_for_other_fragments(fragments):
    def build(fragments):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3))
        rules = dict(sync_every=6, fragments=fragments, outer=palsgd.nesterov(0.5, 0.8))
        return model, palsgd.DiLoCo(model, momentum(model), **rules, **ALONE)

    model, opt = build(2)
    data = batches(0, torch.float32)
    take_steps(model, opt, 12, data)
    other, resumed = build(fragments)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(opt.state_dict(), strict=False)
    want, got = outer_state(opt).sort().values, outer_state(resumed).sort().values
    assert want.abs().max() > 0
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    take_steps(other, resumed, 6, data)


def residues_and_k(folder, savers, **rules):
    model, opt = diloco(compress="int8", **rules)
    if dist.get_world_size() == savers:
        take_steps(model, opt, 8)
        torch.save(saved(model, opt), f"{folder}/{dist.get_rank()}.pt")
        return len(residues_of(opt)), []
    weights, state = torch.load(f"{folder}/{min(dist.get_rank(), savers - 1)}.pt")
    model.load_state_dict(weights)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        opt.load_state_dict(state, strict=False)
    left = len(residues_of(opt))
    take_steps(model, opt, 8)
    return left, [str(w.message) for w in seen], opt.clock


@pytest.mark.parametrize("delay", [0, 3])
def test_residues_are_dropped_by_name_where_the_number_of_workers_changes(world, tmp_path, delay):
    job = dict(folder=str(tmp_path), savers=2, delay=delay)
    assert all(left for left, _ in world.run(residues_and_k, workers=2, **job))
    for left, said, clock in world.run(residues_and_k, workers=3, **job):
        assert left == 0
        assert any("what codecs had not sent yet does not fit workers=3" in line for line in said)
        assert any("the sync under way does not fit workers=3" in s for s in said) == (delay > 0)
        assert clock == 16


@pytest.mark.parametrize(
    ("kind", "turned_on"),
    [
        (torch.optim.AdamW, "amsgrad"),
        (torch.optim.RMSprop, "centered"),
        (torch.optim.RMSprop, "momentum"),
    ],
)
def test_an_inner_state_that_lacks_a_tensor_for_the_new_settings_is_dropped_by_name(
    kind, turned_on
):
    def build(**settings):
        model = linear()
        return model, palsgd.DiLoCo(model, kind(model.parameters(), **settings), **rules)

    rules = dict(sync_every=4, **ALONE)
    model, opt = build()
    take_steps(model, opt, 6)
    weights, state = saved(model, opt)
    model, opt = build(**{turned_on: True})
    model.load_state_dict(weights)
    with pytest.warns(UserWarning, match=f"the inner state does not fit {turned_on}=True"):
        opt.load_state_dict(state, strict=False)
    take_steps(model, opt, 6)
    assert opt.rounds == 3


def test_momentum_is_turned_on_where_there_is_no_inner_state_to_drop():
    model, opt = load(saved_diloco(6, beta=0.0), beta=0.9)  # a warning would be an error
    take_steps(model, opt, 6)
    assert all("momentum_buffer" in kept for kept in opt.inner.state.values())


@pytest.mark.parametrize("begins_with_sgd", [True, False])
def test_the_state_of_another_kind_of_inner_optimizer_is_dropped_by_name(begins_with_sgd):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def build(inner):
        model = linear()
        return model, palsgd.DiLoCo(model, inner(model), sync_every=4, **ALONE)

    before, after = (sgd, adamw) if begins_with_sgd else (adamw, sgd)
    model, opt = build(before)
    take_steps(model, opt, 6)
    opt.param_groups[0]["lr"] /= 2  # half of the way down a schedule
    weights, state = saved(model, opt)
    model, opt = build(after)
    rate = opt.param_groups[0]["lr"]
    model.load_state_dict(weights)
    with pytest.warns(UserWarning, match="the inner state does not fit inner='.*starts anew"):
        opt.load_state_dict(state, strict=False)
    assert not opt.inner.state
    assert opt.param_groups[0]["lr"] == pytest.approx(rate / 2)
    take_steps(model, opt, 6)
    assert opt.rounds == 3


def test_a_sync_under_way_is_left_out_by_name_where_other_buffers_are_averaged():
    def build(buffers):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        rules = dict(sync_every=8, delay=3, buffers=buffers)
        return model, palsgd.DiLoCo(model, momentum(model), **rules, **ALONE)

    data = batches(0, torch.float32)
    for before, after in (("local", "average"), ("average", "recompute")):
        model, opt = build(before)
        take_steps(model, opt, 9, data)
        assert pending_sync(opt)
        weights, state = saved(model, opt)
        model, opt = build(after)
        model.load_state_dict(weights)
        with pytest.warns(UserWarning, match="the sync under way does not fit buffers="):
            opt.load_state_dict(state, strict=False)
        assert not pending_sync(opt)
        take_steps(model, opt, 11, data)
        assert opt.rounds == 1  # that of the next sync


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
@pytest.mark.parametrize("cuts", [(1, 2), (2, 1)], ids=str)
def test_fragments_may_change_before_each_was_synced_once(steps, cuts):
    """Two tensors of one size are two pieces, under one fragment as under two."""

    def build(fragments):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)])
        rules = dict(sync_every=4, fragments=fragments, outer=palsgd.nesterov(0.5, 0.8))
        return model, palsgd.DiLoCo(model, momentum(model), **rules, **ALONE)

    def train(model, opt, steps):
        for x, _ in (2 * batches(0, torch.float32))[:steps]:
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

    model, opt = build(cuts[0])
    train(model, opt, steps)
    synced = bool(opt.outer.state)
    weights, state = saved(model, opt)
    model, opt = build(cuts[1])
    model.load_state_dict(weights)
    opt.load_state_dict(state, strict=False)
    assert [bool(kept) for kept in opt.outer.state.values()] == [True, True] * synced
    train(model, opt, 8)
    assert opt.clock == steps + 8


@pytest.mark.parametrize("changed", [dict(lr=0.01), dict(weight_decay=0.1), dict(momentum=0.5)])
def test_an_optimizer_is_copied_after_a_hyper_parameter_has_changed(changed):
    model, opt = diloco(**ALONE)
    take_steps(model, opt, 5)
    opt.param_groups[0].update(changed)
    twin = copy.deepcopy(opt)
    assert changed.items() <= twin.param_groups[0].items()
    for each in (opt, twin):
        take_steps(each.model, each, 6)
    np.testing.assert_array_equal(vector(twin.model), vector(model))
    opt.load_state_dict(twin.state_dict())  # it has the settings of the original


@pytest.mark.parametrize("steps", [0, 5])
def test_an_optimizer_is_copied_anywhere_in_a_one_cycle_schedule(steps):
    def one_cycle(opt):
        return torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=50)

    model, opt = diloco(scheduler=one_cycle, **ALONE)
    take_steps(model, opt, steps)
    twin = copy.deepcopy(opt)
    for each in (opt, twin):
        take_steps(each.model, each, 6)
        assert each.clock == steps + 6
    np.testing.assert_array_equal(vector(twin.model), vector(model))


# -- schedules of the learning rate --------------------------------------------------------------


def cosine(steps):
    return lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)


def one_cycle(steps):
    return lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=steps)


def halving(steps):
    return lambda opt: torch.optim.lr_scheduler.StepLR(opt, steps, 0.5)


def in_sequence(steps):
    def build(opt):
        first = torch.optim.lr_scheduler.LinearLR(opt, 0.5, total_iters=3)
        return torch.optim.lr_scheduler.SequentialLR(opt, [first, cosine(steps)(opt)], [3])

    return build


SCHEDULES = [cosine, one_cycle, halving, in_sequence]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_of_other_settings_is_refused_where_the_load_is_strict(kind):
    _, state = saved_diloco(6, scheduler=kind(40))
    for other in (kind(80), None):
        opt = diloco(scheduler=other, **ALONE)[1]
        with pytest.raises(ValueError, match=r"other settings.*scheduler: saved '.*40"):
            opt.load_state_dict(state)
    diloco(scheduler=kind(40), **ALONE)[1].load_state_dict(state)


@pytest.mark.parametrize("lr", [0.05, 0.02])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_of_other_settings_goes_on_at_the_saved_step_with_its_own(kind, lr):
    state = saved_diloco(6, scheduler=kind(40))
    model, opt = load(state, scheduler=kind(50), lr=lr)
    other, began_so = diloco(scheduler=kind(50), lr=lr, **ALONE)
    take_steps(other, began_so, 6)
    for _ in range(30):
        mine, theirs = opt.param_groups[0], began_so.param_groups[0]
        assert (mine["lr"], mine["momentum"]) == (theirs["lr"], theirs["momentum"])
        take_steps(model, opt, 1)
        take_steps(other, began_so, 1)


def test_a_schedule_that_only_one_side_has_is_named():
    state = saved_diloco(6, scheduler=cosine(40))
    _, opt = load(state, "scheduler=None.*, so the learning rate stays")
    assert 0 < opt.param_groups[0]["lr"] < 0.05
    _, opt = load(
        saved_diloco(6), "saved None.*, so the schedule begins anew", scheduler=cosine(40)
    )
    assert opt.param_groups[0]["lr"] == 0.05


def shorter_rounds(sync_every, at_sync):
    model, opt = palsgd_run(sync_every=16)
    data = batches()
    take_steps(model, opt, 3, data)
    while at_sync and not opt.synced:
        take_steps(model, opt, 1, data)
    weights, state = saved(model, opt)
    model, opt = palsgd_run(sync_every=sync_every)
    model.load_state_dict(weights)
    try:
        opt.load_state_dict(state, strict=False)
    except ValueError as error:
        return str(error)
    train_until(model, opt, 40)
    return opt.clock


@pytest.mark.parametrize("sync_every", [4, 16])
def test_shorter_rounds_within_a_round_of_steps_without_data_are_refused(world, sync_every):
    for got in world.run(shorter_rounds, workers=2, sync_every=sync_every, at_sync=True):
        assert got == 40
    for got in world.run(shorter_rounds, workers=2, sync_every=sync_every, at_sync=False):
        if sync_every == 16:
            assert got == 40
        else:
            assert "under sync_every=4 (saved 16) there is a sync at clock 4" in got
            assert "save right after a sync" in got
            assert "\n" not in got


def other_rounds_of_diloco():
    model, opt = diloco(sync_every=16)
    take_steps(model, opt, 6)
    weights, state = saved(model, opt)
    model, opt = diloco(sync_every=4)
    model.load_state_dict(weights)
    opt.load_state_dict(state, strict=False)
    train_until(model, opt, 20)
    return opt.clock


def test_rounds_may_change_anywhere_where_every_step_has_a_gradient(world):
    for got in world.run(other_rounds_of_diloco, workers=2):
        assert got == 20


# -- the same iteration ------------------------------------------------------------------------


def palsgd_run(**rules):
    model = linear()
    rules = dict(sync_every=8, mix_prob=0.4, mix_rate=2.0, seed=3) | rules
    return model, palsgd.PALSGD(model, momentum(model), **rules)


def save_everywhere(iterations, clock=40, **rules):
    """States after each of the first iterations, whether they may be saved, and how runs from them
    end. No run is alive beside another, as optimizers of one group would compare places anyway."""
    states, allowed, end = saved_run(iterations, clock, **rules)
    ends = []
    for state in states:
        ends.append(resumed_run(state, end, clock, **rules))
        dist.barrier()
    return allowed, ends


def saved_run(iterations, clock, **rules):
    model, opt = palsgd_run(**rules)
    states, allowed = [], []

    def keep():
        if len(states) < iterations:
            states.append(saved(model, opt))
            allowed.append(opt.may_save)

    train_until(model, opt, clock, on_step=keep)
    return states, allowed, vector(model)


def resumed_run(state, end, clock, **rules):
    model, opt = palsgd_run(**rules)
    assert not shares_group(opt)
    model.load_state_dict(state[0])
    opt.load_state_dict(state[1])
    try:
        train_until(model, opt, clock)
    except palsgd.ConsensusError as error:
        return str(error)
    return "same" if np.array_equal(vector(model), end) else "other"


@pytest.mark.parametrize("rules", [{}, dict(fragments=2), dict(delay=4)], ids=str)
def test_balanced_draws_may_save_after_any_iteration_and_go_on_bit_for_bit(world, rules):
    for allowed, ends in world.run(save_everywhere, workers=2, iterations=13, **rules):
        assert all(allowed)
        assert set(ends) == {"same"}


@pytest.mark.parametrize("rules", [{}, dict(fragments=2)], ids=str)
def test_independent_draws_say_when_all_may_save_and_other_states_are_told_apart(world, rules):
    got = world.run(save_everywhere, workers=2, iterations=13, draws="independent", **rules)
    assert got[0][0] == got[1][0]
    for allowed, ends in got:
        assert 0 < sum(allowed) < len(allowed)
        for may, end in zip(allowed, ends, strict=True):
            assert (end == "same") if may else end.startswith("checkpoints of different syncs")


def refused_save(folder):
    model, opt = palsgd_run(draws="independent")
    said = []

    def save():
        if not (opt.may_save or opt.synced):
            with pytest.raises(RuntimeError, match="cannot save at clock") as caught:
                palsgd.checkpoint.save(folder, model, opt)
            said.append(str(caught.value))

    train_until(model, opt, 40, on_step=save)
    return said


def test_a_checkpoint_that_could_not_be_loaded_is_refused(world, tmp_path):
    for said in world.run(refused_save, workers=2, folder=str(tmp_path)):
        assert said
        assert all("save after an iteration at which opt.may_save is True" in s for s in said)


# -- a sync under way --------------------------------------------------------------------------


def reload_in_flight(late):
    model, opt = diloco(delay=3)
    take_steps(model, opt, 2)
    early = saved(model, opt)
    take_steps(model, opt, 1)
    if dist.get_rank() == 1 and late:
        time.sleep(1.0)
    take_steps(model, opt, 2)
    assert pending_sync(opt)
    model.load_state_dict(early[0])
    opt.load_state_dict(early[1])
    take_steps(model, opt, 10, batches(opt.transport.worker)[::-1])  # other messages than before
    return opt.clock, anchor_of(opt).numpy().copy(), vector(model)


def test_loading_waits_for_the_sync_that_a_late_peer_still_sends(world):
    want = world.run(reload_in_flight, workers=2, late=False)
    got = world.run(reload_in_flight, workers=2, late=True)
    np.testing.assert_equal(got, want)
    np.testing.assert_array_equal(got[0][1], got[1][1])


class Recording(palsgd.Alone):
    """A lone worker's transport that writes down which exchanges were started and finished."""

    def __init__(self):
        self.started, self.finished = [], []

    def start(self, message):
        self.started.append(message)

    def finish(self, message):
        self.finished.append(message)
        return 0


def test_loading_finishes_the_exchange_whose_memory_it_gives_free():
    transport = Recording()
    model, opt = diloco(delay=3, transport=transport)
    early = saved(model, opt)
    take_steps(model, opt, 5)
    assert (len(transport.started), transport.finished) == (1, [])
    opt.load_state_dict(early[1])
    assert transport.finished == transport.started


# -- two optimizers ----------------------------------------------------------------------------


def two_optimizers(draws):
    (one, first), (other, second) = palsgd_run(draws=draws), palsgd_run(draws=draws, seed=8)
    for _ in range(30):
        take_steps(one, first, 1)
        take_steps(other, second, 1)
    return first.rounds, second.rounds, anchor_of(first).numpy(), anchor_of(second).numpy()


def test_two_optimizers_in_one_process_train_with_balanced_draws(world):
    first, second = world.run(two_optimizers, workers=2, draws="balanced")
    assert first[0] > 3
    np.testing.assert_equal(first, second)


def test_two_optimizers_whose_syncs_cross_are_told_to_use_balanced_draws(world):
    for got in world.outcomes(two_optimizers, workers=2, draws="independent"):
        assert got.error == "ConsensusError"
        assert "two optimizers in one process cross" in got.message
        assert "draws='balanced'" in got.message


def two_groups(draws):
    """Two optimizers, each with a process group of its own."""
    built = [palsgd_run(draws=draws, group=dist.new_group([0, 1]), seed=seed) for seed in (7, 8)]
    for _ in range(30):
        for model, opt in built:
            take_steps(model, opt, 1)
    return [opt.rounds for _, opt in built]


def test_two_optimizers_with_a_group_each_need_balanced_draws(world):
    assert world.run(two_groups, workers=2, draws="balanced")[0][0] > 3
    refused = [
        got
        for draws in ("independent", "paced")
        for got in world.outcomes(two_groups, workers=2, draws=draws)
    ]
    for got in refused:
        assert got.error == "ValueError"
        assert "use draws='balanced' for both" in got.message
