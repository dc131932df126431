"""One fault: what happens to which run, when, and to whom. All of it follows from a seed."""

import random
from dataclasses import dataclass

LIBRARY = ("plain", "compressed", "delayed", "fragmented", "paced")
ELASTIC_WORKERS = 3  # the other scenarios have two
# A fault comes at a gradient step that every worker takes; files are damaged when there are two
# saves.
STEPS, STEPS_OF_DAMAGE = (2, 28), (20, 28)
DAMAGES = ("truncate", "flip")


@dataclass(frozen=True)
class Kind:
    """A way in which things go wrong."""

    says: str
    scenarios: tuple[str, ...]
    goes_on: bool = False  # must the run come to its end by itself?
    needs_root: bool = False  # for mounts and network namespaces


KINDS = {
    "kill": Kind("a worker is killed at any instant", (*LIBRARY, "lab", "launched", "elastic")),
    "kill all": Kind("all workers are killed within 30 ms", ("plain", "delayed", "lab")),
    "kill in a save": Kind(
        "a worker is killed before one of the file operations of a save",
        ("plain", "compressed", "delayed", "lab"),
    ),
    "cut a write": Kind("a worker is killed in the middle of writing a file", ("plain", "lab")),
    "stop": Kind(
        "a worker is stopped for a second or two", (*LIBRARY, "lab", "elastic"), goes_on=True
    ),
    "stop for good": Kind(
        "a worker never moves again", ("plain", "delayed", "fragmented", "lab", "elastic")
    ),
    "terminate": Kind("a worker receives SIGTERM", ("plain", "delayed", "lab", "launched")),
    "truncate": Kind("a file of the newest save is cut", ("plain", "delayed", "lab")),
    "flip": Kind("a bit of the newest save flips", ("plain", "compressed", "paced", "lab")),
    "full disk": Kind("nothing more can be written", ("plain", "delayed", "lab"), needs_root=True),
    "read-only disk": Kind("the disk refuses writes", ("plain", "lab"), needs_root=True),
    "nan": Kind("a worker's gradient is nan", LIBRARY),
    "clock jump": Kind(
        "the time of day of a worker jumps by hours", (*LIBRARY, "lab"), goes_on=True
    ),
    "out of memory": Kind("an allocation fails, and the worker ends", ("plain", "delayed", "lab")),
    "out of memory, caught": Kind(
        "an allocation fails, and the step is tried again", ("plain", "paced"), goes_on=True
    ),
    "other settings": Kind("a worker has another learning rate", ("plain", "compressed", "paced")),
    "other code": Kind("a worker's model computes something else", ("plain", "delayed")),
    "second run": Kind("another run starts in the same folder", ("lab",), goes_on=True),
    "link down": Kind(
        "a link is down for a second or two", ("plain", "delayed"), goes_on=True, needs_root=True
    ),
    "link down for good": Kind("a link never comes back", ("plain", "delayed"), needs_root=True),
    "slow link": Kind(
        "packets of a worker take 20 ms longer", ("plain", "delayed"), goes_on=True, needs_root=True
    ),
    "lossy link": Kind(
        "3% of a worker's packets are lost", ("plain", "compressed"), goes_on=True, needs_root=True
    ),
}
PAIRS = [(kind, scenario) for kind in KINDS for scenario in KINDS[kind].scenarios]


@dataclass(frozen=True)
class Fault:
    """Attributes:
    seed: decides all the others.
    kind: a name of KINDS.
    scenario: the run that it happens to.
    victim: the worker.
    step: the gradient step of the victim at which it happens.
    chance: in [0, 1): what else the kind must know, such as a place in a file.
    """

    seed: int
    kind: str
    scenario: str
    victim: int
    step: int
    chance: float

    @classmethod
    def of(cls, seed: int) -> "Fault":
        """Seeds in a row go through all pairs of kind and scenario.

        >>> Fault.of(1) == Fault.of(1 + len(PAIRS))
        False
        """
        kind, scenario = PAIRS[seed % len(PAIRS)]
        draw = random.Random(seed)
        step = draw.randint(*(STEPS_OF_DAMAGE if kind in DAMAGES else STEPS))
        victim = draw.randrange(ELASTIC_WORKERS if scenario == "elastic" else 2)
        return cls(seed, kind, scenario, victim, step, draw.random())

    @property
    def goes_on(self) -> bool:
        """Must the others, at least, come to their end by themselves?"""
        return KINDS[self.kind].goes_on or self.scenario == "elastic"

    def __str__(self) -> str:
        return f"{self.seed}: {self.kind}, {self.scenario}, worker {self.victim}, step {self.step}"


def seed_of(kind: str, scenario: str, repeat: int = 1) -> int:
    """A seed that has this kind and scenario."""
    return PAIRS.index((kind, scenario)) + repeat * len(PAIRS)
