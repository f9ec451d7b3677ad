"""What arithmetic makes of rows, values and counts."""

import pytest
import tensorflow as tf

from towers.graph.facts import (

    COUNT,

    ROWS,

    SHARED,

    Fact,

    added,

    divided,

    first_fault,

    joined,

    multiplied,

    nonlinear,

    sizes,

)

MEAN, SUM = Fact(local=True), Fact(local=True, degree=1)


@pytest.fixture(name="op")
def _op():
    with tf.Graph().as_default():
        yield tf.constant(1.0).op


def test_sums_divided_by_the_number_of_rows_are_means(op):
    assert divided(op, SUM, COUNT) == MEAN
    assert multiplied(op, MEAN, COUNT) == SUM
    assert divided(op, ROWS, COUNT).degree == -1


def test_constants_count_as_means_and_not_as_sums(op):
    assert added(op, [MEAN, SHARED]) == MEAN
    assert "adds a constant to a sum" in added(op, [SUM, SHARED]).fault.what
    assert added(op, [SUM, Fact(zero=True)]) == SUM


def test_what_rows_are_given_by_all_rows_is_a_fault(op):
    assert joined(op, [ROWS, SHARED]).fault is None
    assert "made of all rows" in joined(op, [ROWS, MEAN]).fault.what
    assert "multiplies two" in multiplied(op, MEAN, SUM).fault.what
    assert "divides by" in divided(op, MEAN, SUM).fault.what


def test_the_first_fault_stays(op):
    faulty = nonlinear(op, MEAN)
    assert first_fault([MEAN, faulty]) is faulty.fault
    assert multiplied(op, faulty, ROWS).fault is faulty.fault
    assert added(op, [faulty, SUM, MEAN]).fault is faulty.fault


def test_functions_of_constants_and_of_rows_are_no_fault(op):
    assert nonlinear(op, SHARED) == SHARED
    assert nonlinear(op, ROWS) == ROWS
    assert nonlinear(op, COUNT).degree is None
    assert multiplied(op, MEAN, nonlinear(op, COUNT)).fault is not None


def test_sizes_are_known_one_by_one():
    fact = sizes([COUNT, SHARED])
    assert fact.parts == (COUNT, SHARED) and fact.degree is None and not fact.local
