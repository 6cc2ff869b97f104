"""The page of a diff: what it says, that a spec's text stays text, and (slow) how it behaves in headless Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from helpers import method

import lossdsl
from lossdsl.diff.page import page
from lossdsl.diff.report import Diff, compare
from lossdsl.diff.text import verdict_text
from lossdsl.diff.view import view

HOSTILE = '</script><script>window.bitten = 1</script><img src=x onerror="window.bitten = 2">'


def hostile() -> Diff:
    """A spec that tries to be markup wherever its author may write freely."""
    quoted = HOSTILE.replace("'", "''")
    text = (
        f"title: '{quoted}'\ncite: {{paper: '{quoted}', where: '{quoted}'}}\nnote: '{quoted}'\n"
        f"params:\n  constructor: {{default: 0.2, doc: '{quoted}'}}\n  alert: {{default: 0.5, doc: '${{alert(1)}}'}}\n"
        f"inputs:\n  window: {{axis: token, doc: '{quoted}'}}\n"
        "f: 1[r < 1 + constructor] * min(r, window + alert)\n"
    )
    m = method(text)
    return compare(m, m, labels=(HOSTILE, "$title ${body}"))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(text)
    return parser.found


def test_the_page_says_what_the_terminal_says() -> None:
    diff = lossdsl.compare("icepop", "token_tis", synthetic={"seed": 0})
    text = unescape(re.sub(r"<[^>]+>", "\n", page(diff)))
    assert verdict_text(diff) in text
    for knob in diff.knobs:
        assert knob.a in text and knob.b in text
    for line in ("2 < c ≤ 5, r ≤ 1.2", "2 * r (capped)", "trust region", "log-probs of the sampled tokens"):
        assert line in text, line


def test_the_same_diff_gives_the_same_page() -> None:
    one, other = (page(lossdsl.compare("dapo", "cispo")) for _ in range(2))
    assert one == other


def test_a_spec_is_text_to_the_page() -> None:
    found = tags(page(hostile()))
    assert sum(tag == "script" for tag, _ in found) == 1
    assert "img" not in {tag for tag, _ in found}
    assert not [name for _, attributes in found for name in attributes if name.startswith("on")]


def test_the_page_asks_for_nothing() -> None:
    text = page(lossdsl.compare("grpo", "dapo"))
    for tag, attributes in tags(text):
        for name in ("src", "href"):
            assert attributes.get(name) in (None, "data:,"), (tag, attributes)
    assert "url(" not in text and "@import" not in text and "fetch(" not in text


def test_every_control_has_a_label() -> None:
    found = tags(page(lossdsl.compare("grpo", "dapo")))
    labelled = {a.get("for") for tag, a in found if tag == "label"}
    for tag, attributes in found:
        if tag == "input":
            assert attributes["id"] in labelled or "aria-label" in attributes


# --- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def show(browser: Browser, diff: Diff, folder: Path, **how: Any) -> Path:
    path = folder / "page.html"
    path.write_text(page(diff), encoding="utf-8")
    browser.open(path, **how)
    return path


def masks(browser: Browser, chart: str, side: str) -> list[tuple[float, float]]:
    """The masked pieces of a curve, from what the page drew."""
    query = f"[...document.querySelectorAll('#{chart} rect[data-side={side}][data-kind=masked]')]"
    found = browser.run(f"{query}.map(e => [Number(e.dataset.from), Number(e.dataset.to)])")
    return [(low, high) for low, high in found]


def enter(browser: Browser, field: str, value: float) -> None:
    """A number typed into a field."""
    browser.run(
        f"{{ const e = document.getElementById({field!r}); e.value = {str(value)!r};"
        " e.dispatchEvent(new Event('input', { bubbles: true })); }"
    )


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("dapo", "cispo"), ("icepop", "token_tis"), ("grpo", "dppo_tv"), ("reinforce", "score_centering"),
                                  ("trm_combined", "gspo"), ("aspo", "vaco")])  # fmt: skip
@pytest.mark.parametrize("width", [360, 1100])
def test_a_page_loads_clean_and_fits(browser: Browser, pair: tuple[str, str], width: int, tmp_path: Path) -> None:
    path = show(browser, lossdsl.compare(*pair, synthetic={"seed": 0}), tmp_path, width=width)
    assert browser.errors == [] and browser.requests == [path.as_uri()]
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelectorAll('svg path').length") >= 4  # both curves for both signs
    assert "NaN" not in browser.run("document.querySelector('main').innerHTML")
    smallest = "Math.min(...[...document.querySelectorAll('svg text')].filter(e => e.textContent).map(e => e.getBoundingClientRect().height))"
    assert browser.run(smallest) >= 9  # pixels: still read on a phone


@pytest.mark.slow
@pytest.mark.parametrize("eps_high", [0.28, 0.1, 0.4, 0.65])
def test_moving_a_bound_moves_the_edge_of_the_mask(browser: Browser, eps_high: float, tmp_path: Path) -> None:
    """A > 0 is masked from 1 + eps_high on, A < 0 below 1 - eps_low, whatever the other side's parameters are."""
    show(browser, lossdsl.compare("dapo", "cispo"), tmp_path)
    enter(browser, "p-a.eps_high-number", eps_high)
    ((low, high),) = masks(browser, "pos", "a")
    assert low == pytest.approx(1 + eps_high, rel=1e-9) and high > 1 + eps_high
    ((_, edge),) = masks(browser, "neg", "a")
    assert edge == pytest.approx(0.8, rel=1e-9)
    assert masks(browser, "pos", "b") == [] == masks(browser, "neg", "b")


@pytest.mark.slow
def test_a_narrow_axis_has_enough_digits(browser: Browser, tmp_path: Path) -> None:
    """Bounds at 0.9997 and 1.0004 are not both called 1."""
    show(browser, lossdsl.compare("gspo", "luspo"), tmp_path)
    for chart, edge in (("pos", "1.0004"), ("neg", "0.9997")):
        labels = browser.run(f"[...document.querySelectorAll('#{chart} text')].map(e => e.textContent)")
        assert edge in labels
        places = [x for x in labels if re.fullmatch(r"(1|0\.99|1\.00)\d*", x)]
        assert (
            len(places) - len(set(places)) <= 2
        )  # an edge may stand below a tick of the same number, 1 is also a weight


@pytest.mark.slow
def test_a_slider_is_moved_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    show(browser, lossdsl.compare("grpo", "dapo"), tmp_path)
    browser.run("document.getElementById('p-a.eps').focus()")
    before = masks(browser, "pos", "a")[0][0]
    for _ in range(20):
        browser.press("ArrowRight", 39)
    typed = float(browser.run("document.getElementById('p-a.eps-number').value"))
    assert typed > 0.2 and before == pytest.approx(1.2, rel=1e-9)
    assert masks(browser, "pos", "a")[0][0] == pytest.approx(1 + typed, rel=1e-9)
    reached = set()
    browser.run("document.activeElement.blur()")
    for _ in range(14):
        browser.press("Tab", 9)
        reached.add(browser.run("document.activeElement.id || document.activeElement.tagName"))
    assert {"axis", "scale", "cursor", "p-a.eps", "p-b.eps_high"} <= reached
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"


@pytest.mark.slow
def test_the_reading_is_the_weight(browser: Browser, tmp_path: Path) -> None:
    """The review's example at r = 1.5: masked on one side, 1.28 on the other."""
    show(browser, lossdsl.compare("dapo", "cispo"), tmp_path)
    found = browser.run("[1, -1].map(sign => ['a', 'b'].map(side => weight(side, sign, 1.5)))")
    assert found == [[0, pytest.approx(1.28)], [pytest.approx(1.5), pytest.approx(1.28)]]
    browser.run("document.getElementById('cursor').focus()")
    browser.press("End", 35)
    assert re.search(
        r"at r = [\d.]+:  A > 0: dapo 0 \(masked\), cispo 1.28 \(capped\);",
        browser.run("document.getElementById('readout').textContent"),
    )


@pytest.mark.slow
def test_what_is_not_on_the_axis_has_a_slider(browser: Browser, tmp_path: Path) -> None:
    """min(c, 2) r and c 1[0.5 <= c <= 5] r at c = 3: the first is capped, the second is not; at c = 10 it is masked."""
    show(browser, lossdsl.compare("token_tis", "icepop"), tmp_path)
    choose = "{{ const e = document.getElementById('axis'); e.value = {!r}; e.dispatchEvent(new Event('change')); }}"
    browser.run(choose.format("r"))
    for c, expected in ((1, [1.1, 1.1]), (3, [2.2, 3.3]), (10, [2.2, 0])):
        enter(browser, "x-c-number", c)
        assert browser.run("['a', 'b'].map(side => weight(side, 1, 1.1))") == [pytest.approx(w) for w in expected]
    browser.run(choose.format("c"))
    pieces = masks(browser, "pos", "b")
    assert [pytest.approx(x, rel=1e-9) for x in (0.5, 5.0)] == [pieces[0][1], pieces[1][0]]
    assert browser.run("document.getElementById('x-c').parentElement.hidden") is True


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [
        ("dapo", "cispo"),
        ("token_tis", "icepop"),
        ("grpo", "dual_clip_ppo"),
        ("reinforce", "grpo"),
        ("topr", "pipelinerl"),
        ("tis_sc", "scalerl_cispo"),
        ("sapo", "gspo"),
    ],
)
def test_the_strips_say_what_the_table_says(browser: Browser, pair: tuple[str, str], tmp_path: Path) -> None:
    """At the sample point of every case that has a ratio on the axis, the word in the table of cases."""
    diff = lossdsl.compare(*pair)
    show(browser, diff, tmp_path)
    keys = {c.label: c.key for c in view((diff.a, diff.b)).coordinates}
    told = 0
    for case in diff.cases:
        at = {keys[name]: value for name, value in case.sample if name in keys}
        if set(at) == set(keys.values()):
            script = f"Object.assign(state.at, {json.dumps(at)}); state.cursor = place(state.at[state.axis]); render();"
            read = browser.run(f"{script} ['a', 'b'].map(side => says(side, {case.sign}))")
            told += 1
            assert [re.search(r"\((\w+)\)", x)[1] for x in read] == list(case.actions), (at, read)  # type: ignore[index]
    assert told >= 2


PIXEL = """new Promise(done => {{
  const image = new Image();
  image.onload = () => {{
    const pen = Object.assign(document.createElement("canvas"), {{ width: image.width, height: image.height }}).getContext("2d");
    pen.drawImage(image, 0, 0);
    const at = (v, c) => Math.floor(place(v, DATA.coordinates.find(x => x.label === c)) * image.width);
    done([...pen.getImageData(at({x}, {across!r}), image.height - 1 - at({y}, {up!r}), 1, 1).data].slice(0, 3));
  }};
  image.src = document.querySelector("#map-{panel} image").getAttribute("href");
}})"""


@pytest.mark.slow
def test_maps_show_where_two_ratios_mask(browser: Browser, tmp_path: Path) -> None:
    """At c = 10, r = 1: min(c, 2) r counts, c 1[0.5 <= c <= 5] r is masked (grey); a press moves the token there."""
    show(browser, lossdsl.compare("token_tis", "icepop"), tmp_path)

    def grey(panel: str, c: float, r: float) -> bool:
        red, _, blue = browser.run(PIXEL.format(x=c, y=r, across="c", up="r", panel=panel))
        return abs(red - blue) < 15 and red < 240

    assert browser.run("[state.axis, state.second]") == ["c", "r"]
    for c, r, a, b in ((10, 1, False, True), (3, 1, False, False), (3, 1.3, True, True), (0.3, 1, False, True)):
        assert (grey("a-pos", c, r), grey("b-pos", c, r)) == (a, b), (c, r)
    enter(browser, "p-b.beta-number", 20)
    assert not grey("b-pos", 10, 1)
    assert not grey("a-neg", 3, 1.3) and grey("a-neg", 3, 0.75)
    browser.run("""{ const svg = document.getElementById("map-b-pos"), box = svg.getBoundingClientRect(), unit = box.width / MAP.width;
      svg.dispatchEvent(new PointerEvent("pointerdown", { clientX: box.left + MAP.left * unit, clientY: box.top + MAP.top * unit, bubbles: true })); }""")
    lowest, highest = browser.run("[range()[0], range(secondOf())[1]]")
    assert browser.run("along(state.cursor)") == pytest.approx(lowest, rel=1e-3)
    assert browser.run("state.at.r") == pytest.approx(highest, rel=1e-3)
    assert float(browser.run("document.getElementById('x-r-number').value")) == pytest.approx(highest, rel=1e-3)
    show(browser, lossdsl.compare("dapo", "cispo"), tmp_path)
    assert browser.run("document.getElementById('maps').hidden") is True


@pytest.mark.slow
def test_a_hostile_spec_is_inert(browser: Browser, tmp_path: Path) -> None:
    show(browser, hostile(), tmp_path)
    assert browser.run("window.bitten") is None
    assert browser.errors == []
    assert browser.run("document.querySelector('h1 .a').textContent") == HOSTILE
    ((low, _),) = masks(browser, "pos", "a")
    assert low == pytest.approx(1.2, rel=1e-9)  # and the page works: masked from 1 + 0.2 on


@pytest.mark.slow
def test_the_policy_stops_what_the_page_did_not_bring(browser: Browser, tmp_path: Path) -> None:
    show(browser, lossdsl.compare("grpo", "dapo"), tmp_path)
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.bitten = 1\">')")
    browser.run(
        "{ const s = document.createElement('script'); s.textContent = 'window.bitten = 2'; document.body.append(s); }"
    )
    assert browser.run("new Promise(done => setTimeout(() => done(window.bitten), 100))") is None


# --- the page of a map ------------------------------------------------------------------------------------------------


def test_the_page_of_a_map_has_every_method_and_class() -> None:
    found = lossdsl.map_methods(["grpo", "dapo", "grpo_loo"])
    text = lossdsl.page(found)
    assert "<td>grpo = grpo_loo</td><td>proved</td>" in text
    assert len(re.findall(r"<tr><td>(?:grpo|dapo|grpo_loo)</td>", text)) == 3
    assert lossdsl.page(found) == text


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1100])
def test_a_map_is_read_by_pointer_and_by_keyboard(browser: Browser, width: int, tmp_path: Path) -> None:
    found = lossdsl.map_methods(["grpo", "dapo", "icepop"])
    path = tmp_path / "map.html"
    path.write_text(lossdsl.page(found), encoding="utf-8")
    browser.open(path, width=width)
    assert browser.errors == [] and browser.requests == [path.as_uri()]
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelectorAll('#heat rect[data-row]').length") == 9
    browser.run("document.getElementById('heat').focus()")
    browser.press("ArrowDown", 40)
    browser.press("ArrowRight", 39)
    browser.press("ArrowRight", 39)
    assert (
        browser.run("document.getElementById('readout').textContent") == f"dapo and icepop: {found.cosines[1, 2]:.4f}"
    )


@pytest.mark.slow
def test_the_table_of_a_map_is_sorted_by_its_headers(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "map.html"
    path.write_text(lossdsl.page(lossdsl.map_methods(["reinforce", "grpo", "dapo", "gspo"])), encoding="utf-8")
    browser.open(path)
    column = "[...document.querySelectorAll('table:last-of-type tbody tr')].map(r => r.children[{}].textContent)"
    click = "[...document.querySelectorAll('th')].find(h => h.textContent === {!r}).firstChild.click()"
    browser.run(click.format("method"))
    assert browser.run(column.format(0)) == ["dapo", "grpo", "gspo", "reinforce"]
    for direction in (1, -1):
        browser.run(click.format("cosine"))
        numbers = [float(x) for x in browser.run(column.format(4))]
        assert numbers == sorted(numbers, reverse=direction < 0)


@pytest.mark.slow
def test_the_whole_map_loads_clean(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "map.html"
    path.write_text(lossdsl.page(lossdsl.map_methods()), encoding="utf-8")
    browser.open(path, width=360)
    assert browser.errors == [] and browser.run("document.documentElement.scrollWidth") <= 360
