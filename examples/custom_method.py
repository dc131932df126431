"""A method of one's own, on four simulated workers:

    python examples/custom_method.py

The global step is scaled by how far the workers agree. With D_k = x - x_k, and D their mean,

    agreement = |D|^2 / mean_k |D_k|^2,  x <- x - agreement^power D

The agreement is 1 where all workers moved alike, and about 1 / K where each followed the noise of
its own data. One number travels with the model, and one is kept.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import nn

import palsgd

WORKERS = 4


@dataclass(frozen=True, kw_only=True)
class Agreement(palsgd.Method):
    power: float = 0.5

    global_state = (palsgd.Scalar("agreement", 1.0),)  # equal on all workers; saved and resumed

    def payload(self, w):
        """The displacement, as any method sends it, and its squared length beside it."""
        squared = w.norm(torch._foreach_sub(w.anchor, w.local)) ** 2
        return palsgd.Payload(scalars={"squared": squared})

    def apply(self, w, reduced, outer):
        """All workers see the same mean and the same numbers, so their global models agree."""
        mean, squared = reduced["model"], reduced.scalars["squared"]
        w.agreement = w.norm(mean) ** 2 / squared if squared else 1.0
        torch._foreach_sub_(w.anchor, mean, alpha=w.agreement**self.power)


def shard(worker):
    """Noisy views of one linear map; each worker has inputs of its own."""
    random = torch.Generator().manual_seed(worker)
    truth = torch.linspace(-1, 1, 8)
    inputs = torch.randn(64, 16, 8, generator=random) + 0.3 * worker
    noise = 0.5 * torch.randn(64, 16, generator=random)
    return list(zip(inputs, inputs @ truth + noise, strict=True))


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs).squeeze(1), targets)


def optimizer(model):
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    return palsgd.LocalOptimizer(model, inner, method=Agreement(), sync_every=10)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    result = palsgd.simulate(
        workers=WORKERS, steps=args.steps, model=lambda: nn.Linear(8, 1), loss=loss, data=shard,
        method=optimizer, vectorize=False, device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    kept = palsgd.state.numbers(result.optimizers[0].state_dict())["method"]["global scalars"]
    print(f"loss {result.history[0]['loss']:.3f} -> {result.history[-1]['loss']:.3f}")
    print(f"agreement in the last round: {kept['agreement']:.3f}")


if __name__ == "__main__":
    main()
