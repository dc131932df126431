"""The vectorized engine against the exact one."""

import logging
import re
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import palsgd
from palsgd import registry
from palsgd.simulator import room, stacked_optimizers
from support.engines import METHODS, MIXING, check
from support.problems import batches, linear, mse, net, vector

INNER = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, nesterov=True),
    "dampened": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, dampening=0.3),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


def both(model, method, inner="adamw", *, workers=3, steps=47, data=batches, loss=mse, **shared):
    """The same simulation in both engines."""

    def build(m):
        return METHODS[method](m, INNER[inner](m.parameters()), **shared)

    return [
        palsgd.simulate(
            workers=workers, steps=steps, model=model, loss=loss, data=data, method=build,
            vectorize=vectorize, seed=3,
        )
        for vectorize in (True, False)
    ]  # fmt: skip


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("method", METHODS)
def test_vectorized_workers_equal_exact_ones(method, inner):
    check(*both(linear, method, inner))


@pytest.mark.parametrize("inner", INNER)
def test_rows_that_are_updated_one_at_a_time_are_those_of_one_update(monkeypatch, inner):
    whole, _ = both(linear, "independent", inner)
    monkeypatch.setattr(stacked_optimizers, "PIECE", 1)
    pieces, _ = both(linear, "independent", inner)
    for own, expected in zip(pieces.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_buffers_of_stacked_workers_equal_exact_ones(method):
    # not Adam: the bias before a batch norm has no gradient but rounding, which Adam blows up
    check(*both(partial(net, dtype=torch.float64), method, "momentum"))


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_buffer_policies_hold_in_both_engines(buffers):
    check(*both(partial(net, dtype=torch.float64), "balanced", "momentum", buffers=buffers))


def pooled():
    """In bf16 its largest places are often equal, and rounding decides which has the gradient."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 5),
    )  # fmt: skip


def colour_batches(worker):
    rng = torch.Generator().manual_seed(worker)
    while True:
        yield torch.randn(16, 3, 16, 16, generator=rng), torch.randint(5, (16,), generator=rng)


class Half(nn.Module):
    """A model, one of whose parameters it also reaches by another attribute, which a stack does
    not replace."""

    def __init__(self):
        super().__init__()
        self.net = pooled()
        self.hidden = [self.net[-1].weight]

    def forward(self, x):
        return self.net(x) + self.net[:-1](x) @ self.hidden[0].t()


def low_precision(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def in_low_precision(model):
    return palsgd.simulate(
        workers=2, steps=2, model=model, loss=low_precision, data=colour_batches, vectorize=True,
        method=lambda m: palsgd.DiLoCo(m, torch.optim.SGD(m.parameters(), lr=0.01), sync_every=2),
    )  # fmt: skip


def test_rounding_in_low_precision_is_not_taken_for_another_gradient():
    assert in_low_precision(pooled).engine == "vectorized"


def test_in_low_precision_another_gradient_is_still_refused():
    with pytest.raises(ValueError, match="cannot be vectorized"):
        in_low_precision(Half)


class Leaking(nn.Module):
    """Sensitive to its weights, one of which it also reaches by another attribute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        deep = [(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16)) for _ in range(12)]
        self.net = nn.Sequential(*(each for block in deep for each in block), nn.Linear(16, 5))
        self.hidden = [self.net[0].weight]

    def forward(self, x):
        return self.net[1:](self.net[0](x) + 0.2 * (x @ self.hidden[0].t()))


class Edge(nn.Module):
    """Not finite where its weights are moved by rounding to bf16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(16, 5)
        self.hidden, self.edge = [self.net.weight], nn.Parameter(torch.full((64,), 0.9995))

    def forward(self, x):
        low = (x.bfloat16() @ self.hidden[0].t().bfloat16()).float()
        return self.net(x) + 20 * low + 1e-3 * torch.log1p(-self.edge).mean()


@pytest.mark.parametrize("model", [Leaking, Edge])
def test_only_what_rounding_explains_is_taken_for_rounding(model):
    def data(worker):
        rng = torch.Generator().manual_seed(worker)
        while True:
            yield torch.randn(8, 16, generator=rng), torch.randint(5, (8,), generator=rng)

    with pytest.raises(ValueError, match=r"the stacked gradient of .* is not that of backward"):
        palsgd.simulate(
            workers=2, steps=2, model=model, loss=cross_entropy, data=data, vectorize=True,
            method=lambda m: palsgd.DiLoCo(m, INNER["sgd"](m.parameters()), sync_every=2),
        )  # fmt: skip


def cnn():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)
    )


def image_batches(worker):
    rng = torch.Generator().manual_seed(worker)
    return [
        (torch.randn(6, 1, 8, 8, generator=rng), torch.randint(5, (6,), generator=rng))
        for _ in range(7)
    ]


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.slow
def test_a_cnn_in_float32_stays_within_tolerance_for_hundreds_of_steps():
    check(
        *both(cnn, "independent", "momentum", steps=300, data=image_batches, loss=cross_entropy),
        rtol=2e-3,
        atol=2e-4,
    )


def test_each_worker_is_clipped_by_its_own_norm():
    check(*both(linear, "balanced", "sgd", max_norm=0.3))


@pytest.mark.parametrize("method", ["balanced", "independent"])
def test_a_schedule_follows_each_workers_own_clock(method):
    decay = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1 / (1 + 0.1 * t))
    check(*both(linear, method, scheduler=decay))


@pytest.mark.parametrize("every", [1, 2])
def test_rounds_of_mixing_alone_are_the_same_in_both_engines(every):
    def build(model):
        return palsgd.PALSGD(
            model, INNER["momentum"](model.parameters()), sync_every=every, mix_prob=0.5,
            mix_rate=1.0, draws="independent", outer=palsgd.nesterov(lr=0.5),
        )  # fmt: skip

    results = [
        palsgd.simulate(
            workers=3, steps=20, model=linear, loss=mse, data=batches, method=build, vectorize=v
        )
        for v in (True, False)
    ]
    check(*results)


def test_two_parameter_groups_and_a_frozen_parameter():
    def model():
        built = net(dtype=torch.float64)
        built[3].bias.requires_grad_(False)
        return built

    def build(m):
        groups = [
            {"params": m[0].parameters(), "lr": 0.03},
            {"params": [*m[1].parameters(), m[3].weight]},
        ]
        return METHODS["independent"](m, torch.optim.SGD(groups, lr=0.01, momentum=0.9))

    results = [
        palsgd.simulate(
            workers=3, steps=33, model=model, loss=mse, data=batches, method=build, vectorize=v
        )
        for v in (True, False)
    ]
    check(*results)


def test_a_nan_in_one_stacked_worker_names_worker_and_step():
    def data(worker):
        found = batches(worker)
        if worker == 1:
            found[2] = (found[2][0] * float("nan"), found[2][1])
        return found

    with pytest.raises(palsgd.NonFiniteError, match="worker 1 is nan at gradient step 2"):
        palsgd.simulate(
            workers=3, steps=20, model=linear, loss=mse, data=data, vectorize=True,
            method=lambda m: palsgd.LocalSGD(m, INNER["sgd"](m.parameters()), sync_every=5),
        )  # fmt: skip


class Forking(nn.Linear):
    """Control flow that depends on data."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


def test_a_model_that_vmap_refuses_falls_back_with_the_reason_in_one_line(caplog):
    def run(vectorize):
        return palsgd.simulate(
            workers=2, steps=9, model=lambda: Forking(4, 3).double(), loss=mse, data=batches,
            method=lambda m: METHODS["balanced"](m, INNER["sgd"](m.parameters())),
            vectorize=vectorize,
        )  # fmt: skip

    with caplog.at_level(logging.WARNING, logger="palsgd"):
        result = run("auto")
    assert result.engine == "exact"
    (line,) = caplog.messages
    assert "one after another, because vmap says" in line
    assert "\n" not in line
    np.testing.assert_array_equal(vector(result.model), vector(run(False).model))
    with pytest.raises(ValueError, match="cannot be vectorized"):
        run(True)


def test_an_inner_optimizer_without_a_stacked_twin_falls_back(caplog):
    result = palsgd.simulate(
        workers=2, steps=9, model=linear, loss=mse, data=batches,
        method=lambda m: METHODS["diloco"](m, torch.optim.Adagrad(m.parameters(), lr=0.1)),
    )  # fmt: skip
    assert result.engine == "exact"
    assert "Adagrad has no stacked twin" in caplog.text


def test_too_many_workers_for_the_memory_are_refused_before_the_run():
    with pytest.raises(ValueError, match=r"1000000 workers need about .* GiB .* use at most"):
        palsgd.simulate(
            workers=10**6, steps=1, model=lambda: nn.Linear(1000, 1000), loss=mse, data=batches,
            method=lambda m: palsgd.DDP(m, INNER["sgd"](m.parameters())),
        )  # fmt: skip


def test_memory_that_torch_keeps_of_ended_programs_is_free_for_the_next(monkeypatch):
    """A GPU of 100 of which others have 40. This process may take 50, torch has reserved 45 for it,
    and tensors are in 10 of these."""
    figures = {"mem_get_info": (15, 100), "get_per_process_memory_fraction": 0.5,
               "memory_reserved": 45, "memory_allocated": 10}  # fmt: skip
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert room._free_memory_of(torch.device("cuda"), 0) == 40
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2, 100))  # others have more
    assert room._free_memory_of(torch.device("cuda"), 0) == 37


def test_an_ended_program_is_collected_where_memory_is_short(monkeypatch):
    made = []

    def build():
        made.append(weakref.ref(found := linear()))
        return found

    palsgd.simulate(
        workers=2, steps=9, model=build, loss=mse, data=batches, progress=False, vectorize=False,
        method=lambda m: METHODS["diloco"](m, INNER["sgd"](m.parameters())),
    )  # fmt: skip
    figures = {"mem_get_info": (50, 100), "get_per_process_memory_fraction": 1.0,
               "memory_reserved": 10}  # fmt: skip
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * (made[0]() is not None))
    assert room._free_memory_of(torch.device("cuda"), wanted=55) == 60


class Unusual(nn.Module):
    """Modules whose stacked program would not be what backward() computes."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.kind = nn.Linear(4, 3), kind
        if kind == "unused":
            self.b = nn.Linear(2, 2)
        elif kind == "list":
            self.hidden = [self.a.weight]
        elif kind == "twice":
            self.b = self.a

    def forward(self, x):
        if self.kind == "list":
            return nn.functional.linear(x, self.hidden[0], self.a.bias)
        return self.a(x) + self.b(x) if self.kind == "twice" else self.a(x)


@pytest.mark.parametrize("kind", ["unused", "list", "twice"])
def test_auto_refuses_models_whose_stacked_program_differs(kind, caplog):
    def run(vectorize):
        torch.manual_seed(0)
        return palsgd.simulate(
            workers=2, steps=9, model=lambda: Unusual(kind).double(), loss=mse, data=batches,
            method=lambda m: METHODS["balanced"](m, INNER["adamw"](m.parameters())),
            vectorize=vectorize,
        )  # fmt: skip

    result = run("auto")
    assert result.engine == "exact"
    assert "because" in caplog.text
    np.testing.assert_array_equal(vector(result.model), vector(run(False).model))


def test_a_step_hook_on_the_inner_optimizer_is_not_passed_over():
    def build(model):
        inner = INNER["sgd"](model.parameters())
        inner.register_step_pre_hook(lambda *_: None)
        return METHODS["balanced"](model, inner)

    with pytest.raises(ValueError, match="step hooks"):
        palsgd.simulate(
            workers=2, steps=9, model=linear, loss=mse, data=batches, method=build, vectorize=True
        )


def test_a_schedule_that_reads_the_optimizers_clock_is_the_same_in_both_engines():
    def by_clock(opt):
        return torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1 / (1 + 0.1 * opt.clock))

    check(*both(linear, "independent", "momentum", scheduler=by_clock))


def test_batches_of_unequal_size_are_taken_one_worker_after_another():
    def data(worker):
        *most, (a, y) = batches(worker)
        return [*most, (a[: 6 - worker], y[: 6 - worker])]  # the last one of an epoch

    check(*both(partial(net, dtype=torch.float64), "independent", "momentum", data=data))


def test_scalar_parameters_are_stacked_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.a, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return self.a(x) * self.scale

    check(*both(lambda: Scaled().double(), "balanced", "adamw", max_norm=0.5))


@pytest.mark.parametrize("vectorize", [True, False])
def test_an_evaluation_that_calls_eval_does_not_change_training(vectorize):
    def run(evaluate):
        return palsgd.simulate(
            workers=3, steps=30, model=partial(net, dtype=torch.float64), loss=mse, data=batches,
            method=lambda m: METHODS["balanced"](m, INNER["momentum"](m.parameters())),
            evaluate=evaluate, vectorize=vectorize,
        )  # fmt: skip

    watched = run(lambda model: float(vector(model.eval())[0]))
    np.testing.assert_array_equal(vector(watched.model), vector(run(None).model))
    assert watched.history[-1]["metric"] == vector(watched.model)[0]


def test_falling_back_does_not_lose_the_first_batch():
    def run(vectorize):
        sources = [iter(batches(k) * 20) for k in range(2)]
        return palsgd.simulate(
            workers=2, steps=9, model=linear, loss=mse, data=sources.__getitem__,
            method=lambda m: METHODS["diloco"](m, torch.optim.Adagrad(m.parameters(), lr=0.1)),
            vectorize=vectorize,
        )  # fmt: skip

    np.testing.assert_array_equal(vector(run("auto").model), vector(run(False).model))


class Averaging(nn.Linear):
    """Keeps a mean of its inputs, which it replaces at each pass."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Counting(nn.Linear):
    """Divides by how often it was called."""

    def __init__(self, persistent):
        super().__init__(4, 3)
        self.calls = 0
        self.register_buffer("passes", torch.zeros(()), persistent=False)
        self._own = persistent

    def forward(self, x):
        if self._own:
            self.calls += 1
        else:
            self.passes += 1
        return super().forward(x) / (1 + self.calls + self.passes)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Averaging, "mean is replaced by the forward pass"),
        (partial(Counting, True), "changes model.calls"),
        (partial(Counting, False), "changes model.passes|in-place"),
    ],
)
def test_what_a_stacked_program_would_get_wrong_runs_exactly_as_if_it_had_not_been_tried(
    model, reason, caplog
):
    def run(vectorize):
        return palsgd.simulate(
            workers=2, steps=9, model=model, loss=mse, vectorize=vectorize,
            data=partial(batches, dtype=torch.float32),
            method=lambda m: palsgd.LocalSGD(m, INNER["sgd"](m.parameters()), sync_every=4),
        )  # fmt: skip

    with caplog.at_level(logging.WARNING, "palsgd"):
        fast = run("auto")
    assert fast.engine == "exact"
    assert re.search(reason, caplog.text)
    np.testing.assert_array_equal(vector(fast.model), vector(run(False).model))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_act_on_every_worker(kind):
    def halve(p):
        p.grad.mul_(0.5)

    hook = halve if "accumulate" in kind else lambda gradient: 0.5 * gradient

    def run(method_hooks):
        def method(model):
            if method_hooks:
                getattr(model.weight, kind)(hook)
            return palsgd.LocalSGD(model, INNER["sgd"](model.parameters()), sync_every=4)

        def model():
            built = linear()
            if not method_hooks:
                getattr(built.weight, kind)(hook)
            return built

        return palsgd.simulate(
            workers=2, steps=9, model=model, loss=mse, data=batches, method=method
        )

    assert run(True).engine == "exact"
    with pytest.raises(ValueError, match="register them in method"):
        run(False)


def test_falling_back_leaves_the_random_numbers_of_the_data_alone():
    def data(worker):
        while True:
            yield torch.randn(5, 4), torch.randn(5, 3)

    def loss(model, batch):
        return mse(model, batch) * (1 if float(mse(model, batch).detach()) > -1 else 0)

    def run(vectorize):
        return palsgd.simulate(
            workers=2, steps=9, model=partial(linear, torch.float32), loss=loss, data=data,
            method=lambda m: palsgd.LocalSGD(m, INNER["sgd"](m.parameters()), sync_every=4),
            vectorize=vectorize,
        )  # fmt: skip

    assert run("auto").engine == "exact"
    np.testing.assert_array_equal(vector(run("auto").model), vector(run(False).model))


def test_a_schedule_of_more_than_the_learning_rate_is_refused():
    class Decaying(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self):
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.1 * self.last_epoch
            return [group["lr"] for group in self.optimizer.param_groups]

    with pytest.raises(ValueError, match="schedule changes more than the learning rate"):
        both(linear, "balanced", "sgd", scheduler=Decaying)


def test_small_buckets_count_as_many_messages_in_both_engines():
    check(*both(linear, "balanced", "sgd", bucket_mb=5e-5))


@pytest.mark.parametrize("workers", [1, 3])
def test_an_expanded_gradient_is_clipped_like_any_other(workers):
    def mean(model, batch):
        return model(batch[0]).mean()

    check(*both(linear, "balanced", "sgd", workers=workers, max_norm=0.01, loss=mean))


def test_batches_whose_keys_change_are_taken_one_worker_after_another():
    def data(worker):
        found = [{"x": x, "y": y} for x, y in batches(worker)]
        for i, each in enumerate(found):
            if (i + worker) % 3 == 2:
                each["note"] = torch.zeros(1)
        return found

    def loss(model, batch):
        return mse(model, (batch["x"], batch["y"]))

    check(*both(linear, "balanced", "sgd", data=data, loss=loss))


# -- groups without a trained tensor -----------------------------------------------------------


@pytest.mark.parametrize("empty", ["frozen", "no tensor"])
@pytest.mark.parametrize("name", registry.names())
def test_a_parameter_group_without_a_trained_tensor_changes_nothing(name, empty):
    def model():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)).double()
        net[0].requires_grad_(False)
        return net

    def method(net):
        first = list(net[0].parameters()) if empty == "frozen" else []
        groups = [{"params": first, "lr": 0.1}, {"params": list(net[1].parameters())}]
        rules = dict(sync_every=5, warmup_steps=3) if registry.row(name).rounds else {}
        rules |= MIXING if registry.row(name).mixes else {}
        momentum = 0.0 if name == "scaffold" else 0.9
        kind = getattr(palsgd.methods, registry.row(name).title)
        return kind(net, torch.optim.SGD(groups, lr=0.05, momentum=momentum), **rules)

    def run(vectorize):
        return palsgd.simulate(
            workers=3, steps=14, model=model, loss=mse, data=batches, method=method,
            vectorize=vectorize,
        )  # fmt: skip

    check(run(True), run(False))


def compiled_calls(monkeypatch):
    """The calls of what torch.compile is asked for, as they come."""
    traced = []

    def compile(call, **options):
        def counting(*args):
            traced.append(call)
            return call(*args)

        return counting

    monkeypatch.setattr(torch, "compile", compile)
    return traced


def simulated(model, *, workers=2, **options):
    return palsgd.simulate(
        workers=workers, steps=20, model=model, loss=mse, data=batches,
        method=lambda m: METHODS["balanced"](m, INNER["sgd"](m.parameters())), **options,
    )  # fmt: skip


def test_a_model_that_cannot_be_stacked_is_found_before_anything_is_compiled(monkeypatch):
    """Compiling a ResNet-50 takes minutes, and then the exact engine trains it."""
    traced = compiled_calls(monkeypatch)
    result = simulated(lambda: Forking(4, 3).double(), compile=True, vectorize="auto")
    assert (result.engine, traced) == ("exact", [])


def test_a_simulation_that_is_to_be_compiled_trains_by_the_compiled_program(monkeypatch):
    traced = compiled_calls(monkeypatch)
    found, plain = (simulated(linear, compile=own, vectorize=True) for own in (True, False))
    assert found.engine == "vectorized"
    assert len(traced) > 10
    np.testing.assert_array_equal(vector(found.model), vector(plain.model))


def test_stacks_alike_are_timed_once_and_others_by_themselves(monkeypatch):
    """Timing takes ten gradients and compiles parts of them: a sweep of programs would wait."""
    from palsgd.simulator import vectorized
    from palsgd.simulator.stack import StackedWorkers

    timed = []

    def choose(stack, batches):
        timed.append(stack.count)
        stack.unfold(7)
        return 1.0

    chosen = vectorized.Vectorized._choose_by_time
    monkeypatch.setattr(StackedWorkers, "choose_convolutions", choose)
    monkeypatch.setattr(StackedWorkers, "loop_seconds", lambda stack, batches, graphs: 2.0)
    monkeypatch.setattr(vectorized, "_tried", {})

    def try_stack(self, *, compile, against_loop):
        assert chosen(self, self._first_batches(), against_loop, compiled=False) == 1.0
        assert self.stack.unfolded == 7

    monkeypatch.setattr(vectorized.Vectorized, "choose_program", try_stack)
    deep = partial(net, dtype=torch.float64)
    for options in ({}, {}, {"workers": 3}, {"model": deep}, {}):
        simulated(**({"model": linear, "vectorize": True} | options))
    assert timed == [2, 3, 2]


def test_stacked_batches_have_the_usual_order_in_memory_whichever_a_batch_has():
    """Kernels for channels that are last are not those of stacked workers."""
    found = []

    def loss(model, batch):
        found.append(batch.is_contiguous())
        return model(batch.flatten(1)).square().mean()

    palsgd.simulate(
        workers=2, steps=4, model=lambda: nn.Linear(12, 1), loss=loss, vectorize=True,
        data=lambda worker: [torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last)],
        method=lambda model: palsgd.DiLoCo(
            model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2
        ),
    )  # fmt: skip
    assert found[-4:] == [True] * 4
