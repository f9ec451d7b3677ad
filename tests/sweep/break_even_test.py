"""From which global batch on more GPUs are faster than one."""

from tests.sweep.table_test import of_speeds
from towers.sweep.break_even import break_even, compared, gpu_counts


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
