"""The profiler's file and the Chrome trace, the first one from a real profile."""

import gzip
import json

import tensorflow as tf

from towers.app.diagnosis.recording import HOST, Event, operations, read_events, write_chrome_trace
from towers.machine.tensorflow_internals import ASYNC_DONE, ASYNC_START, CONSUMER, PRODUCER


def event(what, begin, end, **details):
    return Event(HOST, "a thread", what, begin, end, details)


def test_a_profile_holds_what_was_marked_and_ran(tmp_path):
    @tf.function
    def double(x):
        return tf.multiply(x, 2.0, name="doubled")

    double(tf.ones([3]))
    with tf.profiler.experimental.Profile(str(tmp_path)):
        with tf.profiler.experimental.Trace("outer", step_num=7):
            double(tf.ones([3]))
    events = read_events(tmp_path)
    (outer,) = [e for e in events if e.name == "outer"]
    (inner,) = [e for e in events if e.name == "doubled:Mul"]
    assert outer.details["step_num"] == 7
    assert 0 <= outer.begin < inner.begin < inner.end < outer.end < 60
    assert not any(e.name.startswith("Memory") for e in events)


def test_an_asynchronous_operation_is_one_from_its_start_to_its_end():
    call = {"name": "tower_0/call", "kernel_type": "PartitionedCall"}
    receive = {"name": "value/_3", "kernel_type": "_Recv"}
    events = [
        event(ASYNC_DONE, 8, 9, **call, **{CONSUMER: 5}),
        event(ASYNC_START, 1, 2, **call, **{PRODUCER: 5}),
        event(ASYNC_START, 1, 2, **receive, **{PRODUCER: 6}),
        event(ASYNC_DONE, 7, 8, **receive, **{CONSUMER: 6}),
        event(ASYNC_DONE, 0, 1, **call | {"name": "from before"}, **{CONSUMER: 4}),
        event("add:AddV2", 3, 4),
    ]
    found = [(e.name, e.begin, e.end) for e in operations(events)]
    assert found == [("add:AddV2", 3, 4), ("tower_0/call:PartitionedCall", 1, 8)]


def test_the_chrome_trace_has_a_row_for_each_line_in_microseconds(tmp_path):
    path = tmp_path / "trace.json.gz"
    row = Event("step", "towers", "towers", 0.5, 0.75)
    write_chrome_trace(path, [row], [event("add:AddV2", 0.25, 0.5, step_num=3)])
    with gzip.open(path, "rt") as file:
        entries = json.load(file)["traceEvents"]
    first, second = [entry for entry in entries if entry["ph"] == "X"]
    assert first == {
        "ph": "X", "pid": 0, "tid": 0, "name": "towers", "ts": 500000, "dur": 250000, "args": {}
    }
    assert (second["pid"], second["tid"], second["args"]) == (1, 1, {"step_num": "3"})
    names = {e["args"]["name"] for e in entries if e["name"] in ("process_name", "thread_name")}
    assert names == {"step", "towers", HOST, "a thread"}
