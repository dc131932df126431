"""The rules of the family in plain NumPy, written down from the papers, worker by worker."""

import numpy as np

from support.reference import sgd


class LocalSGD:
    """A run of K workers. Its subclasses are methods; each says in which rule it differs.

    `gradient(k, x, i)` is worker k's i-th gradient at x, `lr(t)` the learning rates of all elements
    at step t, `plan(k, r)` worker k's steps without data in round r, `parts` the elements that are
    synced together, the f-th of F of them after step (f + 1) H / F of a round.
    """

    def __init__(
        self, x0, gradient, *, workers, H, lr, inner, outer=None, plan=None, p=0.0, eta=0.0,
        parts=None,
    ):  # fmt: skip
        self.x, self.local = x0.copy(), [x0.copy() for _ in range(workers)]
        self.gradient, self.H, self.lr, self.plan, self.p, self.eta = gradient, H, lr, plan, p, eta
        self.parts = parts or [np.arange(len(x0))]
        self.inner = [inner() for _ in range(workers)]
        self.outer = [(outer or sgd(fixed_lr=1.0))() for _ in self.parts]
        self.drawn = [0] * workers
        self.sums = np.zeros((workers, len(x0)))  # of learning rates since an element's last sync
        self.start()

    def start(self):
        """State of the method's own."""

    def corrected(self, k, g):
        return g

    def pulled(self, k, rate):
        return self.local[k]

    def exchange(self, f, part, rate):
        mean = np.mean([self.x[part] - x[part] for x in self.local], axis=0)
        self.x[part] = self.outer[f](self.x[part], mean)
        for x in self.local:
            x[part] = self.x[part]

    def run(self, steps):
        for t in range(steps):
            for k in range(len(self.local)):
                self._step(k, t)
            for f, part in enumerate(self.parts):
                place = (f + 1) * self.H // len(self.parts)
                if t % self.H + 1 == place or t + 1 == steps:
                    self.exchange(f, part, self.lr(t)[part])
                    self.sums[:, part] = 0
        return self

    def _step(self, k, t):
        round, place = divmod(t, self.H)
        rate = self.lr(t)
        if self.plan is not None and self.plan(k, round)[place]:
            self.local[k] = self.local[k] - rate * self.eta / self.p * (self.local[k] - self.x)
            return
        g = self.corrected(k, self.gradient(k, self.local[k], self.drawn[k]))
        self.drawn[k] += 1
        self.local[k] = self.inner[k](self.local[k], g, rate / (1 - self.p))
        self.sums[k] += rate / (1 - self.p)
        self.local[k] = self.pulled(k, rate)


class FedProx(LocalSGD):
    mu = 0.01

    def corrected(self, k, g):
        return g + self.mu * (self.local[k] - self.x)


class AnchorDecay(LocalSGD):
    decay = 0.01

    def pulled(self, k, rate):
        return self.local[k] - self.decay * rate / self.lr(0) * (self.local[k] - self.x)


class EASGD(LocalSGD):
    rate = None

    def exchange(self, f, part, rate):
        e = 0.9 / len(self.local) if self.rate is None else self.rate
        apart = [x[part] - self.x[part] for x in self.local]
        for x, gap in zip(self.local, apart, strict=True):
            x[part] -= e * gap
        self.x[part] += e * sum(apart)


class SCAFFOLD(LocalSGD):
    s = 1.0

    def start(self):
        self.c = np.zeros_like(self.x)
        self.c_k = [np.zeros_like(self.x) for _ in self.local]

    def corrected(self, k, g):
        return g - self.c_k[k] + self.c

    def exchange(self, f, part, rate):
        changes = []
        for x, total in zip(self.local, self.sums, strict=True):
            gone = (self.x[part] - x[part]) / np.where(total[part] > 0, total[part], 1)
            changes.append(np.where(total[part] > 0, gone - self.c[part], 0))
        for c, change in zip(self.c_k, changes, strict=True):
            c[part] += change
        self.c[part] += np.mean(changes, axis=0)
        self.x[part] += self.s * np.mean([x[part] - self.x[part] for x in self.local], axis=0)
        for x in self.local:
            x[part] = self.x[part]


class SlowMo(LocalSGD):
    b, s = 0.5, 1.0

    def start(self):
        self.u = np.zeros_like(self.x)

    def exchange(self, f, part, rate):
        mean = np.mean([self.x[part] - x[part] for x in self.local], axis=0)
        self.u[part] = self.b * self.u[part] + mean / rate
        self.x[part] -= self.s * rate * self.u[part]
        for x in self.local:
            x[part] = self.x[part]
        for inner in self.inner:
            inner.state["v"] = inner.state["v"].copy()
            inner.state["v"][part] = 0


TWINS = {kind.__name__: kind for kind in (FedProx, AnchorDecay, EASGD, SCAFFOLD, SlowMo)}


def twin(title, /, *args, **settings):
    """The twin of a method, with the method's own settings as attributes."""
    kind = TWINS[title]
    own = {name: settings.pop(name) for name in list(settings) if hasattr(kind, name)}
    return type(title, (kind,), own)(*args, **settings)
