"""The rows of the golden trajectories leave out no pair of settings."""

from pairwise import FACTORS, IMPOSSIBLE, REQUIRED, all_pairs, pairs_of, rows


def test_every_pair_of_values_occurs_in_a_row_or_is_impossible_and_none_is_both():
    occurring = set().union(*(pairs_of(row) for row in rows()))
    assert occurring | IMPOSSIBLE.keys() == set(all_pairs())
    assert not occurring & IMPOSSIBLE.keys()
    assert all(reason for reason in IMPOSSIBLE.values())


def test_every_row_has_a_value_of_each_factor_and_no_row_comes_twice():
    for row in rows():
        assert list(row) == list(FACTORS)
        assert all(value in FACTORS[factor] for factor, value in row.items())
    assert len({tuple(row.values()) for row in rows()}) == len(rows())


def test_required_settings_occur_and_the_rows_are_the_same_when_chosen_again():
    assert rows() == rows()
    for demand in REQUIRED:
        assert any(demand.items() <= row.items() for row in rows())
