"""sweep.csv: its columns, speed-up and efficiency by hand, the way back; advice; sweep.png."""

import math

import pytest

from towers.app.sweep.chart import draw_sweep
from towers.app.sweep.table import advice, filled_row, read_table, Row, with_speedups, write_table
from towers.machine.places import LostDirectoryError


def row(batch_size, num_gpus, speed, model="cnn"):
    """A row of that examples_per_second; None for a cell that failed."""
    cell = Row(model, batch_size, batch_size // num_gpus, num_gpus, num_gpus)
    if speed is None:
        return cell._replace(error="it broke.")
    return cell._replace(examples_per_second=float(speed), val_accuracy=0.5)


def of_speeds(speeds):
    """Rows with speed-ups, from {(global batch, GPUs): examples per second}."""
    return with_speedups([row(*cell, speed) for cell, speed in speeds.items()])


COLUMNS = (
    "model,batch_size,per_tower_batch,num_gpus,num_towers,epochs,accuracy,val_accuracy,seconds,"
    "examples_per_second,speedup,efficiency,host_memory_mb,device_memory_mb,error,noise_scale,"
    "useful_share"
)
RESULTS = """epoch,loss,accuracy,val_loss,val_accuracy,seconds,examples_per_second
1,2.0,0.1,1.5,0.2,10.0,100
2,1.0,0.3,0.9,0.4,6.0,300
"""


def test_a_row_has_the_last_accuracies_all_seconds_and_all_examples_by_all_seconds(tmp_path):
    (tmp_path / "results.csv").write_text(RESULTS)
    done = filled_row(row(64, 1, 0), tmp_path / "results.csv")
    # 300 examples in 3 s and 300 in 1 s are 600 in 4 s.
    assert done[5:10] == (2, 0.3, 0.4, 16.0, pytest.approx(150.0))


def test_speedup_is_against_one_gpu_at_the_same_model_and_batch():
    rows = with_speedups([
        row(64, 4, 300), row(64, 1, 100), row(128, 4, 800), row(128, 1, 200), row(256, 4, 9),
        row(64, 4, 50, "mlp"), row(64, 1, 500, "mlp"), row(512, 4, 9), row(512, 1, None),
    ])
    assert [(r.model, r.batch_size, r.num_gpus, r.speedup, r.efficiency) for r in rows] == [
        ("cnn", 64, 1, 1, 1), ("cnn", 64, 4, 3, 0.75),
        ("cnn", 128, 1, 1, 1), ("cnn", 128, 4, 4, 1),
        ("cnn", 256, 4, None, None), ("cnn", 512, 1, None, None), ("cnn", 512, 4, None, None),
        ("mlp", 64, 1, 1, 1), ("mlp", 64, 4, 0.1, 0.025),
    ]


def test_the_table_comes_back_from_its_file_with_the_figures_of_earlier_versions(tmp_path):
    assert read_table(tmp_path / "sweep.csv") == []
    rows = of_speeds({(64, 1): 100, (64, 2): 150, (128, 1): None})
    rows[0] = rows[0]._replace(epochs=3, val_accuracy=math.inf, host_memory_mb=12.5)
    rows[2] = rows[2]._replace(error='a "quoted", listed error')
    write_table(tmp_path / "sweep.csv", rows)
    lines = (tmp_path / "sweep.csv").read_text().splitlines()
    assert (lines[0], lines[3]) == (
        COLUMNS, 'cnn,128,128,1,1,,,,,,,,,,"a ""quoted"", listed error",,'
    )
    assert read_table(tmp_path / "sweep.csv") == rows


@pytest.mark.parametrize("text", ["a,b\n1,2\n", COLUMNS + "\n1,2\n", COLUMNS + "\nm,x" + "," * 15])
def test_another_file_is_an_error(text, tmp_path):
    (tmp_path / "sweep.csv").write_text(text)
    with pytest.raises(ValueError, match=r"sweep.csv is not what a sweep wrote \(.*\); name an"):
        read_table(tmp_path / "sweep.csv")


def test_a_table_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(LostDirectoryError, match="nowhere/sweep.csv cannot be written .*Make room"):
        write_table(tmp_path / "nowhere" / "sweep.csv", [])


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


def test_useful_examples_decide_what_learns_fastest():
    """By hand: 1 / (1 + 64 / 64) of 100 and of 180 examples/s help, 1 / (1 + 256 / 64) of 300."""
    rows = with_speedups([
        row(64, 1, 100), row(64, 2, 180)._replace(noise_scale=64.0),
        row(256, 2, 300)._replace(noise_scale=64.0), row(256, 4, None),
    ])
    assert [r.useful_share for r in rows] == [0.5, 0.5, 0.2, None]
    assert (
        "cnn is fastest at a global batch of 256 on 2 devices (300 examples/s); counting the "
        "examples that help, cnn learns fastest at 64 on 2 devices (50% of 180 examples/s); "
    ) in advice(rows, on_gpus=True)


@pytest.mark.parametrize("speeds", [
    {(64, 1): 100},
    {(64, 2): 100, (128, 1): 100},
    {(64, 1): 1000, (64, 2): 50, (128, 1): 100, (128, 2): 150},
])
def test_a_sweep_is_drawn_whatever_cells_are_done(speeds, tmp_path):
    draw_sweep(tmp_path / "sweep.png", of_speeds(speeds), "cnn on mnist", "a note")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
