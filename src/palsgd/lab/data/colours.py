"""Pixels as inputs of a model, computed on their device."""

from typing import NamedTuple

import torch
from torch import Tensor

Channels = tuple[float, float, float]


class ColourMap(NamedTuple):
    """(pixels / 255 - mean) / std, as one product and one difference.

    It is made once, where the data are loaded. Numbers that a loss puts onto the device anew in
    every step would let the host wait for the device each time."""

    scale: Tensor
    shift: Tensor

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels * self.scale - self.shift


def colour_map(mean: Channels, std: Channels, device: torch.device | str) -> ColourMap:
    centre, spread = (torch.tensor(each, device=device).view(3, 1, 1) for each in (mean, std))
    return ColourMap(1 / (255 * spread), centre / spread)
