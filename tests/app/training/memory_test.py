"""A lack of memory becomes an error that names the ways out; other errors stay what they are."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from towers.app.training.memory import out_of_memory_explained

RUN = SimpleNamespace(batch_size=2050, step=SimpleNamespace(num_towers=2))
EXHAUSTED = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
CANCELLED = tf.errors.CancelledError(None, None, "RecvAsync is cancelled.")


def explained(error, log):
    with out_of_memory_explained(RUN, log):
        raise error


def test_the_per_tower_batch_and_two_ways_out_are_named(tmp_path):
    with pytest.raises(ValueError) as caught:
        explained(EXHAUSTED, tmp_path / "log.txt")
    for words in ("1,025 examples a tower", "`batch_size` than 2,050", " num_towers=4"):
        assert words in str(caught.value)
    assert caught.value.__cause__ is EXHAUSTED


def test_the_largest_shard_counts_where_the_batch_does_not_divide(tmp_path):
    run_of_three = SimpleNamespace(batch_size=100, step=SimpleNamespace(num_towers=3))
    with pytest.raises(ValueError, match="34 examples a tower"):
        with out_of_memory_explained(run_of_three, tmp_path / "log.txt"):
            raise EXHAUSTED


def test_a_cancelled_transfer_is_a_lack_of_memory_where_the_log_says_so(tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"noise \xff\nRESOURCE_EXHAUSTED: Out of memory\n")
    with pytest.raises(ValueError, match="too little memory"):
        explained(CANCELLED, log)


@pytest.mark.parametrize("text", ["another reason", None])
def test_any_other_cancelled_transfer_stays_what_it_is(text, tmp_path):
    log = tmp_path / "log.txt"
    if text is not None:
        log.write_text(text)
    with pytest.raises(tf.errors.CancelledError):
        explained(CANCELLED, log)


def test_other_errors_and_none_pass_through(tmp_path):
    with pytest.raises(KeyError):
        explained(KeyError("x"), tmp_path)
    with out_of_memory_explained(RUN, tmp_path):
        pass
