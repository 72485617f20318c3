"""The page of a run: what is on it, what it says first, and how it looks in a browser."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cimage_dist.errors import UserError
from cimage_dist.reporting.charts import histogram, is_empty, lines, number, table, thinned
from cimage_dist.reporting.figures import write_figures
from cimage_dist.reporting.page import section, write_page
from cimage_dist.reporting.run import verdict, write_run_page
from tests.reporting.conftest import LOOKS, looked_at

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


def data_of(path: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def test_everything_is_on_the_page(page):
    path, charts = page
    assert {chart["title"] for chart in charts} >= EXPECTED
    assert not any(is_empty(chart) for chart in charts)
    shown = data_of(path)
    assert [s["title"] for s in shown["sections"]] == ["Scores", "Embedding", "Contexts", "Training", "Cost", "Settings"]
    assert any("best control" in text for text in shown["verdict"]) and any("random contexts" in text for text in shown["verdict"])
    assert path.stat().st_size < 300_000


def test_the_page_needs_no_network(page):
    text = page[0].read_text()
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}, "the name of SVG, which is never fetched"
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", text)


def test_labels_of_test_nodes_are_not_on_the_map(page, store_dir, finished_run):
    import numpy as np

    chart = next(c for c in page[1] if c["kind"] == "scatter")
    gids = [int(re.match(r"node (\d+)", text)[1]) for text in chart["hover"]]  # type: ignore[index]
    test = np.load(finished_run / "splits" / "node_test.npy")
    hidden = [value < 0 for value in chart["colours"]["label"]["values"]]
    assert any(hidden) and not all(hidden)
    assert hidden == [bool(test[g]) for g in gids]


def test_a_moved_run_and_one_without_scores(finished_run, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(finished_run, moved)
    (moved / "eval.json").unlink()
    path, charts = write_run_page(moved, points=50)
    assert path == moved / "report.html"
    assert data_of(path)["verdict"][0].startswith("Not scored yet")
    assert "Scores in percent" not in {chart["title"] for chart in charts}


def test_a_run_whose_graph_is_gone_keeps_its_curves(finished_run, tmp_path):
    moved, notes = tmp_path / "elsewhere", []
    shutil.copytree(finished_run, moved)
    config = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(re.sub(r"num_nodes: \d+", "num_nodes: 301", re.sub(r"store_dir: .*", f"store_dir: {tmp_path / 'none'}", config)))
    _, charts = write_run_page(moved, note=notes.append)
    titles = {chart["title"] for chart in charts}
    assert "Loss terms" in titles and "Map of the embedding" not in titles
    assert any("left out" in text for text in notes)


def test_no_run(tmp_path):
    with pytest.raises(UserError, match="No finished run"):
        write_run_page(tmp_path)


def scores(ours: float, control: float) -> dict[str, Any]:
    return {"node": {"val": 1.0, "test": ours}, "controls": {"raw": {"node": {"test": control - 5}}, "smoothed": {"node": {"test": control}}}}


def test_the_verdict_tells_bad_news_too():
    assert "2.00 points above the best control (smoothed, 80.00 %)" in verdict(scores(82.0, 80.0), [], None)[0]
    chosen = scores(82.0, 80.0) | {"controls_best": {"any": "raw", "same_width": "raw"}}
    assert "7.00 points above the best control (raw, 75.00 %)" in verdict(chosen, [], None)[0], "the best by validation, not by test"
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
    assert thinned(list(range(1000)), 100)[-1] == 999 and len(thinned(list(range(1000)), 100)) <= 101
    chart = lines("a", "", "x", "y", {"one": [(0, 1.0), (1, float("nan"))], "none": []})
    assert [s["name"] for s in chart["series"]] == ["one"] and chart["series"][0]["points"][1] == [1.0, None]
    assert sum(histogram("a", "", "x", "y", [1.0, 2.0, 3.0], [(9.0, "far")])["counts"]) == 3


def test_text_cannot_break_out_of_the_page(tmp_path, browser):
    """Names come from files of users."""
    evil = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
    path = tmp_path / "page.html"
    write_page(path, f"a {evil}", evil, [evil], [(evil, evil)], [section(evil, evil, [table(evil, evil, [evil], [[evil]])])])
    tab = browser.new_page()
    tab.goto(path.as_uri())
    tab.wait_for_selector("body[data-ready]")
    assert tab.title().startswith("a </script>") and tab.locator("#sections h2").inner_text().startswith("</script>")
    tab.close()


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_in_a_browser(page, browser, width, scheme):
    assert looked_at(browser, page[0], width, scheme) >= EXPECTED


def test_the_map_answers_to_its_buttons(page, browser):
    tab = browser.new_page()
    tab.goto(page[0].as_uri())
    tab.wait_for_selector("body[data-ready]")

    def first_dot() -> tuple[str, str]:
        dot = tab.locator("figure[data-kind=scatter] circle").first
        return dot.get_attribute("cx"), dot.get_attribute("style")

    start = first_dot()
    tab.locator("figure[data-kind=scatter] button", has_text="PCA").click()
    moved = first_dot()
    tab.locator("figure[data-kind=scatter] button", has_text="degree").click()
    assert moved[0] != start[0] and first_dot()[1] != moved[1]
    tab.locator("figure[data-kind=scatter] circle").first.hover(force=True)
    assert "degree" in tab.locator("#tip").inner_text()
    with tab.expect_download() as download:
        tab.locator("figure[data-kind=lines]").first.hover()
        tab.locator("figure[data-kind=lines] button", has_text="svg").first.click()
    saved = Path(download.value.path()).read_text()
    assert saved.startswith("<svg") and "var(--" not in saved and "rgb(" in saved
    tab.close()


def test_figures_for_papers(page, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    written = write_figures(page[1], tmp_path / "figures")
    names = {path.stem for path in written}
    assert {"loss-terms", "confusion", "hsic-between-factors", "accuracy-by-degree", "map-of-the-embedding-pca-label"} <= names
    assert all(path.stat().st_size > 2_000 for path in written) and {path.suffix for path in written} == {".svg", ".png"}
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"cimage-dist\[figures\]"):
        write_figures(page[1], tmp_path)
