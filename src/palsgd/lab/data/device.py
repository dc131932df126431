"""Copies to the device for which the host does not wait."""

from functools import cache

import torch
from torch import Tensor

Colours = tuple[float, float, float]


def sent(values: Tensor, device: torch.device | str) -> Tensor:
    """A copy on the device, from pinned memory. For a copy from ordinary memory the host would wait
    until the device has made it, and could not prepare the next step in that time."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def normalized(images: Tensor, mean: Colours, std: Colours) -> Tensor:
    """(images / 255 - mean) / std, as one product and one difference."""
    scale, shift = _scale_and_shift(mean, std, str(images.device))
    return images * scale - shift


@cache
def _scale_and_shift(mean: Colours, std: Colours, device: str) -> tuple[Tensor, Tensor]:
    centre, spread = (torch.tensor(each, device=device).view(3, 1, 1) for each in (mean, std))
    return 1 / (255 * spread), centre / spread
