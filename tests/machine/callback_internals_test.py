"""A test for each private part of Keras' callbacks that towers uses."""

import keras
import numpy as np

from towers.machine import callback_internals

C = keras.callbacks


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5), "mse")
    return made


def fitted(*callbacks):
    """A model after two steps of one epoch."""
    keras.utils.set_random_seed(0)
    made = model()
    x = np.arange(8.0).reshape(4, 2) / 8
    made.fit(x, x[:, :1], batch_size=2, verbose=0, shuffle=False, callbacks=list(callbacks))
    return made


def test_the_fields(tmp_path):
    checkpoint = C.ModelCheckpoint(tmp_path / "a.keras", save_freq=100)
    board = C.TensorBoard(tmp_path)
    fitted(checkpoint, board)
    found = vars(checkpoint) | vars(board) | vars(C.SwapEMAWeights())
    assert [found.get(name) for name in callback_internals.CALLBACK_FIELDS] == [
        2, 1, None, 2, 0, False
    ]


def test_says_averages():
    swap = C.SwapEMAWeights(swap_on_epoch=True)
    assert not callback_internals.says_averages(vars(swap))
    fitted(swap)
    assert callback_internals.says_averages(vars(swap))


def test_note_weights_and_with_weights():
    swap, plain = C.SwapEMAWeights(swap_on_epoch=True), fitted()
    callback_internals.note_weights([swap])
    averaged = fitted(swap)
    weights = [plain.optimizer.variables[-2:], averaged.optimizer.variables[-2:]]
    for a, b in zip(*weights, strict=True):  # the averages of both, for now
        np.testing.assert_allclose(a, b, rtol=1e-6)
    with callback_internals.with_weights([swap]):
        kernel, bias = (np.array(v) for v in averaged.optimizer.variables[-2:])
    assert not np.allclose(kernel, weights[0][0]) and not np.allclose(bias, weights[0][1])
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_finalize_averages():
    swap, made = C.SwapEMAWeights(), fitted()
    swap.set_model(made)
    made.layers[0].set_weights([np.full((2, 1), 7.0), np.zeros(1)])
    swap.on_test_begin()
    averages = made.get_weights()
    callback_internals.finalize_averages([swap])
    made.optimizer.finalize_variable_values(made.trainable_variables)
    for a, b in zip(made.get_weights(), averages, strict=True):
        np.testing.assert_array_equal(a, b)


def test_forget_initial_epoch(tmp_path):
    epochs, made = [], model()
    seen = C.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    backup = C.BackupAndRestore(tmp_path, delete_checkpoint=False)
    x, y = np.ones((1, 2)), np.ones(1)
    for callbacks in ([backup], [backup], [seen]):
        made.fit(x, y, epochs=2 if seen in callbacks else 1, verbose=0, callbacks=callbacks)
    callback_internals.forget_initial_epoch(made)
    made.fit(x, y, epochs=2, verbose=0, callbacks=[seen])
    assert epochs == [1, 0, 1]
