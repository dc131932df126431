"""Convolutions from patches beside torch's own."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from palsgd.simulator import stacked_convolutions
from palsgd.simulator.stacked_convolutions import convolutions, unfold_convolutions, ways

FROM_PATCHES = stacked_convolutions._from_patches
SETTINGS = [
    dict(kernel_size=5, padding=2),
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=(3, 2), stride=(2, 1), padding=(0, 1), bias=False),
    dict(kernel_size=1),
]


def gradients(net, weights, images, *, stacked, shared=False):
    def loss(own, x):
        return functional_call(net, own, (x,)).square().sum()

    leaves = {name: x.clone().requires_grad_() for name, x in weights.items()}
    if shared:
        found = vmap(lambda x: loss(leaves, x))(images) if stacked else [
            loss(leaves, x) for x in images
        ]  # fmt: skip
    elif stacked:
        found = vmap(loss)(leaves, images)
    else:
        found = [loss({n: x[k] for n, x in leaves.items()}, images[k]) for k in range(len(images))]
    found = torch.stack(list(found))
    return found.detach(), torch.autograd.grad(found.sum(), list(leaves.values()))


def network(settings):
    return nn.Sequential(nn.Conv2d(3, 4, **settings), nn.ReLU(), nn.Conv2d(4, 2, **settings))


@pytest.mark.parametrize("channels", [0, 3, 4])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_stacked_convolutions_from_patches_equal_those_of_one_worker_after_another(
    settings, shared, channels
):
    torch.manual_seed(0)
    net = network(settings).double()
    images = torch.randn(3, 2, 3, 11, 9, dtype=torch.float64)
    lead = () if shared else (3,)
    weights = {n: torch.randn(*lead, *p.shape).double() for n, p in net.named_parameters()}
    want = gradients(net, weights, images, stacked=False, shared=shared)
    unfold_convolutions(net, channels)
    patched = [m for m in net.modules() if getattr(m.forward, "func", None) is FROM_PATCHES]
    assert [each.in_channels for each in patched] == [n for n in (3, 4) if n <= channels]
    found = gradients(net, weights, images, stacked=True, shared=shared)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [((3, 32, 64), [0, 3, 64]), ((1, 8), [0, 1, 8]), ((32, 64), [0, 64]), ((3, 3), [0, 3])],
)
def test_pictures_alone_and_all_convolutions_are_tried(sizes, found):
    assert ways(nn.Sequential(*(nn.Conv2d(n, 8, 3) for n in sizes))) == found
    assert ways(nn.Linear(3, 3)) == [0]


def test_convolutions_that_are_put_back_compute_what_torchs_do_bit_for_bit():
    net, x = network(SETTINGS[0]), torch.randn(2, 3, 8, 8)
    want = net(x)
    unfold_convolutions(net, 99)
    unfold_convolutions(net, 0)
    assert torch.equal(net(x), want)


@pytest.mark.parametrize(
    "odd",
    [
        dict(groups=2), dict(dilation=2), dict(padding_mode="circular", padding=1),
        dict(padding="same"),
    ],
)  # fmt: skip
def test_convolutions_of_another_kind_are_left_alone(odd):
    assert not list(convolutions(nn.Conv2d(4, 4, 3, **odd)))


def test_under_autocast_patches_are_multiplied_in_low_precision():
    net, x = network(SETTINGS[0]), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        want = net(x)
        unfold_convolutions(net, 99)
        found = net(x)
    assert found.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(found, want, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("channels", [0, 99])
def test_under_autocast_stacked_convolutions_equal_those_of_one_worker_after_another(channels):
    torch.manual_seed(0)
    net, images = network(SETTINGS[0]), torch.randn(3, 2, 3, 8, 8)
    weights = {n: torch.randn(3, *p.shape) for n, p in net.named_parameters()}
    seen = []
    net[0].register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        want = gradients(net, weights, images, stacked=False)
        unfold_convolutions(net, channels)
        found = gradients(net, weights, images, stacked=True)
    assert set(seen) == {torch.bfloat16}
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(want), strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize(
    ("settings", "larger"),
    [
        (dict(kernel_size=3, padding=1), 2 * 8 * 8 * 32),  # the patches, of 27 places and 5 zeros
        (dict(kernel_size=1, stride=2), 2 * 3 * 8 * 8),  # the images
    ],
)
def test_what_has_more_elements_than_compiled_kernels_can_count_is_not_compiled(
    monkeypatch, settings, larger
):
    asked = []

    def fused(call, x, elements):
        asked.append(elements)
        return call

    monkeypatch.setattr(stacked_convolutions, "_fused", fused)
    net = nn.Conv2d(3, 4, **settings)
    unfold_convolutions(net, 99)
    net(torch.randn(2, 3, 8, 8, requires_grad=True)).sum().backward()
    assert set(asked) == {larger}


def test_beyond_their_count_kernels_are_not_compiled(monkeypatch):
    monkeypatch.setattr(stacked_convolutions, "_compiled", lambda call: None)
    on_gpu = SimpleNamespace(is_cuda=True)
    assert stacked_convolutions._fused(sum, on_gpu, 2**31 - 1) is None
    assert stacked_convolutions._fused(sum, on_gpu, 2**31) is sum


@pytest.mark.parametrize("settings", SETTINGS)
def test_operators_return_what_they_promise_to_compilers(settings):
    def check(operator, *given):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))

    conv = nn.Conv2d(3, 4, **settings)
    weight, x = torch.randn(2, *conv.weight.shape), torch.randn(2, 5, 3, 8, 8)
    how = list(conv.stride), list(conv.padding)
    check(stacked_convolutions._convolve, x, weight, *how)
    out, patches = stacked_convolutions._convolve(x, weight, *how)
    check(stacked_convolutions._weight_gradient, out, patches, list(weight.shape))
    check(stacked_convolutions._input_gradient, out, weight, list(x.shape), *how)


def test_one_model_is_evaluated_by_torch(monkeypatch):
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    images = torch.randn(2, 3, 8, 8)
    wanted = net(images)
    unfold_convolutions(net, 3)
    used = []
    by_patches = stacked_convolutions._convolve
    monkeypatch.setattr(
        stacked_convolutions, "_convolve", lambda *args: used.append(1) or by_patches(*args)
    )
    torch.testing.assert_close(net.eval()(images), wanted)
    assert not used
    torch.testing.assert_close(net.train()(images), wanted)
    assert used
