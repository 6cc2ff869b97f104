"""The rooms and import rules of the house, and that its pages are current."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import lossdsl
from lossdsl.loading import import_text
from lossdsl.names import LANGUAGE_NAMES, MODULE_NAMES
from lossdsl.scope import COUNTS, FUNCTIONS, prelude

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lossdsl"


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("lark", {"parse.py"}),
        ("yaml", {"yamlnodes.py"}),
        ("pydantic", {"specdoc.py"}),
        ("matplotlib", {"plot.py", "map_plot.py"}),
    ],
)
def test_a_library_has_one_room(library: str, rooms: set[str]) -> None:
    assert {p.name for p in PACKAGE.rglob("*.py") if library in imports(p)} == rooms


def test_torch_is_imported_only_by_the_runtime() -> None:
    using = {p for p in PACKAGE.rglob("*.py") if "torch" in imports(p)}
    assert {p.relative_to(PACKAGE).parts[0] for p in using} == {"runtime", "api.py"}  # api.py: for type checkers only
    assert "if TYPE_CHECKING:\n    import torch\n" in (PACKAGE / "api.py").read_text()


def test_the_command_line_uses_only_the_public_api() -> None:
    text = "".join(p.read_text() for p in (ROOT / "cli").glob("*.py"))
    assert not re.search(r"from lossdsl|import lossdsl\.", text)
    assert set(re.findall(r"lossdsl\.(\w+)\(", text)) <= set(lossdsl.__all__)


# Data flows one way: each file imports only from the ones before it.
FLOW = ["errors", "yamlnodes", "names", "specdoc", "axes", "ast", "parse", "ir", "scope", "primitives", "lower", "autodiff", "method",
        "reference", "samples", "polynomials", "feasible", "algebra", "text", "prove", "simplify", "limits", "schedule", "plan", "describe", "notation", "mathtext", "emit", "loading", "diff", "lint", "api"]  # fmt: skip
DIFF_FLOW = ["assume", "side", "probes", "naming", "branches", "regions", "equality", "cases", "verdict", "classes", "words", "properties", "knobs",
             "tables", "rollouts", "synthetic", "measure", "map", "report", "text", "map_text", "view", "javascript", "mathml", "paper", "plot", "map_plot", "page", "map_page"]  # fmt: skip


@pytest.mark.parametrize(("folder", "flow"), [(PACKAGE, FLOW), (PACKAGE / "diff", DIFF_FLOW)])
def test_data_flows_one_way(folder: Path, flow: list[str]) -> None:
    for path in folder.glob("*.py"):
        if path.stem in ("__init__", "__main__"):
            continue
        position = flow.index(path.stem)
        for node in ast.parse(path.read_text()).body:  # imports inside functions are lazy, and listed in api.py only
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                assert all(flow.index(name) < position for name in names), (path.stem, names)


def test_no_method_is_named_in_the_compiler() -> None:
    for path in [
        p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".md", ".lark", ".yaml") and p.parent.name != "specs"
    ]:
        named = set(re.findall(r"[a-z_0-9]+", path.read_text().lower())) & set(lossdsl.builtins())
        assert not named, (path.name, named)


def test_reserved_names_cover_the_language_and_the_module() -> None:
    assert set(FUNCTIONS) | set(COUNTS) | set(prelude()) <= LANGUAGE_NAMES
    public = {name for name in dir(lossdsl.module("grpo").Loss) if not name.startswith("_")} - {"grpo"}
    assert public <= MODULE_NAMES, sorted(public - MODULE_NAMES)
    assert {name for name in dir(torch.nn.Module) if not name.startswith("_")} <= MODULE_NAMES


def test_generated_files_are_clean() -> None:
    """Each passes ruff's checks for errors and imports, and imports nothing but torch and the standard library."""
    for name in ("grpo", "trm_max", "tis_sc", "aspo"):
        text = lossdsl.build(name)
        run = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,W,I", "--line-length", "160", "-"],
            input=text,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout
        modules = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        modules |= {
            node.module.split(".")[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        assert modules - {"torch"} <= sys.stdlib_module_names
        assert not re.search(r"/(home|tmp|root|Users)/", text)


def test_a_module_imports_cheaply_once_torch_is_there() -> None:
    import time

    text = lossdsl.build("grpo")
    start = time.perf_counter()
    import_text(text, "timing_probe")
    assert time.perf_counter() - start < 0.5  # compilation happens on the first call, not here


def test_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("make_methods", ROOT / "docs" / "make_methods.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "methods.md").read_text() == module.page(), "run `make docs`"


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)


def test_the_readme_s_spec_is_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (spec,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    path = tmp_path / "tapered.yaml"
    path.write_text(spec)
    warned = lossdsl.check(path)
    assert [d.code for d in warned] == ["W0702", "W0702"]
    (quoted,) = re.findall(r"tapered.yaml(:9:4: warning.*?)\n```", text, re.S)
    assert quoted in lossdsl.render(warned)
    shown = lossdsl.diff_text(lossdsl.compare("token_tis", path))
    for line in re.search(r"```\n(token_tis  \|.*?)```", text, re.S)[1].splitlines():
        assert line in shown, line
    generated = lossdsl.build(path)
    (lines,) = re.findall(r"```python\n(log_r = .*?)```", text, re.S)
    for line in lines.splitlines():
        assert f"    {line}\n" in generated, line
    path.write_text(spec.replace("min(r * A", "min(1.1 * r * A"))
    (found,) = lossdsl.check(path)
    assert found.code == "E0505" and found.message[:60] in text and found.notes[0][:60] in text


@pytest.mark.slow
def test_a_wheel_installs_and_works(tmp_path: Path) -> None:
    """No top-level `cli` or `specs` in site-packages; specs, codes, grammar and prelude travel with the package."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("lossdsl-*.whl")
    venv.create(tmp_path / "env", with_pip=True, system_site_packages=False)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (site / "borrowed.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    assert not (site / "cli").exists() and not (site / "specs").exists()
    run = subprocess.run(
        [str(python.parent / "lossdsl"), "build", "gspo"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "gspo.py").read_text() == lossdsl.build("gspo")
    run = subprocess.run(
        [str(python), "-c", "import lossdsl; print(lossdsl.__file__, lossdsl.explain('E0401')[:7])"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert str(tmp_path) in run.stdout and run.stdout.strip().endswith("# E0401")
