"""Shared settings of the tests."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for helpers.py

settings.register_profile("default", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("default")


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> None:
    """Tests of numbers need no more; more would only fight with the other test process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
