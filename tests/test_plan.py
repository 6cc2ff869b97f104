"""The plan: passes and products from the schedule, bytes by hand, and the numbers of a real run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers import instance

import lossdsl
from lossdsl.plan import BUDGET

SIZES = {"tokens": 8192, "hidden": 512, "vocab": 131072}


def test_a_token_s_own_weight_is_one_pass_of_three_products() -> None:
    plan = lossdsl.plan("dapo", **SIZES)
    assert (plan.passes, plan.products, plan.rows, plan.chunks) == (1, 3, 1024, 8)
    # 1024 rows of 131072 bfloat16; a float32 sum and a bfloat16 gradient of the head; the hidden states' gradient
    MiB = 1 << 20
    assert plan.logits_bytes == 256 * MiB and plan.head_bytes == (256 + 128) * MiB and plan.hidden_bytes == 8 * MiB
    assert plan.peak_bytes == (256 + 256 + 8) * MiB  # the buffer is gone before the bfloat16 gradient is written
    assert (
        plan.full_logits_bytes == (2 * 2048 + 128 + 8) * MiB
    )  # logits and their gradient, as measured: 4100 MiB and both


def test_the_plan_assumes_what_the_module_does() -> None:
    module = sys.modules[type(instance("dapo")).__module__]
    assert module._default_bytes(torch.device("cpu")) == BUDGET


def test_an_answer_s_weight_is_one_pass_where_the_longest_fits() -> None:
    assert lossdsl.plan("gspo", **SIZES, longest=1024).passes == 1
    long = lossdsl.plan("gspo", **SIZES, longest=1025)
    assert (long.passes, long.products) == (2, 4) and "1025" in long.why[0]
    assert lossdsl.plan("gspo", **SIZES, longest=1025, budget="1GiB").passes == 1
    assert lossdsl.plan("seq_mis", **SIZES).passes == 1  # its product is over c, which is known before


def test_a_frozen_head_and_float32() -> None:
    frozen = lossdsl.plan("dapo", **SIZES, frozen_head=True)
    assert frozen.products == 2 and frozen.head_bytes == 0
    assert lossdsl.plan("dapo", **SIZES, dtype="fp32").head_bytes == 256 << 20  # the sum is the gradient


def test_which_rows_leave_is_said() -> None:
    assert any("masked or A == 0" in line for line in lossdsl.plan("dapo", **SIZES).why)
    assert any("c" in line and "A == 0" in line for line in lossdsl.plan("icepop", **SIZES).why)
    assert any("masked only" in line for line in lossdsl.plan("grpo_k3", **SIZES).why)


@pytest.mark.parametrize(("change", "message"), [({"dtype": "int8"}, "bf16"), ({"budget": "lots"}, "512MiB"),
                                                 ({"tokens": 0}, "tokens must be positive")])  # fmt: skip
def test_what_it_refuses(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lossdsl.plan("dapo", **SIZES | change)  # type: ignore[arg-type]


def test_the_command_prints_it_without_torch() -> None:
    code = "import sys, cli; n = cli.main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(n)"
    args = ["plan", "gspo", "--tokens", "8192", "--hidden", "512", "--vocab", "131072", "--longest", "1200"]
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "2 passes, 4 matrix products" in run.stdout and "520 MiB" in run.stdout and "with full logits" in run.stdout
    run = subprocess.run([sys.executable, "-c", code, *args, "--budget", "x"], capture_output=True, text=True)
    assert run.returncode == 2 and "512MiB" in run.stderr and "Traceback" not in run.stderr
