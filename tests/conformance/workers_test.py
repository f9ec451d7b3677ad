"""A run is defined by its number of towers; workers only decide which process computes a tower.

Real processes, which meet over gRPC; each kind of model of tests/conformance/worker.py.
"""

import json

import pytest

from tests.workers import run_all

QUICK = ["cnn", "resnet20", "synchronized", "skip", "embedding", "masked_gru", "two_outputs",
         "sample_weight", "adds_loss"]
REST = ["gru", "tower0", "packed", "schedule"]
SMALL = ["embedding", "masked_gru", "two_outputs_dict", "layer_norm", "sum", "subclassed"]


def digests(num_workers, num_towers, kinds, directory):
    """{kind: digest} of each worker."""
    out = directory / f"{num_workers}-{num_towers}"
    out.mkdir()
    ended = run_all(
        num_workers, "-m", "tests.conformance.worker", f"--num_towers={num_towers}",
        f"--out={out}", f"--kinds={','.join(kinds)}", timeout=3000,
    )
    assert [code for code, _, _ in ended] == [0] * num_workers, ended[0][2]
    return [json.loads((out / f"worker-{w}.json").read_text()) for w in range(num_workers)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_towers, workers, kinds", [
    (4, [2], QUICK),
    (6, [3], SMALL),  # worker 1 has two towers of two subtrees
    pytest.param(4, [4], QUICK + REST, marks=pytest.mark.slow),
    pytest.param(5, [2, 3, 4], ["embedding", "masked_gru", "sum"], marks=pytest.mark.slow),
    pytest.param(8, [3], ["embedding", "two_outputs_dict"], marks=pytest.mark.slow),
])
def test_any_number_of_workers_gives_the_bits_of_one_process(
    num_towers, workers, kinds, tmp_path
):
    (alone,) = digests(1, num_towers, kinds, tmp_path)
    assert len(alone) == len(kinds)
    for num_workers in workers:
        for worker in digests(num_workers, num_towers, kinds, tmp_path):
            assert worker == alone


def test_the_tower_count_does_change_the_bits(tmp_path):
    """Otherwise the test above could not fail."""
    few, many = (digests(1, towers, ["embedding"], tmp_path)[0] for towers in (2, 6))
    assert few != many
