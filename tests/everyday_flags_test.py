"""The everyday flags: train.py's run is Keras' own on one device, for each of them."""

import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import towers
from tests.app.run_test import NUM_CLASSES, config, measured, small_data, small_model
from towers.app.config import TrainConfig
from towers.app.datasets.batches import load_examples
from towers.resume.epoch import Epoch

pytestmark = pytest.mark.usefixtures("in_an_empty_directory", "without_charts")
schedules = keras.optimizers.schedules
BATCH, EPOCHS, WARM = 16, 2, 2
EPOCH, STEPS = 4, 8  # updates: 50 examples are 3 x 16 + 2


def trained(num_towers=3, **values):
    """The run's history, and its final model, whose file knows nothing of towers."""
    history = towers.train(config(run_dir="run", num_towers=num_towers, **values))
    with zipfile.ZipFile("run/final.keras") as file:
        assert b"towers" not in file.read("config.json")
    return history, keras.saving.load_model("run/final.keras")


def by_keras(
    optimizer,
    prepare=None,
    class_weight=None,
):
    """Keras' fit on one device, in the order of examples of the same run: (history, model).

    It runs eagerly, which is sooner done than to trace it.
    """
    train, (x_test, y_test) = small_data()
    examples = load_examples(train)
    keras.utils.set_random_seed(0)
    model = small_model((NUM_CLASSES,), NUM_CLASSES)
    if prepare is not None:
        prepare(model)
    model.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=True)
    losses = {"loss": [], "val_loss": []}
    for epoch in range(EPOCHS):
        total = 0.0
        for x, y in examples.batches(Epoch(BATCH, 0, epoch)):
            model.reset_metrics()
            total += model.train_on_batch(x, np.asarray(y), class_weight=class_weight) * len(y)
        losses["loss"].append(total / 50)
        losses["val_loss"].append(model.evaluate(x_test, np.asarray(y_test), verbose=0))
    optimizer.finalize_variable_values(model.trainable_variables)
    return losses, model


def assert_same(run, expected):
    """Losses and weights agree up to float32's rounding."""
    (history, model), (losses, theirs) = run, expected
    for name, values in losses.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    for a, b in zip(model.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6, err_msg=a.path)


class WarmLine(schedules.LearningRateSchedule):
    """From 0 to 0.1 over two updates, then on a line to 0 after the last."""

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        return 0.1 * keras.ops.minimum(step / WARM, (STEPS - step) / (STEPS - WARM))


def test_cosine_momentum_decay_clipping_and_average_on_accumulated_towers(capsys):
    run = trained(
        optimizer="sgd",
        learning_rate=0.1,
        momentum=0.9,
        schedule="cosine",
        warmup_steps=WARM,
        weight_decay=0.01,
        clip_norm=0.5,
        ema=0.9,
        accumulate=2,
        num_towers=None,
    )
    assert_same(
        run,
        by_keras(
            keras.optimizers.SGD(
                schedules.CosineDecay(0.0, STEPS - WARM, warmup_target=0.1, warmup_steps=WARM),
                momentum=0.9,
                weight_decay=0.01,
                global_clipnorm=0.5,
                use_ema=True,
                ema_momentum=0.9,
            ),
        ),
    )
    shown = capsys.readouterr().out
    assert "Batch     16 global = 4 towers x 4" in shown
    assert "learning rate: from 0 up over 2 updates, then cosine to 0 at update 8\n" in shown


def test_a_line_after_a_warm_up_with_a_frozen_layer_and_weighted_classes():
    """Three towers, batches of 16 and a last one of 2."""

    def freeze_body(model):
        model.get_layer("body").trainable = False

    weights = {1: 5, 2: 0.25}
    run = trained(
        optimizer="rmsprop",
        learning_rate=0.1,
        momentum=0.5,
        schedule="linear",
        warmup_steps=WARM,
        freeze="^body/|/body/",
        class_weight=weights,
    )
    assert '"class_weight": "1:5,2:0.25"' in Path("run/config.json").read_text()
    optimizer = keras.optimizers.RMSprop(WarmLine(), momentum=0.5)
    assert_same(run, by_keras(optimizer, prepare=freeze_body, class_weight=weights))
    keras.utils.set_random_seed(0)
    first = small_model((NUM_CLASSES,), NUM_CLASSES).get_layer("body").kernel
    np.testing.assert_array_equal(run[1].get_layer("body").kernel.numpy(), first.numpy())


def test_a_run_from_the_values_of_a_file_resumes_without_the_file(tmp_path):
    file = tmp_path / "other.keras"
    keras.utils.set_random_seed(7)
    small_model((NUM_CLASSES,), NUM_CLASSES).save(file)
    optimizer = keras.optimizers.Adam(schedules.PiecewiseConstantDecay([EPOCH - 1], [0.05, 0.005]))
    expected = by_keras(optimizer, prepare=lambda model: model.load_weights(file))
    trained(
        optimizer="adam",
        learning_rate=0.05,
        schedule="step:1",
        init_from=str(file),
        max_steps=EPOCH,
    )
    file.unlink()
    history = towers.train(TrainConfig(resume="run", trust_run_dir=True, max_steps=STEPS))
    assert_same((history, keras.saving.load_model("run/final.keras")), expected)


def test_a_fast_run_has_every_part_of_a_run_and_can_go_on_as_the_whole_run():
    fast = towers.train(config(run_dir="fast", batch_size=8, fast_dev_run=True))
    names = {path.name for path in Path("fast").iterdir()}
    assert names >= {"best.keras", "checkpoints", "export", "final.keras", "results.csv"}
    (x, y) = (part[:16] for part in small_data()[1])  # two of three batches
    expected = measured(keras.saving.load_model("fast/final.keras"), x, y)
    found = [fast["val_loss"][0], fast["val_accuracy"][0]]
    assert found == pytest.approx(expected, rel=1e-5) and len(fast["loss"]) == 1
    assert towers.train(TrainConfig(resume="fast", trust_run_dir=True)) == {}  # complete
    whole = towers.train(config(run_dir="whole", batch_size=8))
    resumed = TrainConfig(resume="fast", trust_run_dir=True, fast_dev_run=False)
    assert towers.train(resumed) == whole
    with pytest.raises(ValueError, match=r"^fast_dev_run \(True\) is reached already"):
        towers.train(TrainConfig(resume="whole", trust_run_dir=True, fast_dev_run=True))


def test_the_best_epochs_have_their_models_also_after_a_later_epoch_was_dropped():
    class Spoil(keras.callbacks.Callback):
        """Makes the second and the fourth epoch the best."""

        def on_test_begin(self, logs=None):
            bias = (5, 0, 4, 2)[len(self.model.history.epoch) % 4]
            self.model.trainable_variables[-1].assign([bias, 0, 0])

    values = {"epochs": 4, "keep_best": 2, "monitor": "val_loss"}
    history = towers.train(config(run_dir="run", learning_rate=0.05, **values), [Spoil()])
    order = np.argsort(history["val_loss"])
    assert {*order[:2]} == {1, 3}
    best, second = (f"best-epoch-{index + 1}.keras" for index in order[:2])
    assert {path.name for path in Path("run").glob("best-*")} == {best, second}
    for name, index in ((best, order[0]), (second, order[1]), ("best.keras", order[0])):
        found = measured(keras.saving.load_model(f"run/{name}"), *small_data()[1])
        assert found[0] == pytest.approx(history["val_loss"][index], rel=1e-5)
    Path("run", "best-epoch-9.keras").touch()  # of an epoch that a resumed run has not reached
    towers.train(TrainConfig(resume="run", trust_run_dir=True, epochs=5, keep_best=1000))
    assert not Path("run", "best-epoch-9.keras").exists()
