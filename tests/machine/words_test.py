"""Words for numbers."""

from towers.machine.words import counted, plural


def test_only_one_is_singular():
    assert [plural("tower", count) for count in (0, 1, 2)] == ["towers", "tower", "towers"]
    assert [counted(n, "step") for n in (0, 1, 1500)] == ["0 steps", "1 step", "1,500 steps"]
