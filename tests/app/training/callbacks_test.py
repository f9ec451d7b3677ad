"""The callbacks that a user's function returns."""

import keras
import pytest

from towers.app.training.callbacks import load


class Recorder(keras.callbacks.Callback):
    """Hears nothing."""


def backups():
    return [keras.callbacks.BackupAndRestore("backup")]


def two_callbacks():
    return [Recorder(), keras.callbacks.TerminateOnNaN()]


def one_callback():
    return Recorder()


def classes():
    return [Recorder]


def test_a_users_function_brings_callbacks():
    first, second = load("tests.app.training.callbacks_test:two_callbacks")
    assert isinstance(first, Recorder) and isinstance(second, keras.callbacks.TerminateOnNaN)
    assert load(None) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{__name__}:one_callback", r"returned Recorder; it must be a list of keras"),
        (f"{__name__}:classes", r"returned <class .*Recorder'>, which is no keras"),
        (f"{__name__}:backups", r"returned a BackupAndRestore, .*leave BackupAndRestore out"),
        ("tests.app.training.callbacks_test:none", "has no function 'none'"),
    ],
)
def test_what_brings_no_callbacks_is_refused(spec, message):
    with pytest.raises(ValueError, match=rf"callbacks \('{spec}'\).*{message}"):
        load(spec)
