"""Algorithm 1 of the paper in plain NumPy, step by step, the way one would check it by hand."""

import numpy as np


def algorithm1(
    x0, gradient, *, workers, steps, H, p, eta, lr, inner, outer, plan, warmup=0, beta=None,
    pace=None,
):  # fmt: skip
    """`gradient(k, x, i)` is worker k's i-th gradient at x; `plan(k, r)` its coins in round r;
    `beta(t)` the weight of a mixing step, if it is not lr(t) eta / p; `pace(k, r)` the factor on
    lr and the power of 1 - beta in round r of unevenly fast workers."""
    anchor, local = x0.copy(), [x0.copy() for _ in range(workers)]
    inner_opt, outer_opt = [inner() for _ in range(workers)], outer()
    drawn = [0] * workers  # batches each worker has used
    for t in range(steps):
        if t < warmup:
            mean = np.mean([gradient(k, local[k], drawn[k]) for k in range(workers)], axis=0)
            for k in range(workers):
                local[k] = inner_opt[k](local[k], mean, lr(t))
                drawn[k] += 1
            anchor = local[0].copy()
            continue
        round, place = divmod(t - warmup, H)
        for k in range(workers):
            factor, power = (1 / (1 - p), 1) if pace is None else pace(k, round)
            if plan(k, round)[place]:
                weight = lr(t) * eta / p if beta is None else beta(t)
                weight = 1 - (1 - weight) ** power
                local[k] = local[k] - weight * (local[k] - anchor)
            else:
                g = gradient(k, local[k], drawn[k])
                local[k] = inner_opt[k](local[k], g, lr(t) * factor)
                drawn[k] += 1
        if place == H - 1 or t == steps - 1:
            delta = np.mean([anchor - x for x in local], axis=0)
            anchor = outer_opt(anchor, delta)
            local = [anchor.copy() for _ in range(workers)]
    return anchor


def lagged(
    x0, gradient, *, workers, steps, H, p, eta, lr, inner, outer, plan, delay, parts, blend=None
):
    """Algorithm 1 with syncs that take `delay` steps, of the elements `parts[0]`, `parts[1]`, ...
    in turn within a round. A part that comes back is the global model's, with what the local one
    has gained since it was sent; with `blend`, that share of the local one and the rest of the
    global one."""
    anchor, local = x0.copy(), [x0.copy() for _ in range(workers)]
    inner_opt, outer_opt = [inner() for _ in range(workers)], [outer() for _ in parts]
    drawn, flying = [0] * workers, []  # (clock, part, mean, local models at departure)
    for t in range(steps):
        round, place = divmod(t, H)
        for k in range(workers):
            if plan(k, round)[place]:
                local[k] = local[k] - lr(t) * eta / p * (local[k] - anchor)
            else:
                local[k] = inner_opt[k](local[k], gradient(k, local[k], drawn[k]), lr(t) / (1 - p))
                drawn[k] += 1
        for f, part in enumerate(parts):
            for _, _, mean, then in [c for c in flying if c[1] == f and t + 1 in (c[0], steps)]:
                anchor[part] = outer_opt[f](anchor[part], mean)
                for k in range(workers):
                    kept = anchor[part] + local[k][part] - then[k]
                    blended = (blend or 0) * local[k][part] + (1 - (blend or 0)) * anchor[part]
                    local[k][part] = kept if blend is None else blended
            flying = [c for c in flying if not (c[1] == f and t + 1 in (c[0], steps))]
        for f, part in enumerate(parts):
            if place + 1 == (f + 1) * H // len(parts) or t + 1 == steps:
                mean = np.mean([anchor[part] - x[part] for x in local], axis=0)
                if delay and t + 1 < steps:
                    flying.append((t + 1 + delay, f, mean, [x[part].copy() for x in local]))
                else:
                    anchor[part] = outer_opt[f](anchor[part], mean)
                    for k in range(workers):
                        own = (blend or 0) * local[k][part]
                        local[k][part] = own + (1 - (blend or 0)) * anchor[part]
    return anchor


def sgd(momentum=0.0, nesterov=False, fixed_lr=None):
    def build():
        state = {"v": None}

        def step(x, g, lr=None):
            v = g if state["v"] is None else momentum * state["v"] + g
            state["v"] = v
            return x - (fixed_lr if lr is None else lr) * (g + momentum * v if nesterov else v)

        step.state = state
        return step

    return build


def adamw(decay=0.0, betas=(0.9, 0.999), eps=1e-8, fixed_lr=None):
    def build():
        state = {"m": 0.0, "v": 0.0, "t": 0}

        def step(x, g, lr=None):
            lr = fixed_lr if lr is None else lr
            state["t"] += 1
            state["m"] = betas[0] * state["m"] + (1 - betas[0]) * g
            state["v"] = betas[1] * state["v"] + (1 - betas[1]) * g * g
            m = state["m"] / (1 - betas[0] ** state["t"])
            v = state["v"] / (1 - betas[1] ** state["t"])
            return x * (1 - lr * decay) - lr * m / (np.sqrt(v) + eps)

        return step

    return build
