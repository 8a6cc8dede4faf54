"""The report pages in a real Chromium: they run under their policy, and do what they promise."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time

import pytest

from browser import start_browser
from fathoms.errors import printable
from fathoms.report.page import write_report
from fathoms.training.run_folder import to_toml
from planted_comparison import GRID, write_comparison, write_details, write_run

READY = "'ready' in document.body.dataset"
DRAWN = "document.querySelectorAll('.curve[data-ready]').length === 4"
HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">'"


@pytest.fixture(scope="module")
def browser():
    made = start_browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("web") / "deep"
    lost = [("norm=dyt, depth=24", 1, "diverged"), ("norm=dyt, depth=12", 2, "failed")]
    return write_report(write_comparison(folder, GRID, lost=lost)).as_uri()


@pytest.fixture(scope="module")
def run_address(tmp_path_factory):
    folder = write_run(
        tmp_path_factory.mktemp("run") / "vit_small_patch16-photos-1a2b3c4d", probes=5, blocks=12
    )
    return write_report(write_details(folder, "photos/of_a-thing.jpg")).as_uri()


def quiet(browser, address):
    """Nothing but the page was asked for, and the console is empty."""
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith("data:image/png;base64,")] == [address]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_comparison_is_drawn_without_complaint_request_or_overflow(browser, address, scheme, width):
    browser.open(address, width, scheme=scheme, ready=f"{READY} && {DRAWN}")
    quiet(browser, address)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) == (scheme == "dark")
    painted = """[...document.querySelectorAll('.curve canvas')].map((canvas) => {
      const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      const colours = Array.from({length: pixels.length / 4}, (_, i) => pixels.slice(4 * i, 4 * i + 4).join());
      return new Set(colours).size; })"""
    assert all(colours > 20 for colours in browser.evaluate(painted))
    assert browser.evaluate("document.querySelectorAll('.drawing .picture:not(.narrow) svg').length") >= 7
    shown = "[...document.querySelectorAll('.drawing .picture')].filter((one) => one.checkVisibility())"
    narrow = browser.evaluate(f"{shown}.filter((one) => one.classList.contains('narrow')).length")
    assert narrow == (2 if width == 390 else 0), (
        "names stand above their rows where there is no room beside them"
    )


def column(browser, table, index):
    shown = f"[...document.querySelectorAll('#{table} tbody tr:not([hidden])')]"
    return browser.evaluate(f"{shown}.map((row) => row.cells[{index}].textContent.trim())")


def test_tables_sort_by_number_and_back_and_filter_by_word_and_status(browser, address):
    browser.open(address, ready=READY)
    browser.evaluate("document.querySelectorAll('#arms thead button')[2].click()")
    first = column(browser, "arms", 2)
    browser.evaluate("document.querySelectorAll('#arms thead button')[2].click()")
    second = column(browser, "arms", 2)
    assert sorted(map(float, first)) == list(map(float, first))
    assert first == second[::-1]
    assert browser.evaluate("document.querySelector('#arms [aria-sort]').textContent") == "top1"
    assert browser.evaluate("document.querySelectorAll('#arms [aria-sort]').length") == 1
    set_filter = "document.getElementById('filter').value = {}; document.getElementById('filter').oninput()"
    browser.evaluate(set_filter.format("'DYT depth 24'"))
    assert set(column(browser, "cells", 0)) == {"dyt, depth 24"}
    assert browser.evaluate("document.getElementById('filter-count').textContent") == "3 of 12 runs"
    choose = "const s = document.getElementById('status-filter'); s.value = 'diverged'; s.onchange()"
    browser.evaluate(f"{{ {choose} }}")
    assert column(browser, "cells", 2) == ["diverged"]
    browser.evaluate("document.querySelectorAll('#cells thead button')[3].click()")
    browser.evaluate(f"{{ {set_filter.format(repr(''))}; {choose.replace('diverged', '')} }}")
    assert column(browser, "cells", 3)[-2:] == ["–", "–"], "runs without a number come last"


def test_the_pointer_and_the_keyboard_show_the_numbers_of_an_epoch(browser, address):
    browser.open(address, ready=f"{READY} && {DRAWN}")
    browser.evaluate("document.querySelector('.curve').scrollIntoView({block: 'center'})")
    place = "document.querySelector('.curve .u-over').getBoundingClientRect()"
    box = browser.evaluate(f"(({{x, y, width, height}}) => [x, y, width, height])({place})")
    browser.move(box[0] + 0.6 * box[2], box[1] + 0.5 * box[3])
    browser.wait("!document.querySelector('.curve .tip').hidden", 5)
    tip = browser.evaluate("document.querySelector('.curve .tip').innerText")
    assert re.match(r"epoch 3\nln, depth 24\n\d+\.\d+\s% \(\d", tip), tip
    tips = "[...document.querySelectorAll('.curve .tip')].filter((tip) => !tip.hidden).length"
    assert browser.evaluate(tips) == 4, "the cursor moves in all charts"
    browser.move(5, 5)
    browser.wait(f"{tips} === 0", 5)
    browser.evaluate("document.querySelector('.curve').focus()")
    for _ in range(2):
        browser.key("ArrowRight")
    browser.wait(f"{tips} > 0", 5)
    assert browser.evaluate("document.querySelector('.curve .tip').innerText").startswith("epoch 2")


def test_the_legend_hides_an_arm_and_shows_it_again(browser, address):
    browser.open(address, ready=f"{READY} && {DRAWN}")
    rows = "document.querySelector('#curves-legend').children"
    assert browser.evaluate(f"{rows}[0].textContent") == "ln, depth 24", "best first"
    browser.evaluate(f"{rows}[0].click()")
    browser.wait(DRAWN)
    assert browser.evaluate(f"{rows}[0].getAttribute('aria-pressed')") == "false"
    assert browser.evaluate(f"document.activeElement === {rows}[0]")
    assert browser.evaluate("charts[0].series.length") == 1 + 3 * 3
    browser.evaluate(f"{rows}[0].click()")
    browser.evaluate("document.getElementById('every-seed').click()")
    browser.wait(DRAWN)
    # Each seed and the mean; a diverged run and a failed one have curves too.
    assert browser.evaluate("charts[0].series.length") == 1 + 4 * (3 + 1)
    assert browser.complaints == []


def test_the_theme_button_turns_the_page_and_its_charts(browser, address):
    browser.open(address, ready=f"{READY} && {DRAWN}")
    before = browser.evaluate("[getComputedStyle(document.body).backgroundColor, colour('c0')]")
    browser.evaluate("document.getElementById('theme').click()")
    browser.wait(DRAWN)
    after = browser.evaluate("[getComputedStyle(document.body).backgroundColor, colour('c0')]")
    assert before[0] != after[0]
    assert before[1] != after[1]


WORDS_IN_TWO = """(() => {
  const broken = [], walk = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    if (!node.parentElement.checkVisibility()) continue;
    for (const word of node.data.matchAll(/[\\p{L}\\p{N}]+(?:\\.\\d+)?/gu)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) broken.push(word[0]);
    }
  }
  return broken;
})()"""


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_breaks_inside_a_word(browser, address, run_address, width):
    for page in (address, run_address):
        browser.open(page, width, ready=READY)
        browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert browser.evaluate(WORDS_IN_TWO) == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_every_row_of_a_runs_maps_has_its_label_and_they_do_not_touch(browser, run_address):
    for width in (1280, 390):
        browser.open(run_address, width)
        quiet(browser, run_address)
        assert browser.evaluate("document.querySelectorAll('.example img').length") == 12
        assert browser.evaluate(
            "[...document.images].every((one) => one.complete && one.naturalWidth === 16)"
        )
        boxes = browser.evaluate(
            "[...document.querySelector('.map svg').querySelectorAll('text[text-anchor=end]')].slice(0, 24)"
            ".map((text) => { const box = text.getBoundingClientRect(); return [box.top, box.bottom, box.left]; })"
        )
        assert len(boxes) == 24
        assert all(next_[0] > box[0] + 5 for box, next_ in itertools.pairwise(boxes))
        assert min(box[2] for box in boxes) >= 0


@pytest.mark.parametrize(
    "name",
    [HOSTILE, "x" * 10_000, "\u202egnp.exe <b>", "ערבית عربي "],
    ids=["script", "long", "override", "rtl"],
)
def test_hostile_names_are_text_and_break_nothing(browser, tmp_path, name):
    arms = {name: ({"norm": name, "depth": "1"}, 80.0), "plain": ({"norm": "b", "depth": "2"}, 70.0)}
    folder = write_comparison(tmp_path / "hostile", arms, lost=[(name, 1, "failed")])
    results = json.loads((folder / "results.json").read_text())
    for row in results["cells"]:
        row["reason"] = name
    (folder / "results.json").write_text(json.dumps(results))
    address, shown = write_report(folder).as_uri(), printable(name)[:8]
    for width in (1280, 390):
        browser.open(address, width, ready=f"{READY} && {DRAWN}")
        quiet(browser, address)
        assert browser.evaluate("document.title") == "hostile: 5 of 6 ended, 1 failed"
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelectorAll('main script, img, main b').length") == 0
        assert browser.evaluate("document.querySelector('#arms tbody .name').textContent")[:8] == shown
        assert browser.evaluate("document.querySelector('#curves-legend button').textContent")[:8] == name[:8]


@pytest.mark.parametrize(
    "name", [HOSTILE, "x" * 10_000, "\u202egnp.exe <b>"], ids=["script", "long", "override"]
)
def test_hostile_names_on_a_runs_page_are_text_and_break_nothing(browser, tmp_path, name):
    run = write_run(tmp_path / "run")
    (run / "config.toml").write_text(
        to_toml({"classes": [name[:255], "plain"], "model": {"name": name[:99]}})
    )
    address = write_report(write_details(run, name)).as_uri()
    for width in (1280, 390):
        browser.open(address, width)
        quiet(browser, address)
        assert browser.evaluate("document.title") == "run: done"
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert (
            browser.evaluate("document.querySelectorAll('main script, main b, img:not(.example img)').length")
            == 0
        )
        assert (
            browser.evaluate("document.querySelector('.example .verdict bdi').textContent")[:8]
            == printable(name)[:8]
        )


def test_axis_text_of_a_run_can_be_read_on_a_phone(browser, run_address):
    browser.open(run_address, 390)
    shown = "(text) => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a"
    sizes = browser.evaluate(f"[...document.querySelectorAll('svg text')].map({shown})")
    assert len(sizes) > 60
    assert min(sizes) >= 9.5


def test_it_prints_light_and_whole(browser, address):
    browser.open(address, scheme="dark", ready=f"{READY} && {DRAWN}")
    printed = browser.call("Page.printToPDF", printBackground=True)["data"]
    assert len(printed) > 50_000
    # A4 without its margins, as the printer lays it out.
    browser.open(address, 720, scheme="dark", ready=f"{READY} && {DRAWN}")
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    browser.wait(DRAWN)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 720
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(252, 252, 250)"
    assert browser.evaluate("document.querySelector('.filter').checkVisibility()") is False
    browser.call("Emulation.setEmulatedMedia", media="")
    assert browser.complaints == []


@pytest.mark.clock
@pytest.mark.slow
def test_two_hundred_runs_are_painted_within_two_seconds(browser, tmp_path):
    arms = {
        f"norm=n{norm}, depth={depth}": ({"norm": f"n{norm}", "depth": str(depth)}, 60.0 + norm)
        for norm in range(8)
        for depth in range(1, 6)
    }
    folder = write_comparison(tmp_path / "large", arms, seeds=5, epochs=300, probes=60, lost=())
    browser.open(write_report(folder).as_uri(), ready=f"{READY} && {DRAWN}")
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert browser.evaluate(paint) < 2000
    assert browser.complaints == []


def test_a_followed_page_reloads_itself_and_keeps_what_was_chosen(browser, tmp_path):
    folder = write_comparison(tmp_path / "deep", GRID, lost=[("norm=ln, depth=12", 0, "pending")])
    words = [sys.executable, "-m", "fathoms", "report", str(folder), "--follow"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        address = re.search(r"file://[^;]+", process.stderr.readline())[0]
        for _ in range(600):
            if (folder / "report.html").is_file():
                break
            time.sleep(0.1)
        browser.open(address, ready=f"{READY} && {DRAWN}")
        assert browser.evaluate("document.querySelector('.status').textContent") == "11 of 12 ended"
        # In one call, between two reloads.
        browser.evaluate(
            "document.getElementById('filter').value = 'dyt'; document.getElementById('filter').oninput();"
            "document.querySelectorAll('#arms thead button')[2].click();"
            "document.querySelector('#curves-legend').children[0].click()"
        )
        results = json.loads((folder / "results.json").read_text())
        results["cells"][0] |= {"status": "done", "top1": 81.0, "loss": 0.4}
        (folder / "results.json").write_text(json.dumps(results))
        browser.wait(f"document.querySelector('.status')?.textContent === '12 runs ended' && {DRAWN}", 120)
        assert browser.evaluate("document.getElementById('filter-count').textContent") == "6 of 12 runs"
        assert browser.evaluate("document.querySelector('#arms [aria-sort]').textContent") == "top1"
        assert (
            browser.evaluate("document.querySelector('#curves-legend [aria-pressed=false]').textContent")
            == "ln, depth 24"
        )
        assert browser.complaints == []
        assert process.wait(timeout=90) == 0
        assert "data-reload" not in (folder / "report.html").read_text().partition("</style>")[2][:100]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
