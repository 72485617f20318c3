"""All registered datasets by name."""

from __future__ import annotations

from cimage_dist.data.sources import amazon, digits, forum, ogb, planetoid, sbm, wikics
from cimage_dist.data.sources.raw import Source

SOURCES: dict[str, Source] = {
    **digits.SOURCES,
    **forum.SOURCES,
    **sbm.SOURCES,
    **planetoid.SOURCES,
    **amazon.SOURCES,
    **wikics.SOURCES,
    **ogb.SOURCES,
}
