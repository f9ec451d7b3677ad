"""Each of several workers reads and changes only the examples of its towers, to the same bits."""

import json
from functools import partial

import numpy as np
import pytest

from tests import loading, processes
from tests.app.datasets.sources import Rows
from towers.resume.epoch import Epoch
from towers.app.datasets.batches import load_examples
from towers.step.exchange import towers_of
from towers.step.sharding import rows_of_towers, shard_batch

NUM_EXAMPLES = 23


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    rows = Rows([(np.full((4, 3, 1), n + 1, np.uint8), n) for n in range(NUM_EXAMPLES)])
    return loading.in_each_form(rows, NUM_EXAMPLES, tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize(
    "form, augment", [("arrays", None), ("image files", "crop_flip"), ("a source", None)]
)
def test_own_rows_are_those_of_the_whole_batch_and_other_images_are_0(form, augment, forms):
    examples = load_examples(forms[form], augment=augment)
    for size, num_towers, num_workers in ((10, 4, 2), (4, 7, 3)):
        whole = list(examples.batches(Epoch(size, 1, 2, 1)))
        for worker in range(num_workers):
            own = towers_of(worker, num_workers, num_towers)
            rows = partial(rows_of_towers, num_towers, own)
            found = examples.batches(Epoch(size, 1, 2, 1, rows))
            for expected, batch in zip(whole, found, strict=True):
                shards, theirs = (shard_batch((*b, None), num_towers) for b in (batch, expected))
                for tower in own:
                    pairs = (each[tower].values[:2] for each in (shards, theirs))
                    for a, b in zip(*pairs, strict=True):
                        np.testing.assert_array_equal(a, b)
                is_own = rows(len(batch[1])).numpy()
                for a, b in zip(batch, expected, strict=True):
                    np.testing.assert_array_equal(a[is_own], b[is_own])
                assert form == "arrays" or not batch[0][~is_own].numpy().any()


PROGRAM = """
import collections, json, sys
import tensorflow as tf
from towers.app.config import TrainConfig
from towers.app.datasets import dataset, image_folder
from towers.app.reporting import charts, run_files
from towers.resume.epoch import Epoch
import towers
dataset.usable_memory = lambda: 0  # the images do not fit into it
counts, decode = collections.Counter(), image_folder.decode
def counted(path, shape):
    counts[path.parts[-3]] += 1
    return decode(path, shape)
image_folder.decode = counted
order = Epoch.order
def other_order(epoch, places, count):  # from the second example of each batch on
    found = order(epoch, places, count)
    return tf.concat([found[:1], found[1:][::-1]], 0)
charts.draw_curves = run_files.draw_augmented = lambda *arguments: None
workers, values = towers.join_workers(), json.loads(sys.argv[1])
if values.pop("other_order", None) == workers.index:
    Epoch.order = other_order
towers.train(TrainConfig(**values))
print(json.dumps(counts))
"""


def run(count, run_dir, **options):
    values = {
        "model": "tests.loading:model",
        "num_towers": 2,
        "num_gpus": 1,
        "batch_size": 10,
        "epochs": 1,
        "run_dir": str(run_dir),
        "augment": "crop_flip",
        "optimizer": "sgd",
        **options,
    }
    return processes.run_all(count, "-c", PROGRAM, json.dumps(values))


def test_workers_read_only_the_examples_of_their_towers(tmp_path):
    """They train on 10 + 10 + 3 examples on 2 towers, and validate with 7."""
    generator = np.random.default_rng(0)
    for index in range(30):
        part = ("train", "val")[index >= NUM_EXAMPLES]
        path = tmp_path / "images" / part / f"class {index % 2}" / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        loading.write_pixels(path, generator.integers(0, 256, (6, 7, 3)))
    runs, images = {}, {"dataset": "image_folder", "data_dir": str(tmp_path / "images")}
    for count in (1, 2):
        ended = run(count, tmp_path / f"{count}", **images)
        assert [code for code, _, _ in ended] == [0] * count, ended
        counts = [json.loads(stdout.splitlines()[-1]) for _, stdout, _ in ended]
        runs[count] = [[each[part] for part in ("train", "val")] for each in counts]
    assert loading.final_weights(tmp_path / "1") == loading.final_weights(tmp_path / "2")
    # Tower 0 has 5 + 5 + 2 examples, and 4 of the validation. Tower 1 has 5 + 5 + 1, and 3; and the
    # first of each batch.
    assert runs == {1: [[23, 7]], 2: [[12, 4], [11 + 3, 3 + 1]]}


def test_workers_whose_orders_differ_end_with_an_error(tmp_path):
    ended = run(2, tmp_path, dataset="tests.app.datasets.sources:splits", other_order=1)
    said = "differs from the chief in the order of the examples ("
    assert all(code == 1 and said in errors for code, _, errors in ended), ended
