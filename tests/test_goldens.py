"""Every stage of every built-in, as text that a reviewer can read in a difference. LOSSDSL_REFRESH=1 writes them anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lossdsl

GOLDENS = Path(__file__).parent / "goldens"
STAGES = ("ast", "ir", "schedule", "py")


def stages(name: str) -> str:
    return "".join(f"=== {stage} ===\n{lossdsl.show(name, emit=stage)}\n\n" for stage in STAGES)


@pytest.mark.parametrize("name", lossdsl.builtins())
def test_golden(name: str) -> None:
    path, text = GOLDENS / f"{name}.txt", stages(name)
    if os.environ.get("LOSSDSL_REFRESH"):
        GOLDENS.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    assert path.read_text(encoding="utf-8") == text, "read the difference; `make goldens` accepts it"


def test_no_golden_without_a_method() -> None:
    assert {p.stem for p in GOLDENS.glob("*.txt")} == set(lossdsl.builtins())


DIGEST = """
import hashlib, lossdsl
digest = hashlib.sha256()
for name in lossdsl.builtins():
    digest.update(lossdsl.build(name).encode())
    for stage in ("ast", "ir", "schedule"):
        digest.update(lossdsl.show(name, emit=stage).encode())
    digest.update(lossdsl.show(name).encode() + lossdsl.show(name, latex=True).encode())
print(digest.hexdigest())
"""


def test_the_same_bytes_whatever_the_hash_seed() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(found) == 1
