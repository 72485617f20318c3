"""Charts that need the trained model and the graph: dependence of factors, a map of the embedding,
mistakes by class and by degree.

Labels of test nodes are not read here; where classes appear, they are those of training and
validation nodes.

The map shows dots in one of several views, coloured by one of several properties, with zoom, a
search by id and the nearest neighbours of the node that is picked. The page's script moves the
window (x0, x1, y0, y1), picks a node (`focus`) and marks those near it (`near`); views are scaled
to the unit square so that one window serves all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.ci.diagnostics import conditional_hsic
from cimage_dist.ci.hsic import block_statistics
from cimage_dist.config import Config
from cimage_dist.data.store import Graph
from cimage_dist.eval.controls import smooth_features
from cimage_dist.eval.probe import linear_probe
from cimage_dist.pipeline.neighbors import class_names, node_names
from cimage_dist.reporting.charts import (
    Chart,
    Spec,
    bars,
    category,
    chart,
    heat,
    histogram,
    literal,
    number,
)
from cimage_dist.types import NodeSplit, Topology

_RANDOM_PARTITIONS = 60
_DEGREE_GROUPS = 6
_MOST_CLASSES = 30
_FEW_FOR_TSNE = 60


def sample(num_nodes: int, count: int, seed: int) -> Tensor:
    """At most `count` nodes by a keyed draw, ascending."""
    return (
        torch.argsort(keyed.bits(keyed.stream(seed, "diagnostics", 3), torch.arange(num_nodes)))[
            :count
        ]
        .sort()
        .values
    )


def dependence_charts(
    h: Tensor, labels: Tensor, gids: Tensor, in_context: Tensor, cfg: Config
) -> tuple[list[Chart], dict[str, float]]:
    """The HSIC matrix between factors, F1 first, and the dependence of F1 and F2 given the labels
    beside random partitions; h [n, K, c] of the sample.

    Also {"ours", "random", "below"}: the two values and the share of random partitions that are
    more dependent.
    """
    num_factors = h.shape[1]
    stats = block_statistics(
        h.flatten(1), labels, gids, seed=cfg.run.seed, block_size=cfg.ci.block_size
    )
    between = stats.G.view(num_factors, h.shape[2], num_factors, h.shape[2]).mean(dim=(1, 3))
    order = torch.cat([in_context.nonzero().squeeze(1), (~in_context).nonzero().squeeze(1)])
    first = int(in_context.sum())
    names = [f"{'F1' if in_context[k] else 'F2'}·{k}" for k in order.tolist()]
    matrix = heat(
        "HSIC between factors",
        "Mean normalised HSIC of their channels, F1 first. The dashed "
        "lines part F1 from F2: independent contexts leave the "
        "off-diagonal blocks pale.",
        "factor",
        "factor",
        names,
        names,
        between[order][:, order].tolist(),
        split=first if 0 < first < num_factors else 0,
    )
    blocks: dict[str, Any] = {"block_size": cfg.ci.block_size, "seed": cfg.run.seed}
    rows = h.double()
    ours = conditional_hsic(rows, labels, gids, in_context, **blocks)
    draws = []
    for draw in range(_RANDOM_PARTITIONS):
        shuffled = in_context[
            torch.argsort(
                keyed.bits(
                    keyed.stream(cfg.run.seed, "diagnostics", 4, draw), torch.arange(num_factors)
                )
            )
        ]
        draws.append(conditional_hsic(rows, labels, gids, shuffled, **blocks))
    found = {
        "ours": ours,
        "random": float(np.mean(draws)),
        "below": float(np.mean(np.array(draws) > ours)),
    }
    chart = histogram(
        "Is the partition better than chance?",
        "Dependence of F1 and F2 given the "
        f"pseudo-labels, for {_RANDOM_PARTITIONS} "
        "random partitions of the same sizes; lower is "
        "closer to conditional independence.",
        "normalised HSIC(F1, F2 | labels)",
        "partitions",
        draws,
        [(ours, "this run")],
    )
    return [matrix, chart], found


@dataclass(frozen=True)
class Shown:
    """The nodes on a map: rows `gids` [n] of a graph, their rows z [n, D], clusters [n] and nearest
    neighbours in the embedding, rows [n, k] with cosines [n, k].

    `pseudo` and `confidence` are of all nodes, `known`: whose labels may be shown.
    """

    gids: Tensor
    z: Tensor
    clusters: Tensor
    near: NDArray[np.int64]
    cosines: NDArray[np.float32]
    pseudo: Tensor | None = None
    confidence: Tensor | None = None
    known: Tensor | None = None


def map_chart(graph: Graph, degree: Tensor, shown: Shown, seed: int, near_note: str = "") -> Chart:
    """Two-dimensional maps of some rows of the embedding; `degree` of all nodes. Nodes are called
    by the user's ids where there are some.
    """
    gids = shown.gids
    rows = torch.nn.functional.normalize(shown.z, dim=1).numpy()
    views = _views(rows, seed)
    colours = {"cluster": classes(shown.clusters.tolist())}
    names = node_names(graph, gids.numpy())
    degrees = degree[gids]
    texts = [
        f"node {g}\ndegree {d}\ncluster {c}"
        for g, d, c in zip(names, degrees.tolist(), shown.clusters.tolist(), strict=True)
    ]
    y = graph.labels()
    if y is not None and shown.known is not None:
        seen = torch.where(shown.known[gids], y[gids], -1).tolist()
        called = class_names(graph)
        colours["label"] = classes(seen, called)
        texts = [
            f"{t}\nlabel {'not shown (test)' if v < 0 else called[v]}"
            for t, v in zip(texts, seen, strict=True)
        ]
    if shown.pseudo is not None and shown.confidence is not None:
        colours["pseudo-label"] = classes(shown.pseudo[gids].tolist())
        confidence = shown.confidence
        rank = confidence.double().argsort().argsort().double() / max(1, confidence.numel() - 1)
        colours["confidence"] = shades(
            rank[gids].tolist(), "rank of the confidence of the initial label"
        )
    colours["degree"] = shades(torch.log10(1.0 + degrees.double()).tolist(), "log10 of 1 + degree")
    labels = "" if shown.known is None else " Labels of test nodes are not shown."
    note = (
        f"{len(rows):,} nodes; each dot is one, and dots that are near have similar embeddings. "
        f"Far apart means little: the map is a flat picture of {shown.z.shape[1]} dimensions."
        f"{labels} Click a dot for its nearest neighbours{near_note}; drag to move, zoom with the "
        "buttons or Ctrl and the wheel."
    )
    near = _near(graph, gids, names, shown)
    return scatter("Map of the embedding", note, views, colours, texts, names, near)


def _views(rows: NDArray[np.float32], seed: int) -> dict[str, NDArray[Any]]:
    """{name: [n, 2]}: principal components, t-SNE, and UMAP where it is installed."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    flat = PCA(n_components=min(50, *rows.shape), random_state=seed).fit_transform(rows)
    views = {"PCA": flat[:, :2]}
    if len(rows) <= _FEW_FOR_TSNE:
        return views
    views["t-SNE"] = TSNE(init="pca", random_state=seed, perplexity=30).fit_transform(flat)
    try:
        import umap
    except ImportError:
        return views
    return views | {"UMAP": umap.UMAP(metric="cosine", random_state=seed).fit_transform(rows)}


def _near(graph: Graph, gids: Tensor, names: list[str], shown: Shown) -> dict[str, Any]:
    """Positions of the neighbours among the names of the dots, then of further nodes."""
    others = np.setdiff1d(shown.near, gids.numpy())
    order = np.concatenate([gids.numpy(), others])
    place = np.argsort(order)
    rows = place[np.searchsorted(order, shown.near, sorter=place)]
    return {
        "names": [*names, *node_names(graph, others)],
        "rows": rows.tolist(),
        "cosines": np.round(shown.cosines.astype(np.float64), 3).tolist(),
    }


def mistake_charts(
    z: Tensor, graph: Graph, topology: Topology, split: NodeSplit, cfg: Config, hops: int
) -> list[Chart]:
    """Confusion on validation nodes, and accuracy by degree beside smoothed features. The probe is
    fitted on training nodes.
    """
    y = graph.labels()
    assert y is not None
    blind = replace(split, test=torch.zeros_like(split.test))
    nodes = (split.val & (y >= 0)).nonzero().squeeze(1)
    if nodes.numel() == 0:
        return []
    ours = linear_probe(z, y, blind, cfg.eval, cfg.run.seed, num_classes=graph.num_classes).pred
    smoothed = linear_probe(
        smooth_features(graph.rows(), topology, hops),
        y,
        blind,
        cfg.eval,
        cfg.run.seed,
        num_classes=graph.num_classes,
    ).pred
    assert ours is not None and smoothed is not None
    charts = []
    if graph.num_classes <= _MOST_CLASSES:
        counts = torch.zeros(graph.num_classes, graph.num_classes).index_put_(
            (y[nodes], ours[nodes]), torch.tensor(1.0), accumulate=True
        )
        share = 100 * counts / counts.sum(1, keepdim=True).clamp(min=1)
        note = (
            "Percent of the validation nodes of a class (row) that the linear probe puts "
            "into each class (column)."
        )
        charts.append(
            heat(
                "Confusion",
                note,
                "predicted",
                "class",
                class_names(graph),
                class_names(graph),
                share.round().tolist(),
                text=True,
            )
        )
    degree = topology.degrees()[nodes]
    edges = torch.quantile(
        degree.double(), torch.linspace(0, 1, _DEGREE_GROUPS + 1, dtype=torch.float64)
    ).unique()
    group = torch.bucketize(degree.double(), edges[1:-1], right=True)
    names: list[str] = []
    rows: dict[str, list[float]] = {"CIMAGE": [], "smoothed": []}
    for g in group.unique().tolist():
        inside = nodes[group == g]
        low, high = int(degree[group == g].min()), int(degree[group == g].max())
        names.append(f"{low}" if low == high else f"{low} to {high}")
        for name, pred in (("CIMAGE", ours), ("smoothed", smoothed)):
            rows[name].append(100 * float((pred[inside] == y[inside]).double().mean()))
    note = (
        "Validation accuracy of the probe for nodes of few and of many neighbours; smoothed: "
        "features averaged over neighbours, without training."
    )
    return [*charts, bars("Accuracy by degree", note, "percent", names, rows)]


WINDOW = (-0.03, 1.03, -0.03, 1.03)
_MOST_IN_LEGEND = 24
_UNKNOWN = "#8a8f9855"
_PICKED = "#ea580c"  # seen on light and on dark


def scatter(
    title: str,
    note: str,
    views: Mapping[str, Any],
    colours: Mapping[str, Chart],
    about: Sequence[str],
    names: Sequence[str],
    near: Mapping[str, Any] | None = None,
) -> Chart:
    """Points in one of several views ([n, 2] each), coloured by `classes` or `shades`.

    `about` is what the pointer shows of each point, `names` are their ids. `near`: {"names": of the
    points and after them of further nodes, "rows" [n, k]: positions in these names, the nearest
    first, "cosines" [n, k]}.
    """
    data: list[dict[str, Any]] = [
        {"id": name, "about": text} for name, text in zip(names, about, strict=True)
    ]
    for name, points in views.items():
        place = np.asarray(points, dtype=np.float64)
        low, high = place.min(axis=0), place.max(axis=0)
        place = (place - low) / np.where(high > low, high - low, 1.0)
        for row, (a, b) in zip(data, place.tolist(), strict=True):
            row |= {f"{name} x": number(a, 4), f"{name} y": number(b, 4)}
    for name, property in colours.items():
        for row, value in zip(data, property["values"], strict=True):
            row[name] = value
    places = {name: {axis: _side(f"{name} {axis}", axis) for axis in ("x", "y")} for name in views}
    shown = {name: {"color": _colour(name, property)} for name, property in colours.items()}
    size = 16 if len(data) > 1500 else 26 if len(data) > 500 else 44
    is_near, is_picked = "indexof(near, datum.id) >= 0", "datum.id === focus"
    picked = {"color": {"value": _PICKED}}
    ring = {"type": "point", "filled": False, "clip": True, "size": 4 * size, "strokeWidth": 2}
    layers: list[Spec] = [
        {
            "mark": {"type": "circle", "size": size, "opacity": 0.85, "clip": True},
            "encoding": {"tooltip": {"field": "about"}},
        },
        {"transform": [{"filter": is_near}], "mark": ring, "encoding": picked},
        {
            "transform": [{"filter": is_picked}],
            "mark": ring | {"size": 12 * size, "strokeWidth": 3},
            "encoding": picked,
        },
    ]
    params: list[Spec] = [
        {"name": name, "value": value}
        for name, value in zip(("x0", "x1", "y0", "y1"), WINDOW, strict=True)
    ]
    params += [{"name": "focus", "value": ""}, {"name": "near", "value": []}]
    latest = dict(reversed(places.items()))
    made = chart(
        "scatter",
        title,
        note,
        data,
        480,
        [("map", latest), ("colour", shown)],
        is_wide=True,
        params=params,
        layer=layers,
        encoding={},
    )
    return made | {"near": near}


def _side(field: str, axis: str) -> Spec:
    scale = {"zero": False, "nice": False, "domain": [{"expr": f"{axis}{i}"} for i in (0, 1)]}
    return {"field": field, "type": "quantitative", "axis": None, "scale": scale}


def classes(values: Sequence[int], names: Sequence[str] | None = None) -> Chart:
    """A property of few values; negative ones stand for unknown."""
    last = max(values, default=-1)
    known = [str(i) for i in range(last + 1)] if names is None else list(names)
    return {
        "type": "nominal",
        "values": [known[v] if v >= 0 else None for v in values],
        "domain": [known[v] for v in sorted({v for v in values if v >= 0})],
    }


def shades(values: Sequence[float], label: str) -> Chart:
    return {"type": "quantitative", "values": [number(v, 4) for v in values], "label": label}


def _colour(name: str, property: Chart) -> Spec:
    if property["type"] == "quantitative":
        legend = {"title": property["label"], "gradientLength": 180}
        return {"field": literal(name), "type": "quantitative", "legend": legend}
    seen = property["domain"]
    room = 34 + 7 * min(24, max(map(len, seen), default=0))
    columns = {"columns": {"expr": f"max(1, floor(width / {room}))"}, "labelLimit": room - 24}
    shown = category(
        literal(name),
        scale={"domain": seen},
        legend=columns if len(seen) <= _MOST_IN_LEGEND else None,
    )
    return {"condition": {"test": f"isValid(datum['{name}'])", **shown}, "value": _UNKNOWN}
