"""DDP: gradients are averaged over the workers at every step. A warm-up that never ends."""

from palsgd.method import Method
from palsgd.registry import Row

ROW = Row(
    name="ddp",
    title="DDP",
    method=Method,
    summary="gradients are averaged at every step",
    colours=("#56606b", "#b4bdc7"),
    rounds=False,
    baseline=True,
    default=True,
)
