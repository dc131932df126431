"""Corners of the contract of methods, each of which a small method of its own stands in."""

import copy

import pytest
import torch
from torch import nn

import palsgd
from palsgd.methods.scaffold import SCAFFOLDMethod
from support.engines import check
from support.problems import train


class Scaled(nn.Module):
    """A linear layer and a factor, which is a parameter without axes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.layer(x) * self.factor


def shard(worker, batches=5):
    generator = torch.Generator().manual_seed(worker)
    return [
        tuple(torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (4, 3))
        for _ in range(batches)
    ]


def simulated(method, *, vectorize, steps=12, **settings):
    """Three workers with the model that has a parameter without axes."""

    def optimizer(model):
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        return palsgd.LocalOptimizer(model, inner, method, **dict(sync_every=4) | settings)

    return palsgd.simulate(
        workers=3, steps=steps, model=lambda: Scaled().double(), method=optimizer, data=shard,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        vectorize=vectorize, progress=False,
    )  # fmt: skip


def test_a_part_of_its_own_may_have_tensors_without_axes():
    method = SCAFFOLDMethod()
    exact, fast = (simulated(method, vectorize=v, fragments=2) for v in (False, True))
    check(fast, exact)


class Uneven(palsgd.Method):
    """Rounds of H, H + 1 and H + 2 steps in turn."""

    def length(self, round, facts):
        return facts.sync_every + round % 3


def alone(method, **settings):
    torch.manual_seed(0)
    model = Scaled().double()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    given = dict(sync_every=3, transport=palsgd.Alone()) | settings
    return model, palsgd.LocalOptimizer(model, inner, method, **given)


def test_a_resumed_run_goes_on_with_the_lengths_of_its_rounds():
    model, opt = alone(Uneven())
    train(model, opt, shard(0), 8)
    state = copy.deepcopy(opt.state_dict())
    train(model, opt, shard(0), 30)
    again, resumed = alone(Uneven())
    resumed.load_state_dict(state)
    train(again, resumed, shard(0), 30)
    clocks = [[line["clock"] for line in o.ledger.history] for o in (opt, resumed)]
    assert clocks[1] == clocks[0] == [3, 7, 8, 11, 15, 20, 23, 27, 30]


def test_an_interval_rule_beside_an_own_length_is_refused():
    with pytest.raises(
        ValueError, match=r"sync_every=Auto.* means nothing for Uneven: its own length"
    ):
        alone(Uneven(), sync_every="auto")


class AllOrNeighbour(palsgd.Method):
    """Every second round the mean over all workers, otherwise the next worker's model."""

    def weights(self, worker, round):
        return None if round % 2 else {(worker + 1) % 3: 1.0}

    def global_model(self, w):
        return w.local


class AllOrEqual(AllOrNeighbour):
    def weights(self, worker, round):
        return dict.fromkeys(range(3), 1 / 3) if round % 2 else {(worker + 1) % 3: 1.0}


@pytest.mark.parametrize("vectorize", [False, True])
def test_no_weights_are_the_mean_over_all_workers(vectorize):
    none, equal = (simulated(m(), vectorize=vectorize) for m in (AllOrNeighbour, AllOrEqual))
    torch.testing.assert_close(none.model.state_dict(), equal.model.state_dict())


@pytest.mark.parametrize("weights", [{-1: 1.0}, {1: 1.0}, {}, {0: float("nan")}, 0.5])
def test_weights_that_mean_nothing_are_refused(weights):
    class Wrong(AllOrNeighbour):
        def weights(self, worker, round):
            return weights

    model, opt = alone(Wrong())
    with pytest.raises(ValueError, match=r"Wrong\.weights gives .* for worker 0 in round 0"):
        train(model, opt, shard(0), 3)


class Looking(palsgd.Method):
    """Moves by what it sees, so that engines that show different things end elsewhere."""

    def before_gradient(self, w):
        for gradient, momentum in zip(w.grad, w.inner["momentum_buffer"], strict=False):
            gradient.add_(momentum, alpha=0.01 * (1 + w.round))

    def after_gradient(self, w, rate, mixing):
        torch._foreach_mul_(w.local, 1 - 0.01 / (1 + w.round))

    def join(self, w):
        torch._foreach_add_(w.local, 0.1 * w.round)


def test_rules_see_the_round_and_the_inner_state_in_both_engines():
    def optimizer(model):
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return palsgd.LocalOptimizer(
            model, inner, Looking(), sync_every=4, on_nonfinite="skip", fragments=2
        )

    def spoilt(worker):
        inputs, targets = shard(worker, 20)[8]
        found = shard(worker, 20)
        found[8] = (inputs, targets * (torch.nan if worker == 1 else 1.0))
        return found

    exact, fast = (
        palsgd.simulate(
            workers=3, steps=19, model=lambda: Scaled().double(), method=optimizer, data=spoilt,
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            vectorize=vectorize, progress=False,
        )
        for vectorize in (False, True)
    )  # fmt: skip
    torch.testing.assert_close(fast.model.state_dict(), exact.model.state_dict())


def part(name="own", tensors=(), **more):
    return lambda w: palsgd.Part(name, list(w.local) if tensors == () else tensors, **more)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part()], r"Sending\.payload has no mean called 'model' in round 0"),
        ([part(), part("model", None, every=2)], "no mean called 'model' in round 0"),
        ([part("model", None, reduction="gather")], "no mean called 'model' in round 0"),
        ([part("model", None), part("other", None)], "two parts that are the displacement"),
        ([part("model", None), part(), part()], "two parts called 'own'"),
        ([part("model", None), part(tensors=[])], "'own' has 0 tensors, where the model has 3"),
        ([part("model", None, every=0)], "every of the part 'model'=0 must be a whole number"),
    ],
)
def test_a_payload_that_means_nothing_is_refused(parts, message):
    class Sending(palsgd.Method):
        def payload(self, w):
            return palsgd.Payload(tuple(each(w) for each in parts))

    model, opt = alone(Sending())
    with pytest.raises(ValueError, match=message):
        train(model, opt, shard(0), 3)


class OwnNumber(palsgd.Method):
    """Breaks the promise that a global state is the same on all workers."""

    global_state = (palsgd.Scalar("number"),)

    def apply(self, w, reduced, outer):
        outer.step()
        w.number = w.worker


@pytest.mark.parametrize(
    ("vectorize", "error", "message"),
    [
        (False, palsgd.ConsensusError, "another global model than the rest"),
        (True, ValueError, r"global state 'number' was given \[0, 1, 2\]"),
    ],
)
def test_a_global_number_that_differs_between_workers_is_found(vectorize, error, message):
    with pytest.raises(error, match=message):
        simulated(OwnNumber(), vectorize=vectorize)


class Pair(palsgd.Method):
    def payload(self, w):
        return palsgd.Payload((palsgd.Part("model"), palsgd.Part("pair", list(w.local))))


class OtherPair(Pair):
    pass


def test_composed_methods_that_send_parts_of_one_name_are_refused():
    model, opt = alone([Pair(), OtherPair()])
    with pytest.raises(ValueError, match=r"Pair \+ OtherPair send 'pair'; rename one"):
        train(model, opt, shard(0), 3)
