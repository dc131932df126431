"""A table that others published: Table 1 of SlowMo (CIFAR-10, ResNet-18, 32 workers, H = 12).

First its Local SGD, SlowMo and all-reduce rows; a row counts as reproduced within 0.4 points. Then
DiLoCo, PALSGD and AnchorDecay in the same setting. All methods have a learning rate of their own.

60 epochs in place of 200, three seeds in place of five, products in bf16; the same for all.
"""

from calls import ACCURACY, Call, tuned_comparison
from readings import ends
from study import Claim, Part, Study, main

ROWS = ("ddp", "localsgd", "slowmo")
OURS = ("diloco", "palsgd", "anchordecay")
TINY = "tiny_resnet:TinyResNet"


def table(tiny: bool) -> list[Call]:
    """One search and one comparison, so that all methods have the same seeds and budget."""
    if tiny:
        return tuned_comparison("table", TINY, (*ROWS, *OURS), trials=2, seeds=2, workers=4,
                                batch_size=8, sync_every=12, steps=48, schedule="step",
                                schedule_at="0.5:0.75:0.875", **ACCURACY)  # fmt: skip
    calls = tuned_comparison("table", "cifar10-resnet18", (*ROWS, *OURS), trials=3, seeds=3,
                             together=False, precision="bf16", **ACCURACY)  # fmt: skip
    return [call.shortened(0.3) for call in calls]


def parts(tiny: bool) -> list[Part]:
    """Tiny: the handwritten digits and a net of two residual blocks with BatchNorm."""
    return [
        Part("table", "Are the published rows reproduced, and where do the others stand?",
             table(tiny))
    ]  # fmt: skip


STUDY = Study(
    name="slowmo_table",
    title="SlowMo's Table 1: CIFAR-10, ResNet-18, 32 workers, H = 12, 60 epochs",
    parts=parts,
    claims=[
        Claim("all-reduce 92.66%, Local SGD 91.73%, SlowMo 93.20%", "table", ends(*ROWS)),
        Claim("none", "table", ends(*OURS)),
    ],
    # A gradient step of 50 ms is assumed.
    links=("100mbit,10ms,step=50ms", "1gbit,1ms,step=50ms"),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
