"""Adapts a language model of KerasHub by LoRA: the backbone is frozen, adapters are trained.

    pip install -e '.[text]'                 # KerasHub
    python -m examples.lora

A small GPT-2 first learns melodies: 49 notes, each predicted from the notes before it. Then
`enable_lora` freezes it and adds two small matrices to the query and value of each layer (Hu et al.
2021, https://arxiv.org/abs/2106.09685). These adapters learn the same melodies six semitones
higher, and are saved alone. In your own script, `GPT2Backbone.from_preset("gpt2_base_en")` takes
the place of the first training.
"""

import keras
import keras_hub
import numpy as np
import tensorflow as tf

import towers
from towers.datasets import music

GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
EXAMPLES = 4_000
EPOCHS = 3
GLOBAL_BATCH = 64
RANK = 4
SEMITONES = 6
ADAPTERS = "adapters.lora.h5"


def build_backbone(width: int = 64) -> keras.Model:
    """Returns a GPT-2 of two layers: {"token_ids", "padding_mask"} -> [N, steps, width]."""
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=music.NUM_CLASSES,
        num_layers=2,
        num_heads=4,
        hidden_dim=width,
        intermediate_dim=2 * width,
        max_sequence_length=music.NUM_STEPS,
    )


def build_model(backbone: keras.Model) -> keras.Model:
    """Returns a model of the next notes: the backbone's inputs -> logits [N, steps, notes]."""
    logits = backbone.token_embedding(backbone.output, reverse=True)
    return keras.Model(backbone.input, logits)


def make_data(notes: np.ndarray, semitones: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the inputs, int32 [N, 48], and the note that follows each of their notes."""
    higher = np.where(notes > 0, np.minimum(notes + semitones, music.NUM_CLASSES - 1), notes)
    ids = higher[:, :-1].astype("int32")
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}, higher[:, 1:].astype("int32")


def train(
    model: keras.Model, data: tuple, epochs: int, devices: int, learning_rate: float = 3e-3
) -> dict[str, list[float]]:
    """Trains on the devices, or by Keras on one; returns the history of `fit`."""
    if devices > 1:
        model = towers.make_parallel(model, devices)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(learning_rate)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model.fit(*data, batch_size=GLOBAL_BATCH, epochs=epochs, verbose=2).history


def main(
    examples: int = EXAMPLES,
    epochs: int = EPOCHS,
    adapters: str = ADAPTERS,
    devices: int = DEVICES,
) -> dict[str, list[float]]:
    """Trains the backbone, then the adapters, and saves these; returns the adapters' history."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    notes = music.load().train[0][:examples]
    with tf.device("/cpu:0"):  # keeps the parameters in host memory
        backbone = build_backbone()
        model = build_model(backbone)
    train(model, make_data(notes, 0), epochs, devices)

    with tf.device("/cpu:0"):
        backbone.enable_lora(RANK)
    for weight in backbone.trainable_weights:  # `save_lora_weights` leaves out the biases
        weight.trainable = "lora_" in weight.name
    trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    print(f"{trained:,} of {model.count_params():,} parameters are trained", flush=True)
    higher = make_data(notes, SEMITONES)
    history = train(model, higher, epochs, devices)

    backbone.save_lora_weights(adapters)  # the adapters alone: a few kilobytes
    return history


if __name__ == "__main__":
    main()
