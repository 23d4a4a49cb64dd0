import pytest
from helpers import on_the_cpu


@pytest.fixture
def in_an_interpreter():
    with on_the_cpu():
        yield
