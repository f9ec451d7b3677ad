"""A run is defined by its number of towers; workers only decide which process computes a tower.

Real processes, which meet over gRPC; each kind of model of tests/conformance/worker.py.
"""

import functools
import json
import tempfile
from pathlib import Path

import pytest

from tests.real_workers import run_all

QUICK = ("cnn", "synchronized", "skip", "masked_gru", "two_outputs", "noise", "keeps")
REST = ("resnet20", "embedding", "sample_weight", "adds_loss", "gru", "tower0", "as_gpus",
        "schedule", "ragged_output")
FAR = ("synchronized", "mirrored", "stages")  # statistics, parameters, activations travel, too
SMALL = tuple(f"small_{name}" for name in FAR)
SUMS = ("layer_norm", "sum", "subclassed", "embedding")


def digests(num_workers, num_towers, kinds):
    """{kind: digest} of each worker."""
    with tempfile.TemporaryDirectory() as out:
        ended = run_all(
            num_workers, "-m", "tests.conformance.worker", f"--num_towers={num_towers}",
            f"--out={out}", f"--kinds={','.join(kinds)}", timeout=3000,
        )
        assert [code for code, _, _ in ended] == [0] * num_workers, ended[0][2]
        return [json.loads(Path(out, f"worker-{w}.json").read_text()) for w in range(num_workers)]


@functools.cache
def alone(num_towers, kinds):
    """{kind: digest} of one process."""
    return digests(1, num_towers, kinds)[0]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_towers, workers, kinds", [
    (6, [3], SMALL),  # worker 1 has two towers of two subtrees
    pytest.param(6, [3], FAR, marks=pytest.mark.matrix),
    pytest.param(6, [3], ("embedding", "sparse", "ragged"), marks=pytest.mark.matrix),
    pytest.param(4, [2], QUICK, marks=pytest.mark.matrix),
    pytest.param(4, [4], QUICK + REST, marks=pytest.mark.matrix),
    pytest.param(5, [2, 3, 4], SUMS, marks=pytest.mark.matrix),
    pytest.param(8, [3], ("embedding", "two_outputs_dict"), marks=pytest.mark.matrix),
])
def test_any_number_of_workers_gives_the_bits_of_one_process(num_towers, workers, kinds):
    assert set(alone(num_towers, kinds)) == set(kinds)
    for num_workers in workers:
        for worker in digests(num_workers, num_towers, kinds):
            assert worker == alone(num_towers, kinds)


@pytest.mark.matrix
def test_the_tower_count_does_change_the_bits():
    """Otherwise the test above could not fail."""
    assert alone(4, QUICK)["synchronized"] != alone(6, FAR)["synchronized"]
