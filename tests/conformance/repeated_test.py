"""The same gradient again and again has the same bits, whoever of TensorFlow's threads is first."""

import json

import pytest

from tests import forked
from tests.conformance.cases import BUILT_IN, ODD
from tests.real_workers import ROOT

TELLING = ["wide_fan_out", "own_step", "embedding", "resnet20"]
REST = [case.name for case in [*BUILT_IN, *ODD] if case.name not in TELLING]


@pytest.mark.parametrize("names", [
    pytest.param(TELLING, id="telling"), pytest.param(REST, id="rest", marks=pytest.mark.matrix),
])
def test_a_gradient_has_the_same_bits_every_time(names):
    done = forked.run("-m", "tests.conformance.repeated", *names, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(names, 1)
