"""Kubernetes quantities as numbers."""

from __future__ import annotations

import re

from cimage_dist.errors import UserError

_SCALE = (
    {"": 1.0, "m": 1e-3}
    | {unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)}
    | {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}
)


def number(quantity: str | int | float) -> float:
    """'500m' is 0.5, '4Gi' is 2^32."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", str(quantity))
    if match is None or match[2] not in _SCALE:
        raise UserError(f"{quantity!r} is not a Kubernetes quantity such as 500m, 8 or 64Gi.")
    return float(match[1]) * _SCALE[match[2]]
