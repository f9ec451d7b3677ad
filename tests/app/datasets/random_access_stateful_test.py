"""Examples of an iterable with a state: a run goes on at once, to the bits of one never ended."""

import numpy as np
import pytest

from tests.app.datasets import loaders
from tests.resuming import resumed, train, uninterrupted
from towers.app.datasets.batches import load_examples, shuffled_batches
from towers.app.datasets.random_access import Sized
from towers.app.datasets.user import from_splits, load
from towers.resume.source import InputOptions

ME = "tests.app.datasets.loaders"
FLAGS = ("--model=tests.resuming:model", "--num_gpus=2", "--num_towers=4", "--batch_size=16",
         "--epochs=2", "--device=cpu", "--run_dir=run", "--checkpoint_every=2")


def sized():
    return loaders.Sized(*loaders.arrays()[0])


def examples(given=None):
    given = sized() if given is None else given
    return load_examples(from_splits("given", given, given, num_classes=3).train)


def rows(batches):
    return [y.numpy().tolist() for _, y in batches]


@pytest.mark.telling("load-7")
@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("name", ["load", "itself"])
def test_a_killed_run_goes_on_to_the_same_bits(name, step, tmp_path):
    flags = (f"--dataset={ME}:{name}", *FLAGS)
    code, *_ = train(*flags, cwd=tmp_path, fault=f"step == {step} and kill('KILL')")
    assert code == -9
    assert resumed(tmp_path) == uninterrupted(*flags)


def test_an_epoch_goes_on_in_the_row_whatever_was_read_ahead():
    """The iterable gives 50 examples a pass, an epoch has 30: the second spans two passes."""
    given = loaders.Loader(*loaders.arrays()[0])
    whole = examples(Sized(given, 30))
    epochs = [rows(shuffled_batches(whole, 8, 0, epoch)) for epoch in range(3)]
    assert [list(map(len, epoch)) for epoch in epochs] == [[8, 8, 8, 6]] * 3
    order = np.random.default_rng(5).permutation(50)
    assert sum(epochs[0] + epochs[1], [])[:50] == given.y[order].tolist()
    again = examples(Sized(loaders.Loader(*loaders.arrays()[0]), 30))
    saved = whole.source.state(1, 16)
    again.source.go_on(1, 16, saved)
    assert rows(shuffled_batches(again, 8, 0, 1, start_step=2)) == epochs[1][2:]
    assert rows(shuffled_batches(again, 8, 0, 2)) == epochs[2]


def test_what_is_done_is_not_read_again():
    whole, given = examples(), sized()
    next(iter(shuffled_batches(whole, 8, 0, 0)))
    again = examples(given)
    again.source.go_on(0, 8, whole.source.state(0, 8))
    given.read.clear()
    rows(shuffled_batches(again, 8, 0, 0, start_step=1))
    assert given.read == list(range(8, 50))


def test_states_are_kept_for_the_steps_that_are_read_ahead_alone():
    given = examples()
    for epoch in range(12):
        rows(shuffled_batches(given, 1, 0, epoch))
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
        load_examples(split, InputOptions(data_workers=2))
    with pytest.raises(ValueError, match=r"y is TensorSpec\(shape=\(50,\).*give examples, not b"):
        load(f"{ME}:batched")
    monkeypatch.setattr(loaders, "NUM_EXAMPLES", 50)
    with pytest.raises(ValueError, match=r"NUM_EXAMPLES \(50\) in its module must be two whole"):
        load(f"{ME}:load")


def test_a_state_that_cannot_be_saved_ends_the_run_before_its_first_step(tmp_path):
    code, _, stderr = train(f"--dataset={ME}:unsaved", *FLAGS, cwd=tmp_path, fault="1 / 0")
    assert code == 2
    assert "(train) (Unsaved): its get_state() cannot be saved: a set is none of numbers" in stderr
