"""What must hold before money is spent; each message names the key."""

from __future__ import annotations

from collections.abc import Iterator

from cimage_dist.config import Config
from cimage_dist.errors import UserError
from cimage_dist.planning.batch import masked_edges
from cimage_dist.planning.sizes import GraphSize
from cimage_dist.train.initial import method_for

_FEW_EDGES = 64
_UNKNOWN_CLUSTERS = 20
_MANY_VALUES = 10**9
WHOLE_FEATURES = ("rdgae", "dinknet", "propagated")  # ways to initial labels that read all features at once


def num_clusters(cfg: Config, size: GraphSize) -> int:
    """As `train/initial.py` counts them; where they are to be estimated from the graph, a number of the usual order."""
    return cfg.cluster.num_clusters or (size.classes if cfg.cluster.num_clusters is None and size.classes >= 2 else _UNKNOWN_CLUSTERS)


def check(cfg: Config, size: GraphSize, edges: int) -> None:
    """Raise one UserError with everything that is wrong."""
    wrong = list(_complaints(cfg, size, edges))
    if wrong:
        raise UserError("this plan cannot run well:\n" + "\n".join(f"  - {text}" for text in wrong))


def _complaints(cfg: Config, size: GraphSize, edges: int) -> Iterator[str]:
    res, sampler, world = cfg.resources, cfg.sampler, cfg.resources.num_workers
    if edges // 2 < world:
        yield f"resources.num_workers is {world:,}, but the graph has only {edges // 2:,} undirected edges to share out. Use fewer workers."
    if sampler.fanouts:
        if sampler.batch_edges < world:
            yield (
                f"sampler.batch_edges is {sampler.batch_edges:,}, less than resources.num_workers ({world:,}): some workers would have nothing to do. Raise it."
            )
        if sampler.batch_edges > edges // 2:
            yield f"sampler.batch_edges is {sampler.batch_edges:,}, more than the {edges // 2:,} undirected edges of the graph. Lower it."
        if mismatch := cfg.fanout_mismatch():
            yield mismatch
        if sampler.loader_processes >= res.cpus_per_worker and sampler.loader_processes:
            yield (
                f"sampler.loader_processes is {sampler.loader_processes}, and the training process needs a CPU too, but resources.cpus_per_worker is "
                f"{res.cpus_per_worker}. Set resources.cpus_per_worker={sampler.loader_processes + 1} or more."
            )
    elif min(masked_edges(cfg, size.nodes, edges), cfg.train.batch_edges) < world:
        yield f"train.batch_edges and mask.start_rate leave fewer masked edges in a step than resources.num_workers ({world:,}). Use fewer workers."
    if cfg.loss.uses_partition and cfg.ci.partition == "ci":
        yield from _label_complaints(cfg, size)


def _label_complaints(cfg: Config, size: GraphSize) -> Iterator[str]:
    clusters, ci = num_clusters(cfg, size), cfg.ci
    if ci.block_classes is not None and ci.block_size % ci.block_classes:
        yield f"ci.block_classes is {ci.block_classes}, which does not divide ci.block_size ({ci.block_size})."
    if ci.max_samples < 2 * clusters:
        yield f"ci.max_samples is {ci.max_samples:,}: fewer than two for each of {clusters:,} clusters. Raise it."


def advice(cfg: Config, size: GraphSize) -> list[str]:
    """What will run, but perhaps not as hoped."""
    found = []
    if cfg.resources.min_workers and cfg.resources.min_workers < cfg.resources.num_workers:
        found.append(f"Elastic: batch and memory are those of the fewest workers, resources.min_workers={cfg.resources.min_workers:,}.")
    sampler, world, clusters = cfg.sampler, cfg.resources.num_workers, num_clusters(cfg, size)
    if not sampler.fanouts and world > 1:
        found.append("Full-graph training gives the same numbers on every number of workers, but no speed: set sampler.fanouts to share out the work.")
    if sampler.fanouts and sampler.batch_edges % world:
        found.append(f"sampler.batch_edges={sampler.batch_edges:,} is no multiple of {world:,} workers: some wait for those with one edge more.")
    if sampler.fanouts and world > 1 and sampler.batch_edges // world < _FEW_EDGES:
        found.append(
            f"{sampler.batch_edges // world:,} edges per worker are little work between two reductions: raise sampler.batch_edges, or use fewer workers."
        )
    if -1 in sampler.fanouts:
        found.append("sampler.fanouts has -1 (all neighbours): a batch is then as large as its hubs make it; the sizes below use the mean degree.")
    if sampler.fanouts and cfg.resources.device == "cuda" and not sampler.loader_processes:
        found.append("sampler.loader_processes is 0: the GPU waits while batches are sampled.")
    if cfg.loss.uses_partition and cfg.ci.partition == "ci":
        if clusters > 20 and cfg.ci.block_classes is None:
            found.append(f"ci.block_classes is unset with {clusters} clusters: most blocks hold few nodes of one class; 5 is advised.")
        if cfg.ci.max_samples < 2 * cfg.ci.block_size * clusters:
            found.append(f"ci.max_samples={cfg.ci.max_samples:,} is below twice a block for each cluster ({2 * cfg.ci.block_size * clusters:,}).")
        method = method_for(cfg.cluster.init, size.nodes)
        if method in WHOLE_FEATURES and cfg.data.feature_dtype == "float16" and size.nodes * size.features > _MANY_VALUES:
            found.append(
                f"cluster.init={method} converts all features in every worker's memory: make the labels once with `cimage cluster` and set cluster.from."
            )
    if cfg.data.holdout_edges == "link" and size.edges > 100_000_000:
        found.append("data.holdout_edges=link makes a private copy of the training edges in every worker.")
    return found
