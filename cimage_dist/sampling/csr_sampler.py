"""Neighbour sampling on row pointers and columns: hops, local ids and message weights (§11.1)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cimage_dist.errors import UserError
from cimage_dist.sampling import csr_select
from cimage_dist.sampling.csr_select import CsrGraph, Selection
from cimage_dist.sampling.hidden import HiddenEdges
from cimage_dist.sampling.seeds import IntArray

Engine = Literal["auto", "numpy", "numba"]
Select = Callable[[NDArray[np.int64], int], Selection]
Relabel = Callable[
    [NDArray[np.int64], NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.int64]]
]


@dataclass(frozen=True)
class SampledSubgraph:
    """What a sampler returns. n nodes, e messages, S seeds given.

    node_gid int64 [n]: the seeds without repeats in the order given, then each hop's new nodes,
    ascending inside a hop. src, dst int64 [e]: local ids of the message src -> dst, sorted by dst,
    hence also grouped by hop; ascending gid of src for one dst. entry int64 [e]: position of the
    message in `indices`. weight float32 [e]: visible degree / sampled of dst, 1 where nothing was
    left out. degree float32 [n]: expected visible degree: listed hidden edges taken off, of the
    others the visible share. seed_bid int64 [S]: local id of every seed as given, repeats included.
    nodes_per_hop: seeds, then new nodes of each hop. edges_per_hop: messages into the nodes of each
    hop but the last.
    """

    node_gid: NDArray[np.int64]
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    entry: NDArray[np.int64]
    weight: NDArray[np.float32]
    degree: NDArray[np.float32]
    seed_bid: NDArray[np.int64]
    nodes_per_hop: tuple[int, ...]
    edges_per_hop: tuple[int, ...]


def resolve_engine(engine: Engine = "auto") -> Literal["numpy", "numba"]:
    """numba where it is installed (measured about twice as fast, see benchmarks/sampling.py), else
    numpy; both give the same subgraph.
    """
    has_numba = importlib.util.find_spec("numba") is not None
    if engine == "numba" and not has_numba:
        raise UserError(
            "the compiled sampler was asked for, but numba is not installed. Install it with "
            "`pip install numba`, or use the numpy engine."
        )
    return "numba" if engine != "numpy" and has_numba else "numpy"


def check_fanouts(fanouts: Sequence[int]) -> list[int]:
    bad = [f for f in fanouts if f != -1 and not 1 <= f <= csr_select.MAX_FANOUT]
    if bad or not len(fanouts):
        shown = f"holds {bad[0]}" if bad else "is empty"
        raise UserError(
            f"sampler.fanouts {shown}. Give one number per hop, each between 1 and "
            f"{csr_select.MAX_FANOUT}, or -1 for all neighbours: [10, 5]."
        )
    return [int(f) for f in fanouts]


def relabel(
    known: NDArray[np.int64], columns: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(gids not in `known`, ascending; local id of every column), where known[i] has local id i and
    new ones follow.
    """
    distinct, inverse = np.unique(columns, return_inverse=True)
    order = np.argsort(known)
    place = np.searchsorted(known, distinct, sorter=order)
    candidate = order[np.minimum(place, len(known) - 1)]
    is_known = known[candidate] == distinct
    local = np.where(is_known, candidate, len(known) + np.cumsum(~is_known) - 1)
    return distinct[~is_known], local[inverse]


def expand(
    graph: CsrGraph,
    seeds: NDArray[np.int64],
    fanouts: Sequence[int],
    select: Select,
    relabel: Relabel,
    hidden: HiddenEdges | None,
    rescale: bool,
) -> SampledSubgraph:
    """Grow the subgraph hop by hop with `select(targets, fanout)`; every node is a target once, in
    the hop after its first appearance.
    """
    num_nodes = len(graph.indptr) - 1
    if seeds.size and not 0 <= seeds.min() <= seeds.max() < num_nodes:
        bad = seeds[(seeds < 0) | (seeds >= num_nodes)]
        raise UserError(
            f"{bad.size} of {seeds.size} seed nodes are outside the graph of {num_nodes} nodes, "
            f"the first is {bad[0]}. Node ids run from 0."
        )
    distinct, first, inverse = np.unique(seeds, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    nodes = distinct[order]
    nodes_per_hop, edges_per_hop = [len(nodes)], []
    src, dst, entry, weight = [], [], [], []
    begin = 0
    for fanout in fanouts:
        targets = nodes[begin:]
        selection = select(targets, fanout)
        columns = graph.indices[selection.entry].astype(np.int64)
        fresh, local = relabel(nodes, columns)
        src.append(local)
        dst.append(np.repeat(np.arange(begin, len(nodes)), selection.kept))
        entry.append(selection.entry)
        weight.append(np.repeat(selection.visible / np.maximum(selection.kept, 1), selection.kept))
        begin = len(nodes)
        nodes = np.concatenate([nodes, fresh])
        nodes_per_hop.append(len(fresh))
        edges_per_hop.append(len(columns))
    # The rows of the last hop are not read, so their visible degree is an expectation. So is that
    # of all others: a node must have one degree whether it is at the rim of a rank's subgraph or
    # inside another's.
    degree = graph.indptr[nodes + 1] - graph.indptr[nodes]
    visible = degree if hidden is None else hidden.expected_visible(nodes, degree)
    all_weights = np.concatenate(weight).astype(np.float32)
    return SampledSubgraph(
        node_gid=nodes,
        src=np.concatenate(src),
        dst=np.concatenate(dst),
        entry=np.concatenate(entry),
        weight=all_weights if rescale else np.ones_like(all_weights),
        degree=visible.astype(np.float32),
        seed_bid=rank[inverse],
        nodes_per_hop=tuple(nodes_per_hop),
        edges_per_hop=tuple(edges_per_hop),
    )


def sample(
    indptr: IntArray,
    indices: IntArray,
    seeds: NDArray[np.int64],
    fanouts: Sequence[int],
    *,
    key: int,
    hidden: HiddenEdges | None = None,
    rescale: bool = True,
    engine: Engine = "auto",
) -> SampledSubgraph:
    """Sample the neighbourhoods of `seeds` (gids, repeats allowed), fanouts[h] neighbours without
    replacement in hop h, -1 for all.

    `key` holds (seed, step): the draw of a node is a function of the key, its gid and the hidden
    edges, so it is the same whichever batch, rank or process asks. Hidden edges are taken away
    before the draw, so a fan-out counts visible neighbours. Weights follow §11.1, deg(v) /
    sampled(v) with global degrees of the visible graph; `csr_select` states the distribution and
    when a degree is exact.
    """
    fanouts = check_fanouts(fanouts)
    graph = CsrGraph(np.asarray(indptr), np.asarray(indices))
    select, labels = engine_functions(engine)
    keys, bound = csr_select.draw_keys(key), csr_select.list_bound(fanouts)
    wanted = np.asarray(seeds, dtype=np.int64)
    return expand(
        graph,
        wanted,
        fanouts,
        lambda targets, fanout: select(graph, targets, fanout, bound, keys, hidden),
        labels,
        hidden,
        rescale,
    )


def engine_functions(engine: Engine) -> tuple[Callable[..., Selection], Relabel]:
    """(select, relabel) of an engine."""
    if resolve_engine(engine) == "numba":
        from cimage_dist.sampling import csr_numba

        return csr_numba.select, csr_numba.relabel
    return csr_select.select, relabel
