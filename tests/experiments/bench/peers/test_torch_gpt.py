import importlib.util
import sys

import numpy as np
import pytest
from gpt_steps import losses, workload_and_arguments

from experiments.bench.peers import Task

IS_INSTALLED = all(map(importlib.util.find_spec, ["torch", "torchlogix"])) and sys.version_info >= (3, 12)
pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="needs PyTorch and torchlogix: from Python 3.12 on")


@pytest.mark.parametrize("place", ["124M", "1.3B"])
def test_three_steps_have_the_losses_of_ours(place):
    from experiments.bench.peers import torch as peer

    workload, arguments = workload_and_arguments(place)
    task = Task(workload.op, workload.options, [arguments], (), 3, "float32", "highest", True, 1e-3, "best")
    model, parameters, loss_of = peer.gpt(task, arguments)
    optimizer, found = peer.adamw(parameters), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    np.testing.assert_allclose(found, losses(place, "xla"), rtol=1e-5)
