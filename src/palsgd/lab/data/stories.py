"""A grammar of short English stories: endless text, and the least loss on it known exactly."""

from itertools import pairwise

from palsgd.lab.data.grammar import Grammar, Rule, Slot


def _remembered(words: str) -> Slot:
    return Slot(words.split(), remembered=True)


def _fresh(words: str) -> Slot:
    return Slot(words.split())


def _by_hero(she: str, he: str) -> Slot:
    return Slot([she, he] * 8, follows="hero")


# A model learns to repeat the words of one slot after those of another, each suddenly. What comes
# up again in every story is learnt early, whatever the seed. What comes up again in some is learnt
# late or not at all, and if it is worth some percent of the loss, runs that differ in their seed
# alone end so far apart. So only the two names are remembered. All else is drawn anew at each
# mention, and the rules say "it" where a story means the same thing again.
SLOTS = {
    "hero": _remembered("lily tom mia ben sara tim anna max lucy sam emma jack zoe leo ella finn"),
    "she": _by_hero("she", "he"),
    "her": _by_hero("her", "his"),
    "him": _by_hero("her", "him"),
    "girl": _by_hero("girl", "boy"),
    "friend": _remembered("spot pip momo coco bobo kiki toto lulu nono fifi gigi titi"),
    "animal": _fresh("dog cat rabbit bear bird frog duck mouse fox owl turtle squirrel"),
    "family": _fresh("mom dad grandma grandpa sister brother aunt uncle"),
    "trait": _fresh("kind brave curious shy clever gentle funny quiet careful honest"),
    "place": _fresh("park forest garden beach farm river hill lake village castle cave zoo"),
    "weather": _fresh("sunny rainy windy cold warm snowy cloudy foggy"),
    "colour": _fresh("red blue green yellow pink purple orange white black golden"),
    "toy": _fresh("ball kite doll boat drum puzzle robot train balloon book car bell"),
    "food": _fresh("cake apple pie bread soup cheese honey corn jam rice"),
    "sad": _fresh("sad upset worried scared lonely angry"),
    "glad": _fresh("happy glad proud excited cheerful thankful"),
    "size": _fresh("big small tiny huge little old pretty tall"),
    "how": _fresh("slowly quickly quietly carefully happily gently loudly bravely"),
    "did": _fresh("ran jumped walked danced hopped skipped raced marched"),
    "hide": _fresh("tree rock bush door gate fence bench wall box log"),
}


def _while_it_lasts(name: str, turns: int, goes_on: list[tuple], ends: list[tuple]) -> dict:
    """A scene of at most so many turns: state `name`, then `name 1`, `name 2`, ..."""
    states = [name, *(f"{name} {i}" for i in range(1, turns + 1))]
    scene = {
        state: [Rule(weight, text, after) for weight, text in goes_on] + [Rule(*e) for e in ends]
        for state, after in pairwise(states)
    }
    return scene | {states[-1]: [Rule(*end) for end in ends]}


RULES = {
    "start": [
        Rule(3, "once upon a time there was a {trait} child named {hero} .", "home"),
        Rule(2, "one {weather} day a {trait} child named {hero} woke up early .", "home"),
        Rule(1, "{hero} was a {trait} child who lived near the {place} .", "home"),
    ],
    "home": [
        Rule(3, "{she} lived with {her} {family} in a {size} house .", "friend"),
        Rule(2, "every day {she} {did} to the {place} .", "friend"),
        Rule(1, "{her} {family} loved {him} very much .", "friend"),
    ],
    "friend": [
        Rule(3, "{her} best friend was a {animal} named {friend} .", "out"),
        Rule(1, "{she} had a {size} {animal} named {friend} .", "out"),
    ],
    "out": [
        Rule(3, "one {weather} morning {hero} and {friend} went to the {place} .", "find"),
        Rule(2, "{hero} liked to play in the {place} with {friend} .", "find"),
    ],
    "find": [
        Rule(3, "they found a {colour} {toy} behind a {size} {hide} .", "play"),
        Rule(2, "they found a {colour} basket with some {food} in it .", "eat"),
        Rule(2, "suddenly {hero} could not find {her} {colour} {toy} .", "search"),
    ],
    **_while_it_lasts(
        "play",
        4,
        goes_on=[
            (3, "{hero} {did} {how} with it ."),
            (2, "{friend} wanted to hold it too ."),
            (1, '" look how {size} it is ! " said {hero} .'),
        ],
        ends=[
            (2, "then it fell into the water .", "broken"),
            (1, "they {did} {how} until it was late .", "evening"),
        ],
    ),
    **_while_it_lasts(
        "eat",
        3,
        goes_on=[
            (3, "{hero} ate some of it {how} ."),
            (2, "{friend} took a {size} bite and was {glad} ."),
        ],
        ends=[
            (2, "they took the rest home to {her} {family} .", "happy"),
            (1, "but the basket was not for them .", "broken"),
        ],
    ),
    **_while_it_lasts(
        "search",
        4,
        goes_on=[
            (3, "{hero} looked behind the {hide} ."),
            (2, "{friend} looked under the {size} {hide} ."),
        ],
        ends=[(2, "at last they saw it behind the {hide} .", "happy")],
    ),
    "broken": [
        Rule(2, "{hero} felt {sad} and began to cry .", "help"),
        Rule(1, "{friend} felt {sad} and {hero} did not know what to do .", "help"),
    ],
    "help": [
        Rule(2, "{her} {family} came and helped them {how} .", "happy"),
        Rule(1, "{friend} had a {size} idea and {did} away {how} .", "happy"),
    ],
    "happy": [
        Rule(2, '" thank you , {friend} ! " said {hero} .', "evening"),
        Rule(2, '" now i am {glad} , " said {hero} .', "evening"),
        Rule(1, "they laughed and {did} {how} .", "evening"),
    ],
    "evening": [
        Rule(3, "when the sun went down {hero} told {her} {family} about it .", "moral"),
        Rule(1, "in the evening {she} was {glad} and tired .", "moral"),
    ],
    "moral": [
        Rule(3, "{hero} the {trait} {girl} and {friend} were {glad} .", "end"),
        Rule(2, "from then on they went to the {place} on every {weather} day .", "end"),
        Rule(1, "and so a {trait} {girl} and {friend} became best friends .", "end"),
    ],
}

GRAMMAR = Grammar(SLOTS, RULES, start="start")
