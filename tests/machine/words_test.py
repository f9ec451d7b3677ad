"""Words for numbers."""

from towers.machine.words import plural


def test_only_one_is_singular():
    assert [plural("tower", count) for count in (0, 1, 2)] == ["towers", "tower", "towers"]
