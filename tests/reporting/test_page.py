"""The page of a run: what is on it, what it says first, and how it looks in a browser."""

from __future__ import annotations

import html
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cimage_dist.errors import UserError
from cimage_dist.reporting.charts import histogram, lines, number, table, thinned
from cimage_dist.reporting.page import section, write_figures, write_page
from cimage_dist.reporting.run import verdict, write_run_page
from tests.pages import LOOK, LOOKS, looked_at

EXPECTED = {
    "Scores in percent",
    "Few labels",
    "Map of the embedding",
    "Confusion",
    "Accuracy by degree",
    "HSIC between factors",
    "Is the partition better than chance?",
    "Size of the first context",
    "Clustering quality",
    "Trusted nodes",
    "Scores of the factors",
    "Dependence of F1 and F2 given the labels",
    "Loss terms",
    "Cluster term",
    "Validation",
    "Speed",
    "Where the time goes",
    "Memory",
    "Differences from the defaults",
    "Environment",
}


@pytest.fixture(scope="module")
def page(finished_run: Path) -> tuple[Path, list[dict[str, Any]]]:
    return write_run_page(finished_run, points=200)


def words_of(path: Path, name: str) -> list[str]:
    """The texts of all elements of a name."""
    return [
        html.unescape(text)
        for text in re.findall(rf"<{name}>(.*?)</{name}>", path.read_text().partition("<script")[0])
    ]


def test_everything_is_on_the_page(page):
    path, charts = page
    assert {chart["title"] for chart in charts} >= EXPECTED
    assert all(chart["data"] for chart in charts)
    assert words_of(path, "h2") == [
        "Scores",
        "Embedding",
        "Contexts",
        "Training",
        "Cost",
        "Settings",
    ]
    said = " ".join(words_of(path, "li"))
    assert "best control" in said and "random contexts" in said
    assert path.stat().st_size < 1_500_000, "most of it is the script that draws"


def test_the_page_needs_no_network(page):
    text = page[0].read_text().partition("<script>")[0]
    linked = re.findall(r'<a href="(https?://[^"]+)"', text)
    assert len(re.findall(r"https?://", text)) == len(linked), (
        "links for the reader only; what the script does is looked at in a browser"
    )
    assert any("doi.org" in url for url in linked)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", text)


def test_labels_of_test_nodes_are_not_on_the_map(page, store_dir, finished_run):
    import numpy as np

    chart = next(c for c in page[1] if c["kind"] == "scatter")
    gids = [int(re.findall(r"node (\d+)", row["about"])[0]) for row in chart["data"]]
    test = np.load(finished_run / "splits" / "node_test.npy")
    hidden = [row["label"] is None for row in chart["data"]]
    assert any(hidden) and not all(hidden)
    assert hidden == [bool(test[g]) for g in gids]


def test_a_moved_run_and_one_without_scores(finished_run, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(finished_run, moved)
    (moved / "eval.json").unlink()
    path, charts = write_run_page(moved, points=50)
    assert path == moved / "report.html"
    assert words_of(path, "li")[0].startswith("Not scored yet")
    assert "Scores in percent" not in {chart["title"] for chart in charts}


def test_a_run_whose_graph_is_gone_keeps_its_curves(finished_run, tmp_path):
    moved, notes = tmp_path / "elsewhere", []
    shutil.copytree(finished_run, moved)
    config = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(
        re.sub(
            r"num_nodes: \d+",
            "num_nodes: 301",
            re.sub(r"store_dir: .*", f"store_dir: {tmp_path / 'none'}", config),
        )
    )
    _, charts = write_run_page(moved, note=notes.append)
    titles = {chart["title"] for chart in charts}
    assert "Loss terms" in titles and "Map of the embedding" not in titles
    assert any("left out" in text for text in notes)


def test_no_run(tmp_path):
    with pytest.raises(UserError, match="No finished run"):
        write_run_page(tmp_path)


def scores(ours: float, control: float) -> dict[str, Any]:
    return {
        "node": {"val": 1.0, "test": ours},
        "controls": {
            "raw": {"node": {"test": control - 5}},
            "smoothed": {"node": {"test": control}},
        },
    }


def test_the_verdict_tells_bad_news_too():
    assert (
        "2.00 points above the best control (smoothed, 80.00 %)"
        in verdict(scores(82.0, 80.0), [], None)[0]
    )
    chosen = scores(82.0, 80.0) | {"controls_best": {"any": "raw", "same_width": "raw"}}
    assert "7.00 points above the best control (raw, 75.00 %)" in verdict(chosen, [], None)[0], (
        "the best by validation, not by test"
    )
    assert "1.50 points BELOW" in verdict(scores(78.5, 80.0), [], None)[0]
    worse = verdict(None, [], {"ours": 0.3, "random": 0.1, "below": 0.0})
    assert "MORE dependent" in worse[1] and "lower than 0%" in worse[1]
    records = [
        {"kind": "ci", "step": 0, "status": "fallback-top-b", "variance_f2_min": 0.0},
        {"kind": "ci", "step": 5, "status": "ok", "variance_f2_min": 1e-9},
    ]
    said = " ".join(verdict(None, records, None))
    assert "1 of 2 refreshes" in said and "collapsed" in said


def test_numbers_that_json_cannot_hold():
    assert number(float("nan")) is None and number(float("inf")) is None and number(None) is None
    assert number(1 / 3) == 0.33333
    assert (
        thinned(list(range(1000)), 100)[-1] == 999 and len(thinned(list(range(1000)), 100)) <= 101
    )
    chart = lines("a", "", "x", "y", {"one": [(0, 1.0), (1, float("nan"))], "none": []})
    assert chart["data"] == [
        {"series": "one", "x": 0.0, "y": 1.0},
        {"series": "one", "x": 1.0, "y": None},
    ]
    counted = histogram("a", "", "x", "y", [1.0, 2.0, 3.0], [(9.0, "far")])["data"]
    assert sum(row["count"] for row in counted) == 3 and counted[-1]["high"] == 9.0


def test_text_cannot_break_out_of_the_page(tmp_path, browser):
    """Names come from files of users."""
    bad = "document.title='broken'"
    evil = f'</script><script>{bad}</script><img src=x onerror="{bad}">'
    path = tmp_path / "page.html"
    write_page(
        path,
        f"a {evil}",
        evil,
        [evil],
        [(evil, evil)],
        [section(evil, evil, [table(evil, evil, [evil], [[evil]])])],
    )
    tab = browser.new_page()
    tab.goto(path.as_uri())
    tab.wait_for_selector("body[data-ready]")
    assert tab.title().startswith("a </script>") and tab.locator(
        "#sections h2"
    ).inner_text().startswith("</script>")
    tab.close()


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_in_a_browser(page, browser, width, scheme):
    assert looked_at(browser, page[0], width, scheme) >= EXPECTED


def test_the_map_answers_to_its_buttons(page, browser):
    tab = browser.new_page()
    tab.goto(page[0].as_uri())
    tab.wait_for_selector("body[data-ready]")
    card = tab.locator("figure[data-kind=scatter]")

    def dots() -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = card.locator(".mark-symbol.role-mark path").evaluate_all(
            "nodes => nodes.map(n => [n.getAttribute('transform'), n.getAttribute('fill')])"
        )
        return found

    def choose(option: str) -> None:
        before, deadline = dots(), time.monotonic() + 120
        card.get_by_label(option, exact=True).check()
        while dots() == before:
            assert time.monotonic() < deadline
            tab.wait_for_timeout(50)

    start = dots()
    choose("PCA")
    moved = dots()
    choose("degree")
    assert [place for place, _ in moved] != [place for place, _ in start]
    assert [colour for _, colour in dots()] != [colour for _, colour in moved]
    card.locator("svg .mark-symbol.role-mark path").first.hover(force=True)
    tab.wait_for_selector("#vg-tooltip-element.visible")
    assert "degree" in tab.locator("#vg-tooltip-element").inner_text()
    with tab.expect_download() as download:
        lines = tab.locator("figure[data-kind=lines]").first
        lines.locator("summary").click()
        lines.get_by_text("Save as SVG").click()
    saved = Path(download.value.path()).read_text()
    assert saved.startswith("<svg") and "var(--" not in saved and "#0f766e" in saved
    tab.close()


def test_a_node_is_found_by_its_id(page, browser):
    """Search, neighbours, zoom and click, on a map of fewer dots than nodes."""
    chart = next(c for c in page[1] if c["kind"] == "scatter")
    near, first = chart["near"], chart["data"][3]
    tab = browser.new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(page[0].as_uri())
    tab.wait_for_selector("body[data-ready]")
    card = tab.locator("figure[data-kind=scatter]")
    box, panel = card.locator("input[type=search]"), card.locator(".picked")

    def search(text: str) -> None:
        box.fill(text)
        box.press("Enter")

    search(first["id"])
    assert panel.locator("b").inner_text().startswith(f"node {first['id']}, degree")
    assert panel.locator("li").count() == len(near["rows"][3]) == 8
    nearest = near["names"][near["rows"][3][0]]
    assert panel.locator("li").first.inner_text().startswith(nearest)
    shown = sum(place < len(chart["data"]) for place in near["rows"][3])
    tab.wait_for_function(
        "n => document.querySelectorAll(\"svg path[stroke='#ea580c']\").length === n", arg=shown + 1
    )
    dots = card.locator("svg .mark-symbol.role-mark path")

    def places() -> list[str]:
        found: list[str] = dots.evaluate_all("nodes => nodes.map(n => n.getAttribute('transform'))")
        return found

    def wait_for(is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_true():
            assert time.monotonic() < deadline
            tab.wait_for_timeout(50)

    start = places()
    card.get_by_label("zoom in").click()
    wait_for(lambda: places() != start)
    card.get_by_text("whole map").click()
    wait_for(lambda: places() == start)
    search("no such node")
    assert "cimage neighbors --id" in panel.inner_text()
    dots.nth(5).click(force=True)
    wait_for(lambda: panel.locator("li").count() == 8)
    assert said == []
    tab.close()


def test_neighbours_are_those_of_the_embedding(page, finished_run):
    import numpy as np

    from cimage_dist.io.checkpoint import load_rows

    chart = next(c for c in page[1] if c["kind"] == "scatter")
    z = load_rows(finished_run / "embeddings")
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    near = chart["near"]
    for place in (0, 100, 199):
        node = int(chart["data"][place]["id"])
        cosine = z @ z[node]
        cosine[node] = -2
        found = [int(near["names"][i]) for i in near["rows"][place]]
        np.testing.assert_allclose(cosine[found], np.sort(cosine)[::-1][:8], atol=1e-5)
        np.testing.assert_allclose(near["cosines"][place], cosine[found], atol=1e-3)


def test_the_winner_is_bold_and_methods_keep_their_colour(page):
    scores = next(c for c in page[1] if c["title"] == "Scores in percent")
    for row, bold in zip(scores["data"], scores["bold"], strict=True):
        values = {i: float(text.split()[0]) for i, text in enumerate(row) if i and text != "-"}
        assert bold == {i for i in values if values[i] == max(values.values())} or len(values) == 1
    text = page[0].read_text()
    assert 'class="bold" data-label=' in text
    domains = [
        c["spec"]["layer"][0]["encoding"]["color"]["scale"]["domain"]
        for c in page[1]
        if c["title"] in ("Few labels", "Accuracy by degree")
    ]
    assert len(domains) == 2 and domains[0] == domains[1]


def test_the_page_explains_itself(page):
    text = page[0].read_text().partition("<script")[0]
    assert "row of numbers, its embedding" in text
    for word in ("Control", "Probe", "HSIC", "Factor, F1, F2"):
        assert f"<dt>{word}</dt>" in text
    assert re.search(r"Made on \d{4}-\d\d-\d\d by cimage-dist \d", text)


def test_charts_follow_the_colours_of_the_system(page, browser):
    tab = browser.new_page(color_scheme="light")
    tab.goto(page[0].as_uri())
    tab.wait_for_selector("body[data-ready]")
    assert tab.locator("figure[data-kind=bars] path[fill='#0f766e']").count() > 0
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_selector("figure[data-kind=bars] path[fill='#2dd4bf']", state="attached")
    tab.close()


def test_nothing_is_cut_off_when_the_window_changes(page, browser):
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(page[0].as_uri())
    tab.wait_for_selector("body[data-ready]")

    def cut() -> list[str]:
        return [card["title"] for card in tab.evaluate(LOOK) if card["clipped"]]

    for width, height in ((390, 900), (390, 2600)):
        tab.set_viewport_size({"width": width, "height": height})
        tab.wait_for_timeout(300)
        deadline = time.monotonic() + 30
        while cut():
            assert time.monotonic() < deadline, cut()
            tab.wait_for_timeout(100)
    tab.close()


def test_figures_for_papers(page, tmp_path):
    written = write_figures(page[1], tmp_path / "figures")
    names = {path.stem for path in written}
    assert {
        "loss-terms",
        "confusion",
        "hsic-between-factors",
        "accuracy-by-degree",
        "map-of-the-embedding-pca-label",
    } <= names
    starts = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<svg"}
    assert {path.suffix for path in written} == set(starts)
    assert all(
        path.stat().st_size > 2_000 and path.read_bytes().startswith(starts[path.suffix])
        for path in written
    )
