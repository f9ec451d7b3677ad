"""UserObjects in place of names, and what the configuration then says."""

import keras
import pytest

from towers.app.config import TrainConfig
from towers.app.training.user_objects import PYTHON, UserObjects, title

MODEL = keras.Sequential([keras.Input((1,))])


def test_an_object_takes_the_place_of_its_name():
    config = TrainConfig(seed=3)
    assert UserObjects().named_in(config) == config
    assert UserObjects(model=MODEL).named_in(config) == TrainConfig(seed=3, model=PYTHON)
    named = UserObjects(MODEL, train=[1]).named_in(config)
    assert (named.model, named.dataset, named.seed) == (PYTHON, PYTHON, 3)


def test_a_run_that_goes_on_is_given_its_objects_again():
    config = TrainConfig(resume="run", model=PYTHON, dataset=PYTHON)
    assert UserObjects(MODEL, [1]).named_in(config) == config
    with pytest.raises(ValueError, match=r"model \(python\) .*Config\(resume='run'\), \.\.\.\)"):
        UserObjects(train=[1]).named_in(config)
    with pytest.raises(ValueError, match=r"dataset \(python\) is an object of the script"):
        UserObjects(MODEL).named_in(config)


@pytest.mark.parametrize(("model", "dataset", "expected"), [
    ("cnn", "mnist", "cnn on mnist"), (PYTHON, "mnist", "own on mnist"), (PYTHON, PYTHON, "own"),
    ("cnn", PYTHON, "cnn"),
])
def test_the_title_names_what_has_a_name(model, dataset, expected):
    own = keras.Sequential([keras.Input((1,))], name="own")
    assert title(TrainConfig(model=model, dataset=dataset), own) == expected


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
