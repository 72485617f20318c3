"""Exact full-graph embedding, layer by layer, in ranges of target rows so that memory stays
bounded.

`encode_graph` keeps every layer in memory; `encode_share` divides the rows of each layer over
ranks. `encode_rows` gives some rows of one layer from a reader of the layer before it,
wherever that is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cimage_dist.config import ModelConfig
from cimage_dist.nn.encoder import Encoder, Encoding
from cimage_dist.nn.projection import placed
from cimage_dist.nn.propagate import RowPropagation, gcn_smooth
from cimage_dist.nn.routing import normalize_factors, use_fused
from cimage_dist.types import EdgeList, Features, Topology

# Gathered floats per range: 2^24 is 64 MB a copy; a few copies are alive at once.
MAX_FLOATS = 1 << 24


def target_ranges(
    topology: Topology, width: int, max_floats: int = MAX_FLOATS, within: slice | None = None
) -> Iterator[slice]:
    """Consecutive row ranges holding at most max_floats / width messages each (a single larger row
    stands alone), of all rows or those `within`.
    """
    limit = max(1, max_floats // width)
    begin, last = (0, topology.num_nodes) if within is None else (within.start, within.stop)
    while begin < last:
        end = (
            int(torch.searchsorted(topology.indptr, topology.indptr[begin] + limit, right=True)) - 1
        )
        end = min(max(end, begin + 1), begin + limit, last)
        yield slice(begin, end)
        begin = end


def range_edges(topology: Topology, rows: slice, device: torch.device) -> EdgeList:
    """Messages into a range of rows; dst counts from its start."""
    first, last = int(topology.indptr[rows.start]), int(topology.indptr[rows.stop])
    dst = torch.repeat_interleave(topology.indptr[rows.start : rows.stop + 1].diff())
    return EdgeList(
        topology.indices[first:last].to(torch.int64).to(device), dst.to(device), topology.num_nodes
    )


def encode_graph(
    encoder: Encoder, x: Features, topology: Topology, max_floats: int = MAX_FLOATS
) -> Encoding:
    """(h, z) of all nodes on the unmasked topology, equal to the encoder's own forward in eval
    mode.
    """
    return encode_share(
        encoder, x, topology, slice(0, topology.num_nodes), lambda rows: rows, max_floats
    )


@torch.no_grad()
def encode_share(
    encoder: Encoder,
    x: Features,
    topology: Topology,
    rows: slice,
    share: Callable[[Tensor], Tensor],
    max_floats: int = MAX_FLOATS,
) -> Encoding:
    """(h, z) of a range of nodes, from their own features x [T, F] and the layers' rows of the
    others: `share` gives all rows [N, K, C] of a layer for this range's. Collective where it is.
    """
    was_training = encoder.training
    encoder.eval()
    cfg = encoder.cfg
    h = start = _projected(encoder, x, max_floats)
    advance = _layer_of(encoder, topology, rows, start, max_floats)
    for number in range(1, cfg.num_layers + 1):
        h = advance(share(h), number)
    z = h
    if cfg.tail and cfg.propagation == "routing":
        z = _smoothed(share(h), topology, rows, max_floats)
    encoder.train(was_training)
    return Encoding(h, z)


def _projected(encoder: Encoder, x: Features, max_floats: int) -> Tensor:
    """[T, K, C]"""
    weight, cfg = encoder.linear.weight, encoder.cfg
    step = max(1, max_floats // max(cfg.num_factors * cfg.factor_dim, x.shape[1]))
    parts = x.split(step) if x.shape[0] else [x]
    return torch.cat([encoder.project(placed(part, weight.device, weight.dtype)) for part in parts])


def _layer_of(
    encoder: Encoder, topology: Topology, rows: slice, start: Tensor, max_floats: int
) -> Callable[[Tensor, int], Tensor]:
    """A layer: all rows of the layer before [N, K, C] and its number -> those of the range; `start`
    are the range's rows of h⁰.
    """
    device, cfg = start.device, encoder.cfg
    if cfg.propagation == "gcn":
        # Nothing of size messages x width is made: all targets at once.
        degree = (topology.degrees() + 1).to(device)
        edges = range_edges(topology, rows, device)
        step = RowPropagation(edges, degree, rows, encoder.alpha, start.dtype)
        if encoder.edges is None:
            return lambda h, number: step(h, start)
        cut, nonlinear, begin = encoder.num_linear, encoder.edges, start[:, : encoder.num_linear]

        def both(h: Tensor, number: int) -> Tensor:
            own = h[rows, cut:]
            if number <= nonlinear.LAYERS:
                own = nonlinear.after(gcn_smooth(h[:, cut:], edges, degree, rows), own, number)
            return encoder.join(step(h[:, :cut], begin), own, number)

        return both
    if use_fused(start, cfg.routing_backend):  # here neither
        edges = range_edges(topology, rows, device)
        return lambda h, number: encoder.layer(h, edges, number, start, rows)
    width = cfg.num_factors * cfg.factor_dim

    def advance(h: Tensor, number: int) -> Tensor:
        unit = normalize_factors(h)
        parts = [
            encoder.layer(
                unit,
                range_edges(topology, part, device),
                number,
                start[part.start - rows.start : part.stop - rows.start],
                part,
                is_unit=True,
            )
            for part in target_ranges(topology, width, max_floats, rows)
        ]
        return torch.cat(parts) if parts else start[:0]

    return advance


def _smoothed(h: Tensor, topology: Topology, rows: slice, max_floats: int) -> Tensor:
    degree = (topology.degrees() + 1).to(h.device)
    parts = [
        gcn_smooth(h, range_edges(topology, part, h.device), degree, part)
        for part in target_ranges(topology, h[:1].numel(), max_floats, rows)
    ]
    return torch.cat(parts) if parts else h[:0]


def embed_graph(encoder: Encoder, x: Features, topology: Topology) -> Tensor:
    """The embedding: z with all K factors, float32 [N, K*C] on the CPU; row i is global node i."""
    return encode_graph(encoder, x, topology).z.flatten(1).float().cpu()


def reach(cfg: ModelConfig) -> int:
    """Hops from which a node's embedding takes information."""
    return cfg.num_layers + (cfg.tail and cfg.propagation == "routing")


def num_stages(cfg: ModelConfig) -> int:
    """Passes over all rows: the projection, each layer, the tail of a routing encoder."""
    return 1 + reach(cfg)


def closed_range(topology: Topology, rows: slice) -> tuple[Tensor, EdgeList, slice]:
    """A range of rows and all that send messages to it, by themselves: their gids ascending, the
    messages in local ids, where the range is stored.

    Local ids ascend with gids, so sums along messages have the order they have on the whole graph.
    """
    edges = range_edges(topology, rows, torch.device("cpu"))
    gids, local = torch.unique(
        torch.cat([edges.src, torch.arange(rows.start, rows.stop)]), return_inverse=True
    )
    begin = int(local[edges.src.numel()])
    return (
        gids,
        EdgeList(local[: edges.src.numel()], edges.dst, gids.numel()),
        slice(begin, begin + rows.stop - rows.start),
    )


@torch.no_grad()
def encode_rows(
    encoder: Encoder,
    stage: int,
    rows: slice,
    topology: Topology,
    read: Callable[[Tensor], Features],
    read_start: Callable[[Tensor], Tensor] | None = None,
    max_floats: int = MAX_FLOATS,
) -> Iterator[Tensor]:
    """The output of a stage for a range of rows, a few at a time: float32 [n, K*C] on the CPU,
    equal to what `encode_graph` has there.

    Stage 0 projects the features, 1 .. num_layers are the layers, the one after smooths.
    `read(gids)` gives rows of the stage's input, gids ascending; `read_start` rows of stage 0,
    which an encoder with teleport asks for. The encoder must be in eval mode. How the range is cut
    depends on it and on max_floats alone.
    """
    assert not encoder.training
    cfg, weight = encoder.cfg, encoder.linear.weight
    width = cfg.num_factors * cfg.factor_dim
    if stage == 0:
        step = max(1, max_floats // max(width, encoder.linear.in_features))
        for begin in range(rows.start, rows.stop, step):
            x = read(torch.arange(begin, min(begin + step, rows.stop)))
            projected = encoder.project(placed(x, weight.device, weight.dtype))
            yield projected.flatten(1).float().cpu()
        return

    def factors(flat: Features) -> Tensor:
        assert isinstance(flat, Tensor)
        return flat.to(weight.device, weight.dtype).view(-1, cfg.num_factors, cfg.factor_dim)

    for part in target_ranges(topology, width, max_floats, rows):
        gids, edges, targets = closed_range(topology, part)
        h = factors(read(gids))
        edges = edges.to(weight.device)
        degree = (topology.indptr[gids + 1] - topology.indptr[gids] + 1).to(weight.device)
        if stage <= cfg.num_layers:
            start = factors(read_start(torch.arange(part.start, part.stop))) if read_start else None
            out = encoder.layer(h, edges, stage, start, targets, degree=degree)
        else:
            out = gcn_smooth(h, edges, degree, targets)
        yield out.flatten(1).float().cpu()
