"""One value for each output of a model, from whatever structure it comes in."""

import pytest

from towers.step.outputs import per_output

A_LIST, A_DICT = ["p", "q"], {"b": "q", "a": "p"}  # structures of outputs; dicts in sorted order


@pytest.mark.parametrize("value, outputs, expected", [
    (5, "one", [5]),
    (None, A_LIST, [None, None]),
    ([5, 6], A_LIST, [5, 6]),
    ((5, 6), A_DICT, [5, 6]),
    ({"first": 5, "second": 6}, A_LIST, [5, 6]),  # by the outputs' names
    ({"second": 6}, A_LIST, [None, 6]),
    ({"a": 5, "b": 6}, A_DICT, [5, 6]),
    ({"b": 6}, A_DICT, [None, 6]),
])
def test_a_value_is_laid_beside_the_flattened_outputs(value, outputs, expected):
    names = ["first", "second"] if outputs is A_LIST else None
    assert per_output(value, outputs, names, "y") == expected


def test_one_value_stands_for_every_output_only_where_it_may():
    assert per_output(5, A_LIST, None, "loss", repeat=True) == [5, 5]
    with pytest.raises(ValueError, match="y is one value, but the model has 2 outputs"):
        per_output(5, A_LIST, None, "y")


@pytest.mark.parametrize("value, message", [
    ([1, 2, 3], "y has 3 entries, but the model has 2 outputs"),
    ({"first": 1, "third": 3}, r"y names \['third'\]; the outputs are \['first', 'second'\]"),
])
def test_what_does_not_match_the_outputs_is_refused_with_both(value, message):
    with pytest.raises(ValueError, match=message):
        per_output(value, A_LIST, ["first", "second"], "y")
