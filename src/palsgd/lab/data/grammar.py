"""Text from a probabilistic grammar whose entropy is known exactly.

In each state of a grammar one of a few sentences is drawn, which leads to the next state, until
a state that has none. A sentence is words and slots in braces. A slot's word is drawn anew at
each mention; or, where remembered, at the first mention and kept; or it follows another slot's
word (a pronoun follows a name).

The choices can be read back from the text. Any two sentences that may be drawn in one state
differ at some place where neither can have a word of the other (checked below), so the text says
which one was drawn, hence where the next begins and in which state, and each slot stands for one
word. Text and choices determine each other, and the entropy of the text is the sum over all
choices of P(the choice is made) * (its own entropy).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

END = 0  # the word that ends a text


@dataclass(frozen=True)
class Slot:
    words: Sequence[str]  # the i-th has weight 1/i
    remembered: bool = False
    follows: str | None = None  # has the word at the place of that slot's


@dataclass(frozen=True)
class Rule:
    weight: float
    sentence: str
    leads_to: str


@dataclass(frozen=True)
class Texts:
    words: np.ndarray  # a text per row, END behind it
    lengths: np.ndarray  # END included
    nats: np.ndarray  # -log of each text's probability


class Grammar:
    def __init__(self, slots: Mapping[str, Slot], rules: Mapping[str, Sequence[Rule]], start: str):
        self.slots, self.rules, self.start = slots, rules, start
        _check_readable(slots, rules)
        literal = {word for some in rules.values() for rule in some for word in _cells(rule)}
        filled = {word for slot in slots.values() for word in slot.words}
        self.vocabulary = ["<end>", *sorted({w for w in literal if w[0] != "{"} | filled)]
        self._measure()
        self._tabulate()

    def text(self, words: Sequence[int]) -> str:
        return " ".join(self.vocabulary[word] for word in words if word != END)

    def _measure(self) -> None:
        """Expected nats and words of a text, END included; the longest; the most sentences; and by
        remembered slot the nats that its further mentions would cost if it were not remembered.

        All texts at once, by state and by the slots mentioned so far."""
        self.entropy, self.mean_length, self.longest, self.most_sentences = 0.0, 1.0, 1, 0
        self.worth = {name: 0.0 for name, slot in self.slots.items() if slot.remembered}
        here = {(self.start, frozenset[str]()): (1.0, 1)}
        while here:
            there: dict = defaultdict(lambda: (0.0, 0))
            for (state, mentioned), (chance, length) in here.items():
                shares = _shares([rule.weight for rule in self.rules[state]])
                self.entropy += chance * _entropy(shares)
                for share, rule in zip(shares, self.rules[state], strict=True):
                    nats, after = self._mention(rule, mentioned)
                    for name in self._repeated(rule, mentioned):
                        self.worth[name] += chance * share * _entropy(_weights(self.slots[name]))
                    words = len(_cells(rule))
                    self.entropy += chance * share * nats
                    self.mean_length += chance * share * words
                    self.longest = max(self.longest, length + words)
                    if rule.leads_to in self.rules:
                        key = (rule.leads_to, after)
                        known, longest = there[key]
                        there[key] = (known + chance * share, max(longest, length + words))
            here, self.most_sentences = there, self.most_sentences + 1
            assert self.most_sentences < 1000, "a grammar with a loop has no longest text"

    def _mention(self, rule: Rule, mentioned: frozenset[str]) -> tuple[float, frozenset[str]]:
        """Nats of the slots of a sentence, and the slots that are known after it."""
        nats = 0.0
        for name in _slots_of(rule):
            slot = self.slots[name]
            if slot.follows:
                assert slot.follows in mentioned, f"{name} comes before {slot.follows}"
            elif name not in mentioned:
                nats += _entropy(_weights(slot))
                mentioned |= {name} if slot.remembered else set()
        return nats, mentioned

    def _repeated(self, rule: Rule, mentioned: frozenset[str]) -> Iterator[str]:
        """The remembered slots of a sentence at their second and further mentions."""
        known = set(mentioned)
        for name in _slots_of(rule):
            if name in known:
                yield name
            elif self.slots[name].remembered:
                known.add(name)

    def _tabulate(self) -> None:
        """The grammar as arrays: states, sentences (the last is empty, for texts that ended) and
        slots by number. A cell of a sentence is a word, or a slot's number past all words."""
        number = {word: i for i, word in enumerate(self.vocabulary)}
        slot_number = {name: i for i, name in enumerate(self.slots)}
        states = {name: i for i, name in enumerate(self.rules)}
        flat = [rule for some in self.rules.values() for rule in some]
        rows = [
            [
                len(number) + slot_number[cell[1:-1]] if cell[0] == "{" else number[cell]
                for cell in _cells(rule)
            ]
            for rule in flat
        ]
        self._cells = _table([*rows, []], fill=-1)
        over = len(states)
        self._leads_to = np.array([*(states.get(rule.leads_to, over) for rule in flat), over])
        shares = [_shares([rule.weight for rule in some]) for some in self.rules.values()]
        self._first = np.cumsum([0, *map(len, shares)])
        self._rule_nats = -np.log(np.concatenate([*shares, [1.0]]))
        self._rule_steps = _table([_steps(each) for each in [*shares, np.ones(1)]], fill=np.inf)
        weights = [_weights(slot) for slot in self.slots.values()]
        self._slot_words = _table([[number[w] for w in s.words] for s in self.slots.values()], END)
        self._slot_nats = _table([-np.log(each) for each in weights], fill=0.0)
        self._slot_steps = _table([_steps(each) for each in weights], fill=np.inf)
        self._source = np.array([slot_number[s.follows or n] for n, s in self.slots.items()])
        self._kept = np.array([s.remembered or s.follows is not None for s in self.slots.values()])

    def draw(self, each: int, *randoms: np.random.Generator) -> Texts:
        """`each` texts from each of the generators, all at once: those of the first one first. They
        are the texts that each generator would give by itself."""
        count = each * len(randoms)
        nats = np.zeros(count)
        drawn = np.empty((count, self.most_sentences), dtype=np.int64)
        state = np.full(count, list(self.rules).index(self.start))
        all_chances = [one.random((self.most_sentences, each)) for one in randoms]
        for step, chances in enumerate(np.concatenate(all_chances, axis=1)):
            drawn[:, step] = self._first[state] + _pick(self._rule_steps[state], chances)
            nats += self._rule_nats[drawn[:, step]]
            state = self._leads_to[drawn[:, step]]
        cells = self._cells[drawn].reshape(count, -1)
        nats += self._fill(cells, each, randoms)
        words = np.full((count, self.longest), END)
        used = cells >= 0
        places = used.cumsum(axis=1) - 1
        words[np.nonzero(used)[0], places[used]] = cells[used]
        return Texts(words, used.sum(axis=1) + 1, nats)

    def _fill(
        self, cells: np.ndarray, each: int, randoms: Sequence[np.random.Generator]
    ) -> np.ndarray:
        """Put words into the slots, in place; the nats of each text's words."""
        text, place = np.nonzero(cells >= len(self.vocabulary))
        slot = cells[text, place] - len(self.vocabulary)
        kept = self._kept[slot]
        own = np.concatenate([one.random((each, len(self.slots))) for one in randoms])
        # The texts of a generator are neighbours, and so are their slots.
        counts = np.bincount(text // each, minlength=len(randoms))
        new = np.concatenate([one.random(n) for one, n in zip(randoms, counts, strict=True)])
        chances = np.where(kept, own[text, self._source[slot]], new)
        chosen = _pick(self._slot_steps[slot], chances)
        cells[text, place] = self._slot_words[slot, chosen]
        nats = self._slot_nats[slot, chosen]
        once = np.zeros((len(cells), len(self.slots)))
        once[text[kept], self._source[slot[kept]]] = nats[kept]
        return once.sum(axis=1) + np.bincount(text[~kept], nats[~kept], minlength=len(cells))


def _check_readable(slots: Mapping[str, Slot], rules: Mapping[str, Sequence[Rule]]) -> None:
    for name, slot in slots.items():
        if slot.follows:
            assert len(slot.words) == len(slots[slot.follows].words), name
        else:
            assert len(set(slot.words)) == len(slot.words), f"{name} has a word twice"

    def possible(cell: str) -> set[str]:
        return set(slots[cell[1:-1]].words) if cell[0] == "{" else {cell}

    for some in rules.values():
        for one, other in combinations(some, 2):
            pairs = zip(_cells(one), _cells(other), strict=False)
            assert any(possible(a).isdisjoint(possible(b)) for a, b in pairs), (one, other)


def _cells(rule: Rule) -> list[str]:
    return rule.sentence.split()


def _slots_of(rule: Rule) -> list[str]:
    return [cell[1:-1] for cell in _cells(rule) if cell[0] == "{"]


def _weights(slot: Slot) -> np.ndarray:
    return _shares([1 / (i + 1) for i in range(len(slot.words))])


def _shares(weights: Sequence[float]) -> np.ndarray:
    return np.array(weights) / sum(weights)


def _entropy(shares: np.ndarray) -> float:
    return float(-(shares * np.log(shares)).sum())


def _steps(shares: np.ndarray) -> np.ndarray:
    """The limits between the choices on [0, 1]; the last choice has no upper limit."""
    return np.append(np.cumsum(shares)[:-1], np.inf)


def _pick(steps: np.ndarray, chances: np.ndarray) -> np.ndarray:
    return (steps <= chances[:, None]).sum(axis=1)


def _table(rows: Sequence[Sequence | np.ndarray], fill: float) -> np.ndarray:
    table = np.full((len(rows), max(map(len, rows))), fill)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table
