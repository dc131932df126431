"""Small problems that worker processes train on, and the loop they train with."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import palsgd


def regression_data(worker, batches=5, rows=6, inputs=4, outputs=3):
    """Least-squares batches of one worker, in NumPy, the same in every process."""
    rng = np.random.default_rng([7, worker])
    return [
        (rng.normal(size=(rows, inputs)), rng.normal(size=(rows, outputs))) for _ in range(batches)
    ]


def regression_gradient(k, x, i, inputs=4, outputs=3):
    """Gradient of mean((a W' + b - y)^2) with respect to (W, b) laid end to end."""
    data = regression_data(k)
    a, y = data[i % len(data)]
    W, b = x[: inputs * outputs].reshape(outputs, inputs), x[inputs * outputs :]
    residual = 2 * (a @ W.T + b - y) / y.size
    return np.concatenate([(residual.T @ a).ravel(), residual.sum(axis=0)])


def regression_start(inputs=4, outputs=3):
    return np.random.default_rng(3).normal(size=inputs * outputs + outputs)


def linear(dtype=torch.float64):
    """The same problem's model."""
    model = nn.Linear(4, 3).to(dtype)
    nn.utils.vector_to_parameters(torch.tensor(regression_start(), dtype=dtype), model.parameters())
    return model


def batches(worker=None, dtype=torch.float64):
    worker = dist.get_rank() if worker is None else worker
    return [
        (torch.tensor(a, dtype=dtype), torch.tensor(y, dtype=dtype))
        for a, y in regression_data(worker)
    ]


def net(seed=0, dtype=torch.float32):
    """Two layers, a batch norm, and tensors whose sizes do not divide evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def mse(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def train(model, opt, data, steps, on_step=None):
    for batch in palsgd.until(data, opt, steps=steps):
        mse(model, batch).backward()
        opt.step()
        opt.zero_grad()
        if on_step:
            on_step()


def trained(build, steps, **rules):
    """The model of least squares, and the optimizer `build(model, **rules)` that has trained it."""
    model = linear()
    opt = build(model, **rules)
    train(model, opt, batches(), steps)
    return model, opt


def vector(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().numpy()


def global_vector(model, opt):
    with opt.anchor_weights():
        return vector(model)
