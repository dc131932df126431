"""Small methods, each of which uses one part of the contract that the library's own leave alone."""

from dataclasses import dataclass

import torch

import palsgd
from palsgd.method import Part, Payload, Scalar


@dataclass(frozen=True, kw_only=True)
class GrowingRounds(palsgd.Method):
    """`length`: each round is a step longer than the one before."""

    def length(self, round, facts):
        return facts.sync_every + round


@dataclass(frozen=True, kw_only=True)
class Ring(palsgd.Method):
    """`weights` and `global_model`: each worker averages with its right neighbour."""

    workers: int

    def weights(self, worker, round):
        return (
            dict.fromkeys({worker, (worker + 1) % self.workers}, 0.5) if self.workers > 1 else None
        )

    def payload(self, w):
        pairs = zip(w.local, w.anchor, strict=True)
        return Payload((Part("local", [x.to(a.dtype) for x, a in pairs]),))

    def apply(self, w, reduced, outer):
        torch._foreach_copy_(w.anchor, reduced["local"])

    def global_model(self, w):
        return w.anchor


@dataclass(frozen=True, kw_only=True)
class Remembering(palsgd.Method):
    """`join` and a local state: the gradient is moved by a mean of the displacements so far; a
    worker that comes back starts from the anchor."""

    local_state = ("memory",)

    def before_gradient(self, w):
        torch._foreach_add_(w.grad, w.memory, alpha=0.01)

    def apply(self, w, reduced, outer):
        for memory, a, x in zip(w.memory, w.anchor, w.local, strict=True):
            memory.lerp_((a - x).to(memory.dtype), 0.5)
        outer.step()

    def join(self, w):
        for memory, a in zip(w.memory, w.anchor, strict=True):
            memory.copy_(a)


@dataclass(frozen=True, kw_only=True)
class FarthestTwice(palsgd.Method):
    """`gather`: the displacements of all workers, of which the last worker's counts twice."""

    def payload(self, w):
        return Payload((Part("model", reduction="gather"),))

    def apply(self, w, reduced, outer):
        for a, rows in zip(w.anchor, reduced["model"], strict=True):
            a.sub_((rows.sum(0) + rows[-1]) / (len(rows) + 1))


@dataclass(frozen=True, kw_only=True)
class MomentumToo(palsgd.Method):
    """`every` and `inner`: the inner momentum is averaged too, with every second round."""

    def payload(self, w):
        momentum = Part("momentum", w.inner["momentum_buffer"], every=2)
        return Payload((Part("model"), momentum))

    def apply(self, w, reduced, outer):
        outer.step()
        if "momentum" in reduced:
            for own, mean in zip(w.inner["momentum_buffer"], reduced["momentum"], strict=True):
                own.copy_(mean.expand_as(own))


@dataclass(frozen=True, kw_only=True)
class ByDistance(palsgd.Method):
    """Scalars, a global number, a norm: the outer step is shorter the farther the workers are."""

    global_state = (Scalar("longest", 0.0),)
    local_state = (Scalar("seen", 1.0),)

    def payload(self, w):
        away = w.norm(torch._foreach_sub(list(w.anchor), list(w.local)))
        return Payload(scalars={"distance": away, "steps": w.gradient_steps, "seen": w.seen})

    def apply(self, w, reduced, outer):
        w.longest = max(w.longest, reduced.scalars["distance"])
        w.seen = w.seen + w.gradient_steps
        scale = 1 / (1 + w.longest + 0.001 * reduced.scalars["seen"])
        for a, mean in zip(w.anchor, reduced["model"], strict=True):
            a.sub_(mean * scale)


@dataclass(frozen=True, kw_only=True)
class BySteps(palsgd.Method):
    """ "weighted" and `rate_sums`: displacements per learning rate, weighted by gradient steps."""

    def payload(self, w):
        rates = [(a - x) / r for a, x, r in zip(w.anchor, w.local, w.rate_sums, strict=True)]
        return Payload((Part("rate", rates, reduction="weighted"),), weight=w.gradient_steps)

    def apply(self, w, reduced, outer):
        torch._foreach_sub_(w.anchor, torch._foreach_mul(reduced["rate"], 0.05))


@dataclass(frozen=True, kw_only=True)
class Halfway(palsgd.Method):
    """`restart`: the local model goes half of the way to the anchor."""

    def restart(self, w):
        for x, a in zip(w.local, w.anchor, strict=True):
            x.copy_(torch.lerp(x.to(a.dtype), a.expand_as(x), 0.5))


@dataclass(frozen=True, kw_only=True)
class AlwaysPulling(palsgd.Method):
    """`after_gradient` without steps that lack data: a pull after every gradient, as strong as the
    learning rate."""

    def after_gradient(self, w, rate, mixing):
        for group, each in enumerate(rate or ()):
            palsgd.tensors.mix_(*w.group(group), each)


METHODS = {
    "growing": lambda workers: GrowingRounds(),
    "ring": lambda workers: Ring(workers=workers),
    "remembering": lambda workers: Remembering(),
    "gather": lambda workers: FarthestTwice(),
    "momentum": lambda workers: MomentumToo(),
    "distance": lambda workers: ByDistance(),
    "weighted": lambda workers: BySteps(),
    "halfway": lambda workers: Halfway(),
    "pulling": lambda workers: AlwaysPulling(),
    "pulling halfway": lambda workers: [AlwaysPulling(), Halfway()],
}
