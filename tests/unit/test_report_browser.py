"""The page of `python -m brigade report` in a real browser: Debian's Chromium, without a window and without a network."""

import itertools
import json
import os
import time
from pathlib import Path

import pytest

from brigade.report import page, records
from testing import browser as browsers
from testing.browser import show
from testing.left_out import leave_out
from testing.recorded import append, write_run

SCRIPT = "<script>window.hacked = 1</script>"
LIMIT = 2.0  # seconds from the call to the last chart
FIGURES = 11


@pytest.fixture(scope="module")
def browser():
    if not (browsers.CHROMIUM and browsers.DRIVER):
        leave_out(f"the tests of report's page in a browser are left out: {browsers.MISSING}")
    with browsers.browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose texts would all be scripts, with a spike, a NaN and a fault."""
    folder = tmp_path_factory.mktemp("runs") / "</title><script>window.hacked = 1<"
    changes = {"model": {"model_name_or_path": SCRIPT}, "data": {"dataset_name": "</script>" + SCRIPT}}
    run = write_run(folder, answer=f"rare words {SCRIPT}", changes=changes, hosts=[SCRIPT])
    append(run, event="step", step=201, loss=float("nan"), grad_norm=1e9)
    append(run, event="slow", step=201, rank=1, host=SCRIPT, why="</td><img src=x onerror='window.hacked=1'>")
    return run


def _each(browser, selector, what):
    """`what` of each element e that the selector names."""
    return browser.execute_script(f"return [...document.querySelectorAll('{selector}')].map(e => {what})")


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "report.html"
    page.write(records.read_records([run]), path)
    return path


def test_every_chart_is_drawn_nothing_is_fetched_and_no_text_is_a_script(browser, written):
    show(browser, written)
    assert browser.get_log("browser") == []
    charts = _each(browser, ".chart", "e.querySelectorAll('svg path').length")
    assert len(charts) == FIGURES - 1 and all(charts), charts
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert all(url.startswith(("file:", "data:", "blob:")) for url in urls) and len(urls) >= 1, urls
    assert browser.execute_script("return window.hacked === undefined")
    assert "rare words <script>" in browser.execute_script("return document.querySelector('#answers').innerText")


def test_what_got_into_the_page_all_the_same_neither_runs_nor_fetches(browser, written):
    show(browser, written)
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'https://example.org/x.png'; document.body.append(i);"
    )
    assert browser.execute_script("return window.hacked === undefined")
    said = " ".join(entry["message"] for entry in browser.get_log("browser"))
    assert "Content Security Policy" in said and "example.org" in said


def test_keyboard_search_and_axes(browser, written):
    from selenium.webdriver.common.keys import Keys

    show(browser, written)
    body, active = browser.find_element("tag name", "body"), lambda: browser.switch_to.active_element
    body.send_keys(Keys.TAB)
    assert active().text == "Skip to the figures"
    chart = browser.find_element("css selector", "#held-out-loss .chart")
    chart.send_keys(Keys.END)
    readout = browser.find_element("css selector", "#held-out-loss .readout")
    assert readout.text.startswith("step 200: 2.")
    chart.send_keys(Keys.HOME)
    assert readout.text.startswith("step 0: 8.4")
    assert chart.get_attribute("role") == "img" and "lowest 2." in chart.get_attribute("aria-label")

    body.send_keys("/")
    active().send_keys("rare words")
    assert browser.find_element("id", "found").text == "1 found"
    hidden = "return [...document.querySelectorAll('#recipe tbody tr')].every(row => row.offsetHeight === 0)"
    assert browser.execute_script(hidden)
    active().send_keys(Keys.ESCAPE)
    assert not browser.execute_script(hidden)

    browser.find_element("css selector", "input[value=time]").click()
    deadline = time.monotonic() + 30
    while (
        browser.execute_script("return document.documentElement.dataset.drawn") != "time"
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    titles = _each(browser, ".role-axis-title text", "e.textContent")
    assert "seconds" in titles and "step" not in titles and browser.get_log("browser") == []


@pytest.mark.parametrize("width, dark", [(400, True), (1600, False)])
def test_it_fits_a_phone_and_a_wide_screen_by_day_and_night(browser, written, width, dark):
    show(browser, written, width, dark=dark)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    ground, ink = browser.execute_script(
        "const of = (e, key) => getComputedStyle(e)[key].match(/\\d+/g).slice(0, 3).map(Number);"
        "return [of(document.body, 'backgroundColor'), of(document.querySelector('.chart text'), 'fill')]"
    )
    assert (sum(ground) < sum(ink)) == dark and abs(sum(ground) - sum(ink)) > 300


def test_a_narrower_window_cuts_no_legend_and_paper_cuts_nothing(browser, run, tmp_path):
    path = tmp_path / "several.html"
    page.write(records.read_records([write_run(tmp_path / "one", answer="a\n" * 60), run]), path)
    show(browser, path, 1600)
    narrow = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    cut = (  # pixels by which a legend is outside of its drawing, to the right or above
        "(([l, d]) => Math.round(Math.max(l.right - d.right, d.top - l.top)))"
        "([e, e.closest('svg')].map(x => x.getBoundingClientRect()))"
    )
    deadline = time.monotonic() + 30
    while max(_each(browser, ".role-legend", cut)) > 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert max(_each(browser, ".role-legend", cut)) <= 0
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert set(_each(browser, "nav, fieldset, details", "getComputedStyle(e).display")) == {"none"}
    assert set(_each(browser, ".wide, .answer dd, pre", "getComputedStyle(e).maxHeight")) == {"none"}
    assert set(_each(browser, ".wide, .answer dd", "getComputedStyle(e).overflowX")) == {"visible"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_each_part_has_a_name_and_each_chart_a_table(browser, written):
    show(browser, written)
    assert browser.execute_script("return document.documentElement.lang") == "en"
    levels = _each(browser, "h1,h2,h3,h4", "+e.tagName[1]")
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 2 for a, b in itertools.pairwise(levels))
    named = _each(
        browser, "input,[role=region],[role=img],table", "Boolean(e.labels?.length || e.ariaLabel || e.caption)"
    )
    assert len(named) > 20 and all(named)
    tables = _each(browser, "figure:has(.chart)", "e.querySelectorAll('details tbody tr').length")
    assert len(tables) == FIGURES - 1 and all(tables)


@pytest.mark.slow
def test_a_hundred_thousand_steps_open_at_once(browser, tmp_path):
    run = write_run(tmp_path / "long", steps=1_000)
    lines = (run / "events.jsonl").read_text().splitlines()
    logged = [line.partition('"step": ')[0::2] for line in lines if '"event": "step"' in line]
    with (run / "events.jsonl").open("a") as file:  # the same thousand, a hundred times
        for round_ in range(1, 100):
            for place, (head, tail) in enumerate(logged, 1):
                file.write(f'{head}"step": {1000 * round_ + place}{tail.lstrip("0123456789")}\n')
    append(run, event="step", step=100_001, loss=77.0)
    path = tmp_path / "long.html"
    page.write(records.read_records([run]), path)
    assert path.stat().st_size < 5e6
    tried = []
    while not tried or (min(tried) > LIMIT and len(tried) < 6):  # another program may have had the processor
        tried.append(show(browser, path))
    assert min(tried) <= LIMIT, tried
    (label,) = _each(browser, "#training-loss .chart", "e.ariaLabel")
    assert "highest 77 at step 100001" in label


def test_several_runs_side_by_side(browser, run, tmp_path):
    others = [write_run(tmp_path / name, lower=lower) for name, lower in (("one", 0.0), ("two", 0.1))]
    path = tmp_path / "report.html"
    page.write(records.read_records([*others, run]), path)
    show(browser, path)
    assert browser.get_log("browser") == []
    assert len(set(_each(browser, "#held-out-loss .mark-line path", "e.getAttribute('stroke')"))) == 3
    headings = [h.text for h in browser.find_elements("css selector", "h2")]
    assert headings[:2] == ["What differs", "Verdict"]
    assert "two has the lower loss" in browser.find_element("id", "verdict").text


def test_a_picture_for_people_to_look_at(browser, written):
    """BRIGADE_SCREENSHOTS=FOLDER keeps them: nobody but a person sees whether a page is good to look at."""
    if folder := os.environ.get("BRIGADE_SCREENSHOTS"):
        for width, dark in ((400, False), (400, True), (1600, False), (1600, True)):
            show(browser, written, width, dark=dark)
            browser.save_screenshot(str(Path(folder) / f"report-{width}-{'dark' if dark else 'light'}.png"))
