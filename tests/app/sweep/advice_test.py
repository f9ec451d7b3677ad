"""The one sentence that a sweep ends with."""

import pytest

from tests.app.sweep.table_test import of_speeds, row
from towers.app.sweep.advice import advice, break_even, compared, gpu_counts
from towers.app.sweep.cells import Machine
from towers.app.sweep.table import with_speedups

GPUS, CORES = Machine("NVIDIA H100", 16), Machine(None, 2)


def test_it_names_the_fastest_setting_and_from_where_on_gpus_pay():
    rows = of_speeds({
        (64, 1): 1000, (64, 2): 900, (64, 4): 800,
        (128, 1): 1100, (128, 2): 1300, (128, 4): 1200,
        (256, 1): 1200, (256, 2): 2000, (256, 4): 3000,
    })
    assert advice(rows, GPUS) == (
        "cnn is fastest at a global batch of 256 on 4 GPUs (3,000 examples/s, 2.50 times 1 GPU), "
        "and 2 and 4 GPUs pay from a global batch of 128 on."
    )


def test_a_speedup_that_still_grows_asks_for_larger_batches():
    rows = of_speeds({(64, 1): 1000, (64, 2): 500, (1024, 1): 1000, (1024, 2): 900})
    assert advice(rows, GPUS).endswith(
        " and 2 GPUs do not pay, because 512 examples a tower are too few (0.90 times 1 GPU with 2 "
        "at 1,024, and still growing with the batch: try larger ones)."
    )


def test_a_speedup_that_does_not_grow_blames_the_model():
    rows = of_speeds({(64, 1): 1000, (64, 2): 700, (1024, 1): 1000, (1024, 2): 700})
    assert advice(rows, GPUS).endswith(
        " and 2 GPUs do not pay, because the model computes too little for the parameters that "
        "each step moves (0.70 times 1 GPU with 2 at 1,024)."
    )


def test_some_gpu_counts_may_pay_and_others_not():
    rows = of_speeds({(64, 1): 1000, (64, 2): 1500, (64, 8): 500})
    assert "2 GPUs pay from a global batch of 64 on and 8 GPUs do not pay, because" in advice(
        rows, GPUS
    )


def test_without_gpus_it_says_so_and_blames_the_shared_cores():
    rows = of_speeds({(64, 1): 1000, (64, 2): 700})
    assert advice(rows, CORES) == (
        "On logical CPU devices, which say little about GPUs, cnn is fastest at a global batch of "
        "64 on 1 device (1,000 examples/s), and 2 devices do not pay, because they share the 2 "
        "cores that 1 device has for itself."
    )


def test_each_model_gets_its_clause_in_one_sentence():
    rows = with_speedups([row(64, 1, 1000), row(64, 1, 2000, "mlp")])
    assert advice(rows, GPUS) == (
        "cnn is fastest at a global batch of 64 on 1 GPU (1,000 examples/s); mlp is fastest at a "
        "global batch of 64 on 1 GPU (2,000 examples/s)."
    )


def test_without_one_gpus_cell_it_tells_no_speedup():
    assert advice(of_speeds({(64, 1): None, (64, 2): 1000}), GPUS) == (
        "cnn is fastest at a global batch of 64 on 2 GPUs (1,000 examples/s), and with no cell on "
        "1 GPU there is no speed-up to tell."
    )


@pytest.mark.parametrize("machine", [GPUS, CORES])
def test_without_any_cell_done_it_gives_the_first_error(machine):
    assert advice(of_speeds({(64, 1): None}), machine) == "No cell could run: it broke."


def test_break_even_is_the_smallest_batch_from_which_on_more_gpus_are_faster():
    rows = of_speeds({
        (32, 1): 10, (32, 2): 11,  # faster by chance: slower again at 64
        (64, 1): 10, (64, 2): 9,
        (128, 1): 10, (128, 2): 12,
        (256, 1): 10, (256, 2): 15,
    })
    assert break_even(rows, 2) == 128


def test_as_fast_as_one_is_not_faster():
    assert break_even(of_speeds({(64, 1): 10, (64, 2): 10}), 2) is None


def test_a_batch_without_a_speedup_does_not_move_the_break_even():
    rows = of_speeds({
        (64, 1): 10, (64, 2): 12, (128, 1): None, (128, 2): 20, (256, 1): 10, (256, 2): 15,
    })
    assert break_even(rows, 2) == 64
    assert [r.batch_size for r in compared(rows, 2)] == [64, 256]


def test_gpu_counts_are_those_with_a_cell_done():
    assert gpu_counts(of_speeds({(64, 4): 10, (64, 1): 10, (64, 8): None})) == [1, 4]
