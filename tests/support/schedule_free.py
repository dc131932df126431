"""Schedule-free SGD in a few lines, and its twin in NumPy: an inner optimizer with train() and
eval().

    y = (1 - b) z + b x,   z <- z - lr grad(y),   x <- (1 - c) x + c z with c = 1 / t

The parameters hold y in training mode and x in evaluation mode; x is never stored.
"""

import numpy as np
import torch


class ScheduleFreeSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, b=0.9):
        super().__init__(params, dict(lr=lr, b=b, t=0, training=True))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["training"], "step() in evaluation mode"
            group["t"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                x = (p - (1 - group["b"]) * z) / group["b"]
                z -= group["lr"] * p.grad
                x += (z - x) / group["t"]
                p.copy_((1 - group["b"]) * z + group["b"] * x)

    def eval(self):
        self._switch(training=False)

    def train(self):
        self._switch(training=True)

    @torch.no_grad()
    def _switch(self, *, training):
        for group in self.param_groups:
            for p in group["params"]:
                z, b = self.state[p].get("z"), group["b"]
                if z is not None and group["training"] != training:
                    p.copy_((1 - b) * z + b * p if training else (p - (1 - b) * z) / b)
            group["training"] = training


def local_sgd(start, gradient, *, workers, steps, H, lr, b=0.9):
    """Workers that average y and z every H steps. Returns the evaluation weights of the last sync
    and those of the end, where no sync took place unless H divides `steps`."""
    y, z, x = ([start.copy() for _ in range(workers)] for _ in range(3))
    shown = start
    for t in range(steps):
        for k in range(workers):
            z[k] = z[k] - lr * gradient(k, y[k], t)
            x[k] = x[k] + (z[k] - x[k]) / (t + 1)
            y[k] = (1 - b) * z[k] + b * x[k]
        if (t + 1) % H == 0:
            y, z = ([np.mean(each, axis=0)] * workers for each in (y, z))
            x = [(y[k] - (1 - b) * z[k]) / b for k in range(workers)]
            shown = x[0]
    return shown, y
