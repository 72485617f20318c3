"""Pages in a browser, where there is one: what every page must look like."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


# Playwright keeps an event loop running in this thread: no longer than the tests of one file, since
# others start loops of their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(
        (
            found
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (found := shutil.which(name))
        ),
        None,
    )
    if path is None:
        pytest.skip("no Chromium on this machine")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        usual = found.new_page

        def new_page(**options: Any) -> Any:
            page = usual(**options)
            page.set_default_timeout(180_000)  # the machine may be busy
            return page

        found.new_page = new_page
        yield found
        found.close()


LOOKS = [(390, "dark"), (1280, "light")]
LOOK = """[...document.querySelectorAll("figure")].map(figure => {
  const box = node => node.getBoundingClientRect();
  const isSeen = node => box(node).width > 0 && +getComputedStyle(node).opacity > 0;
  const isOutside = (a, b) =>
    a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
  const texts = nodes => nodes.map(node => node.textContent);
  const words = [...figure.querySelectorAll("svg text")].filter(isSeen);
  return {
    title: figure.querySelector("h3").textContent, kind: figure.dataset.kind,
    shapes: figure.querySelectorAll("svg .role-mark > *").length,
    rows: figure.querySelectorAll("tbody tr").length,
    hidden: [...figure.querySelectorAll(".scroll")].some(n => n.scrollWidth > n.clientWidth + 1),
    width: box(figure).width, height: box(figure.querySelector(".plot, .scroll")).height,
    small: texts(words.filter(node => box(node).height < 8)),
    clipped: texts(words.filter(node => isOutside(box(node), box(node.closest("svg"))))),
  };
})"""


def looked_at(browser: Any, path: Path, width: int, scheme: str) -> set[str]:
    """Titles of the charts of a page.

    Checks that the page is quiet and needs no network, and that every chart can be seen and read.
    """
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("body[data-ready]")
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    cards = tab.evaluate(LOOK)
    for card in cards:
        assert card["rows" if card["kind"] == "table" else "shapes"] > 0, card
        assert card["height"] > 60 and 0 < card["width"] <= width, card
        assert card["small"] == [] and card["clipped"] == [], card
        assert not card["hidden"], card  # no table is wider than its card
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, (
        "nothing sticks out sideways"
    )
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(v) for v in re.findall(r"\d+", background)[:3]) < 200) == (scheme == "dark")
    tab.close()
    return {card["title"] for card in cards}
