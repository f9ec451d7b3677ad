"""Orders the operations of a divided step into stages of the towers, and meetings between them.

    before   once    parameters are read
    0        towers  forward, backward               -->  parts of the loss and of the gradients
    1        once    one tree of additions, then the update
    2        towers  what reads the new weights ...

Even numbers are stages in the towers, odd ones are meetings on the parameter device.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from towers.divide.context import reads
from towers.divide.facts import ONCE, OWN, SIZE, Op, Value
from towers.divide.flat import has_effects

Phases = dict[int, list[Op]]


def phases_of(ops: Sequence[Op]) -> Phases:
    """Returns the operations by phase.

    Each is in the earliest phase that it can run in. If no tower waits for it, as for the update,
    the metrics and moving averages, it is in the last one.
    """
    run = [op for op in ops if not op.is_made_where_read]
    before = states_before(run)
    awaited = _awaited(run, before)
    phase_of: dict[Op, int] = {}
    # Operations that no tower waits for run in the last meeting: no stage waits for an update.
    for op in run:
        if op.in_towers is not None or op in awaited:
            is_in_towers = op.in_towers is not None
            earliest = max([0 if is_in_towers else -1, *(phase_of[other] for other in before[op])])
            earliest = max([earliest, *_met(op, phase_of)])
            # Towers have even phases and meetings odd ones: take the next one of the right kind.
            phase_of[op] = earliest + (earliest % 2 == is_in_towers)
    last = max([-1, *(phase + (phase % 2 == 0) for phase in phase_of.values())])
    phases: Phases = defaultdict(list)
    for op in run:
        phases[phase_of.get(op, last)].append(op)
    assert all((op.in_towers is None) == k % 2 for k, group in phases.items() for op in group)
    return phases


def _met(op: Op, phase_of: dict[Op, int]) -> Iterable[int]:
    """Returns the phases in which an operation can have what it reads."""
    for value, need in reads(op):
        made = phase_of.get(value.op, -1)
        is_whole = op.in_towers is None or need != OWN and value.fact not in (ONCE, SIZE)
        yield made + 1 if made % 2 == 0 and is_whole else made  # towers meet


def states_before(ops: Iterable[Op]) -> dict[Op, list[Op]]:
    """Returns the operations that must run before each one, because they share a state.

    Operations that read or change one state keep their order, and so do all that print, check or
    call Python.
    """
    before: dict[Op, list[Op]] = defaultdict(list)
    changed: dict[Value | None, Op] = {}  # what has changed a state last
    used: dict[Value | None, list[Op]] = defaultdict(list)  # what has read it since
    for op in ops:
        changes = has_effects(op)
        states: Sequence[Value | None] = op.states or [None] * changes
        for state in states:
            if state in changed:
                before[op].append(changed[state])
            if changes:
                before[op] += used.pop(state, [])
                changed[state] = op
            else:
                used[state].append(op)
    return before


def _awaited(ops: Sequence[Op], before: dict[Op, list[Op]]) -> set[Op]:
    """Returns the operations whose results or effects some operation of the towers needs."""
    awaited: set[Op] = set()
    for op in reversed(ops):
        if op.in_towers is not None or op in awaited:
            awaited.update(before[op])
            awaited.update(value.op for value, _ in reads(op))
    return awaited
