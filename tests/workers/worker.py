"""python -m tests.workers.worker WHAT...: one worker that meets those that TF_CONFIG names."""

import ctypes
import json
import os
import sys
import time

import keras
import tensorflow as tf

from towers.machine import tensorflow_internals
from towers.machine.logical import logical_cpus
from towers.step import checks
from towers.workers import watch, workers
from towers.workers.cluster import LOST_WORKER, LostWorkerError
from towers.workers.worker_collectives import WorkerCollectives


def collectives(cluster):
    """Prints what each operation gives."""
    made = WorkerCollectives(cluster.num_workers, cluster.index)

    @tf.function(autograph=False)
    def meet(count):
        own = tf.range(count) + 100 * cluster.index
        row = tf.range(cluster.num_workers, dtype=tf.int64) + 100 * cluster.index
        return {
            "gather": made.all_gather(tf.cast(own, tf.float64)),
            "bool": made.all_gather(tf.constant([cluster.index == 0])),
            "bfloat16": tf.cast(made.all_gather(tf.constant(0.5, tf.bfloat16)), tf.float32),
            "all_to_all": made.all_to_all(row),
            "broadcast": made.broadcast(tf.constant([cluster.index + 0.5])),
        }

    with tf.device("/cpu:0"):
        for count in (3, 2, 3):
            found = meet(tf.constant(count))
    say({name: value.numpy().tolist() for name, value in found.items()})


def between_steps(cluster):
    """Prints what workers tell each other."""
    data = b"\xff" * cluster.index + bytes([cluster.index])
    say(
        {
            "all_reduce_max": [
                cluster.all_reduce_max(0, 7),
                cluster.all_reduce_max(cluster.index, 3 - cluster.index),
            ],
            "all_gather": [list(row) for row in cluster.all_gather(data)],
            "broadcast": list(cluster.broadcast(bytes(range(9 + cluster.index)))),
            "answers": tensorflow_internals.health_error(1 - cluster.index, 3.0) is None,
        }
    )


def epochs(cluster):
    steps(cluster, lambda value: cluster.check_same({"value": value}, watch.EPOCH))


def steps(cluster, meet=None):
    """Meets the others again and again; prints "begun" once."""
    watch.set_timeout(float(os.environ.get("TIMEOUT", "60")))
    for count in range(10**9):
        (meet or cluster.all_reduce_max)(0)
        if count == 20:
            say("begun")
        time.sleep(0.01)


def differ(cluster):
    """Each worker says something else of itself; then worker 1 has another version of Keras."""
    cluster.check_same({"seed": 1})
    try:
        cluster.check_same({"seed": 1, "index": cluster.index, **{c: cluster.index for c in "abc"}})
    except ValueError as error:
        first = str(error)
    version, keras.__version__ = keras.__version__, str(cluster.index)
    try:
        checks.check_agreement(cluster, [], {})
    except ValueError as error:
        say([first, str(error)])
    keras.__version__ = version


def part(cluster):
    """Worker 0 comes a second late; prints when it came, and when the other had parted."""
    cluster.all_reduce_max(0)
    if cluster.index == 0:
        time.sleep(1)
        say(time.monotonic())
    cluster.barrier()
    if cluster.index == 1:
        say(time.monotonic())


def part_once(cluster):
    """Worker 1 comes to the first of the two meetings alone."""
    if cluster.index == 1:
        cluster.all_reduce_max(0)
        time.sleep(1)  # its last message arrives
        os._exit(0)
    cluster.barrier()
    os._exit(0)


def hang_wholly(cluster):
    """Worker 1 does not come to a step, and holds Python's lock, so that no thread runs."""
    hang_between_steps(cluster, lambda: ctypes.PyDLL(None).sleep(1000), timeout=1.0)


def sleep_for_long():
    time.sleep(1000)


def hang_between_steps(cluster, sleep=sleep_for_long, timeout=3.0):
    """Worker 1 does not come to a step; its threads run."""
    watch.set_timeout(timeout)
    cluster.all_reduce_max(0)
    say("begun")
    if cluster.index == 1:
        sleep()
    cluster.all_reduce_max(0)


def pause(cluster):
    """Worker 1 is away for longer than the timeout, waited for by nobody that long; then all.

    At last it is at work, and waited for.
    """
    watch.set_timeout(2.0)
    cluster.all_gather(b"")
    if cluster.index == 1:
        time.sleep(6)  # as if it read its data: nothing has been trained yet
    cluster.broadcast(b"")
    for seconds in (0, 3 if cluster.index == 1 else 2, 0, 4, 0, 4):
        time.sleep(seconds)
        cluster.all_reduce_max(0)
    if cluster.index == 1:
        with watch.at_work("a file"):
            time.sleep(6)
    cluster.all_reduce_max(0)
    say("came")


def say(what):
    print(json.dumps(what), flush=True)


def main(*acts):
    logical_cpus(2)
    try:
        cluster = workers.join_workers()
        for act in acts:
            act(cluster)
        cluster.barrier()
    except LostWorkerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(LOST_WORKER)


if __name__ == "__main__":
    main(*(globals()[name] for name in sys.argv[1:]))
