"""Every worker's GPUs: of a list that there is already, of the machine's, or too few."""

import pytest

from towers.launch.gpus import shares


@pytest.mark.parametrize("workers, each, visible, present, expected", [
    (2, 2, None, 4, ["0,1", "2,3"]),
    (2, 1, None, 8, ["0", "1"]),
    (3, 2, None, None, ["0,1", "2,3", "4,5"]),  # nobody knows how many there are
    (2, 2, "7,5,3,1,0", 0, ["7,5", "3,1"]),
    (2, 1, " GPU-8f2a , MIG-11ab ", None, ["GPU-8f2a", "MIG-11ab"]),
])
def test_each_worker_gets_the_next_ones(workers, each, visible, present, expected):
    assert shares(workers, each, visible, present) == expected


@pytest.mark.parametrize("workers, each, visible, present, message", [
    (4, 2, None, 4, "--workers (4) with --gpus_per_worker (2) need 8 GPUs; this machine has 4. "
     "Use --gpus_per_worker=1."),
    (4, 2, None, 3, "this machine has 3. Use --workers=1."),
    (2, 1, None, 0, "this machine has 0. Leave --gpus_per_worker out to run on CPUs."),
    (2, 1, "3", 8, "CUDA_VISIBLE_DEVICES='3' names 1. Use --workers=1."),
    (2, 1, "", 8, "CUDA_VISIBLE_DEVICES='' names 0. Leave"),
    (2, 1, "0,-1,1", 8, "CUDA_VISIBLE_DEVICES='0,-1,1' names 1. Use --workers=1."),
])
def test_too_few_are_refused_with_what_would_work(workers, each, visible, present, message):
    with pytest.raises(ValueError) as error:
        shares(workers, each, visible, present)
    assert message in str(error.value)
