"""A random-access source, and an iterable with a state: structures, errors, and runs on them."""

import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import processes
from tests.app.datasets import loaders
from tests.app.datasets.sources import NUM_CLASSES, Pixels, Rows
from tests.loading import config, final_weights, refusal
from tests.resuming import resumed, train, uninterrupted
from towers.app.datasets import batches as input_lib
from towers.app.datasets.random_access import Sized, split_of
from towers.app.datasets.user import from_splits, load
from towers.resume.source import InputOptions

COUNT, BATCH = 23, 5
SOURCES = "tests.app.datasets.sources"
LOADERS = "tests.app.datasets.loaders"
FLAGS = ("--model=tests.resuming:model", "--num_gpus=2", "--num_towers=4", "--batch_size=16",
         "--epochs=2", "--device=cpu", "--run_dir=run", "--checkpoint_every=2")


def read_examples(examples=None, **options):
    split, *_ = split_of(examples or Pixels(COUNT), "here", NUM_CLASSES, custom_loss=False)
    return input_lib.load_examples(split, InputOptions(**options))


def test_structures_keep_their_names_and_64_bit_numbers_become_32_bit_ones():
    rows = Rows([({"b": index, "a": ([1.0, 2.0],)}, (0.5, index)) for index in range(4)])
    split, *_ = split_of(rows, "here", None, custom_loss=False)
    assert [leaf.path for leaf in split.source.leaves] == ["x['a'][0]", "x['b']", "y[0]", "y[1]"]
    (x, y), = input_lib.ordered_batches(input_lib.load_examples(split), 4)
    assert x["b"].numpy().tolist() == y[1].numpy().tolist() == [0, 1, 2, 3]
    assert x["a"][0].shape == (4, 2) and list(x) == ["b", "a"]
    dtypes = {part.dtype for part in tf.nest.flatten((x, y))}
    assert dtypes == {tf.float32, tf.int32}


@pytest.mark.parametrize(("rows", "message"), [
    ([], "here: no examples"),
    ([(np.zeros(2), 1)], "here: y is a label, .* add NUM_CLASSES = N beside"),
    ([7], "here: example 0 is a int"),
])
def test_what_is_no_source_of_examples_is_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        split_of(Rows(rows), "here", None, custom_loss=False)


def test_a_fault_in_training_is_raised_as_one_line_with_the_index():
    examples = read_examples(Pixels(COUNT, raises=11))
    message = "here: example 11 cannot be read: KeyError: 'no such row' (sources.py:23)."
    assert message in refusal(list, input_lib.shuffled_batches(examples, BATCH, 0, 0))


def test_a_source_that_changes_its_length_is_refused_in_the_next_epoch():
    examples = read_examples()
    assert len(list(input_lib.shuffled_batches(examples, BATCH, 0, 0))) == 5
    examples.source.source.examples.count = 22
    message = refusal(list, input_lib.shuffled_batches(examples, BATCH, 0, 1))
    assert message.startswith("here: 22 examples now, 23 at the start.")


def test_the_digest_is_of_shapes_and_size():
    digests = [input_lib.digest(read_examples(Pixels(*what))) for what in
               ((COUNT,), (COUNT,), (COUNT + 1,), (COUNT, (3, 2, 1)))]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_a_run_on_a_source_has_the_bits_of_a_run_on_its_arrays(tmp_path, capsys):
    read = towers.train(config(tmp_path / "read", f"{SOURCES}:splits", data_workers=1))
    assert read == towers.train(config(tmp_path / "arrays", f"{SOURCES}:in_memory"))
    assert final_weights(tmp_path / "read") == final_weights(tmp_path / "arrays")
    assert "23 train, 7 test, read while training runs" in capsys.readouterr().out


@pytest.mark.matrix
def test_workers_read_the_same_order_and_give_the_bits_of_one(tmp_path):
    flags = {"batch_size": BATCH, "epochs": 1, "augment": "crop_flip"}
    towers.train(config(tmp_path / "one", f"{SOURCES}:splits", **flags))
    ended = processes.run_all(
        2, "train.py", "--model=tests.loading:model", f"--dataset={SOURCES}:splits",
        "--num_towers=2", "--num_gpus=1", f"--run_dir={tmp_path / 'two'}",
        *[f"--{name}={value}" for name, value in flags.items()],
    )
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert final_weights(tmp_path / "one") == final_weights(tmp_path / "two")


# Iterables with a state: a run goes on at once, to the bits of one never ended
def sized():
    return loaders.Sized(*loaders.arrays()[0])


def examples(given=None):
    given = sized() if given is None else given
    return input_lib.load_examples(from_splits("given", given, given, num_classes=3).train)


def rows(batches):
    return [y.numpy().tolist() for _, y in batches]


@pytest.mark.telling("load-7")
@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("name", ["load", "itself"])
def test_a_killed_run_goes_on_to_the_same_bits(name, step, tmp_path):
    flags = (f"--dataset={LOADERS}:{name}", *FLAGS)
    code, *_ = train(*flags, cwd=tmp_path, fault=f"step == {step} and kill('KILL')")
    assert code == -9
    assert resumed(tmp_path) == uninterrupted(*flags)


def test_an_epoch_goes_on_in_the_row_whatever_was_read_ahead():
    """The iterable gives 50 examples a pass, an epoch has 30: the second spans two passes."""
    given = loaders.Loader(*loaders.arrays()[0])
    whole = examples(Sized(given, 30))
    epochs = [rows(input_lib.shuffled_batches(whole, 8, 0, epoch)) for epoch in range(3)]
    assert [list(map(len, epoch)) for epoch in epochs] == [[8, 8, 8, 6]] * 3
    order = np.random.default_rng(5).permutation(50)
    assert sum(epochs[0] + epochs[1], [])[:50] == given.y[order].tolist()
    again = examples(Sized(loaders.Loader(*loaders.arrays()[0]), 30))
    saved = whole.source.state(1, 16)
    again.source.go_on(1, 16, saved)
    assert rows(input_lib.shuffled_batches(again, 8, 0, 1, start_step=2)) == epochs[1][2:]
    assert rows(input_lib.shuffled_batches(again, 8, 0, 2)) == epochs[2]


def test_what_is_done_is_not_read_again():
    whole, given = examples(), sized()
    next(iter(input_lib.shuffled_batches(whole, 8, 0, 0)))
    again = examples(given)
    again.source.go_on(0, 8, whole.source.state(0, 8))
    given.read.clear()
    rows(input_lib.shuffled_batches(again, 8, 0, 0, start_step=1))
    assert given.read == list(range(8, 50))


def test_states_are_kept_for_the_steps_that_are_read_ahead_alone():
    given = examples()
    for epoch in range(12):
        rows(input_lib.shuffled_batches(given, 1, 0, epoch))
    assert given.source.state(0, 0) and given.source.state(11, 50)
    with pytest.raises(KeyError):
        given.source.state(0, 1)


def test_one_loader_for_both_splits_is_refused_where_it_has_the_state_itself():
    train, _ = loaders.arrays()
    itself = loaders.Sized(*train, ("state_dict", "load_state_dict"), False)
    for custom_loss in (False, True):
        with pytest.raises(ValueError, match="train and test are the same Sized; make two"):
            from_splits("given", itself, itself, custom_loss=custom_loss)


def test_counts_and_processes_are_refused_with_the_way_out(monkeypatch):
    with pytest.raises(ValueError, match=r"given \(train\) \(Loader\).*give it a `__len__`; or"):
        examples(loaders.Loader(*loaders.arrays()[0]))
    split = from_splits("given", sized(), sized(), num_classes=3).train
    with pytest.raises(ValueError, match=r"data_workers \(2\): given \(train\) is read in its own"):
        input_lib.load_examples(split, InputOptions(data_workers=2))
    with pytest.raises(ValueError, match=r"y is TensorSpec\(shape=\(50,\).*give examples, not b"):
        load(f"{LOADERS}:batched")
    monkeypatch.setattr(loaders, "NUM_EXAMPLES", 50)
    with pytest.raises(ValueError, match=r"NUM_EXAMPLES \(50\) in its module must be two whole"):
        load(f"{LOADERS}:load")


def test_a_state_that_cannot_be_saved_ends_the_run_before_its_first_step(tmp_path):
    code, _, stderr = train(f"--dataset={LOADERS}:unsaved", *FLAGS, cwd=tmp_path, fault="1 / 0")
    assert code == 2
    assert "(train) (Unsaved): its get_state() cannot be saved: a set is none of numbers" in stderr
