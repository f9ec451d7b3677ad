"""Numbers as a run shows them."""

import pytest
from rich.text import Text

from towers.app.reporting.formats import format_bytes, format_loss, format_seconds, wrapped


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0:00"), (59.6, "1:00"), (186, "3:06"), (3723, "1:02:03")]
)
def test_seconds_become_minutes_and_hours(seconds, expected):
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 bytes"), (999, "999 bytes"), (4799528, "4.8 MB"), (2.5e12, "2500.0 GB")],
)
def test_bytes_get_a_unit(count, expected):
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(0.08123, "0.0812"), (3e-5, "3.000e-05"), (0, "0.0000"), (1e7, "1.000e+07")],
)
def test_a_tiny_loss_does_not_look_like_zero(loss, expected):
    assert format_loss(loss) == expected


@pytest.mark.parametrize("text, expected", [
    ("Data  one two", ["Data  one two"]),  # as wide as the terminal
    ("Data  one two three four", ["Data  one two", "  three four"]),
    ("Data  one /a/long/path/of/a/run two", ["Data  one", "  /a/long/path/of/a/run", "  two"]),
    ("      one two three", ["      one two", "  three"]),
    ("Data  \u65e5\u672c two three", ["Data  \u65e5\u672c", "  two three"]),  # two columns each
])
def test_a_line_breaks_between_words_and_words_stay_whole(text, expected):
    assert wrapped(Text(text), 13, 2).plain.split("\n") == expected


def test_styles_stay_with_their_words_and_what_must_not_break_does_not():
    styled = wrapped(Text.assemble(("one", "bold"), " two ", ("three", "green")), 8, 2)
    words = {styled.plain[span.start:span.end]: span.style for span in styled.spans}
    assert words == {"one": "bold", "three": "green"}
    assert wrapped(Text("one two three", no_wrap=True), 8, 2).plain == "one two three"
