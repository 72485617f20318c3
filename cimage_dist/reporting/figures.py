"""The charts of a page as files for papers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from cimage_dist.io import artifacts
from cimage_dist.reporting.charts import Chart, Spec, drawn
from cimage_dist.reporting.theme import config

_WIDTH = 320  # and the most of the height
_SCALE = 4  # of pixels in png files


def write_figures(
    charts: Sequence[Chart], folder: Path, kinds: Sequence[str] = ("pdf", "png", "svg")
) -> list[Path]:
    """A file of every kind for every chart but tables, named after the chart.

    A chart with choices gives one for every combination of them.
    """
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, spec in itertools.chain.from_iterable(map(_drawings, charts)):
        svg = vl_convert.vegalite_to_svg(spec, config=config("light", "white"))
        made = {"svg": lambda text: text.encode(), "pdf": vl_convert.svg_to_pdf}
        made["png"] = lambda text: vl_convert.svg_to_png(text, scale=_SCALE)
        for kind in kinds:
            written.append(folder / f"{name}.{kind}")
            artifacts.write_bytes(written[-1], made[kind](svg))
    return written


def _drawings(chart: Chart) -> Iterator[tuple[str, Spec]]:
    """(file name, specification) of a chart."""
    if chart["kind"] == "table":
        return
    for picked in itertools.product(*[options.items() for _, options in chart["choices"]]):
        words = [chart["title"], *[name for name, _ in picked]]
        encoding = {key: value for _, part in picked for key, value in part.items()}
        slug = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
        size = {"width": _WIDTH, "height": min(_WIDTH, chart["spec"]["height"]), "autosize": "pad"}
        yield slug, drawn(chart, encoding) | size
