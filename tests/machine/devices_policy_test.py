"""Which policy: GPUs', or CPU devices'; what each makes of a step is in step/policy_test."""

import pytest

from towers.machine.devices import CPU, GPU, REHEARSAL, policy_of


@pytest.mark.parametrize(("devices", "value", "expected"), [
    (["/cpu:0", "/cpu:1"], None, CPU), (["/cpu:0"], "0", CPU), (["/cpu:0"], "", CPU),
    (["/gpu:0"], None, GPU), (["/cpu:0", "/gpu:1"], None, GPU), (["/cpu:0"], "1", GPU),
])
def test_gpus_and_those_that_rehearse_them_have_the_policy_of_gpus(
    devices, value, expected, monkeypatch
):
    monkeypatch.delenv(REHEARSAL, raising=False)
    if value is not None:
        monkeypatch.setenv(REHEARSAL, value)
    assert policy_of(devices) is expected
