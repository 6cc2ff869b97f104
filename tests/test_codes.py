"""Every diagnostic code has a page, and every page's examples do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lossdsl
from lossdsl.errors import codes

PACKAGE = Path(lossdsl.__file__).parent
EXAMPLES = {code: re.findall(r"```yaml (bad|good)\n(.*?)```", lossdsl.explain(code), re.S) for code in codes()}
WITH_EXAMPLES = [
    code for code in codes() if code not in ("E0101", "E0601", "E0602", "E0603", "E0604", "E0605", "E0606")
]  # those are about files and requests


def test_every_code_used_has_a_page_and_the_reverse() -> None:
    source = "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    assert set(re.findall(r'"([EW]\d{4})"', source)) == set(codes())


@pytest.mark.parametrize("code", WITH_EXAMPLES)
def test_the_bad_example_has_exactly_this_code_and_the_good_one_none(code: str) -> None:
    examples = dict(EXAMPLES[code])
    assert [d.code for d in lossdsl.check_text(examples["bad"])] == [code]
    assert lossdsl.check_text(examples["good"]) == ()


@pytest.mark.parametrize("code", WITH_EXAMPLES)
def test_a_diagnostic_is_short_and_points_into_the_file(code: str) -> None:
    (found,) = lossdsl.check_text(dict(EXAMPLES[code])["bad"])
    text = lossdsl.render([found])
    assert len(text.splitlines()) <= 5
    assert "\n" not in found.message and found.message
    if found.span is not None:
        assert re.match(rf"spec\.yaml:\d+:\d+: (error|warning)\[{code}\]", text) and "^" in text


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    for code, request in {
        "E0101": lambda: lossdsl.load(tmp_path / "missing.yaml"),
        "E0601": lambda: lossdsl.load("no_such_method"),
        "E0603": lambda: lossdsl.explain("E9999"),
    }.items():
        with pytest.raises(lossdsl.SpecError) as error:
            request()
        assert [d.code for d in error.value.diagnostics] == [code]


@pytest.mark.parametrize(("content", "word"), [(b"\xff\xfe\x00", "UTF-8"), (b"", "mapping")])
def test_unreadable_files(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    (found,) = lossdsl.check(path)
    assert word in found.message
    assert "folder" in lossdsl.check(tmp_path)[0].message
