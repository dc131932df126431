"""The report in a real browser: Debian's chromium, driven by Playwright."""

import json
import re
import shutil
from itertools import product

import pytest

from palsgd.lab.report import write_report
from support import runs
from support.patience import patient

CHROMIUM = shutil.which("chromium")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Four methods in three seeds, a grid and a sweep: every part of the page."""
    folder = tmp_path_factory.mktemp("browser")
    for seed in (2022, 2023, 2024):
        runs.write_comparison(folder / "runs" / f"seed{seed}", seed=seed)
    for interval, outer_lr in product((16, 32), (0.3, 0.5)):
        chosen = {"sync_every": interval, "outer_lr": outer_lr}
        runs.write_run(folder / "runs" / f"{interval},{outer_lr}", method="palsgd", **chosen)
    runs.write_run(folder / "runs" / "p", method="palsgd", mix_prob=0.2)
    return write_report([folder / "runs"], folder / "report.html", figures=False)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # The browser is only shown files of ours, and in containers it cannot sandbox as root.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, report):
    """Opens the report; at the end, nothing may have gone wrong or left the machine."""
    contexts, complaints = [], []

    def watch(route):
        if not route.request.url.startswith(("file:", "data:")):
            complaints.append(route.request.url)
            return route.abort()
        return route.continue_()

    def open_page(path=report, **options):
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        context.set_default_timeout(patient(20_000))
        contexts.append(context)
        page = context.new_page()
        page.route("**/*", watch)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def shown(page, switch):
    """The positions of the switch whose figures are visible."""
    visible = page.locator(f'figure[data-switch="{switch}"] > .variant:visible')
    return set(visible.evaluate_all("all => all.map(each => each.dataset.value)"))


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def scrolls_sideways(page):
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


def point_at(page, variant, x, y):
    """Moves the pointer to a place given in the figure's own coordinates, in the middle of the
    screen, where no bar covers it."""
    place = """([variant, x, y]) => {
        const svg = variant.querySelector("svg");
        const by = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
        const at = () => svg.getBoundingClientRect();
        scrollBy(0, at().top + y * by - innerHeight / 2);
        return [at().left + x * by, at().top + y * by];
    }"""
    page.mouse.move(*page.evaluate(place, [variant.element_handle(), x, y]))


def test_the_axis_switch_changes_every_curve(open_page):
    page = open_page()
    assert shown(page, "axis") == {"time_s"}
    for word, axis in (
        ("bytes", "bytes_sent"),
        ("examples", "examples"),
        ("gradients", "gradient_steps"),
        ("steps", "step"),
    ):
        page.get_by_role("radio", name=word).check(force=True)
        assert shown(page, "axis") == {axis}
    assert shown(page, "final") == {"metric"}, "the other switch stays"
    page.get_by_role("radio", name="loss").check(force=True)
    assert shown(page, "final") == {"loss"}


def test_the_switch_is_worked_by_keyboard(open_page):
    page = open_page()
    page.get_by_role("radio", name="bytes").focus()
    page.keyboard.press("ArrowRight")
    assert shown(page, "axis") == {"examples"}


def test_without_scripts_the_curves_stand_against_time(open_page):
    page = open_page(java_script_enabled=False)
    visible = page.locator('figure[data-switch="axis"] > .variant:visible')
    assert visible.count() == 6
    assert all(each.get_attribute("data-value") == "time_s" for each in visible.all())


def test_every_figure_is_read_with_arrow_keys(open_page):
    page = open_page()
    figures = page.locator(".variant:visible")
    assert figures.count() > 8, "curves, maps, ablations, bars and timelines"
    for figure in figures.all():
        figure.focus()
        page.keyboard.press("ArrowRight")
        first = page.locator(".tooltip").inner_text()
        assert first
        page.keyboard.press("ArrowRight")
        assert page.locator(".tooltip").inner_text() != first
        page.keyboard.press("Escape")
        assert page.locator(".tooltip").is_hidden()


def test_the_main_figure_reads_as_a_speed_up_with_its_interval_and_n(open_page):
    page = open_page()
    figure = page.locator('figure[data-switch="axis"] > .variant:visible').first
    figure.focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    text = page.locator(".tooltip").inner_text()
    assert re.search(r"^loss 0\.\d+", text)
    assert re.search(r"\d x\n?.*\[\d.* x, .*\].*n = 3", text, re.DOTALL)


def test_a_cell_of_a_map_says_its_settings_and_its_loss(open_page):
    page = open_page()
    cells = page.locator(".variant:visible", has_text="outer lr").first
    reading = json.loads(cells.get_attribute("data-reading"))
    row = reading["rows"][0]
    left, right, label, text, _ = row["cells"][0]
    point_at(page, cells, (left + right) / 2, (row["top"] + row["bottom"]) / 2)
    shown_text = page.locator(".tooltip").inner_text()
    assert label in shown_text
    assert text in shown_text


@pytest.mark.parametrize("axis", ["step", "bytes_sent"])
def test_the_tooltip_shows_the_value_of_the_files_where_the_curve_is_drawn(open_page, axis):
    """The pointer goes to a point's place as matplotlib drew it, so both must agree on scales."""
    page = open_page()
    page.locator(f'input[value="{axis}"]').check(force=True)
    variant = page.locator('figure[data-switch="axis"] > .variant:visible').nth(1)
    data = json.loads(page.locator("script.data").text_content())
    line = next(each for each in data["points"]["loss"] if each["label"] == "diloco")
    drawn = variant.locator(f'[data-line="{line["line"]}"] > path').last.get_attribute("d")
    places = [tuple(map(float, pair)) for pair in re.findall(r"[ML] ?([\d.]+) ([\d.]+)", drawn)]
    point_at(page, variant, *places[-1])
    text = page.locator(".tooltip").inner_text()
    assert "diloco" in text
    assert f"{line['mean'][-1]:.6g}" in text
    if axis == "step":
        assert f"steps {line['x']['step'][-1]:,}" in text


def test_the_tooltip_says_which_bar_of_a_timeline_it_is_on(open_page):
    page = open_page()
    variant = page.locator('.variant[data-reading*="worker 2"]').last
    row = next(
        each
        for each in json.loads(variant.get_attribute("data-reading"))["rows"]
        if re.fullmatch("ddp: .*, worker 2", each["title"])
    )
    left, right, kind, text, _ = max(row["cells"], key=lambda cell: cell[1] - cell[0])
    point_at(page, variant, (left + right) / 2, (row["top"] + row["bottom"]) / 2)
    shown_text = page.locator(".tooltip").inner_text()
    assert row["title"] in shown_text
    assert kind in shown_text
    assert text in shown_text


def test_the_legend_hides_a_line_in_all_curves_and_from_the_tooltip(open_page):
    page = open_page()
    button = page.get_by_role("button", name="localsgd")
    number = button.get_attribute("data-line")
    lines = page.locator(f'[data-switch="axis"] > .variant:visible [data-line="{number}"]')
    assert lines.first.is_visible()
    before = lines.count()
    button.click()
    assert lines.count() == before
    assert not any(line.is_visible() for line in lines.all())
    variant = page.locator('figure[data-switch="axis"] > .variant:visible').first
    point_at(page, variant, 100, 60)
    assert "localsgd" not in page.locator(".tooltip").inner_text()
    button.click()
    assert lines.first.is_visible()


def test_a_phone_needs_no_sideways_scrolling(open_page):
    page = open_page(viewport=PHONE)
    assert not scrolls_sideways(page)
    for summary in page.locator("summary").all():
        summary.click()
    assert not scrolls_sideways(page)
    sizes = page.locator(".variant:visible svg text").evaluate_all(
        "all => all.map(text => text.getBoundingClientRect().height)"
    )
    assert min(sizes) > 9, "the figures' text stays readable"


def test_on_a_phone_every_cell_of_a_table_is_on_the_screen_with_its_name(open_page):
    page = open_page(viewport=PHONE)
    for summary in page.locator("summary").all():
        summary.click()
    cells = page.locator(".cards td")
    assert cells.count() > 20
    for edges in cells.evaluate_all(
        "all => all.map(e => e.getBoundingClientRect()).map(box => [box.left, box.right])"
    ):
        assert edges[0] >= 0
        assert edges[1] <= PHONE["width"]
    names = cells.evaluate_all("all => all.map(each => getComputedStyle(each, '::before').content)")
    assert '"bytes"' in names


def test_a_finger_on_a_phone_gets_the_tooltip_inside_the_screen(open_page):
    page = open_page(viewport=PHONE, has_touch=True)
    variant = page.locator('figure[data-switch="axis"] > .variant:visible').first
    variant.scroll_into_view_if_needed()
    variant.tap(position={"x": 300, "y": 100})
    frame = page.locator(".tooltip").bounding_box()
    assert frame["x"] >= 0
    assert frame["x"] + frame["width"] <= 360


def test_dark_mode_changes_the_page_and_the_figures(open_page):
    def line_colour(page):
        line = page.locator('.variant:visible [data-line="0"] > path').last
        return line.evaluate("path => getComputedStyle(path).stroke")

    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    assert background(light) == "rgb(255, 255, 255)"
    assert sum(map(int, re.findall(r"\d+", background(dark)))) < 150
    assert line_colour(light) != line_colour(dark)
    dark.emulate_media(media="print")
    assert background(dark) == "rgb(255, 255, 255)", "paper is white"


def test_names_from_files_stay_text_in_tooltips(open_page, tmp_path):
    evil = "<img src=x onerror=console.log(1)>"
    folder = runs.write_run(tmp_path / "run", method="palsgd")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("method: palsgd", f"method: '{evil}'"))
    page = open_page(write_report([folder], tmp_path / "report.html", figures=False))
    variant = page.locator('figure[data-switch="axis"] > .variant:visible').first
    point_at(page, variant, 150, 100)
    assert evil in page.locator(".tooltip").inner_text()
