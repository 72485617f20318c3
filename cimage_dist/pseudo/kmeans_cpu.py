"""The compiled inner loop of k-means on a CPU."""

from __future__ import annotations

from typing import Any

import numba

# Rows are finite by the time they get here; sums over a row may be taken in vector order.
_FAST = {"nnan", "ninf", "nsz", "reassoc", "contract"}


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def add_chunk(
    rows_nD: Any, score_nC: Any, labels_n: Any, nearest_n: Any, sums_CD: Any, counts_C: Any
) -> float:
    """Fill labels (lowest score, ties to the lowest id) and nearest = ‖x‖² + score; add the rows to
    `sums`, 1 to `counts`; returns Σ nearest.
    """
    total = 0.0
    for i in range(rows_nD.shape[0]):
        lowest = score_nC[i, 0]
        for c in range(1, score_nC.shape[1]):
            lowest = min(lowest, score_nC[i, c])
        label = 0
        while score_nC[i, label] != lowest:
            label += 1
        row, kept = rows_nD[i], sums_CD[label]
        square = rows_nD.dtype.type(0)
        for j in range(row.size):
            square += row[j] * row[j]
        for j in range(row.size):
            kept[j] += row[j]
        labels_n[i] = label
        nearest_n[i] = max(square + lowest, rows_nD.dtype.type(0))
        counts_C[label] += 1.0
        total += nearest_n[i]
    return total
