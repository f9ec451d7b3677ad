"""Numbers as a run shows them."""

import pytest

from towers.app.reporting import formats


@pytest.mark.parametrize(("shown", "value", "expected"), [
    (formats.format_seconds, 59.6, "1:00"),
    (formats.format_seconds, 3723, "1:02:03"),
    (formats.format_loss, 0.08123, "0.0812"),
    (formats.format_loss, 0, "0.0000"),
    (formats.format_loss, 3e-5, "3.000e-05"),  # a tiny loss does not look like zero
    (formats.format_loss, 1e7, "1.000e+07"),
    (formats.format_values, {"loss": 0.0812, "accuracy": 0.9763}, "loss 0.0812  accuracy 0.976"),
])
def test_a_number_is_shown_with_its_unit_and_few_digits(shown, value, expected):
    assert shown(value) == expected
