"""Each of several workers reads and changes only the examples of its towers, to the same bits."""

import json
from functools import partial

import numpy as np
import pytest

from tests import loading, processes
from tests.app.datasets.sources import Rows
from towers.app.datasets.batches import load_examples, shuffled_batches
from towers.resume.source import InputOptions
from towers.step.exchange import towers_of
from towers.step.sharding import rows_of_towers, shard_batch

NUM_EXAMPLES = 23


@pytest.fixture(name="forms", scope="module")
def _forms(tmp_path_factory):
    rows = Rows([(np.full((4, 3, 1), n + 1, np.uint8), n) for n in range(NUM_EXAMPLES)])
    return loading.in_each_form(rows, NUM_EXAMPLES, tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize("form, augment", [
    ("arrays", None), ("arrays", "crop_flip"), ("image files", None), ("image files", "crop_flip"),
])
def test_own_rows_and_all_labels_are_those_of_the_whole_batch_and_other_images_are_0(
    form, augment, forms
):
    examples = load_examples(forms[form], InputOptions(augment=augment))
    for size, num_towers, num_workers in ((10, 4, 2), (5, 7, 3), (4, 8, 4), (30, 3, 3)):
        whole = list(shuffled_batches(examples, size, 1, 2, 1))
        for worker in range(num_workers):
            own = towers_of(worker, num_workers, num_towers)
            rows = partial(rows_of_towers, num_towers, own)
            found = shuffled_batches(examples, size, 1, 2, 1, rows)
            for all_x, x in zip(whole, found, strict=True):
                np.testing.assert_array_equal(all_x[1], x[1])
                shards, theirs = (shard_batch((*b, None), num_towers) for b in (x, all_x))
                for tower in own:
                    np.testing.assert_array_equal(*(s[tower].values[0] for s in (shards, theirs)))
                begin, end = rows(len(x[1]))
                if form == "image files":
                    assert not x[0][:begin].numpy().any() and not x[0][end:].numpy().any()


PROGRAM = """
import collections, json, sys
from towers.app.config import TrainConfig
from towers.app.datasets import dataset, image_folder
import towers
dataset.usable_memory = lambda: 0  # the images do not fit into it
counts, decode = collections.Counter(), image_folder.decode
def counted(path, shape):
    counts[path.parts[-3]] += 1
    return decode(path, shape)
image_folder.decode = counted
towers.train(TrainConfig(**json.loads(sys.argv[1])))
print(json.dumps(counts))
"""


def test_workers_decode_only_the_images_of_their_towers(tmp_path):
    """In 2 epochs of 10 + 10 + 3 images, on 4 towers; the validation has 10 + 1."""
    generator = np.random.default_rng(0)
    for index in range(34):
        part = ("train", "val")[index >= NUM_EXAMPLES]
        path = tmp_path / "images" / part / f"class {index % 2}" / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        loading.write_pixels(path, generator.integers(0, 256, (6, 7, 3)))
    runs = {}
    for count in (1, 2):
        values = {"model": "tests.loading:model", "dataset": "image_folder", "num_towers": 4,
                  "data_dir": str(tmp_path / "images"), "num_gpus": 1, "batch_size": 10,
                  "epochs": 2, "run_dir": str(tmp_path / f"{count}"), "augment": "crop_flip"}
        ended = processes.run_all(count, "-c", PROGRAM, json.dumps(values))
        assert [code for code, _, _ in ended] == [0] * count, ended
        runs[count] = [json.loads(said.splitlines()[-1]) for _, said, _ in ended]
    assert loading.final_weights(tmp_path / "1") == loading.final_weights(tmp_path / "2")
    assert runs[1] == [{"train": 2 * 23, "val": 2 * 11}]
    # Towers 0 and 1 have 3 + 3, 3 + 3 and 1 + 1 images. Towers 2 and 3 have 2 + 2, 2 + 2 and 1, and
    # an empty shard repeats one.
    assert runs[2] == [{"train": 2 * 14, "val": 2 * 7}, {"train": 2 * 9, "val": 2 * 5}]
