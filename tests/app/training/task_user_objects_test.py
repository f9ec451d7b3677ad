"""Objects in place of names, what the configuration then says, and the user's callbacks."""

import keras
import pytest

from towers.app.config import TrainConfig
from towers.app.training.task import PYTHON, UserObjects, load_callbacks

MODEL = keras.Sequential([keras.Input((1,))])


def test_an_object_takes_the_place_of_its_name():
    config = TrainConfig(seed=3)
    assert UserObjects().named_in(config) == config
    assert UserObjects(model=MODEL).named_in(config) == TrainConfig(seed=3, model=PYTHON)
    named = UserObjects(MODEL, train=[1]).named_in(config)
    assert (named.model, named.dataset, named.seed) == (PYTHON, PYTHON, 3)


@pytest.mark.parametrize(
    ("objects", "config", "message"),
    [
        (UserObjects(MODEL), {"model": "mlp"}, r"model \(mlp\) is the configuration's"),
        (UserObjects(MODEL), {"resume": "run"}, r"model \(cnn\) is the configuration's"),
        (UserObjects(train=[1]), {"dataset": "music"}, r"dataset \(music\) is the configuration's"),
        (UserObjects(train=[1]), {"data_dir": "x"}, r"data_dir \(x\) has no effect beside `train`"),
        (UserObjects(test=[1]), {}, "`test` needs `train`"),
        (UserObjects(model="mlp"), {}, r"model \('mlp'\) must be a keras.Model"),
        (UserObjects(), {"model": PYTHON}, r"towers.train\(config, \.\.\.\) there"),
    ],
)
def test_what_is_given_twice_or_not_at_all_is_refused(objects, config, message):
    with pytest.raises(ValueError, match=message):
        objects.named_in(TrainConfig(**config))


class Recorder(keras.callbacks.Callback):
    """Hears nothing."""


RETURNED = {
    "two": [Recorder(), keras.callbacks.TerminateOnNaN()], "one": Recorder(),
    "classes": [Recorder], "backups": [keras.callbacks.BackupAndRestore("backup")],
}
two, one, classes, backups = (lambda returned=value: returned for value in RETURNED.values())


def test_a_users_function_brings_callbacks_before_those_of_a_script():
    mine = Recorder()
    assert load_callbacks(f"{__name__}:two", [mine]) == [*RETURNED["two"], mine]
    assert load_callbacks(None) == []


@pytest.mark.parametrize("name, message", [
    ("one", "returned Recorder; it must be a list of keras"),
    ("classes", "returned <class .*Recorder'>, which is no keras"),
    ("backups", "returned a BackupAndRestore, .*leave BackupAndRestore out"),
    ("none", "has no function 'none'"),
])
def test_what_brings_no_callbacks_is_refused(name, message):
    with pytest.raises(ValueError, match=rf"callbacks \('{__name__}:{name}'\).*{message}"):
        load_callbacks(f"{__name__}:{name}")
    with pytest.raises(ValueError, match="^callbacks hold <class "):
        load_callbacks(None, [Recorder])
