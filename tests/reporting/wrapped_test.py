"""Lines between words, in a terminal's width."""

import pytest
from rich.text import Text

from towers.reporting.wrapped import wrapped


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
