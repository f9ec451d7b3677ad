"""The order of the examples in an epoch, which must not change under checkpoints that exist."""

import tensorflow as tf

from towers.resume.epoch import Epoch


def test_an_epoch_has_the_order_that_earlier_versions_gave_it():
    epoch = Epoch(4, seed=5, number=2)
    order = epoch.order(tf.range(11, dtype=tf.int64), 11).numpy().tolist()
    assert order == [0, 4, 8, 5, 7, 1, 6, 3, 2, 9, 10]
    assert epoch.key == 2080082186671054586
    rest = epoch._replace(start_step=1).indices(11)
    assert [batch.tolist() for batch in rest.as_numpy_iterator()] == [order[4:8], order[8:]]
