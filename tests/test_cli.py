"""The command line as a person uses it: in a folder of their own, by its exit codes and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from lossdsl.cli import main

import lossdsl

SPEC = """lossdsl: 1
name: mine
params:
  eps: {default: 0.2, min: 0, max: 1, doc: half width}
level: token
T: M(r, 1 - eps, 1 + eps) * r
normaliser: token-mean
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(SPEC)


def run(*args: str) -> int:
    return main(args)


def test_write_check_build_import(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "mine.yaml") == 0
    assert run("build", "mine.yaml") == 0
    assert "wrote mine.py" in capsys.readouterr().out
    program = "from mine import Loss; import torch; x = -torch.ones(1, 2); x.requires_grad_();"
    program += "print(float(Loss(compile=False)(x, mask=x < 0, advantages=torch.ones(1), prox_logp=x.detach()).loss))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(out.stdout) == pytest.approx(1.0)  # sg(W) * A * log pi with weights only: -(1 * 1 * -1)


def test_a_mistake_is_located_and_short(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(SPEC.replace("1 + eps", "1 + epsi"))
    assert run("check", "mine.yaml") == 1
    out = capsys.readouterr().out
    assert "mine.yaml:6:22: error[E0401]: unknown name `epsi`" in out and "did you mean `eps`?" in out
    assert run("build", "mine.yaml") == 1
    assert "Traceback" not in capsys.readouterr().err
    assert not Path("mine.py").exists()
    assert run("check", "mine.yaml", "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)["diagnostics"]
    assert (found["code"], found["line"], found["column"]) == ("E0401", 6, 22)


def test_several_specs_become_a_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", "grpo", "mine.yaml", "-o", "losses/", "--set", "eps=0.3", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"written": ["losses/grpo.py", "losses/mine.py"]}
    assert sorted(p.name for p in Path("losses").iterdir()) == ["__init__.py", "_lossdsl.py", "grpo.py", "mine.py"]
    out = subprocess.run(
        [sys.executable, "-c", "from losses.mine import Loss; print(Loss().eps)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "0.3"


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("check", "grop"), 2, "did you mean `grpo`?"),
        (("check", "missing.yaml"), 2, "no file"),
        (("show", "nothing"), 2, "no built-in"),
        (("build", "grpo", "dapo", "-o", "one.py"), 2, "folder"),
        (("build", "grpo", "--set", "eps"), 2, "NAME=NUMBER"),
        (("build", "grpo", "--set", "epz=1"), 2, "no parameter `epz`"),
        (("build", "grpo", "--set", "eps=-1"), 2, "outside"),
        (("build", "grpo", "-o", "no/such/folder.py"), 2, "folder"),
        (("explain", "E9999"), 2, "no code"),
        (("verify", "mine.yaml"), 1, "not generated"),
        (("new", "not a name"), 1, "cannot be a method's name"),
    ],
)
def test_requests_that_make_no_sense(
    args: tuple[str, ...], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args) == code
    streams = capsys.readouterr()
    assert word in streams.err + streams.out and "Traceback" not in streams.err


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(lossdsl.builtins())
    assert run("list") == 0
    assert "masked r, truncated c (sequence, product)" in capsys.readouterr().out
    for args in (
        ("show", "gspo"),
        ("show", "gspo", "--latex"),
        *(("show", "gspo", "--emit", e) for e in ("ast", "ir", "schedule", "py")),
    ):
        assert run(*args) == 0
        out = capsys.readouterr().out
        assert any(word in out for word in ("geomean", "mean_t"))


def test_the_review_s_own_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Ratio controlled, and masked or truncated, as the review's table says it for each method."""
    table = {
        "reinforce": ("none", "no ratio"), "grpo": ("r", "masked r"), "dapo": ("r", "masked r"), "gspo": ("r", "masked r (sequence"),
        "cispo": ("r", "truncated r"), "decoupled_ppo": ("r and c", "masked r, unclipped c"), "token_tis": ("r and c", "masked r, truncated c"),
        "icepop": ("r and c", "masked r, masked c"), "seq_tis": ("r and c", "masked r, truncated c (sequence"),
        "seq_mis": ("r and c", "masked r, masked c (sequence"), "geo_mis": ("r and c", "masked r, masked c (sequence, geometric mean"),
        "scalerl_dapo": ("rho", "masked rho"), "scalerl_gspo": ("rho", "masked rho (sequence"), "scalerl_cispo": ("rho", "truncated rho"),
        "pipelinerl": ("rho", "truncated rho"), "sao": ("rho", "masked rho"), "topr": ("rho", "truncated rho (sequence, product, one sign"),
        "dppo_tv": ("rho", "masked rho (divergence test"), "trm_max": ("rho", "masked rho (whole answer"), "score_centering": ("none", "score centred"),
    }  # fmt: skip
    for name, (ratio, treatment) in table.items():
        row = lossdsl.describe(lossdsl.load(name))
        assert row.ratio == ratio and row.treatment.startswith(treatment), row


def test_new_is_a_spec_that_checks(capsys: pytest.CaptureFixture[str]) -> None:
    for origin in lossdsl.builtins():
        assert run("new", "fresh", "--from", origin) == 0
        Path("fresh.yaml").write_text(capsys.readouterr().out)
        assert lossdsl.check("fresh.yaml") == ()
        assert lossdsl.load("./fresh.yaml").name == "fresh"


def test_verify_tells_current_stale_and_edited(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", "mine.yaml", "--set", "eps=0.4") == 0
    assert run("verify", "mine.py", "--set", "eps=0.4") == 0
    assert run("verify", "mine.py") == 1
    assert "not what mine gives today" in capsys.readouterr().out
    assert run("build", "mine.yaml") == run("verify", "mine.py") == 0
    Path("mine.yaml").write_text(SPEC.replace("default: 0.2", "default: 0.25"))
    assert run("verify", "mine.py", "--json") == 1
    Path("mine.yaml").write_text(SPEC)
    text = Path("mine.py").read_text()
    Path("mine.py").write_text(text.replace("1 + eps", "1 + 2 * eps"))
    assert run("verify", "mine.py") == 1
    assert "edited by hand" in capsys.readouterr().out
    assert run("build", "dapo", "gspo", "-o", "losses/") == run("verify", "losses/dapo.py", "losses/gspo.py") == 0


def test_the_schema_accepts_every_spec_and_refuses_a_typo(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema") == 0
    schema = json.loads(capsys.readouterr().out)
    for name in lossdsl.builtins():
        text = lossdsl.api.find(name).text
        jsonschema.validate(_numbers(yaml.safe_load(text)), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(SPEC) | {"normalizer": "sum"}, schema)


def _numbers(value: object) -> object:
    """PyYAML reads 3e-4 as text; editors, which follow YAML 1.2, read a number."""
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "build", "list", "show", "new", "schema", "explain", "verify"):
        with pytest.raises(SystemExit) as stop:
            run(command, "--help")
        assert stop.value.code == 0
        assert "example:" in capsys.readouterr().out
    assert run() == 2


def test_the_module_runs_and_torch_stays_out() -> None:
    """`check`, `list`, `show`, `build`, ... answer without importing torch."""
    program = (
        "import sys; from lossdsl.cli import main;"
        "[main(a) for a in (['list'], ['show', 'gspo'], ['check', 'grpo'], ['build', 'trm_max'], ['schema'], ['explain', 'E0401'], ['verify', 'trm_max.py'])];"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    out = subprocess.run([sys.executable, "-m", "lossdsl", "--version"], check=True, capture_output=True, text=True)
    assert out.stdout.startswith("lossdsl ")


def test_a_pipe_that_closes_early_is_no_error() -> None:
    out = subprocess.run(f"{sys.executable} -m lossdsl list | head -n 1", shell=True, capture_output=True, text=True)
    assert "Traceback" not in out.stderr and "BrokenPipe" not in out.stderr


# --- diff ---------------------------------------------------------------------------------------------------------------


def test_diff_has_the_exit_codes_of_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", "grpo", "grpo") == 0
    assert run("diff", "grpo", "dapo") == 1
    assert run("diff", "grpo", "token_tis", "--assume", "c=1") == 0
    Path("bad.yaml").write_text(SPEC.replace("1 + eps", "1 + epsi"))
    capsys.readouterr()
    for wrong in (["grpoo"], ["bad.yaml"], ["no.yaml"], ["dapo", "--assume", "c"], ["dapo", "--set", "a.epz=1"]):
        assert run("diff", "grpo", *wrong) == 2
        captured = capsys.readouterr()
        assert captured.err and not captured.out and "Traceback" not in captured.err


def test_diff_settings_go_to_their_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", "grpo", "mine.yaml", "--set", "b.eps=0.3", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["a"]["params"]["eps"], found["b"]["params"]["eps"]) == (0.2, 0.3)
    assert found["schema"] == "lossdsl.diff/1" and found["verdict"]["kind"] == "differ"
    edges = {row["where"] for row in found["cases"] if not row["same"]}
    assert edges == {"1.2 < r ≤ 1.3", "0.7 ≤ r < 0.8"}
    assert run("diff", "grpo", "mine.yaml", "--set", "eps=0.3", "--json") == 1  # both sides have it
    found = json.loads(capsys.readouterr().out)
    assert found["a"]["params"]["eps"] == found["b"]["params"]["eps"] == 0.3
    assert all(row["same"] for row in found["cases"])


def test_diff_does_not_import_torch() -> None:
    program = (
        "import sys; from lossdsl.cli import main; main(['diff', 'grpo', 'dapo']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_a_diff_is_the_same_bytes_in_two_processes() -> None:
    program = "from lossdsl.cli import main; main(['diff', 'vaco', 'dppo_tv', '--json'])"
    outs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, env={"PYTHONHASHSEED": seed, "PATH": ""})
        for seed in ("1", "2")
    ]
    assert outs[0].stdout == outs[1].stdout and outs[0].stdout
