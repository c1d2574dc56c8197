"""Kernels are interpreted here: large programs, which are let go of before they fill the process."""

import pytest
from support.memory import forget_programs


@pytest.fixture(autouse=True)
def room_for_kernels():
    yield
    forget_programs()
