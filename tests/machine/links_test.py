"""Every link is tried before the first step; a link that changes bits or hangs is named.

Real links change no bits, so `copied`, which sends all values, is replaced by one that fails.
"""

import re
import threading
import time

import pytest
import tensorflow as tf

import towers
from tests.step import small_step
from towers.machine import links
from towers.machine.devices import GPU, short_name
from towers.step.placement import Placement

DEVICES = ("/cpu:1", "/cpu:2", "/cpu:3")
HOME = "/cpu:0"
FIX = "Use add_on=cpu: all additions run on the CPU, and devices send nothing to each other."


@pytest.fixture(autouse=True)
def _new():
    links.try_links.cache_clear()
    yield
    links.try_links.cache_clear()


def one_bit_changed(value, left):
    flipped = value.numpy()
    flipped[-1] ^= 1 << 40
    return tf.constant(flipped)


def never_written(value, left):
    return left


@pytest.fixture
def broken(monkeypatch):
    """broken(source, target, fault): what arrives on this link is fault(value, left).

    left: the bits that the last value of this size has left in the target's memory.
    """

    def breaks(source, target, fault):
        memory = {}

        def copied(value, device):
            moved, place = sent(value, device), (device, value.shape[0])
            if (short_name(value.device), device) == (source, target):
                moved = fault(moved, memory.get(place, tf.zeros_like(moved)))
            memory[place] = moved
            return moved

        monkeypatch.setattr(links, "copied", copied)

    sent = links.copied
    return breaks


def test_bits_go_over_every_link_in_both_directions(monkeypatch):
    seen, sent = {}, links.copied

    def copied(value, device):
        moved = sent(value, device)
        assert short_name(moved.device) == device
        seen.setdefault((short_name(value.device), device), set()).add(value.shape[0] * 8)
        return moved

    monkeypatch.setattr(links, "copied", copied)
    links.try_links(DEVICES, False)
    outward = {(HOME, device) for device in DEVICES}
    assert set(seen) == outward | {link[::-1] for link in outward}
    links.try_links(DEVICES, True)
    assert set(seen) - {link for link in seen if HOME in link} == {
        (a, b) for a in DEVICES for b in DEVICES if a != b
    }
    assert all(min(sizes) < 64 and max(sizes) >= 2**22 for sizes in seen.values())


@pytest.mark.parametrize(
    "fault, source, target, name",
    [
        (one_bit_changed, HOME, "/cpu:2", "between /cpu:0 and /cpu:2"),
        (never_written, "/cpu:3", HOME, "between /cpu:0 and /cpu:3"),
        (one_bit_changed, "/cpu:3", "/cpu:1", "from /cpu:3 to /cpu:1"),
    ],
)
def test_a_link_that_changes_bits_is_named(fault, source, target, name, broken):
    broken(source, target, fault)
    with pytest.raises(ValueError, match=f"^the link {name} changes bits: ") as caught:
        links.try_links(DEVICES, True)
    is_between = HOME not in (source, target)
    remedy = FIX if is_between else "Leave /cpu:. out, such as with CUDA_VISIBLE_DEVICES"
    assert re.search(remedy, str(caught.value))


def test_a_link_that_hangs_or_fails_is_named_in_time(broken, monkeypatch):
    monkeypatch.setattr(links, "SECONDS", 1.0)
    end, began = threading.Event(), time.monotonic()
    broken("/cpu:1", "/cpu:3", lambda value, left: end.wait(60) and value)
    try:
        with pytest.raises(ValueError) as caught:
            links.try_links(DEVICES, True)
    finally:
        end.set()
    assert time.monotonic() - began < 5
    hangs = "the link from /cpu:1 to /cpu:3 hangs: nothing arrived in 1 seconds"
    assert str(caught.value) == f"{hangs}. {FIX}"

    def fail(value, left):
        raise tf.errors.InternalError(None, None, "peer access")

    broken("/cpu:1", "/cpu:3", fail)
    with pytest.raises(ValueError, match="^the link from /cpu:1 to /cpu:3 fails: peer access"):
        links.try_links(DEVICES, True)


def test_a_step_and_a_fit_begin_with_it_and_add_on_cpu_needs_no_link_between_devices(
    broken, monkeypatch
):
    broken("/cpu:1", "/cpu:0", one_bit_changed)
    with pytest.raises(ValueError, match="the link between /cpu:0 and /cpu:1 changes bits"):
        small_step.make_step(policy=GPU)
    small_step.make_step()  # devices that share one memory have no links
    broken("/cpu:1", "/cpu:2", one_bit_changed)
    options = {"policy": GPU, "devices": DEVICES}
    with pytest.raises(ValueError, match="the link from /cpu:1 to /cpu:2 changes bits"):
        small_step.make_step(**options)
    step = small_step.make_step(**options, add_on="cpu")
    assert not step.policy.add_on_devices
    monkeypatch.setenv("TOWERS_REHEARSE_GPUS", "1")
    x, y = small_step.batch(12)
    for add_on, error in (("auto", "from /cpu:1 to /cpu:2"), ("cpu", None)):
        parallel = towers.make_parallel(step.model, [1, 2, 3], add_on=add_on)
        parallel.compile("sgd", "sparse_categorical_crossentropy")
        if error is None:
            parallel.fit(x, y, verbose=0)
        else:
            with pytest.raises(ValueError, match=error):
                parallel.fit(x, y, verbose=0)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"strategy": "sharded"}, "strategy=sharded, which sends.*Use strategy=parameter_server"),
        ({"gpus_per_tower": 2}, r"gpus_per_tower \(2\): stages send.*Use gpus_per_tower=1"),
    ],
)
def test_what_must_send_between_devices_does_not_go_with_add_on_cpu(options, error):
    with pytest.raises(ValueError, match=f"^add_on=cpu does not go with {error}"):
        Placement(**options, add_on="cpu")


def test_parameters_on_a_gpu_do_not_go_with_add_on_cpu():
    with pytest.raises(ValueError, match="^add_on=cpu: the parameters are on /gpu:0.*=cpu; in a"):
        Placement(add_on="cpu").policy_for(GPU, "/gpu:0")
    assert Placement().policy_for(GPU, "/gpu:0") is GPU
