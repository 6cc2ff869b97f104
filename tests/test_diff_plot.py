"""The pictures of a diff: what they show, and that they are the same bytes every time."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lossdsl.cli import main

import lossdsl
from lossdsl.diff.map_plot import map_figure
from lossdsl.diff.paper import Stretch, paper, stretches
from lossdsl.diff.plot import figure, plot
from lossdsl.diff.synthetic import synthetic_rollouts


def pieces(a: str, b: str, side: int, sign: int) -> list[Stretch]:
    return list(stretches(paper(lossdsl.compare(a, b)), side, sign))


@pytest.mark.parametrize(
    ("side", "sign", "expected"),
    [  # the review's five rows, with the bounds [0.8, 1.28]
        (0, 1, [("masked", 1.28, None, 0.0)]),
        (0, -1, [("masked", None, 0.8, 0.0)]),
        (1, 1, [("raised", None, 0.8, 0.8), ("capped", 1.28, None, 1.28)]),
        (1, -1, [("raised", None, 0.8, 0.8), ("capped", 1.28, None, 1.28)]),
    ],
)
def test_flat_pieces_end_on_the_bounds(side: int, sign: int, expected: list[Any]) -> None:
    found = pieces("dapo", "cispo", side, sign)
    assert [(p.kind, p.weight) for p in found] == [(e[0], e[3]) for e in expected]
    for piece, (_, low, high, _) in zip(found, expected, strict=True):
        assert low is None or piece.low == pytest.approx(low, rel=1e-12)
        assert high is None or piece.high == pytest.approx(high, rel=1e-12)


def test_a_weight_that_is_one_number_is_not_bounded() -> None:
    assert pieces("reinforce", "score_centering", 0, 1) == []


def test_a_divergence_mask_is_drawn_over_probabilities() -> None:
    on = paper(lossdsl.compare("grpo", "dppo_tv"))
    assert [(a.label, a.kind) for a in on.axes] == [("mu", "chance"), ("pi", "chance")]
    assert [c.label for c in on.resting] == ["c"]
    mu, pi = np.array([0.001, 0.99]), np.array([0.003, 0.80])  # the review's two examples
    assert on.weight(1, 1, mu, pi)[0] == pytest.approx(3)  # rare: barely moved, kept
    assert on.weight(1, -1, mu, pi)[1] == 0  # common: moved by 0.19, masked
    assert on.weight(0, 1, mu, pi)[0] == 0  # ratio 3 is beyond 1.2
    assert on.weight(0, -1, mu, pi)[1] == pytest.approx(0.80 / 0.99)  # ratio 0.81 is inside


def test_r_and_rho_are_drawn_over_r_and_c() -> None:
    on = paper(lossdsl.compare("token_tis", "pipelinerl"))
    assert [a.label for a in on.axes] == ["r", "c"]
    r, c = np.array([0.9, 1.1, 1.1]), np.array([1.0, 1.5, 0.5])
    assert np.allclose(on.weight(1, 1, r, c), np.minimum(r * c, 1.02))  # its weight is min(rho, C), C = 1.02


@pytest.mark.parametrize(("names", "expected"), [
    (("grpo", "dapo"), {"r": (0.8, 1.2, 1.28)}),
    (("gspo", "gspo_token"), {"geomean_t(r)": (0.9997, 1.0004)}),
    (("grpo", "gspo"), {"r": (0.8, 1.2), "geomean_t(r)": (0.9997, 1.0004)}),
    (("seq_tis", "seq_mis"), {"r": (0.8, 1.2), "prod_t(c)": (2.0,)}),
])  # fmt: skip
def test_axes_are_what_is_tested(names: tuple[str, str], expected: dict[str, tuple[float, ...]]) -> None:
    on = paper(lossdsl.compare(*names))
    assert {a.label: a.edges for a in on.axes} == expected and not on.resting
    assert all(a.range[0] < a.edges[0] and a.edges[-1] < a.range[1] for a in on.axes)


def test_curves_are_the_weights() -> None:
    made = figure(lossdsl.compare("dapo", "cispo"))
    panels = [ax for ax in made.axes if ax.get_ylabel() == "W"]
    assert [ax.texts[0].get_text() for ax in panels] == ["A > 0", "A < 0"]
    (masked, capped), (low_masked, raised) = (ax.get_lines()[:2] for ax in panels)
    for line, at, weight in [
        (masked, 1.5, 0),
        (masked, 0.6, 0.6),
        (capped, 1.5, 1.28),
        (low_masked, 0.6, 0),
        (raised, 0.6, 0.8),
    ]:
        assert np.interp(np.log(at), line.get_xdata(), line.get_ydata()) == pytest.approx(weight, abs=2e-3)
    assert {t.get_text() for t in panels[0].texts} >= {"0.8", "1.28"}  # the breakpoints, in numbers
    labels = {t.get_text() for ax in made.axes for t in ax.texts}
    assert {"masked", "capped at 1.28", "raised at 0.8"} <= labels
    assert masked.get_linestyle() != capped.get_linestyle()  # told apart without colours
    assert made.axes[-1].get_xlabel() == r"$r=\pi_\theta/\pi_{\mathrm{prox}}$"


def test_two_ratios_are_three_maps_for_each_sign() -> None:
    made = figure(lossdsl.compare("icepop", "token_tis", synthetic={"seed": 0}))
    maps = [ax.images[0] for ax in made.axes if ax.images]
    assert len(maps) == 6
    for first in (0, 3):
        a, b, gap = (np.asarray(m.get_array()) for m in maps[first : first + 3])
        assert np.allclose(a - b, gap)
        assert maps[first].norm.vmax == maps[first + 1].norm.vmax  # one scale for both weights
    assert maps[2].norm.vmin == -maps[2].norm.vmax
    dots = [ax.collections[-1].get_offsets() for ax in made.axes if ax.images]
    assert all(len(d) > 100 for d in dots)


def test_tokens_of_rollouts_are_drawn_where_they_lie() -> None:
    rollouts = synthetic_rollouts(0)
    made = figure(lossdsl.compare("grpo", "dapo", synthetic={"seed": 0}))
    shown = sum(int(t.get_text().split()[0]) for ax in made.axes for t in ax.texts if "tokens" in t.get_text())
    assert shown == int((np.asarray(rollouts.batch.values["A"])[rollouts.batch.seq] != 0).sum())


@pytest.mark.parametrize(
    ("a", "b"),
    [("reinforce", "score_centering"), ("grpo", "gspo"), ("topr", "pipelinerl"), ("trm_combined", "kimi_k25"), ("aspo", "rec_ring")],
)  # fmt: skip
def test_every_kind_of_view_is_drawn(a: str, b: str, tmp_path: Path) -> None:
    plot(lossdsl.compare(a, b, synthetic={"seed": 0}), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", lossdsl.builtins())
def test_every_builtin_is_drawn(name: str, tmp_path: Path) -> None:
    plot(lossdsl.compare(name, "icepop"), tmp_path / "x.png")


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_same_diff_gives_the_same_bytes(kind: str, tmp_path: Path) -> None:
    code = (
        "import sys, lossdsl; from lossdsl.diff.plot import plot; plot(lossdsl.compare('dapo', 'cispo'), sys.argv[1])"
    )
    for seed in "12":
        path = str(tmp_path / f"{seed}.{kind}")
        subprocess.run([sys.executable, "-c", code, path], check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    first, second = ((tmp_path / f"{seed}.{kind}").read_bytes() for seed in "12")
    assert first == second and b"Date" not in first


def test_a_map_is_its_cosines_and_its_classes(tmp_path: Path) -> None:
    found = lossdsl.map_methods(["grpo", "dapo", "grpo_loo"])
    made = map_figure(found)
    (image,) = made.axes[0].images
    assert np.array_equal(np.asarray(image.get_array()), found.cosines)
    assert [t.get_text() for t in made.axes[0].get_xticklabels()] == ["grpo", "dapo", "grpo_loo"]
    dots = {
        (round(float(x)), round(float(y)))
        for line in made.axes[0].get_lines()
        for x, y in line.get_xydata()
        if line.get_marker() == "o"
    }
    assert dots == {(0, 2), (2, 0)}  # these two differ in the advantage alone
    for name in ("one.svg", "two.svg"):
        lossdsl.plot(found, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_gradient_that_could_not_be_measured_is_crossed_out() -> None:
    found = lossdsl.map_methods(["grpo", "dapo"])
    cosines = found.cosines.copy()
    cosines[1, :] = cosines[:, 1] = np.nan
    made = map_figure(replace(found, cosines=cosines))
    assert sum(line.get_marker() == "x" for line in made.axes[0].get_lines()) == 3


def test_without_matplotlib_the_message_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.modules['matplotlib.figure'] = None\n"
        "import lossdsl; from lossdsl.diff.plot import plot\n"
        "try: plot(lossdsl.compare('grpo', 'dapo'), 'x.png')\n"
        "except lossdsl.SpecError as e: print(lossdsl.render(e.diagnostics))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "E0606" in run.stdout and "pip install 'lossdsl[plot]'" in run.stdout


def test_a_wrong_ending_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(lossdsl.SpecError) as error:
        plot(lossdsl.compare("grpo", "dapo"), tmp_path / "x.gif")
    assert error.value.diagnostics[0].code == "E0606" and ".svg" in error.value.diagnostics[0].help


def test_torch_is_not_needed() -> None:
    code = "import sys, lossdsl; from lossdsl.diff.plot import figure; figure(lossdsl.compare('grpo', 'dapo')); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_command_writes_both_and_says_where_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, picture = tmp_path / "x.html", tmp_path / "x.svg"
    assert main(["diff", "grpo", "dapo", "--html", str(html), "--plot", str(picture)]) == 1
    assert html.read_text().startswith("<!doctype html>") and "<svg" in picture.read_text()
    assert main(["map", "grpo", "dapo", "--html", str(html), "--plot", str(picture)]) == 0
    assert "heat" in html.read_text()
    capsys.readouterr()
    for option in (["--html", str(tmp_path / "no" / "x.html")], ["--plot", str(tmp_path / "no" / "x.png")]):
        assert main(["diff", "grpo", "dapo", *option]) == 2
        assert "cannot write" in capsys.readouterr().err
    assert main(["diff", "grpo", "dapo", "--plot", str(tmp_path / "x.gif")]) == 2
    assert "E0606" in capsys.readouterr().err
