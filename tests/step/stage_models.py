"""Models whose stages could go wrong: what spans stages, loops, is paired, or is in no layer."""

import keras
import numpy as np
import tensorflow as tf

from tests.bits import bits as bits_of

L = keras.layers


def image_batch(n, rng):
    return rng.normal(size=(n, 12, 12, 2)).astype("float32"), rng.normal(size=(n, 3))


def row_batch(n, rng):
    return rng.normal(size=(n, 6)), rng.normal(size=(n, 3))


def token_batch(n, rng):
    return rng.integers(0, 9, (n, 7)), rng.normal(size=(n, 3))


def u_net():
    """Skips from the first stages to the last."""
    x = keras.Input((12, 12, 2))
    down = [L.Conv2D(4, 3, padding="same", activation="relu")(x)]
    down.append(L.Conv2D(6, 3, strides=2, padding="same", activation="relu")(down[-1]))
    down.append(L.Conv2D(8, 3, strides=2, padding="same", activation="relu")(down[-1]))
    up = down.pop()
    for skip in reversed(down):
        up = L.Conv2DTranspose(4, 2, strides=2, activation="relu")(up)
        up = L.BatchNormalization()(L.Concatenate()([up, skip]))
    return keras.Model(x, L.Dense(3)(L.Dropout(0.2)(L.GlobalAveragePooling2D()(up))))


def attention():
    """Post-norm; silu has a gradient of its own; a mask of the first layer reaches the loss."""
    x = keras.Input((7,))
    y = L.Embedding(9, 8, mask_zero=True)(x)
    attended = L.MultiHeadAttention(2, 4, dropout=0.1)(y, y)
    y = L.LayerNormalization()(L.Add()([y, attended]))
    y = L.LayerNormalization()(L.Add()([y, L.Dense(8, activation="silu")(y)]))
    return keras.Model(x, L.Dense(3)(L.GlobalAveragePooling1D()(y)))


def pools():
    """Overlapping pools, whose gradients oneDNN pairs with them."""
    layers = [keras.Input((12, 12, 2))]
    for _ in range(3):
        layers += [L.Conv2D(4, 3, padding="same"), L.MaxPooling2D(3, 1), L.Activation("gelu")]
    return keras.Sequential([*layers, L.Flatten(), L.Dense(3)])


def shared():
    """A layer that two stages call, and one with a regularizer."""
    again = L.Dense(6, activation="tanh", kernel_regularizer="l2", name="again")
    x = keras.Input((6,))
    y = L.Dense(6, kernel_regularizer="l1", activity_regularizer="l2")(again(x))
    y = L.Dense(6, bias_regularizer="l2", activation="swish")(y)
    return keras.Model(x, L.Dense(3)(again(y)))


def loops():
    """Recurrent layers on each side of a cut, masked; their lists of tensors stay in a stage."""
    x = keras.Input((7,))
    y = L.Embedding(9, 4, mask_zero=True)(x)
    y = L.Bidirectional(L.GRU(5, return_sequences=True))(y)
    y = L.LSTM(4, return_sequences=True, recurrent_dropout=0.2)(y)
    return keras.Model(x, L.Dense(3)(L.SimpleRNN(4)(y)))


def nested():
    """Models inside of it, one of them called twice; operations that are no layers."""
    inner = keras.Sequential(
        [
            keras.Input((6,)),
            L.Dense(6, activation="relu"),
            L.BatchNormalization(),
            L.Dropout(0.3),
            L.Dense(6),
        ]
    )
    a = keras.Input((6,))
    block = keras.Model(a, keras.ops.tanh(inner(a)) * 0.5 + a)
    x = keras.Input((6,))
    return keras.Model(x, L.Dense(3)(inner(block(block(x)))))


MODELS = {
    "u_net": (u_net, image_batch),
    "attention": (attention, token_batch),
    "pools": (pools, image_batch),
    "shared": (shared, row_batch),
    "loops": (loops, token_batch),
    "nested": (nested, row_batch),
}


def bits(make_step, batch):
    """Every bit that a step makes of training and evaluation."""
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    step = make_step()
    found = [step(*batch(n, rng)) for n in (9, 4, 3)]
    found.append(step.test_batch(*batch(5, rng)))
    found += [v.value for v in [*step.model.variables, *step.optimizer.variables]]
    flat = tf.nest.flatten(tf.nest.map_structure(tf.convert_to_tensor, found))
    return b"".join(map(bits_of, flat))
