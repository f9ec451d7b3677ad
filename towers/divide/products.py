"""Moves products of parts behind the addition of the parts, if only the sum is needed.

    before    tower 0: 0.1 * part ---+              after    tower 0: part ---+
              tower 1: 0.1 * part ---+--- update             tower 1: part ---+--- 0.1 * sum, update

One product replaces a product in each tower. Keras' optimizers multiply by the learning rate.
Copies and changes of sign move with the products.
"""

from collections.abc import Sequence

from towers.divide.facts import ONCE, PART, SIZE, WHOLE, Op, Value

FACTORS = ("Mul", "RealDiv", "Div", "DivNoNan")


def multiply_sums(ops: Sequence[Op]) -> None:
    """Lets products of parts that no tower reads run once, on the sum of the parts; also copies.

    ops: in an order that they can run in, with their places decided.
    """
    read_in_towers: set[Value] = set()
    for op in reversed(ops):
        if op.in_towers is None:
            continue
        is_sum = set(op.in_towers.facts) <= {PART, ONCE}
        is_known = {value.fact for value in op.inputs} <= {PART, ONCE, SIZE}  # in all towers alike
        # A product is moved only if every tower multiplies by the same whole value.
        is_moved = op.type in (*FACTORS, "Identity", "Neg") and is_sum and is_known
        if is_moved and read_in_towers.isdisjoint(op.outputs):
            op.in_towers = None
            for value in op.outputs:
                value.fact = ONCE
        else:
            read_in_towers |= {value for value, need in op.in_towers.needs if need != WHOLE}
