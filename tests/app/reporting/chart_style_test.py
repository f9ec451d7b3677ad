"""What the charts share: a PNG of the size asked for, written whole or not at all."""

import itertools
import os
import struct

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from towers.app.reporting.chart_style import COLORS, drawn, style_axes


def test_a_picture_has_120_pixels_an_inch(tmp_path):
    with drawn(tmp_path / "a.png", 4.0, 2.5, "a title", "a note") as figure:
        figure.subplots().plot([1, 2], [3, 4])
    content = (tmp_path / "a.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (480, 300)  # its header's first two numbers
    assert os.listdir(tmp_path) == ["a.png"]


def test_a_picture_that_fails_leaves_the_old_one_alone(tmp_path):
    (tmp_path / "a.png").write_text("old")
    with pytest.raises(ZeroDivisionError):
        with drawn(tmp_path / "a.png", 4.0, 2.5, "a title"):
            1 / 0
    assert (tmp_path / "a.png").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.png"]


def test_the_title_stands_on_top_and_the_note_below_where_there_is_one(tmp_path):
    with drawn(tmp_path / "a.png", 4.0, 2.5, "a title", "a note") as figure:
        assert (figure.get_suptitle(), figure.get_supxlabel()) == ("a title", "a note")
    with drawn(tmp_path / "b.png", 4.0, 2.5, "a title") as figure:
        assert (figure.get_suptitle(), figure.get_supxlabel()) == ("a title", "")


def test_axes_get_their_words_and_a_frame_of_one_line():
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    style_axes(axes, "time", "batch", "seconds")
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) == (
        "time", "batch", "seconds"
    )
    visible = [side for side, spine in axes.spines.items() if spine.get_visible()]
    assert visible == ["bottom"]


def luminance(color):
    """Relative luminance, by WCAG 2.1."""
    channels = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_stand_out_from_white_and_no_two_are_alike():
    assert all((1.05 / (luminance(color) + 0.05)) > 2 for color in COLORS)
    for a, b in itertools.combinations(COLORS, 2):
        distance = sum((int(a[i:i + 2], 16) - int(b[i:i + 2], 16)) ** 2 for i in (1, 3, 5)) ** 0.5
        assert distance > 60  # of 442, black to white
