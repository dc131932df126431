"""A codec of one's own, on four simulated workers:

    python examples/custom_codec.py

A block of 256 values becomes 68 bytes: two bits for each value, which say -s, 0 or s, and the size
s of the block. What a code loses goes with the next message; the library does that.
"""

import argparse

import torch
from torch import Tensor, nn

import palsgd

WORKERS = 4


class Ternary(palsgd.Codec):
    gathered, decay = True, 0.9  # a code that loses much is coded once, and its residue decays

    def encode(self, blocks: Tensor) -> Tensor:
        """(n, 256) floats -> (n, 68) bytes: four values in each of 64, then the size."""
        large = blocks.abs() > 0.7 * blocks.abs().mean(dim=1, keepdim=True)
        count = large.sum(dim=1, keepdim=True).clamp(min=1)
        size = (blocks.abs() * large).sum(dim=1, keepdim=True) / count
        digits = (blocks.sign() * large + 1).to(torch.uint8).view(len(blocks), 64, 4)
        packed = (digits << self._places(blocks.device)).sum(dim=2, dtype=torch.uint8)
        return torch.cat([packed, size.view(torch.uint8)], dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        digits = (codes[:, :64, None] >> self._places(codes.device)) & 3
        size = codes[:, 64:].contiguous().view(torch.float32)
        return (digits.reshape(len(codes), 256).float() - 1) * size

    def _places(self, device: torch.device) -> Tensor:
        return torch.arange(0, 8, 2, dtype=torch.uint8, device=device)


def shard(worker: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of points around ten centres, and the centre of each. Workers have other points."""
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    random, labels = torch.Generator().manual_seed(1 + worker), torch.arange(1280) % 10
    points = centres[labels] + 1.5 * torch.randn(1280, 64, generator=random)
    return list(zip(points.split(32), labels.split(32), strict=True))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def train(steps: int, compress: palsgd.Codec | str | None):
    def method(model: nn.Module) -> palsgd.PALSGD:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return palsgd.PALSGD(model, inner, sync_every=16, compress=compress)

    return palsgd.simulate(
        workers=WORKERS, steps=steps, loss=loss, data=shard, method=method,
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=320)
    args = parser.parse_args()
    for name, codec in {"float32": None, "int8": "int8", "ternary": Ternary()}.items():
        last = train(args.steps, codec).history[-1]
        print(f"{name:8} loss {last['loss']:.3f}, {last['bytes_sent'] / 1e3:.0f} kB sent")


if __name__ == "__main__":
    main()
