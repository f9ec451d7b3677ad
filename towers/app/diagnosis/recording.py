"""A recording of TensorFlow's profiler: its file -> events -> a Chrome trace.

The file is an XSpace: planes (the host, each GPU) of lines (threads, streams) of events.
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from towers.machine import tensorflow_internals

HOST = tensorflow_internals.HOST_PLANE


class Event(NamedTuple):
    """Something that ran.

    plane: "/host:CPU", or a GPU such as "/device:GPU:0".
    line: the thread, or the GPU's stream.
    name: what ran; TensorFlow's operations as "node name:type".
    begin, end: seconds since the begin of the profile.
    details: what else the profiler says, by name.
    """

    plane: str
    line: str
    name: str
    begin: float
    end: float
    details: Mapping[str, Any] = {}


def read_events(directory: Path) -> list[Event]:
    """The events of the newest profile below a directory that `tf.profiler.experimental` wrote to.

    GPUs' events are those of their streams alone, not what the profiler has derived from them.
    """
    path = max(directory.glob("plugins/profile/*/*.xplane.pb"))  # each folder's name is its time
    space = tensorflow_internals.read_profile(path)
    lines = [
        (plane, line)
        for plane in space.planes
        for line in plane.lines
        if plane.name == HOST or tensorflow_internals.is_gpu_stream(plane.name, line.name)
    ]
    start = min((line.timestamp_ns for _, line in lines), default=0)
    return [event for plane, line in lines for event in _line_events(plane, line, start)]


def _line_events(plane: Any, line: Any, start: int) -> list[Event]:
    """A line's events; times count from `start`, in nanoseconds."""
    result = []
    for event in line.events:
        name = plane.event_metadata[event.metadata_id].name
        if not tensorflow_internals.is_note(name):
            begin = (line.timestamp_ns - start) * 1000 + event.offset_ps
            details = {
                plane.stat_metadata[stat.metadata_id].name: _value(plane, stat)
                for stat in event.stats
                if stat.WhichOneof("value") not in (None, "bytes_value")
            }
            thread = f"{line.name or 'thread'} {line.id}"
            end = begin + event.duration_ps
            result.append(Event(plane.name, thread, name, begin / 1e12, end / 1e12, details))
    return result


def _value(plane: Any, stat: Any) -> Any:
    """A number or a string."""
    kind = stat.WhichOneof("value")
    return plane.stat_metadata[stat.ref_value].name if kind == "ref_value" else getattr(stat, kind)


def operations(events: Iterable[Event]) -> list[Event]:
    """The events, with each asynchronous operation as one, named by its node and its type.

    TensorFlow notes its start and its end apart, perhaps on two threads. Receiving is left out:
    it only waits for what is being computed elsewhere.
    """
    result, started = [], {}
    for event in sorted(events, key=lambda event: event.begin):
        start = tensorflow_internals.async_start(event.name, event.details)
        end = tensorflow_internals.async_end(event.name, event.details)
        if start is not None:
            started[start] = event
        elif end is not None:
            first = started.pop(end.key, None)
            if first is not None and "Recv" not in end.kind:
                name = f"{end.node}:{end.kind}"
                result.append(first._replace(name=name, end=event.begin))
        else:
            result.append(event)
    return result


def write_chrome_trace(path: Path, rows: Sequence[Event], events: Sequence[Event]) -> None:
    """Writes a gzipped Chrome trace, for chrome://tracing or ui.perfetto.dev.

    The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

    Args:
        path: a new file, by custom trace.json.gz.
        rows: shown first.
        events: shown below them.
    """
    entries: list[dict[str, Any]] = []
    planes: dict[str, int] = {}
    lines: dict[tuple[str, str], int] = {}
    for event in [*rows, *events]:
        if event.plane not in planes:
            planes[event.plane] = len(planes)
            entries.append(_label("process_name", planes[event.plane], 0, event.plane))
            order = {"name": "process_sort_index", "args": {"sort_index": planes[event.plane]}}
            entries.append({"ph": "M", "pid": planes[event.plane], **order})
        process = planes[event.plane]
        key = event.plane, event.line
        if key not in lines:
            lines[key] = len(lines)
            entries.append(_label("thread_name", process, lines[key], event.line))
        entries.append({
            "ph": "X",
            "pid": process,
            "tid": lines[key],
            "name": event.name,
            "ts": round(event.begin * 1e6, 3),
            "dur": round((event.end - event.begin) * 1e6, 3),
            "args": {name: str(value) for name, value in event.details.items()},
        })
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": entries, "displayTimeUnit": "ms"}, file)


def _label(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
