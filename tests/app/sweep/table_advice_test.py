"""The one sentence that a sweep ends with."""

import pytest

from tests.app.sweep.rows import of_speeds, row
from towers.app.sweep.table import advice, with_speedups


@pytest.mark.parametrize("speeds, on_gpus, expected", [
    ({(64, 1): 1000, (64, 2): 900, (64, 4): 800, (256, 1): 1200, (256, 2): 2000, (256, 4): 3000},
     True, "cnn is fastest at a global batch of 256 on 4 devices (3,000 examples/s); 2 devices pay "
     "from a global batch of 256 on; 4 devices pay from a global batch of 256 on."),
    ({(64, 1): 1000, (64, 2): 700, (1024, 1): 1000, (1024, 2): 900}, True,
     "1 device (1,000 examples/s); 2 devices do not pay (0.90 times 1 device at 1,024): a step "
     "computes too little for what it moves; try larger batches or --profile."),
    ({(64, 1): 1000, (64, 2): 700}, False,
     "On logical CPU devices, which say little about GPUs, cnn is fastest at a global batch of 64 "
     "on 1 device (1,000 examples/s); 2 devices do not pay (0.70 times 1 device at 64): they share "
     "the cores that 1 device has alone."),
    ({(64, 1): None, (64, 2): 1000}, True,
     "; 2 devices have no speed-up, because 1 device was not measured."),
    # faster by chance at 32: slower again at 64
    ({(32, 1): 10, (32, 2): 11, (64, 1): 10, (64, 2): 9, (128, 1): 10, (128, 2): 12}, True,
     "; 2 devices pay from a global batch of 128 on."),
    ({(64, 1): 10, (64, 2): 10}, True, "; 2 devices do not pay (1.00 times 1 device at 64): a step "
     "computes too little for what it moves; try larger batches or --profile."),
    # a batch without a speed-up
    ({(64, 1): 10, (64, 2): 12, (128, 1): None, (128, 2): 20, (256, 1): 10, (256, 2): 15}, True,
     "; 2 devices pay from a global batch of 64 on."),
    ({(64, 1): None}, True, "No cell could run: it broke."),
])
def test_it_names_the_fastest_setting_and_where_more_gpus_pay_or_why_not(speeds, on_gpus, expected):
    assert advice(of_speeds(speeds), on_gpus).endswith(expected)


def test_each_model_gets_its_clause():
    rows = with_speedups([row(64, 1, 1000), row(64, 1, 2000, "mlp")])
    assert advice(rows, True).count(" is fastest at a global batch of 64 on 1 device") == 2
