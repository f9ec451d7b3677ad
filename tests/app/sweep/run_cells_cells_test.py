"""A sweep's cells: what the lists span, and what is an error."""

import pytest

from towers.app.config import TrainConfig
from towers.app.sweep.run_cells import make_cells

LISTS = {"models": ["cnn"], "dropouts": [], "batch_sizes": ["64"], "gpu_counts": ["1"]}


def cells(shared=TrainConfig(), **lists):
    return make_cells(**{**LISTS, **lists}, shared=shared)


def test_the_cells_are_all_combinations_batches_before_gpu_counts():
    found = cells(TrainConfig(num_towers=4), models=["cnn", "mlp"], dropouts=["0.25"],
                  batch_sizes=["64", "66"], gpu_counts=["1", "2"])
    assert [row[:5] for row in found] == [
        (f"{model} dropout=0.25", batch, shard, gpus, 4) for model in ("cnn", "mlp")
        for batch, shard in ((64, 16), (66, 17)) for gpus in (1, 2)
    ]
    assert list(found.values())[-1] == TrainConfig(
        num_towers=4, model="mlp", dropout=0.25, batch_size=66, num_gpus=2
    )


@pytest.mark.parametrize("change, message", [
    ({"batch_sizes": []}, r"batch_sizes \(\) must be a list of .* such as batch_sizes=64,128"),
    ({"gpu_counts": ["1", "two"]}, r"gpu_counts \(1,two\) must be a list of different whole"),
    ({"gpu_counts": ["1.5"]}, r"gpu_counts \(1.5\)"),
    ({"batch_sizes": ["64", "0"]}, r"batch_sizes \(64,0\)"),
    ({"batch_sizes": ["64", "064"]}, r"batch_sizes \(64,064\)"),
    ({"models": ["cnn", ""]}, r"model \(cnn,\)"),
    ({"dropouts": ["0", "half"]}, r"dropout \(0,half\)"),
    ({"dropouts": ["1.0"]}, r"dropout \(1.0\) must be a number from 0 to below 1"),
    ({"shared": TrainConfig(num_towers=2), "gpu_counts": ["4"]}, r"num_towers \(2\) is below the"),
])
def test_what_no_run_could_have_is_an_error_that_names_it(change, message):
    with pytest.raises(ValueError, match=message):
        cells(**change)
