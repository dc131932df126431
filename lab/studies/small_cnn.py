"""The small CNN on CIFAR-10: accuracy against K, against H, and with shards that differ.

Learning rates are chosen from the paper's grids, by runs as long as those that are judged: shorter
ones choose outer steps that overfit later (lab/records/2026-11-17-small-cnn). Of these grids the
lowest learning rate and outer learning rate are left out, with which accuracy after five epochs is
a third to two thirds of the best, at every K. 20 epochs in place of 100; against H 3,072 steps,
which are whole rounds of every H, 31 epochs, with products in bf16. All methods have the same.
"""

from calls import ACCURACY, Call
from grid import grid_comparison
from hardware import assumed
from readings import along
from study import Claim, Part, Study, main

METHODS = ("ddp", "localsgd", "diloco", "palsgd", "anchordecay")
OF_PICTURES = ("no-pull", "equal-gradients", "accumulated")


def parts(tiny: bool) -> list[Part]:
    """Tiny: the handwritten digits in place of CIFAR-10, and a net of two layers."""
    recipe = "digits" if tiny else "cifar10-cnn"
    workers = (2, 4) if tiny else (4, 8, 16, 32, 64)
    intervals = (8, 32) if tiny else (1024, 32, 128, 512)
    shards = ("dirichlet:0.1",) if tiny else ("reshuffled", "dirichlet:0.1", "dirichlet:1")
    usual = workers[len(workers) // 2]  # 16; tiny: 4

    rates = {"lr": (2e-3, 1e-2) if tiny else (1e-2, 1e-3)}
    outer = rates if tiny else rates | {"outer_lr": (1.0, 0.1)}
    methods = {name: rates if name in ("ddp", "localsgd") else outer for name in METHODS}

    few = dict(steps=96, batch_size=16)
    whole = few if tiny else dict(epochs=20.0)
    long = few if tiny else dict(epochs=None, whole_rounds=False, steps=3 * 1024,
                                 evaluate_every=256, precision="bf16")  # fmt: skip

    def point(
        name: str, size: dict = whole, of: tuple[str, ...] = METHODS,
        controls: tuple[str, ...] = OF_PICTURES, tried: int = 1, **settings: object,
    ) -> list[Call]:  # fmt: skip
        return grid_comparison(name, recipe, {each: methods[each] for each in of}, tried=tried,
                               seeds=2 if tiny else 3, beside={}, controls=controls, **size,
                               **settings, **ACCURACY)  # fmt: skip

    def at(name: str, *of: str, tried: int = 1, **settings: object) -> list[Call]:
        """Against H: the paper's methods, with the control that tells what the pull is worth."""
        return point(name, long, of, ("no-pull",), tried, workers=usual, sharding="fixed",
                     **settings)  # fmt: skip

    return [
        Part("workers", "What does accuracy lose with more workers, at H = 32?",
             [call for k in workers for call in point(f"K{k}", workers=k, sharding="fixed")]),
        Part("interval", f"What does accuracy lose with a longer interval, at K = {usual}?",
             [*(call for h in intervals
                for call in at(f"H{h}", "localsgd", "diloco", "palsgd", sync_every=h)),
              *at("ddp", "ddp", tried=2)]),  # as many runs as the others' grids have
        Part("shards", f"Does an anchor matter where shards differ, at K = {usual}?",
             [call for each in shards
              for call in point(each.replace(":", ""), workers=usual, sharding=each)]),
    ]  # fmt: skip


STUDY = Study(
    name="small_cnn",
    title="Small CNN on CIFAR-10, K = 4 to 64, four methods, AnchorDecay and controls",
    parts=parts,
    claims=[
        Claim("Local SGD degrades with K; DiLoCo and PALSGD lie near each other", "workers",
              along("workers", *METHODS)),
        Claim("PALSGD is ahead of DiLoCo at long intervals", "interval",
              along("sync_every", "diloco", "palsgd")),
        Claim("none (fixed shards alone)", "shards", along("sharding", *METHODS)),
    ],
    # A gradient step of 10 ms is assumed.
    links=assumed("10ms"),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(STUDY))
