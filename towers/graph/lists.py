"""Holds the rules of lists of tensors, by which loops read rows and write results.

The fact of a list is the fact of its tensors stacked along a new first axis. A list of rows has the
batch axis 0; a list of steps, each with a batch axis 0, has the batch axis 1.
"""

from dataclasses import replace

from towers.graph.elements import one_row
from towers.graph.facts import EACH_ROW, PLACE, UNKNOWN, Fact, Op, open_axis


def reserve(op: Op) -> Fact:
    """Returns the fact of TensorListReserve or EmptyTensorList: a list without values."""
    has_rows = op.type == "TensorListReserve" and op.facts[1].degree == 1
    return Fact(axis=0 if has_rows else None, zero=True)


def get_item(op: Op) -> Fact:
    """Returns the fact of TensorListGetItem."""
    values, index = op.facts[:2]
    if values.axis == 0:
        return one_row(values, index) if index.is_counter else op.faulty(values, PLACE)
    if values.axis is None:
        return op.combine([values, index]) if index.loop else values
    axis = open_axis(op.output) if values.axis == UNKNOWN else values.axis - 1
    return replace(values, axis=axis)


def set_item(op: Op) -> Fact:
    """Returns the fact of TensorListSetItem (list, index, item) or TensorListPushBack."""
    before, item = op.facts[0], op.facts[-1]
    index = op.facts[1] if len(op.facts) == 3 else Fact(loop=item.loop, numbers="own")
    if index.is_counter:
        if item.loop is index.loop and not item.has_rows:  # each row's value in its place
            return replace(item, axis=0, loop=None, fault=before.fault or item.fault)
        rows = replace(item, axis=0)
        return op.faulty(rows, EACH_ROW) if item.local else rows
    if item.axis is not None and item.axis != UNKNOWN:
        item = replace(item, axis=item.axis + 1)
    if before.axis == 0 and before.local:
        return op.faulty(before, PLACE)
    return item if before.zero else op.choose([before, item])
