"""Finds what a tf.data.Dataset draws for each iterator, and whether it can be repeated.

list_files(shuffle, seed) -> interleave -> shuffle(1000, seed) -> map -> batch -> prefetch
                                           draws a seed for each iterator, as it is made
"""

import re
from typing import NamedTuple

import tensorflow as tf

from towers.machine.data_internals import (
    begins_again,
    dataset_graphs,
    dataset_parts,
    dataset_seeds,
    reshuffles,
)
from towers.machine.user_lines import warn_user

# Operations in functions of a dataset that keep something from one iterator to the next one, or
# that make datasets which do.
_KEEP = re.compile(r"PyFunc|Generator|Shuffle|Cache|RandomDataset|SnapshotDataset")
_CHANGE_VARIABLES = re.compile(r"^Assign|^Rng|^Stateful(Uniform|Standard|Truncated|Random)")
_DRAW = re.compile(r"^(Random|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial)")


class Draws(NamedTuple):
    """Describes the random numbers of a dataset."""

    seeds: list[list[int]]  # of each `shuffle` and each `random`
    is_plain: bool  # whether all iterators give the same elements
    is_known: bool  # whether an iterator depends on earlier ones only by their number
    variables: list[tf.Variable]  # which reading changes, such as those of a tf.random.Generator


def examine(dataset: tf.data.Dataset, argument: str) -> Draws:
    """Returns what a dataset draws. Raises ValueError if a `shuffle` in it cannot be repeated."""
    parts = dataset_parts(dataset)
    seeds = [pair for part in parts if (pair := dataset_seeds(part)) is not None]
    if (0, 0) in seeds:
        raise ValueError(
            f"{argument}: a `shuffle` in this tf.data.Dataset has no seed, so that a resumed fit "
            "cannot repeat its order. Give shuffle(..., seed=1), or call "
            "keras.utils.set_random_seed(1) before making the dataset."
        )
    if any(_draws_unseeded(node) for part in parts for node in _nodes(part)):
        warn_user(
            f"{argument}: a function of this tf.data.Dataset draws random numbers without a seed, "
            "so that a resumed fit draws others. Call keras.utils.set_random_seed(1) before "
            "making the dataset."
        )
    variables = {id(v): v for part in parts for v in _changed_variables(part)}
    keeps = any(_KEEP.search(node.op) for part in parts for node in _nodes(part))
    is_plain = not (keeps or any(map(_draws, parts)))
    begins_draws_again = any(
        begins_again(part) and any(map(_draws, dataset_parts(part))) for part in parts
    )
    return Draws(
        [list(pair) for pair in seeds],
        is_plain,
        not (keeps or begins_draws_again),
        list(variables.values()),
    )


def _nodes(part: tf.data.Dataset) -> list[tf.compat.v1.NodeDef]:
    """Returns the nodes of a dataset's functions, and of the functions that they call."""
    definitions = [graph.as_graph_def() for graph in dataset_graphs(part)]
    return [
        node
        for definition in definitions
        for nodes in (definition.node, *(f.node_def for f in definition.library.function))
        for node in nodes
    ]


def _changed_variables(part: tf.data.Dataset) -> list[tf.Variable]:
    if not any(_CHANGE_VARIABLES.search(node.op) for node in _nodes(part)):
        return []
    return [variable for graph in dataset_graphs(part) for variable in graph.variables]


def _draws(part: tf.data.Dataset) -> bool:
    """Returns whether a dataset gives other elements for each iterator, apart from its inputs."""
    is_random = dataset_seeds(part) is not None
    return is_random and (reshuffles(part) or begins_again(part)) or bool(_changed_variables(part))


def _draws_unseeded(node: tf.compat.v1.NodeDef) -> bool:
    if not _DRAW.search(node.op) or "seed" not in node.attr:
        return False
    return node.attr["seed"].i == node.attr["seed2"].i == 0
