"""The ledger of a fit: the lines of its steps, and equal on any number of devices."""

import keras
import pytest
import tensorflow as tf

import towers
from tests.parallel.fits import STEPS, Fits, classifier, rows
from towers.resume.ledger import read_ledger
from towers.step.digests import as_digits, sum_of_bits


@pytest.fixture(scope="module")
def fits():
    return Fits(classifier(), *rows(), shuffle=False)


def ledger_of(fits, path, every=1):
    """The lines of a fit's ledger; interrupted_test has those of a resumed fit."""
    ledger = towers.Ledger(path, every=every)
    Fits(fits.model, *rows(), callbacks=lambda: [ledger], shuffle=False).plain()
    return read_ledger(path)


def test_each_line_has_the_place_and_the_batch_of_its_step(fits, tmp_path):
    lines = ledger_of(fits, tmp_path / "ledger.csv")
    assert [(line.epoch, line.step) for line in lines] == [(1 + s // 4, s + 1) for s in range(8)]
    for i, line in enumerate(lines):
        batch = [part[i % 4 * 7 :][:7] for part in rows()]
        assert line.batch == as_digits(sum_of_bits(list(map(tf.constant, batch))))
    assert len({line.parameters for line in lines}) == STEPS
    assert len({line.seeds for line in lines}) == STEPS


def test_a_longer_distance_leaves_lines_out_and_a_second_fit_begins_again(fits, tmp_path):
    all_lines = ledger_of(fits, tmp_path / "a")
    assert ledger_of(fits, tmp_path / "a", every=3) == [all_lines[2], all_lines[5]]


def test_the_ledger_is_equal_on_one_device_and_on_two_that_measure_noise_and_save(tmp_path):
    found = []
    several = [towers.NoiseScale(), towers.Resume(tmp_path / "backup")]
    for num_gpus, callbacks in ((1, []), (2, several)):
        keras.utils.set_random_seed(3)
        path = tmp_path / str(len(found))
        parallel = classifier(num_gpus)
        parallel.fit(
            *rows(), batch_size=7, shuffle=False, verbose=0,
            callbacks=[towers.Ledger(path, every=1), *callbacks],
        )  # fmt: skip
        found.append(read_ledger(path))
    assert found[0] == found[1] and len(found[0]) == 4


def test_wrong_arguments_and_plain_models_are_errors(tmp_path):
    for arguments, message in (
        (("a", 0), r"every \(0\) must be"),
        (("a", True), r"every \(True\) must be"),
        ((3,), r"path \(3\) must be a path"),
    ):
        with pytest.raises(ValueError, match=message):
            towers.Ledger(*arguments)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="towers.Ledger works only in the fit of a parallel model"):
        model.fit(*rows(), verbose=0, callbacks=[towers.Ledger(tmp_path / "a")])
