"""Which part of the training data is held out for choosing settings.

A run with split=test trains on all training data, the held out part included, and is evaluated on
the test set. A run with split=choose trains on the training data without the held out part and is
evaluated on that part; it never loads the test set. So settings can be chosen on data that say
nothing about the test set.
"""

import numpy as np

from palsgd.lab.data.sharding import random_stream


def held_out_count(examples: int, share: float) -> int:
    return max(1, round(share * examples))


def held_out(examples: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The examples that remain for training, and those held out. They are drawn at random, since
    files may be sorted by class, and are always the same ones."""
    order = random_stream(0).permutation(examples)
    count = held_out_count(examples, share)
    return np.sort(order[count:]), np.sort(order[:count])
