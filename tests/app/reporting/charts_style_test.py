"""What the charts share: a PNG of the size asked for, written whole or not at all."""

import os
import struct

import pytest

from towers.app.reporting.charts import figure_file


def test_a_picture_has_its_words_and_120_pixels_an_inch(tmp_path):
    with figure_file(tmp_path / "a.png", 4.0, 2.5, "a title", "a note") as figure:
        figure.subplots().plot([1, 2], [3, 4])
    assert (figure.get_suptitle(), figure.get_supxlabel()) == ("a title", "a note")
    content = (tmp_path / "a.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (480, 300)  # its header's first two numbers


def test_a_picture_that_fails_leaves_the_old_one_alone(tmp_path):
    (tmp_path / "a.png").write_text("old")
    with pytest.raises(ZeroDivisionError):
        with figure_file(tmp_path / "a.png", 4.0, 2.5, "a title"):
            1 / 0
    assert (tmp_path / "a.png").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.png"]
