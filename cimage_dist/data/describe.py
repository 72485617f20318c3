"""What a graph store holds and what ingest did to get there, as facts and as lines to print."""

from __future__ import annotations

from typing import Any

import numpy as np

from cimage_dist.data.sparse import CsrFeatures
from cimage_dist.data.store import MASKS, Graph

_MOST_EDGES = 200_000_000  # beyond this, components are not counted
_SHOWN_CLASSES = 20
_QUANTILES = {"least": 0.0, "quarter": 0.25, "median": 0.5, "three_quarters": 0.75, "most": 1.0}


def describe(graph: Graph) -> dict[str, Any]:
    """Counts are of the stored graph, `statistics` of what was read; what is not known (a store of
    an older version, a very large graph) is None.
    """
    statistics, notes = graph.manifest.get("statistics", {}), graph.manifest.get("notes", {})
    degrees = np.diff(graph.indptr)
    values = graph.num_nodes * graph.num_features
    nonzeros = statistics.get("feature_nonzeros")
    ids = graph.ids
    return {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges // 2,
        "features": graph.num_features,
        "classes": graph.num_classes,
        "ids": None if ids is None else {"type": str(ids.values.type), "first": _first(ids)},
        "edges_read": statistics.get("edges_read"),
        "self_loops_removed": statistics.get("self_loops_removed"),
        "duplicates_merged": statistics.get("duplicates_merged"),
        "isolated_nodes": int((degrees == 0).sum()),
        **_components(graph),
        "degrees": {
            name: float(np.quantile(degrees, share, method="nearest"))
            for name, share in _QUANTILES.items()
        },
        "feature_density": None if nonzeros is None else nonzeros / values,
        "features_stored": "sparse" if isinstance(graph.x, CsrFeatures) else "dense",
        "class_counts": _class_counts(graph, notes.get("class_names")),
        "unlabelled": None if graph.y is None else int((graph.y < 0).sum()),
        "splits": {
            name: np.asarray(graph.masks[name]).sum(axis=0).tolist()
            for name in MASKS
            if name in graph.masks
        },
        "ignored_columns": notes.get("ignored_columns", {}),
        "weights": notes.get("weights"),
        "warnings": notes.get("warnings", []),
    }


def _first(ids: Any) -> list[Any]:
    found: list[Any] = ids.values[:3].to_pylist()
    return found


def _components(graph: Graph) -> dict[str, Any]:
    if graph.num_edges > _MOST_EDGES:
        return {"components": None, "largest_component": None}
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    n = graph.num_nodes
    ones = np.ones(graph.num_edges, dtype=np.int8)
    matrix = csr_array((ones, graph.indices, graph.indptr), shape=(n, n))
    count, labels = connected_components(matrix, directed=False)
    return {"components": int(count), "largest_component": int(np.bincount(labels).max())}


def _class_counts(graph: Graph, names: list[str] | None) -> dict[str, int] | None:
    if graph.y is None:
        return None
    counts = np.bincount(graph.y[graph.y >= 0], minlength=graph.num_classes).tolist()
    return dict(zip(names or map(str, range(len(counts))), counts, strict=True))


def lines_of(facts: dict[str, Any]) -> list[str]:
    """The facts of `describe` for a person."""
    nodes = facts["nodes"]
    ids = f" (ids such as {', '.join(map(repr, facts['ids']['first']))})" if facts["ids"] else ""
    lines = [
        f"{nodes:,} nodes{ids}, {facts['edges']:,} undirected edges, {facts['features']:,} "
        f"features, {facts['classes']} classes"
    ]
    if facts["edges_read"] is not None:
        lines.append(
            f"edges: {facts['edges_read']:,} rows read, {facts['self_loops_removed']:,} self-loops "
            f"and {facts['duplicates_merged']:,} duplicates dropped (a pair in both directions "
            "counts as one)"
        )
    parts = [f"{facts['isolated_nodes']:,} nodes without an edge"]
    if facts["components"] is not None:
        parts.append(
            f"{facts['components']:,} components, the largest with "
            f"{100 * facts['largest_component'] / nodes:.1f} % of the nodes"
        )
    degrees = ", ".join(
        f"{name.replace('_', ' ')} {value:,.0f}" for name, value in facts["degrees"].items()
    )
    lines += [f"structure: {', '.join(parts)}", f"degrees: {degrees}"]
    if facts["feature_density"] is not None:
        lines.append(
            f"features: {100 * facts['feature_density']:.3g} % of the values are not zero, stored "
            f"{facts['features_stored']}"
        )
    lines.append(f"labels: {_labels(facts)}")
    splits = ", ".join(f"{name} {_counts(count)}" for name, count in facts["splits"].items())
    if facts["class_counts"]:
        lines.append(f"splits: {splits or 'none given, so drawn at random (data.split)'}")
    for name, columns in facts["ignored_columns"].items():
        lines.append(f"columns of {name} that are not used: {', '.join(columns)}")
    if facts["weights"]:
        lines.append(facts["weights"])
    return lines + [f"warning: {text}" for text in facts["warnings"]]


def _counts(count: int | list[int]) -> str:
    if isinstance(count, int):
        return f"{count:,}"
    return f"{min(count):,} to {max(count):,} ({len(count)} splits)"


def _labels(facts: dict[str, Any]) -> str:
    counts = facts["class_counts"]
    if counts is None:
        return "none"
    shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:_SHOWN_CLASSES])
    more = f", and {len(counts) - _SHOWN_CLASSES} more classes"
    return shown + more * (len(counts) > _SHOWN_CLASSES) + f"; {facts['unlabelled']:,} without"
