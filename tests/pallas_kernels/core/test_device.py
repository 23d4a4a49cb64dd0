import types

import jax
import pytest

from pallas_kernels.core import device
from pallas_kernels.core.device import BLACKWELL, HOPPER, targeting


@pytest.fixture
def gpu(monkeypatch):
    def make(capability, kind="NVIDIA GPU", core_count=99):
        described = {} if capability is None else {"compute_capability": capability}
        fake = types.SimpleNamespace(
            platform="gpu", device_kind=kind, core_count=core_count, local_hardware_id=0, __hash__=object.__hash__
        )
        vars(fake).update(described)
        monkeypatch.setattr(device, "_default_device", lambda: fake)
        monkeypatch.setattr(device, "_describe", device._describe.__wrapped__)

    return make


@pytest.mark.parametrize(
    ("capability", "run"),
    [("9.0", True), ("10.0", True), ("12.1", True), ("8.9", False), ("7.5", False), ("gfx942", False), (None, False)],
)
def test_kernels_run_on_compute_capability_9_and_up(capability, run, gpu):
    gpu(capability)
    assert device.kernels_run() == run


def test_the_default_device_says_what_it_is(gpu):
    gpu("10.3", "NVIDIA B300", 160)
    found = device.target()
    assert (found.kind, found.capability, found.multiprocessors) == ("NVIDIA B300", (10, 3), 160)


@pytest.mark.gpu
def test_the_driver_says_what_the_device_has():
    found = device.gpu()
    assert found.multiprocessors == jax.local_devices()[0].core_count
    assert found.shared_bytes > 64 * 1024 and found.l2_bytes > 2**20 and found.registers >= 65536


def test_without_a_gpu_kernels_do_not_run_but_are_traced_for_hopper():
    with jax.default_device(jax.devices("cpu")[0]):
        assert not device.kernels_run()
        assert device.gpu() is None
        assert device.target() == HOPPER


def test_the_targeted_device_goes_before_the_default_one(gpu):
    gpu("8.0")
    with targeting(BLACKWELL):
        assert device.target() == BLACKWELL
        assert device.kernels_run()
    assert not device.kernels_run()


def test_what_is_traced_for_one_device_is_traced_again_for_another():
    found = []
    f = jax.jit(lambda x: (found.append(device.target()), x)[1])
    with jax.default_device(jax.devices("cpu")[0]):
        for gpu in (HOPPER, BLACKWELL, HOPPER):
            with targeting(gpu):
                f(1.0)
    assert found == [HOPPER, BLACKWELL]
