from pathlib import Path

import ml_dtypes
import numpy as np

from tests.checkpointing.wire import Wire
from towers.checkpointing import relay
from towers.checkpointing.checkpoints import Checkpoint
from towers.checkpointing.relay import Found, Heard
from towers.machine.cluster import ALONE
from towers.machine.workers import Workers

ARRAYS = {
    "a": np.arange(6, dtype="float32").reshape(2, 3).T,  # not contiguous
    "b": np.array(3, "int64"),
    "c": np.zeros([0, 4], "bool"),
    "d": np.array([0.5, -1.5], ml_dtypes.bfloat16),
}


def test_what_the_chief_has_found_is_heard_bit_for_bit():
    wire, state = Wire(), {"position": {"step": 7}, "text": "\u00e9"}
    told = Heard(Found(Path("x/y"), Checkpoint(state, ARRAYS), ["z is damaged"]), 12)
    relay.tell(wire, told)
    wire.turn()
    heard = relay.hear(wire)
    assert heard.finished_step == 12 and heard.found.checkpoint.state == state
    assert heard.found._replace(checkpoint=None) == told.found._replace(checkpoint=None)
    assert list(heard.found.checkpoint.arrays) == list(ARRAYS)
    for name, array in heard.found.checkpoint.arrays.items():
        assert (array.dtype, array.shape) == (ARRAYS[name].dtype, ARRAYS[name].shape)
        assert array.tobytes() == ARRAYS[name].tobytes()


def test_that_there_is_nothing_is_heard_too():
    wire = Wire()
    relay.tell(wire, Heard(None, None))
    wire.turn()
    assert relay.hear(wire) == Heard(None, None)
    assert wire.told == []


def test_who_is_alone_tells_nobody():
    relay.tell(Workers(ALONE), Heard(Found(Path(), None, []), None))  # nothing looks at it
