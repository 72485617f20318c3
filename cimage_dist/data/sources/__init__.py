"""All registered datasets by name."""

from __future__ import annotations

from cimage_dist.data.sources import generated, published
from cimage_dist.data.sources.raw import Source

SOURCES: dict[str, Source] = {**generated.SOURCES, **published.SOURCES}
