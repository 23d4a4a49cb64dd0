import numpy as np
import pytest
from gpt_steps import losses

from experiments.bench.gpt_workload import FLAX


@pytest.mark.parametrize("place", ["124M", "1.3B"])
def test_three_steps_have_the_losses_of_ours(place):
    np.testing.assert_allclose(losses(place, FLAX), losses(place, "xla"), rtol=1e-5)
