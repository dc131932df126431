"""The mistakes of a first hour with the library: each is answered by what to do instead."""

import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import palsgd
from support.problems import batches, linear, mse, train
from support.stepping import sgd, take_step


def alone(model=None, **settings):
    model = linear() if model is None else model
    return model, palsgd.PALSGD(model, sgd(model), transport=palsgd.Alone(), **settings)


def told(warned) -> list[str]:
    return [str(each.message) for each in warned]


# -- building ----------------------------------------------------------------------------------


def test_the_parameters_in_place_of_the_model():
    model = linear()
    with pytest.raises(ValueError, match=r"got generator; give the model itself, not its param"):
        palsgd.PALSGD(model.parameters(), sgd(model), transport=palsgd.Alone())


def test_no_inner_optimizer():
    message = r"PALSGD needs a model and an inner optimizer .* PALSGD\(model, torch.optim.AdamW\("
    with pytest.raises(TypeError, match=message):
        palsgd.PALSGD(linear().parameters(), lr=1e-3)


def test_the_class_of_an_inner_optimizer():
    with pytest.raises(ValueError, match=r"must be a torch optimizer, got type; use for instance"):
        palsgd.PALSGD(linear(), torch.optim.AdamW)


def test_no_process_group():
    model = linear()
    with pytest.raises(ValueError, match=r"init_process_group\(\).*torchrun.*palsgd.Alone\(\)"):
        palsgd.PALSGD(model, sgd(model))


def test_a_mix_rate_that_is_too_large():
    with pytest.raises(ValueError, match=r"beta=32, .* for param group 0 .*use mix_rate <= 2"):
        alone(mix_rate=64.0)


def test_a_mix_rate_that_a_schedule_makes_too_large():
    rising = lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 + t)  # noqa: E731
    with pytest.raises(ValueError, match=r"use mix_rate <= .* \(at clock 4, to which"):
        alone(mix_rate=0.45, scheduler=rising)


def test_a_mix_rate_that_is_too_small_to_matter():
    with pytest.warns(UserWarning, match=r"pulls a worker back by 0.013%.*use pull=0.5 instead"):
        alone(mix_rate=4e-5)


def test_a_mix_prob_in_per_cent():
    with pytest.raises(ValueError, match=r"mix_prob=10 must be a number in \[0, 1\).*use 0 for"):
        alone(mix_prob=10)


def test_an_optimizer_of_another_model():
    with pytest.raises(ValueError, match=r"not the model's .*build it from model.parameters\(\)"):
        palsgd.PALSGD(linear(), sgd(linear()), transport=palsgd.Alone())


def test_an_optimizer_object_as_the_outer_one():
    model = linear()
    with pytest.raises(ValueError, match="outer=") as refusal:
        alone(model, outer=sgd(model, momentum=0.9))
    assert str(refusal.value).startswith("outer=an SGD object is not a function")
    assert "palsgd.nesterov(lr=0.7)" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_inner_optimizer_that_needs_a_closure():
    model = linear()
    with pytest.raises(ValueError, match=r"inner=LBFGS evaluates the loss .*torch.optim.AdamW"):
        palsgd.PALSGD(model, torch.optim.LBFGS(model.parameters()), transport=palsgd.Alone())


def test_more_fragments_than_the_model_has_pairs_of_elements():
    model = nn.Linear(2, 1, bias=False)
    with pytest.raises(ValueError, match=r"fragments=2 needs at least 4 elements, .* has 2; use"):
        alone(model, fragments=2)


@pytest.mark.parametrize(
    ("build", "given", "nearest"),
    [
        (palsgd.PALSGD, "sync_evry", "sync_every"),
        (palsgd.DiLoCo, "otuer", "outer"),
        (palsgd.LocalSGD, "warmup_step", "warmup_steps"),
        (palsgd.DDP, "maxnorm", "max_norm"),
        (palsgd.LocalOptimizer, "fragment", "fragments"),
        (palsgd.methods.FedProx, "muh", "mu"),
        (palsgd.methods.SCAFFOLD, "compres", "compress"),
    ],
)
def test_a_misspelt_keyword_gets_the_nearest_name(build, given, nearest):
    model = linear()
    message = f"{build.__name__} got an unexpected keyword '{given}'; did you mean {nearest}\\?"
    with pytest.raises(TypeError, match=message):
        build(model, sgd(model), **{given: 1})


@pytest.mark.parametrize(
    ("build", "given"), [(palsgd.PALSGD, "H"), (palsgd.LocalSGD, "mix_prob"), (palsgd.DDP, "pull")]
)
def test_a_keyword_like_no_other_gets_the_names_there_are(build, given):
    model = linear()
    message = f"{build.__name__} got an unexpected keyword '{given}'; it takes average_state, "
    with pytest.raises(TypeError, match=message):
        build(model, sgd(model), **{given: 1})


# -- the loop ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [dict(steps=4), dict(epochs=1)])
def test_a_plain_optimizer_in_until(steps):
    with pytest.raises(TypeError, match=r"got SGD as its optimizer.*opt = palsgd.PALSGD\(model"):
        palsgd.until(batches(0), sgd(linear()), **steps)


def test_the_inner_optimizer_stepped_in_place_of_the_other():
    model, opt = alone()
    batch = next(palsgd.until(batches(0), opt, steps=4))
    mse(model, batch).backward()
    with pytest.raises(RuntimeError, match=r"own step\(\) was called \(SGD\).*call step\(\) of"):
        opt.inner.step()
    assert opt.clock == 0


def test_a_warm_up_that_is_longer_than_the_run():
    model, opt = alone(warmup_steps=1024)
    with pytest.warns(UserWarning, match=r"lasts 1024 steps and the run 40: no local step will be"):
        train(model, opt, batches(0), 40)


def test_an_iterator_in_place_of_a_loader():
    model, opt = alone(mix_prob=0.0)
    with pytest.raises(ValueError, match=r"ran dry at clock 5 of 20 .*can be iterated again"):
        train(model, opt, iter(batches(0)), 20)


def test_a_parameter_that_is_frozen_in_mid_run():
    model, opt = alone(sync_every=2, mix_prob=0.0)
    take_step(model, opt, batches(0)[0])
    model.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"frozen.*build a new"):
        take_step(model, opt, batches(0)[0])


def test_a_step_inside_anchor_weights():
    model, opt = alone()
    take_step(model, opt, batches(0)[0])
    with opt.anchor_weights(), pytest.raises(RuntimeError, match="leave the with block before"):
        opt.step()


def test_a_step_without_backward():
    _, opt = alone()
    with pytest.warns(UserWarning, match=r"no parameter has a gradient.*call loss.backward\(\)"):
        opt.step()


@pytest.mark.parametrize("bound", ["opt", "inner"])
def test_a_schedule_that_is_stepped_with_the_loop(bound):
    model = linear()
    inner = sgd(model)
    opt = palsgd.PALSGD(model, inner, sync_every=8, mix_prob=0.5, transport=palsgd.Alone())
    bound = {"opt": opt, "inner": inner}[bound]
    schedule = torch.optim.lr_scheduler.LinearLR(bound, 1.0, 0.0, total_iters=40)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for batch in palsgd.until(batches(0), opt, steps=40):
            take_step(model, opt, batch)
            schedule.step()
    (message,) = told(warned)
    assert message.startswith("LinearLR was stepped ")
    assert "give it to the palsgd optimizer as scheduler=" in message


def test_a_schedule_that_is_stepped_once_per_epoch_is_left_in_peace():
    model = linear()
    opt = palsgd.PALSGD(model, sgd(model), sync_every=4, mix_prob=0.5, transport=palsgd.Alone())
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for _ in range(6):
        for batch in batches(0):
            take_step(model, opt, batch)
        schedule.step()
    assert opt.rounds > 4


# -- several workers ---------------------------------------------------------------------------


def built_between(model=None, **settings):
    model = linear() if model is None else model
    return model, palsgd.PALSGD(model, sgd(model), sync_every=6, **settings)


def dropped(ends):
    model, opt = built_between(mix_prob=0.0)
    for batch in batches()[:4]:
        take_step(model, opt, batch)
    if ends == "finish":
        opt.finish()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del opt
        gc.collect()
    return told(warned)


def test_a_loop_that_ends_by_data(world):
    for worker, messages in enumerate(world.run(dropped, workers=2, ends="data")):
        (message,) = messages
        assert message.startswith(f"the last 4 steps of worker {worker} were not synced")
        assert "call opt.finish() after the loop, or use palsgd.until()" in message


def test_a_run_that_finished_is_dropped_in_silence(world):
    assert world.run(dropped, workers=2, ends="finish") == [[], []]


def unequal():
    model, opt = built_between(mix_prob=0.0)
    for batch in (batches() * 4)[: (16, 10)[dist.get_rank()]]:
        take_step(model, opt, batch)


def test_workers_with_unequal_numbers_of_batches(world):
    got, _ = world.outcomes(unequal, workers=2, timeout=8)
    assert got.error == "SyncError", got.trace
    assert "could not exchange with worker 1" in got.message
    assert "it left early" in got.message
    assert "end all loops at one clock with palsgd.until()" in got.message
    assert "GLHF" not in got.message


def unequal_finish():
    model, opt = built_between(mix_prob=0.0)
    for batch in (batches() * 4)[: (16, 10)[dist.get_rank()]]:
        take_step(model, opt, batch)
    opt.finish()


def test_workers_with_unequal_numbers_of_batches_that_call_finish(world):
    for got in world.outcomes(unequal_finish, workers=2, timeout=8):
        assert got.error == "ConsensusError", got.trace
        assert "worker 1 of 2 called finish() while worker 0 came to the sync" in got.message
        assert "palsgd.until()" in got.message


def other_seed():
    torch.manual_seed(dist.get_rank())
    model, opt = built_between(nn.Linear(4, 3).double())
    train(model, opt, batches(), 6)


def test_models_of_different_seeds(world):
    for got in world.outcomes(other_seed, workers=2, timeout=8):
        assert got.error == "ConsensusError", got.trace
        assert "worker 1 of 2 holds another global model" in got.message
        assert "same seed" in got.message
        assert "DistributedDataParallel" in got.message


def other_settings():
    model, opt = built_between(seed=dist.get_rank())
    train(model, opt, batches(), 6)


def test_settings_that_differ(world):
    for got in world.outcomes(other_settings, workers=2, timeout=8):
        assert got.error == "ValueError", got.trace
        assert "seed differs between workers: rank 1 has 1, rank 0 has 0" in got.message


def wrapped_later():
    model, opt = built_between(mix_prob=0.0)
    wrapped = DistributedDataParallel(model)
    for batch in batches() * 2:
        take_step(wrapped, opt, batch)


def test_a_model_that_is_wrapped_in_ddp_after_the_optimizer_was_built(world):
    for got in world.outcomes(wrapped_later, workers=2, timeout=10):
        assert got.error == "ConsensusError", got.trace
        assert "something else averages in every step" in got.message
        assert "call opt.attach(model)" in got.message


def same_data():
    model, opt = built_between(mix_prob=0.0)
    train(model, opt, batches(0), 12)


def test_the_same_data_on_all_workers(world):
    for got in world.outcomes(same_data, workers=2, timeout=10):
        assert got.error == "ConsensusError", got.trace
        assert "these workers train on the same data" in got.message
        assert "DistributedSampler" in got.message


# -- states ------------------------------------------------------------------------------------


def test_a_state_saved_under_another_h():
    _, saved = alone(sync_every=4)
    _, opt = alone(sync_every=8)
    with pytest.raises(ValueError, match=r"sync_every: saved 4, here 8.*strict=False"):
        opt.load_state_dict(saved.state_dict())
