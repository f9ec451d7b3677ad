"""What a loss's reduction must be."""

import keras
import pytest

from towers.step.gathering import NeedsOtherTowers
from towers.step.outputs import check_reduction


@pytest.mark.parametrize("reduction", [None, "none"])
def test_a_loss_without_a_reduction_is_left_to_make_parallel(reduction):
    with pytest.raises(NeedsOtherTowers, match="must be one number. Use one of sum_over_batch_s"):
        check_reduction(keras.losses.MeanSquaredError(reduction=reduction))
