"""Real processes, which meet over gRPC."""

import json

import pytest

from tests.real_workers import run_all


@pytest.mark.parametrize("count", [2, pytest.param(11, marks=pytest.mark.matrix)])
def test_every_worker_has_the_others_values_in_order(count):
    """With 11, TensorFlow's own order is that of text: 10 comes before 2."""
    ended = run_all(count, "-m", "tests.workers.worker", "collectives")
    assert [code for code, _, _ in ended] == [0] * count, ended[0][2]
    for worker, (_, said, _) in enumerate(ended):
        assert json.loads(said) == {
            "gather": [[100.0 * w, 100.0 * w + 1, 100.0 * w + 2] for w in range(count)],
            "bool": [[w == 0] for w in range(count)],
            "bfloat16": [0.5] * count,
            "all_to_all": [100 * w + worker for w in range(count)],
            "broadcast": [0.5],
        }
