"""opt.eval() shows the global model, opt.train() goes back; and inner optimizers that have both."""

import copy

import numpy as np
import pytest
import torch

import palsgd
from support import schedule_free
from support.problems import (
    batches,
    global_vector,
    linear,
    net,
    regression_gradient,
    regression_start,
    vector,
)
from support.schedule_free import ScheduleFreeSGD
from support.stepping import build, sgd, take_step

LR = 0.05


def alone(model, **rules):
    rules = dict(sync_every=4, transport=palsgd.Alone()) | rules
    return palsgd.LocalSGD(model, sgd(model, momentum=0.9), **rules)


def trained(steps=6, **rules):
    model = linear()
    opt = alone(model, **rules)
    for batch in (batches(0) * 3)[:steps]:
        take_step(model, opt, batch)
    return model, opt


def test_eval_shows_what_anchor_weights_shows_and_train_goes_back_bit_for_bit():
    model, opt = trained()
    local, expected = vector(model), global_vector(model, opt)
    opt.eval()
    np.testing.assert_array_equal(vector(model), expected)
    opt.eval()  # the second changes nothing
    np.testing.assert_array_equal(vector(model), expected)
    opt.train()
    np.testing.assert_array_equal(vector(model), local)
    opt.train()
    np.testing.assert_array_equal(vector(model), local)
    assert not np.array_equal(local, expected)


def test_buffers_are_those_of_the_last_sync_between_eval_and_train():
    model = net()
    opt = alone(model)
    for batch in (batches(0, torch.float32) * 2)[:6]:
        take_step(model, opt, batch)
        if opt.synced:
            synced = [b.clone() for b in model.buffers()]
    local = [b.clone() for b in model.buffers()]
    opt.eval()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), synced, strict=True))
    opt.train()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), local, strict=True))
    assert not torch.equal(local[0], synced[0])


def test_train_without_eval_changes_nothing():
    model, opt = trained()
    before = vector(model)
    opt.train()
    np.testing.assert_array_equal(vector(model), before)


def test_evaluations_between_steps_leave_the_training_as_it_is():
    ends = []
    for evaluates in (False, True):
        model = linear()
        opt = alone(model)
        for batch in batches(0) * 3:
            opt.train()  # as Hugging Face's Trainer does at every step
            take_step(model, opt, batch)
            if evaluates:
                opt.eval()
        opt.train()
        ends.append(vector(model))
    np.testing.assert_array_equal(*ends)


def test_a_step_after_eval_is_refused_with_the_way_back():
    _, opt = trained()
    opt.eval()
    clock = opt.clock
    with pytest.raises(RuntimeError, match=r"step\(\) after eval\(\).*call opt.train\(\) first"):
        opt.step()
    assert opt.clock == clock
    opt.train()
    opt.step()


def test_eval_inside_anchor_weights_is_refused():
    _, opt = trained()
    with opt.anchor_weights(), pytest.raises(RuntimeError, match="leave the with block first"):
        opt.eval()


def test_anchor_weights_after_eval_shows_the_same_and_stays():
    model, opt = trained()
    local = vector(model)
    opt.eval()
    shown = vector(model)
    np.testing.assert_array_equal(global_vector(model, opt), shown)
    np.testing.assert_array_equal(vector(model), shown)
    opt.train()
    np.testing.assert_array_equal(vector(model), local)


def test_until_goes_back_to_training():
    model, opt = trained()
    opt.eval()
    for batch in palsgd.until(batches(0), opt, steps=12):
        take_step(model, opt, batch)
    assert opt.clock == 12


def test_finish_after_eval_syncs_the_local_model():
    ends = []
    for evaluates in (False, True):
        model, opt = trained()
        if evaluates:
            opt.eval()
        opt.finish()
        ends.append(vector(model))
    np.testing.assert_array_equal(*ends)


def test_a_state_and_a_checkpoint_saved_after_eval_are_those_of_training(tmp_path):
    model, opt = trained()
    local, clock = vector(model), opt.clock
    opt.eval()
    shown = vector(model)
    palsgd.checkpoint.save(tmp_path, model, opt)
    np.testing.assert_array_equal(vector(model), shown)  # still shown
    fresh = linear()
    again = alone(fresh)
    palsgd.checkpoint.load(tmp_path, fresh, again)
    np.testing.assert_array_equal(vector(fresh), local)
    np.testing.assert_array_equal(global_vector(fresh, again), shown)
    assert again.clock == clock


def test_a_state_loaded_after_eval_leaves_the_loaded_weights_alone():
    model, opt = trained()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    saved = vector(model)
    take_step(model, opt, batches(0)[0])
    opt.eval()
    model.load_state_dict(weights)
    opt.load_state_dict(state)
    opt.train()
    np.testing.assert_array_equal(vector(model), saved)


@pytest.mark.usefixtures("alone")
def test_eval_during_the_warmup_shows_the_local_model():
    model, opt = build(warmup_steps=4)
    take_step(model, opt, batches(0)[0])
    before = vector(model)
    opt.eval()
    np.testing.assert_array_equal(vector(model), before)
    opt.train()
    take_step(model, opt, batches(0)[1])
    assert opt.clock == 2


# -- inner optimizers with a mode of their own -----------------------------------------------------


def schedule_free_worker(steps, average_state=("z",), **rules):
    """The evaluation weights at the end, and the local model after train()."""
    model = linear()
    inner = ScheduleFreeSGD(model.parameters(), lr=LR)
    rules = dict(sync_every=4, average_state=average_state) | rules
    opt = palsgd.LocalSGD(model, inner, **rules)
    data, early = batches(), None
    for t in range(steps):
        take_step(model, opt, data[t % len(data)])
        if t == 1:  # before the first sync
            opt.eval()
            early = vector(model)
            opt.train()
    opt.eval()
    assert not inner.param_groups[0]["training"]
    shown = vector(model)
    saved = opt.state_dict()
    opt.train()
    assert inner.param_groups[0]["training"]
    return early, shown, vector(model), saved, model.state_dict()


@pytest.mark.parametrize("fragments", [1, 3])
def test_schedule_free_workers_evaluate_one_model_which_is_the_twins(world, fragments):
    got = world.run(schedule_free_worker, workers=2, steps=10, fragments=fragments)
    shown, local = schedule_free.local_sgd(
        regression_start(), regression_gradient, workers=2, steps=10, H=4, lr=LR
    )
    for k, (early, found, trained, _, _) in enumerate(got):
        if fragments == 1:  # fragments are synced at other clocks than the twin's
            np.testing.assert_array_equal(early, regression_start())
            np.testing.assert_allclose(found, shown, rtol=0, atol=1e-12)
            np.testing.assert_allclose(trained, local[k], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(got[0][0], got[1][0])
    np.testing.assert_array_equal(got[0][1], got[1][1])
    assert not np.array_equal(got[0][2], got[1][2])


def test_without_the_averaged_state_schedule_free_workers_evaluate_different_models(world):
    got = world.run(schedule_free_worker, workers=2, steps=10, average_state=())
    assert np.abs(got[0][1] - got[1][1]).max() > 1e-6


def resumed_schedule_free(saved, weights, steps):
    rank = torch.distributed.get_rank()
    model = linear()
    model.load_state_dict(weights[rank])
    inner = ScheduleFreeSGD(model.parameters(), lr=LR)
    opt = palsgd.LocalSGD(model, inner, sync_every=4, average_state=("z",))
    opt.load_state_dict(saved[rank])
    data = batches()
    for t in range(steps[0], steps[1]):
        take_step(model, opt, data[t % len(data)])
    opt.eval()
    return vector(model)


def test_a_state_saved_in_evaluation_mode_resumes_bit_for_bit(world):
    whole = world.run(schedule_free_worker, workers=2, steps=15)
    half = world.run(schedule_free_worker, workers=2, steps=10)
    saved, weights = [each[3] for each in half], [each[4] for each in half]
    got = world.run(resumed_schedule_free, workers=2, saved=saved, weights=weights, steps=(10, 15))
    np.testing.assert_array_equal(got[0], whole[0][1])
    np.testing.assert_array_equal(got[1], whole[1][1])


def test_the_exact_simulator_averages_the_state_as_processes_do(world):
    got = world.run(schedule_free_worker, workers=2, steps=12)
    data = [batches(k) for k in range(2)]
    result = palsgd.simulate(
        workers=2, steps=12, model=linear, loss=lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(),
        data=lambda k: iter(data[k] * 9),
        method=lambda m: palsgd.LocalSGD(
            m, ScheduleFreeSGD(m.parameters(), lr=LR), sync_every=4, average_state=("z",)
        ),
    )  # fmt: skip
    assert result.engine == "exact"
    np.testing.assert_array_equal(vector(result.model), got[0][2])


def momentum_job(blend):
    model = linear()
    rules = dict(sync_every=3, average_state=("momentum_buffer",), blend=blend)
    opt = palsgd.LocalSGD(model, sgd(model, momentum=0.9), **rules)
    seen = []
    momenta = lambda: [opt.state[p]["momentum_buffer"].clone() for p in model.parameters()]  # noqa: E731
    opt.inner.register_step_post_hook(lambda *_: seen.append(momenta()))
    for batch in batches()[:3]:
        take_step(model, opt, batch)
    return seen[-1], momenta()


@pytest.mark.parametrize("blend", [None, 0.25])
def test_the_averaged_state_is_the_mean_blended_as_the_model_is(world, blend):
    got = world.run(momentum_job, workers=2, blend=blend)
    for i in range(2):
        mean = (got[0][0][i] + got[1][0][i]) / 2
        for before, after in got:
            expected = mean + (blend or 0) * (before[i] - mean)
            torch.testing.assert_close(after[i], expected, rtol=0, atol=1e-14)


def test_an_inner_optimizer_with_modes_is_refused_unless_its_state_is_named():
    model = linear()
    inner = ScheduleFreeSGD(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match=r"ScheduleFreeSGD has train\(\) and eval\(\).*'z'"):
        alone_with(model, inner)
    alone_with(model, inner, average_state=())
    palsgd.DDP(model, inner, transport=palsgd.Alone())  # it has no local phase


def alone_with(model, inner, **rules):
    return palsgd.LocalSGD(model, inner, sync_every=2, transport=palsgd.Alone(), **rules)


def test_a_list_of_inner_optimizers_passes_both_calls_on_to_those_that_have_them():
    model = linear()
    free = ScheduleFreeSGD([model.weight], lr=LR)
    opt = alone_with(model, [free, torch.optim.SGD([model.bias], lr=LR)], average_state=("z",))
    take_step(model, opt, batches(0)[0])
    opt.eval()
    assert not free.param_groups[0]["training"]
    opt.train()
    assert free.param_groups[0]["training"]


def test_a_name_that_the_inner_optimizer_has_not_is_refused_at_the_first_sync():
    model = linear()
    opt = alone_with(model, sgd(model, momentum=0.9), average_state=("zz",))
    take_step(model, opt, batches(0)[0])
    with pytest.raises(ValueError, match="has no 'zz'; its state has momentum_buffer"):
        take_step(model, opt, batches(0)[0])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (dict(average_state="z"), "must be names"),
        (dict(average_state=("z",), delay=1), "use delay=0"),
    ],
)
def test_settings_of_the_averaged_state_that_cannot_work_are_refused(rules, message):
    model = linear()
    with pytest.raises(ValueError, match=message):
        alone_with(model, sgd(model), **rules)


def test_the_vectorized_engine_says_that_it_does_not_average_inner_state():
    with pytest.raises(ValueError, match="average_state names tensors of the inner optimizer"):
        palsgd.simulate(
            workers=2, steps=4, model=linear, loss=lambda m, b: m(b[0]).sum(),
            data=lambda k: iter(batches(k)), vectorize=True,
            method=lambda m: palsgd.LocalSGD(
                m, sgd(m, momentum=0.9), sync_every=2, average_state=("momentum_buffer",)
            ),
        )  # fmt: skip
