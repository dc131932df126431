"""Gradients that are replayed as CUDA graphs, beside those that are computed anew."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import nn

import palsgd
from palsgd.simulator.graphed import EAGER_STEPS, GraphedGradient, Graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def build():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Dropout(0.5), nn.Linear(8, 5))


def batches(worker):
    generator = torch.Generator("cuda").manual_seed(worker)
    while True:
        x = torch.randn(6, 3, 8, 8, generator=generator, device="cuda")
        yield x, torch.randint(5, (6,), generator=generator, device="cuda")


def cross_entropy(net, batch):
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def simulated(graphs, model=build, loss=cross_entropy, **more):
    def method(net):
        inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        return palsgd.PALSGD(net, inner, sync_every=5, mix_prob=0.2, pull=0.5, **more)

    return palsgd.simulate(
        workers=2, steps=30, model=model, data=batches, method=method, vectorize=False,
        loss=loss, device="cuda", progress=False, compile=graphs,
    )  # fmt: skip


@pytest.fixture
def replays(monkeypatch):
    """One for each replay."""
    found = []
    replay = GraphedGradient._replay

    def counted(self, leaves):
        found.append(1)
        replay(self, leaves)

    monkeypatch.setattr(GraphedGradient, "_replay", counted)
    return found


def assert_same_weights(one, other):
    for name, x in other.model.state_dict().items():
        torch.testing.assert_close(one.model.state_dict()[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [build, dropping])
def test_graphs_train_to_the_weights_of_gradients_that_are_computed_anew(model, replays, caplog):
    """Random numbers too are those that would be drawn otherwise."""
    graphed = simulated(True, model)
    gradients = sum(each.gradient_steps for each in graphed.ledgers)
    assert len(replays) == gradients - 2 * EAGER_STEPS + 2, "one more for each worker to compare"
    assert_same_weights(graphed, simulated(False, model))
    assert "no CUDA graph" not in caplog.text


def test_the_gradients_of_a_worker_outlast_the_next_replay_of_another():
    """Where gradients are averaged, the first worker begins its next step before the last has taken
    its own. All memory that the first has used and freed is full of what no gradient is."""
    models = [build().cuda() for _ in range(2)]

    def with_scratch(net, batch):
        if net is models[0]:
            scratch = [torch.full((512,), 1000.0, device="cuda") for _ in range(1000)]
            del scratch
        return cross_entropy(net, batch)

    graphs = Graphs()
    first, last = (GraphedGradient(model, with_scratch, graphs) for model in models)
    data = batches(0)
    for _ in range(EAGER_STEPS + 2):
        for gradient in (first, last):
            gradient.model.zero_grad()
            gradient(next(data))
    before = [p.grad.clone() for p in models[1].parameters()]
    first(next(data))
    assert graphs.may
    torch.testing.assert_close([p.grad for p in models[1].parameters()], before, rtol=0, atol=0)


def test_graphs_whose_gradients_are_averaged_train_to_the_same_weights():
    for steps in (30, 15):
        found, want = (simulated(graphs, warmup_steps=steps) for graphs in (True, False))
        assert_same_weights(found, want)


def test_gradients_are_recorded_while_a_thread_makes_batches(caplog):
    ended = Event()

    def make_batches():
        count = 0
        while not ended.is_set():
            torch.ones(1000).pin_memory().to("cuda", non_blocking=True)
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(make_batches)
        try:
            simulated(True)
        finally:
            ended.set()
        assert made.result() > 100
    assert "no CUDA graph" not in caplog.text


@pytest.mark.parametrize("model", [build, dropping])
def test_training_goes_on_after_a_gradient_that_cannot_be_recorded(model, replays, caplog):
    def reading(net, batch):  # the host waits for a number, which a recording cannot do
        loss = cross_entropy(net, batch)
        return loss * (1.0 if loss.item() > 0 else 2.0)

    graphed = simulated(True, model, loss=reading)
    assert "no CUDA graph, because CUDA error: operation not permitted" in caplog.text
    assert not replays
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same_weights(graphed, simulated(False, model))
