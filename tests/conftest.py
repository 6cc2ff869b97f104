"""Shared settings of the tests."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import Phase, settings

sys.path.insert(0, str(Path(__file__).parent))  # for helpers.py

settings.register_profile("default", deadline=None, derandomize=True, print_blob=False)
# HYPOTHESIS_PROFILE=quick shows a failing example at once instead of shrinking it.
settings.register_profile("quick", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> None:
    """Tests of numbers need no more; more would only fight with the other test process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are captured and guarded as always, but run by PyTorch: what is counted is captures."""
    import torch

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
