"""Settings, refusals and special moments of the family's methods."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import palsgd
from palsgd import registry
from palsgd.events import Synced
from palsgd.methods.anchordecay import AnchorDecayMethod
from palsgd.methods.easgd import EASGDMethod
from palsgd.methods.fedprox import FedProxMethod
from palsgd.methods.scaffold import SCAFFOLDMethod
from palsgd.methods.slowmo import SlowMoMethod
from support.core_access import anchor_of, method_states
from support.places import ROOT
from support.problems import batches, linear, mse, train, vector

FAMILY = ("FedProx", "EASGD", "SCAFFOLD", "SlowMo", "AnchorDecay")
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


def alone(title, model=None, inner=SGD, inner_lr=0.1, **settings):
    """An optimizer of one worker."""
    model = linear() if model is None else model
    inner = inner(model.parameters(), lr=inner_lr) if callable(inner) else inner
    build = getattr(palsgd.methods, title)
    return model, build(model, inner, **dict(sync_every=4, transport=palsgd.Alone()) | settings)


def simulated(workers, build, steps=16, data=batches, **options):
    return palsgd.simulate(
        workers=workers, steps=steps, model=linear, loss=mse, data=data, method=build,
        vectorize=False, **options,
    )  # fmt: skip


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "settings", "method"),
    [
        ("FedProx", {"mu": 0.02}, FedProxMethod(mu=0.02)),
        ("EASGD", {}, EASGDMethod(rate=None)),
        ("SCAFFOLD", {}, SCAFFOLDMethod(lr=1.0)),
        ("SlowMo", {"lr": 0.9}, SlowMoMethod(momentum=0.5, lr=0.9)),
        ("AnchorDecay", {}, AnchorDecayMethod(decay=0.01)),
    ],
)
def test_a_preset_builds_the_optimizer_of_its_method(title, settings, method):
    _, opt = alone(title, sync_every=64, **settings)
    assert opt.method == method
    assert opt.sync_every == 64
    assert settings.items() <= opt.config.items()


def test_models_are_averaged_by_default_and_anchor_decay_takes_a_nesterov_step():
    outer = {title: alone(title)[1].outer.defaults for title in FAMILY}
    for title in FAMILY:
        found = tuple(outer[title][name] for name in ("lr", "momentum", "nesterov"))
        assert found == ((0.7, 0.5, True) if title == "AnchorDecay" else (1.0, 0, False))


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        (FedProxMethod, {"mu": -0.1}, "mu=-0.1 must be a finite number >= 0"),
        (FedProxMethod, {"mu": math.inf}, "mu=inf must be a finite number >= 0"),
        (FedProxMethod, {"mu": "1"}, "mu='1' must be a finite number >= 0"),
        (EASGDMethod, {"rate": -1.0}, "rate=-1.0 must be a finite number >= 0, or None"),
        (SCAFFOLDMethod, {"lr": 0.0}, "lr=0.0 must be a finite number > 0"),
        (SlowMoMethod, {"momentum": 1.0}, "momentum=1.0 must be a number >= 0 and < 1"),
        (SlowMoMethod, {"lr": math.nan}, "lr=nan must be a finite number > 0"),
        (AnchorDecayMethod, {"decay": 1.5}, "decay=1.5 must be a number >= 0 and < 1"),
    ],
)
def test_a_setting_out_of_its_range_is_refused_with_the_range(method, settings, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        method(**settings)


def test_an_elastic_rate_at_which_models_swing_apart_is_refused():
    def build(rate, model):
        inner = SGD(model.parameters(), lr=0.1)
        return palsgd.methods.EASGD(model, inner, rate=rate, sync_every=4)

    simulated(4, partial(build, 0.4))
    with pytest.raises(ValueError, match=r"^rate=0\.41 makes 4 workers .* use rate <= 0\.4, or"):
        simulated(4, partial(build, 0.41))


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (ADAMW, "with AdamW the displacement over the rates is no gradient"),
        (partial(SGD, momentum=0.9), "with momentum the displacement"),
        (partial(SGD, maximize=True), "with maximize=True"),
    ],
)
def test_scaffold_refuses_an_inner_optimizer_whose_steps_are_no_gradients(inner, reason):
    with pytest.raises(ValueError, match=rf"^SCAFFOLD reads .*{reason}.* use torch\.optim\.SGD"):
        alone("SCAFFOLD", inner=inner)


def test_scaffold_looks_at_every_one_of_several_inner_optimizers():
    model = linear()
    plain, adamw = SGD([model.weight], lr=0.1), ADAMW([model.bias], lr=0.1)
    with pytest.raises(ValueError, match="with AdamW"):
        palsgd.methods.SCAFFOLD(model, [plain, adamw], sync_every=4, transport=palsgd.Alone())


@pytest.mark.parametrize("title", ["EASGD", "SCAFFOLD"])
def test_a_sync_that_cannot_travel_during_steps_is_refused(title):
    with pytest.raises(ValueError, match=rf"^delay=2 means nothing for {title}: .*; leave it out$"):
        alone(title, delay=2)


@pytest.mark.parametrize("title", FAMILY)
def test_compression_and_fragments_are_accepted(title):
    model, opt = alone(title, compress="int8", fragments=2, model=linear(torch.float32))
    train(model, opt, batches(0, torch.float32), 12)
    assert np.isfinite(vector(model)).all()


# -- AnchorDecay -------------------------------------------------------------------------------


def share_left(lr, decay=0.2, **group):
    """How much of a gap to the anchor a step with a gradient of zero leaves."""
    model = linear()
    inner = SGD([{"params": model.parameters(), "lr": lr, **group}])
    _, opt = alone("AnchorDecay", model, inner, decay=decay)
    start = vector(model)
    for gap in (0.0, 0.5):  # the first step sets the anchor
        with torch.no_grad():
            model.weight.add_(gap)
            model.bias.add_(gap)
        (0.0 * model(batches(0)[0][0])).sum().backward()
        opt.step()
    return ((vector(model) - start) / 0.5).mean()


def test_the_decay_is_in_proportion_to_the_initial_learning_rate():
    assert share_left(0.1) == pytest.approx(0.8)
    assert share_left(0.03) == pytest.approx(0.8)
    assert share_left(0.05, initial_lr=0.1) == pytest.approx(0.9)


def test_a_learning_rate_that_has_risen_too_far_is_refused():
    model, opt = alone("AnchorDecay", decay=0.5)
    opt.param_groups[0]["lr"] = 0.3
    with pytest.raises(ValueError, match=r"^decay=0\.5 gives a pull of 1\.5, above 1, as param gr"):
        train(model, opt, batches(0), 1)


def test_a_first_learning_rate_of_zero_is_refused_once_it_matters():
    model, opt = alone("AnchorDecay", inner_lr=0.0)
    train(model, opt, batches(0), 2)
    opt.param_groups[0]["lr"] = 0.3
    with pytest.raises(ValueError, match=r"param group 0's first one, which is 0; build the inner"):
        train(model, opt, batches(0), 4)


# -- FedProx -----------------------------------------------------------------------------------


def test_a_step_without_any_gradient_is_taken():
    model, opt = alone("FedProx")
    before = vector(model)
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        opt.step()
    assert opt.clock == 1
    np.testing.assert_array_equal(vector(model), before)


# -- SlowMo ------------------------------------------------------------------------------------


def momenta_at_syncs(model, inner, loss, **settings):
    """The inner optimizer's state right after each sync: name to largest magnitudes."""
    opt = palsgd.methods.SlowMo(model, inner, sync_every=4, transport=palsgd.Alone(), **settings)
    seen = []

    def look(event):
        entries = [entry for state in opt.state.values() for entry in state.items()]
        seen.append([(name, float(v.abs().max())) for name, v in entries if v is not None])

    opt.on(Synced, look)
    opt.run_until(8)  # where every fragment is synced
    for _ in range(8):
        loss().backward()
        opt.step()
        opt.zero_grad()
    return seen


def test_a_sync_zeroes_the_momentum_of_an_inner_sgd_and_keeps_adams_moments():
    model = linear()
    loss = lambda: mse(model, batches(0)[0])  # noqa: E731
    sgd = momenta_at_syncs(model, SGD(model.parameters(), lr=0.1, momentum=0.9), loss)
    assert sgd == [[("momentum_buffer", 0.0)] * 2] * 2
    adamw = momenta_at_syncs(model, ADAMW(model.parameters(), lr=0.1), loss)
    assert all(value > 0 for entries in adamw for _, value in entries)
    assert {name for name, _ in adamw[0]} == {"step", "exp_avg", "exp_avg_sq"}


def test_momentum_is_zeroed_also_beside_a_parameter_that_never_had_a_gradient():
    model = nn.ModuleDict({"used": linear(), "unused": linear()})
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = momenta_at_syncs(model, inner, lambda: mse(model["used"], batches(0)[0]))
    assert seen == [[("momentum_buffer", 0.0)] * 2] * 2


@pytest.mark.parametrize("fragments", [1, 2])
def test_momentum_is_zeroed_also_where_it_lies_in_memory_as_the_weight_does_not(fragments):
    model = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        inner.state[p]["momentum_buffer"] = torch.zeros(p.shape)
    loss = lambda: model(torch.ones(1, 2, 5, 5)).square().mean()  # noqa: E731
    seen = momenta_at_syncs(model, inner, loss, fragments=fragments)
    strides = inner.state[model.weight]["momentum_buffer"].stride()
    assert strides != model.weight.stride()
    assert seen[-1] == [("momentum_buffer", 0.0)] * 2


def test_slowmo_ends_finite_where_the_learning_rate_ends_at_zero():
    model, opt = alone(
        "SlowMo", scheduler=lambda opt: LambdaLR(opt, lambda t: max(0.0, 1 - t / 11))
    )
    train(model, opt, batches(0), 12)
    assert opt.param_groups[0]["lr"] == 0
    assert np.isfinite(vector(model)).all()
    assert np.isfinite(method_states(opt)["velocity"].numpy()).all()


def test_slowmo_is_the_same_whoever_steps_the_schedule():
    """The rate at a sync is that of the last step before it, not of the first one after it."""
    decay = lambda t: 0.8**t  # noqa: E731
    model, opt = alone("SlowMo", scheduler=lambda opt: LambdaLR(opt, decay))
    train(model, opt, batches(0), 12)
    other, opt = alone("SlowMo")
    scheduler = LambdaLR(opt, decay)
    train(other, opt, batches(0), 12, on_step=scheduler.step)
    np.testing.assert_allclose(vector(model), vector(other), rtol=1e-12)


# -- workers that are left out -----------------------------------------------------------------


def with_a_broken_batch(worker):
    """The second round of worker 1 has a gradient that is not finite."""
    found = [*batches(worker)] * 4
    if worker == 1:
        found[5] = (found[5][0] * math.nan, found[5][1])
    return found


def left_out(title, steps, **settings):
    def build(model):
        inner = SGD(model.parameters(), lr=0.05)
        return getattr(palsgd.methods, title)(
            model, inner, sync_every=4, on_nonfinite="skip", **settings
        )

    return simulated(3, build, steps=steps, data=with_a_broken_batch).optimizers


def test_a_worker_that_was_left_out_starts_without_a_correction_and_leaves_no_bias():
    opts = left_out("SCAFFOLD", steps=8)
    own = [method_states(opt)["control"].numpy() for opt in opts]
    common = method_states(opts[0])["mean_control"].numpy()
    np.testing.assert_array_equal(own[1], common)
    assert np.abs(own[0] - common).max() > 1e-3
    for moment in (8, 12, 16):
        opts = left_out("SCAFFOLD", steps=moment)
        own = [method_states(opt)["control"].numpy() for opt in opts]
        common = method_states(opts[0])["mean_control"].numpy()
        np.testing.assert_allclose(common, np.mean(own, axis=0), rtol=0, atol=1e-12)


def test_a_worker_that_was_left_out_of_an_elastic_exchange_goes_on_from_the_centre():
    opts = left_out("EASGD", steps=8)
    centre = anchor_of(opts[0]).numpy()
    np.testing.assert_array_equal(vector(opts[1].model), centre)
    assert np.abs(vector(opts[0].model) - centre).max() > 1e-3


@pytest.mark.parametrize("title", FAMILY)
def test_all_workers_stay_finite_and_agree_after_one_was_left_out(title):
    opts = left_out(title, steps=16)
    for opt in opts:
        np.testing.assert_array_equal(anchor_of(opt), anchor_of(opts[0]))
        assert np.isfinite(vector(opt.model)).all()


# -- figures and pages -------------------------------------------------------------------------


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return np.dot(linear, [0.2126, 0.7152, 0.0722])


def test_every_method_has_a_line_of_its_own_that_is_readable_on_white_and_on_black():
    rows = registry.rows()
    for row in rows:
        light, dark = map(luminance, row.colours)
        assert 1.05 / (light + 0.05) >= 3, row.title  # the contrast that graphics need
        assert (dark + 0.05) / 0.05 >= 3, row.title
    dashed = [row.dashes for row in rows if row.dashes]
    assert len({row.colours[0] for row in rows}) == len({row.colours[1] for row in rows})
    assert len({row.colours[0] for row in rows}) == len(rows)
    assert len(set(dashed)) == len(dashed)


def test_the_page_of_methods_has_every_method_and_each_of_its_settings():
    page = (ROOT / "docs" / "methods.md").read_text()
    for row in registry.rows():
        assert f"`{row.title}`" in page
        for name in row.settings():
            assert f"`{name}`" in page, f"{row.title}: {name}"


@pytest.mark.parametrize(
    ("title", "settings"), [("FedProx", {"mu": 10**30}), ("SCAFFOLD", {"lr": 10**30})]
)
def test_whole_numbers_of_any_size_are_taken_as_floats(title, settings):
    """torch takes whole numbers of 64 bits alone."""
    model, opt = alone(title, sync_every=1, **settings)
    mse(model, batches(0)[0]).backward()
    opt.step()
    assert opt.clock == 1
