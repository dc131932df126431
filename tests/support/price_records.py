"""Records of prices as `bench/prices.py` writes them, with prices by a formula."""

import itertools
import math
from typing import Any

CONDITIONS = {
    "workload": "stories", "parameters": 127_616, "workers": 8, "steps": 1920, "mix_prob": 0.1,
}  # fmt: skip
INTERVALS = (16, 32, 64, 128)
SHARES = (0.0, 0.125, 0.25, 0.5, 0.75)


def extra_by_formula(H: int, share: float, compress: str | None) -> float:
    """Linear in log H and in the delay's share, so that interpolation must find it exactly."""
    return 0.02 * math.log2(H) + 0.2 * share + {None: 0.0, "int8": 0.01, "int4": 0.03}[compress]


def entry(method: str, steps: int, extra: float | None, **fields: Any) -> dict[str, Any]:
    found = {
        "method": method, "steps": steps, "sync_every": None, "delay_share": 0.0, "compress": None,
        "accumulate": 1, "gradients": "fp32",
    }  # fmt: skip
    price = None if extra is None else {"mean": extra, "low": extra - 0.01, "high": extra + 0.01}
    return {**found, **fields, "extra_steps": price, "at_least": 3.0}


def price_record(*, tiny: bool = False, longer: float = 0.0) -> dict[str, Any]:
    """`longer` is what the long runs cost more than the short ones."""
    prices = [entry("ddp", 1920, 0.001, gradients="bf16")]
    prices += [
        entry("ddp", 1920, 0.1 * many, gradients="bf16", accumulate=many) for many in (4, 16, 64)
    ]
    for method, H in itertools.product(("localsgd", "diloco", "palsgd"), INTERVALS):
        short = extra_by_formula(H, 0.0, None) - longer
        prices.append(entry(method, 480, short, sync_every=H))
        for share, code in itertools.product(SHARES, (None, "int8", "int4")):
            if share and code == "int4":
                continue  # not every pair is measured
            extra = extra_by_formula(H, share, code)
            fields = {"sync_every": H, "delay_share": share, "compress": code}
            prices.append(entry(method, 1920, extra, **fields))
    return {"tiny": tiny, "conditions": CONDITIONS, "prices": prices}
