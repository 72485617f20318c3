"""What must hold before money is spent; each message names the key.

Memory of one worker, part by part. Parts of one phase are held together; phases follow one another,
so the largest counts.

Sizes of tensors come from the played step (`play.py`), scaled by the rows of the real batch; the
formulas here are for what a small run cannot show: arrays of N entries, queues, the refresh. The
graph store is mapped and shared by all workers of a machine, and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from cimage_dist.ci import packed_size
from cimage_dist.config import Config
from cimage_dist.errors import UserError
from cimage_dist.nn.inference import MAX_FLOATS
from cimage_dist.planning.play import SECOND, Played, Rows
from cimage_dist.planning.sizes import GraphSize, masked_edges, neighbourhood, slices
from cimage_dist.pseudo.propagated import settings_for
from cimage_dist.train.initial import method_for

_FEW_EDGES = 64
_UNKNOWN_CLUSTERS = 20
_MANY_VALUES = 10**9
# Ways to initial labels that read all features at once.
CONVERTED_FEATURES = ("rdgae", "dinknet")
WHOLE_FEATURES = (*CONVERTED_FEATURES, "propagated")


def num_clusters(cfg: Config, size: GraphSize) -> int:
    """As `train/initial.py` counts them; a number of the usual order where the graph decides."""
    is_by_classes = cfg.cluster.num_clusters is None and size.classes >= 2
    return cfg.cluster.num_clusters or (size.classes if is_by_classes else _UNKNOWN_CLUSTERS)


def check(cfg: Config, size: GraphSize, edges: int) -> None:
    """Raise one UserError with everything that is wrong."""
    wrong = list(_complaints(cfg, size, edges))
    if wrong:
        raise UserError("this plan cannot run well:\n" + "\n".join(f"  - {text}" for text in wrong))


def _complaints(cfg: Config, size: GraphSize, edges: int) -> Iterator[str]:
    res, sampler, world = cfg.resources, cfg.sampler, cfg.resources.num_workers
    if edges // 2 < world:
        yield (
            f"resources.num_workers is {world:,}, but the graph has only {edges // 2:,} "
            "undirected edges to share out. Use fewer workers."
        )
    if sampler.fanouts:
        if sampler.batch_edges < world:
            yield (
                f"sampler.batch_edges is {sampler.batch_edges:,}, less than "
                f"resources.num_workers ({world:,}): some workers would have nothing to do. "
                "Raise it."
            )
        if sampler.batch_edges > edges // 2:
            yield (
                f"sampler.batch_edges is {sampler.batch_edges:,}, more than the "
                f"{edges // 2:,} undirected edges of the graph. Lower it."
            )
        if mismatch := cfg.fanout_mismatch():
            yield mismatch
        if sampler.loader_processes >= res.cpus_per_worker and sampler.loader_processes:
            yield (
                f"sampler.loader_processes is {sampler.loader_processes}, and the training "
                "process needs a CPU too, but resources.cpus_per_worker is "
                f"{res.cpus_per_worker}. Set "
                f"resources.cpus_per_worker={sampler.loader_processes + 1} or more."
            )
    elif min(masked_edges(cfg, size.nodes, edges), cfg.train.batch_edges) < world:
        yield (
            "train.batch_edges and mask.start_rate leave fewer masked edges in a step than "
            f"resources.num_workers ({world:,}). Use fewer workers."
        )
    if cfg.loss.uses_partition and cfg.ci.partition == "ci":
        yield from _label_complaints(cfg, size)


def _label_complaints(cfg: Config, size: GraphSize) -> Iterator[str]:
    clusters, ci = num_clusters(cfg, size), cfg.ci
    if ci.block_classes is not None and ci.block_size % ci.block_classes:
        yield (
            f"ci.block_classes is {ci.block_classes}, which does not divide ci.block_size "
            f"({ci.block_size})."
        )
    if ci.max_samples < 2 * clusters:
        yield (
            f"ci.max_samples is {ci.max_samples:,}: fewer than two for each of {clusters:,} "
            "clusters. Raise it."
        )


def advice(cfg: Config, size: GraphSize) -> list[str]:
    """What will run, but perhaps not as hoped."""
    found = []
    if cfg.resources.min_workers and cfg.resources.min_workers < cfg.resources.num_workers:
        found.append(
            "Elastic: batch and memory are those of the fewest workers, "
            f"resources.min_workers={cfg.resources.min_workers:,}."
        )
    sampler, world, clusters = cfg.sampler, cfg.resources.num_workers, num_clusters(cfg, size)
    if reason := cfg.unshared_work():
        found.append(reason[0].upper() + reason[1:])
    if sampler.fanouts and sampler.batch_edges % world:
        found.append(
            f"sampler.batch_edges={sampler.batch_edges:,} is no multiple of {world:,} workers: "
            "some wait for those with one edge more."
        )
    if sampler.fanouts and world > 1 and sampler.batch_edges // world < _FEW_EDGES:
        found.append(
            f"{sampler.batch_edges // world:,} edges per worker are little work between two "
            "reductions: raise sampler.batch_edges, or use fewer workers."
        )
    if -1 in sampler.fanouts:
        found.append(
            "sampler.fanouts has -1 (all neighbours): a batch is then as large as its hubs make "
            "it; the sizes below use the mean degree."
        )
    if sampler.fanouts and cfg.resources.device == "cuda" and not sampler.loader_processes:
        found.append("sampler.loader_processes is 0: the GPU waits while batches are sampled.")
    if cfg.loss.uses_partition and cfg.ci.partition == "ci":
        if clusters > 20 and cfg.ci.block_classes is None:
            found.append(
                f"ci.block_classes is unset with {clusters} clusters: most blocks hold few "
                "nodes of one class; 5 is advised."
            )
        if cfg.ci.max_samples < 2 * cfg.ci.block_size * clusters:
            found.append(
                f"ci.max_samples={cfg.ci.max_samples:,} is below twice a block for each cluster "
                f"({2 * cfg.ci.block_size * clusters:,})."
            )
        method = method_for(cfg.cluster.init, size.nodes)
        is_half = cfg.data.feature_dtype == "float16"
        if method in CONVERTED_FEATURES and is_half and size.nodes * size.features > _MANY_VALUES:
            found.append(
                f"cluster.init={method} converts all features in every worker's memory: make "
                "the labels once with `cimage cluster` and set cluster.from."
            )
    if cfg.data.holdout_edges == "link" and size.edges > 100_000_000:
        found.append(
            "data.holdout_edges=link makes a private copy of the training edges in every worker."
        )
    return found


Where = Literal["device", "host"]
Phase = Literal["always", "step", "refresh", "validation", "set-up"]

# Assumptions, not counted from tensors.
PROCESS_BYTES = 600_000_000  # an interpreter with torch, numba and Ray's worker
LOADER_BYTES = 100_000_000  # what a forked loader process makes its own
CUDA_BYTES = 1_500_000_000  # context, kernels and NCCL's buffers
# of the widest tensor, beside what is kept between the passes; near what single-threaded CPU steps
# peak at
WORKING_COPIES = 6
_ENTRY_BYTES = 16  # row and column of a feature that is not zero
_PIECE_NODES = 2048  # nodes embedded at a time in a refresh (train/embedder.py)
_GROUP_BLOCKS = 16  # HSIC blocks computed at a time (stats/hsic.py)
_MESSAGE_BYTES = 32  # both ends, two weights and their order (nn/propagate.py)
_POOLED = 0.2  # of the nodes are for training and validation, where the split is drawn
_FIT_ROWS, _ASSIGN_ROWS = 100_000, 50_000  # of k-means for the initial labels (train/initial.py)


class Part(NamedTuple):
    name: str
    where: Where
    phase: Phase
    size: float


@dataclass(frozen=True)
class Memory:
    parts: list[Part]

    def total(self, where: Where | None = None) -> int:
        """The largest phase on the device, on the host, or on both when they are the same."""
        mine = [part for part in self.parts if where in (None, part.where)]
        phase = {
            name: sum(part.size for part in mine if part.phase == name) for name in get_args(Phase)
        }
        return round(phase.pop("always") + max(phase.values()))


def estimate(
    cfg: Config, size: GraphSize, edges: int, rows: Rows, played: Played, use_cuda: bool
) -> Memory:
    numbers, kept = 4 * played.parameters, played.kept
    buckets = numbers if cfg.resources.num_workers > 1 else 0
    batch = cfg.train.accumulate * played.batch.at(rows)
    working = WORKING_COPIES * kept.widest_at(rows)
    held_out = 8 * (size.nodes + 1) + 4 * edges if cfg.data.holdout_edges == "link" else 0
    parts = [
        Part("weights and buffers", "device", "always", played.model_bytes),
        Part("gradients", "device", "always", numbers),
        Part("Adam's two moments", "device", "always", 2 * numbers),
        Part("gradient buckets", "device", "always", buckets),
        Part("CUDA context and NCCL (assumed)", "device", "always", CUDA_BYTES if use_cuda else 0),
        Part("batch: features, messages, pairs", "device", "step", batch),
        Part("activations kept for backward", "device", "step", kept.at(rows)),
        Part("working copies of both passes (assumed)", "device", "step", working),
        Part("process (assumed)", "host", "always", PROCESS_BYTES),
    ]
    if cfg.sampler.fanouts:
        parts += _sampled(cfg, size, edges, rows)
    if cfg.loss.uses_partition and cfg.ci.partition == "ci":
        parts += _refresh(cfg, size, edges)
    if cfg.train.validate_every:
        parts += _validation(cfg, size, edges)
    parts.append(Part("training edges without the held-out ones", "host", "always", held_out))
    return Memory([part._replace(size=round(part.size)) for part in parts if part.size])


def _sampled(cfg: Config, size: GraphSize, edges: int, rows: Rows) -> list[Part]:
    sampler, hops = cfg.sampler, len(cfg.sampler.fanouts)
    views = ("", SECOND) if cfg.loss.redundancy_weight > 0 else ("",)
    nodes = sum(rows[f"nodes within {hops}{view}"] for view in views)
    messages = sum(rows[f"messages within {hops - 1}{view}"] for view in views)
    # node ids and degrees; source, target and weight of messages; pairs with weights
    batch = 12 * nodes + 20 * messages + 20 * rows["pairs"]
    batches = batch * (sampler.loader_processes * sampler.prefetch + 1)
    copied = 8 * edges if sampler.backend in ("pyg-lib", "torch-sparse") else 0
    loaders = LOADER_BYTES * sampler.loader_processes
    wide = np.dtype(cfg.data.feature_dtype).itemsize + 4  # as stored, and in single precision
    read = nodes * size.features * wide
    if size.entries is not None:
        read = sum(rows[f"entries{view}"] for view in views) * (_ENTRY_BYTES + wide)
    return [
        Part("edges before every 16th row", "host", "always", size.nodes / 2),
        Part("sampler's 64-bit copy of the columns", "host", "always", copied),
        Part("loader processes (assumed)", "host", "always", loaders),
        Part("prefetched batches", "host", "step", batches),
        Part("feature rows being read", "host", "step", read),
    ]


def _refresh(cfg: Config, size: GraphSize, edges: int) -> list[Part]:
    """What conditional-independence scores need: labels of all nodes at the start, samples and
    statistics at a refresh (§7.4, §6.7).
    """
    world, ci, is_sampled = cfg.resources.num_workers, cfg.ci, bool(cfg.sampler.fanouts)
    width, scored = cfg.model.num_factors * cfg.model.factor_dim, score_width(cfg)
    sample, bank = refresh_rows(cfg, size)
    own = slices(min(2 * ci.max_samples, size.nodes) if is_sampled else size.nodes, world)[1]
    if is_sampled:
        nodes, _ = neighbourhood(min(_PIECE_NODES, own), cfg.sampler.fanouts, size.nodes, edges)
        embedding = sum(nodes) * (_row_bytes(size) + 4 * 3 * width)
    else:
        embedding = 4 * size.nodes * 4 * width
    method = method_for(cfg.cluster.init, size.nodes)
    is_whole = method in WHOLE_FEATURES
    # Sparse rows are read from the store, dense ones mapped unless they are to be converted.
    is_copied = cfg.data.feature_dtype == "float16" or size.entries is not None
    # K-means on propagated features takes a few columns of mapped dense rows at a time.
    is_mapped = method not in CONVERTED_FEATURES and size.entries is None
    converted = size.nodes * _row_bytes(size) if is_whole and is_copied and not is_mapped else 0
    first = size.nodes / 2 if method == "selfkmeans" and is_sampled else 0
    # Labels from a file are mapped, and three marks of a byte are made for each node.
    labels = (3 if cfg.cluster.init == "file" and is_sampled else 24) * size.nodes
    fitted = min(size.nodes / world, _FIT_ROWS if size.nodes <= _FIT_ROWS else _ASSIGN_ROWS)
    smoothed = _smoothed_bytes(size, world) if is_whole else 0
    solver = 8 * 8 * scored**2 + 8 * _GROUP_BLOCKS * packed_size(ci.block_size) * scored
    kept: Phase = "set-up" if is_sampled else "always"
    return [
        Part("labels and confidence of all nodes", "host", kept, labels),
        Part("edges before every 16th row, for the first encoder", "host", "set-up", first),
        Part("rows clustered at a time", "host", "set-up", 12 * fitted * width),
        Part("all features in single precision", "host", "set-up", converted),
        Part("smoothed columns, and rows made of them", "host", "set-up", smoothed),
        Part("embedding the sample", "device", "refresh", embedding),
        Part("own rows of h and z", "host", "refresh", 8 * own * width),
        Part("gathered sample, three copies", "host", "refresh", 12 * sample * width),
        Part("gathered bank, three copies", "host", "refresh", 12 * bank * width),
        Part("averaged HSIC statistics", "host", "always", 8 * scored**2 if ci.average else 0),
        Part("HSIC statistics and solver", "host", "refresh", solver),
    ]


def _validation(cfg: Config, size: GraphSize, edges: int) -> list[Part]:
    """Every layer for all nodes, a share of the rows on each rank (`nn/inference.py`); a rank reads
    the features of its share once and keeps them.
    """
    world, width = cfg.resources.num_workers, cfg.model.num_factors * cfg.model.factor_dim
    own, layer = slices(size.nodes, world)[1], 4 * size.nodes * width
    whole = layer if world > 1 else 0  # one rank's share is the layer
    if cfg.model.propagation == "routing":
        messages = 4 * 4 * min(MAX_FLOATS, edges / world * width)
        whole += layer  # with factors of length one
    else:
        messages = _MESSAGE_BYTES * edges / world
    by_links = cfg.train.validate_by == "link" or (
        cfg.train.validate_by == "auto" and cfg.data.holdout_edges == "link"
    )
    scored = layer if by_links else 12 * _POOLED * size.nodes * width
    features = own * _row_bytes(size)
    return [
        Part("features of its share of the nodes, to validate", "host", "always", features),
        Part("all rows of a layer", "device", "validation", whole),
        Part("its share of three layers", "device", "validation", 12 * own * width),
        Part("messages into its share", "device", "validation", messages),
        Part("rows that are scored", "host", "validation", scored),
    ]


def _row_bytes(size: GraphSize) -> float:
    """A row of features in single precision."""
    if size.entries_per_node is None:
        return 4.0 * size.features
    return size.entries_per_node * (_ENTRY_BYTES + 4)


def _smoothed_bytes(size: GraphSize, world: int) -> float:
    """A worker's columns of all nodes, and its rows where these are others."""
    width = min(size.features, settings_for(size.nodes).width)
    return (4 if world == 1 else 8) * size.nodes * width / world


def refresh_rows(cfg: Config, size: GraphSize) -> tuple[int, int]:
    """Rows of all ranks that a refresh gathers: sample of the scores, bank of the growth."""
    bank = min(cfg.cluster.bank_size, size.nodes) if cfg.cluster.growth == "any" else 0
    return min(cfg.ci.max_samples, size.nodes), bank


def score_width(cfg: Config) -> int:
    """D: columns that the scores look at."""
    return cfg.model.num_factors * (cfg.model.factor_dim if cfg.ci.features == "channel" else 1)
