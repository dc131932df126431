"""Settings of the library, each with what Algorithm 1 in NumPy makes of the same."""

import torch

import palsgd
from support.problems import regression_gradient, regression_start
from support.reference import adamw, algorithm1, sgd

LR = 0.05
INNER = {
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=LR), sgd()),
    "momentum": (lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9), sgd(momentum=0.9)),
    "adamw": (lambda ps: torch.optim.AdamW(ps, lr=LR, weight_decay=0.1), adamw(decay=0.1)),
}
OUTER = {
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=0.7), sgd(fixed_lr=0.7)),
    "momentum": (
        lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.8),
        sgd(momentum=0.8, fixed_lr=0.3),
    ),
    "nesterov": (
        palsgd.nesterov(lr=0.3, momentum=0.8),
        sgd(momentum=0.8, nesterov=True, fixed_lr=0.3),
    ),
    "adam": (lambda ps: torch.optim.Adam(ps, lr=0.02), adamw(fixed_lr=0.02)),
}
RULES = dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, seed=11)


def expected(inner, outer, workers, steps, draws, lr=lambda t: LR, beta=None, **rules):
    rules = RULES | rules
    H, p = rules["sync_every"], rules["mix_prob"]
    plan = lambda k, r: palsgd.round_plan(  # noqa: E731
        seed=rules["seed"], worker=k, round=r, sync_every=H, mix_prob=p, draws=draws
    )
    return algorithm1(
        regression_start(), regression_gradient, workers=workers, steps=steps, H=H, p=p,
        eta=rules["mix_rate"], lr=lr, inner=INNER[inner][1], outer=OUTER[outer][1], plan=plan,
        warmup=rules.get("warmup_steps", 0), beta=beta,
    )  # fmt: skip
