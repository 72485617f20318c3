"""The plan of a run: sizes, steps, memory and communication of one worker, before anything
starts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from cimage_dist.ci.hsic import repeats_for
from cimage_dist.ci.kernels import packed_size
from cimage_dist.config import Config
from cimage_dist.errors import UserError
from cimage_dist.planning.memory import (
    Memory,
    advice,
    check,
    estimate,
    num_clusters,
    refresh_rows,
    score_width,
)
from cimage_dist.planning.play import Call, Played, Rows, play
from cimage_dist.planning.sizes import (
    GraphSize,
    graph_size,
    masked_edges,
    rows_per_step,
    slices,
    training_edges,
)
from cimage_dist.train.teleport import FALLBACK

_GB = 1e9


def make_plan(cfg: Config, memory_gb: float | None = None) -> dict[str, Any]:
    """Check the config, play a few steps of it, and scale them up. `memory_gb`: what a worker may
    use (on its device, where that is a GPU).
    """
    size = graph_size(cfg.data)
    edges = training_edges(size, cfg.data)
    model = cfg.model.sized(size.features, size.nodes, edges, len(cfg.sampler.fanouts))
    if model.teleport is None:
        model = replace(model, teleport=FALLBACK)  # what it will be makes no difference to a plan
    cfg = replace(cfg, model=model)
    check(cfg, size, edges)
    batches_per_epoch = _batches_per_epoch(cfg, size, edges)
    total_steps = math.ceil(batches_per_epoch * cfg.train.epochs / cfg.train.accumulate)
    res = cfg.resources
    # An elastic run that has shrunk has the same global batch on fewer workers: that is when memory
    # is short.
    shrunk = replace(cfg, resources=replace(res, num_workers=res.min_workers or res.num_workers))
    rows, found_by = rows_per_step(shrunk, size, edges, batches_per_epoch)
    played = play(cfg, size.features, num_clusters(cfg, size), rows, size.entries_per_node)
    use_cuda = res.device == "cuda" or (res.device == "auto" and torch.cuda.is_available())
    memory = estimate(shrunk, size, edges, rows, played, use_cuda)
    world = res.num_workers
    global_batch = (
        cfg.sampler.batch_edges
        if cfg.sampler.fanouts
        else math.ceil(masked_edges(cfg, size.nodes, edges) / batches_per_epoch)
    )
    plan: dict[str, Any] = {
        "graph": {
            "name": cfg.data.name,
            "nodes": size.nodes,
            "undirected_edges": size.edges // 2,
            "training_edges": edges // 2,
            "features": size.features,
            "classes": size.classes,
            "store_bytes": size.store_bytes,
            "from": size.origin,
        },
        "steps": {
            "global_batch_edges": global_batch,
            "edges_per_worker": [
                slices(global_batch, world)[0],
                slices(global_batch, shrunk.resources.num_workers)[1],
            ],
            "batches_per_epoch": batches_per_epoch,
            "batches_per_step": cfg.train.accumulate,
            "total_steps": total_steps,
            "refreshes": _refreshes(cfg, total_steps),
        },
        "batch": {**_batch(rows), "found_by": found_by},
        "model": {
            "parameters": played.parameters,
            "bytes": played.model_bytes,
            "checkpoint_bytes": played.checkpoint_bytes,
        },
        "memory": _memory(memory, use_cuda),
        "step_collectives": summarise(played.step, world),
        "refresh": _refresh(cfg, size, played),
        "redundancy": _redundancy(cfg, rows),
        "resources": {
            "workers": world,
            "cpus": world * res.cpus_per_worker,
            "gpus": world if use_cuda else 0,
            "disk_bytes_per_machine": size.store_bytes,
        },
        "notes": advice(cfg, size),
    }
    plan["verdict"] = _verdict(plan["memory"]["limiting_bytes"], memory_gb, use_cuda)
    return plan


def _batches_per_epoch(cfg: Config, size: GraphSize, edges: int) -> int:
    if cfg.sampler.fanouts:
        return -(-(edges // 2) // cfg.sampler.batch_edges)
    return max(1, math.ceil(masked_edges(cfg, size.nodes, edges) / cfg.train.batch_edges))


def _refreshes(cfg: Config, total_steps: int) -> int:
    has_any = cfg.loss.uses_partition and cfg.ci.partition == "ci"
    return math.ceil(total_steps / cfg.ci.every_steps) if has_any else 0


def _batch(rows: dict[str, float]) -> dict[str, Any]:
    """Nodes and messages of the largest share."""
    nodes = [count for kind, count in rows.items() if kind.startswith("nodes")]
    messages = [count for kind, count in rows.items() if kind.startswith("messages")]
    return {
        "nodes": round(max(nodes)),
        "messages": round(max(messages)),
        "pairs": round(rows["pairs"]),
        "rows": {kind: round(n) for kind, n in rows.items()},
    }


def summarise(calls: Iterable[Call], world: int) -> dict[str, Any]:
    """Equal collectives together, and what each rank sends: twice its bytes for a ring all-reduce,
    its bytes to every other rank for a gather.
    """
    listed = list(calls)
    groups = [(call, len(list(same))) for call, same in itertools.groupby(sorted(listed))]
    reduced = sum(call.size for call in listed if call.operation == "all_reduce")
    gathered = sum(call.size for call in listed if call.operation == "all_gather")
    return {
        "calls": [
            {
                "operation": call.operation,
                "times": times,
                "bytes_each": call.size,
                "dtype": call.dtype,
            }
            for call, times in groups
        ],
        "number": len(listed),
        "bytes_reduced": reduced,
        "bytes_sent_per_rank": round(2 * (world - 1) / world * reduced + (world - 1) * gathered),
    }


def _memory(memory: Memory, use_cuda: bool) -> dict[str, Any]:
    limiting = memory.total("device") if use_cuda else memory.total()
    return {
        "parts": [part._asdict() for part in memory.parts],
        "device_bytes": memory.total("device") if use_cuda else None,
        "host_bytes": memory.total("host") if use_cuda else memory.total(),
        "limiting_bytes": limiting,
    }


def _refresh(cfg: Config, size: GraphSize, played: Played) -> dict[str, Any] | None:
    """Reduced bytes as played; gathered ones and products by formula, because the played sample is
    small: n·D·4 bytes and nb·B(B+1)·D² flops (§7.4).
    """
    if not _refreshes(cfg, 1):
        return None
    world, ci, width = (
        cfg.resources.num_workers,
        cfg.ci,
        cfg.model.num_factors * cfg.model.factor_dim,
    )
    sample, bank = refresh_rows(cfg, size)
    blocks = sample // ci.block_size * repeats_for(sample, ci.block_size, ci.repeats)
    done = summarise(played.refresh, world)
    return {
        "every_steps": ci.every_steps,
        "sample": sample,
        "blocks": blocks,
        "collectives": done["number"],
        "bytes_reduced": done["bytes_reduced"],
        # rows with their label and global id (16 bytes); the bank's rows with their label
        "bytes_gathered": 0
        if world == 1
        else sample * (4 * score_width(cfg) + 16) + bank * (4 * width + 8),
        "flops_all_workers": 2 * blocks * packed_size(ci.block_size) * score_width(cfg) ** 2,
        "nodes_embedded_per_worker": slices(
            min(2 * ci.max_samples, size.nodes) if cfg.sampler.fanouts else size.nodes, world
        )[1],
    }


def _redundancy(cfg: Config, rows: Rows) -> dict[str, Any] | None:
    """The redundancy loss's own work on the worker with the largest share, per batch of n rows.

    A product of 2nD² flops per view and pass, 8nD².
    """
    if cfg.loss.redundancy_weight == 0:
        return None
    width, n = cfg.model.num_factors * cfg.model.factor_dim, rows["endpoints"]
    return {
        "views_encoded": 2,
        "rows_per_worker": round(n),
        "channels": width,
        "flops_per_worker": round(8 * n * width**2),
    }


def _verdict(needed: int, memory_gb: float | None, use_cuda: bool) -> str:
    """Against the limit given, else against this machine's GPU; a plan is often made elsewhere, so
    that one only informs.
    """
    what = "GPU memory" if use_cuda else "memory"
    if memory_gb is not None:
        if needed > memory_gb * _GB:
            raise UserError(
                f"a worker needs about {needed / _GB:.1f} GB of {what}, more than --memory "
                f"{memory_gb:g}. Lower sampler.batch_edges or sampler.fanouts, "
                "use more workers (resources.num_workers), or train.precision=bfloat16."
            )
        return f"fits: about {needed / _GB:.1f} of {memory_gb:g} GB {what} per worker"
    if use_cuda and torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0).total_memory
        return (
            f"{'fits' if needed <= here else 'does not fit'}: about {needed / _GB:.1f} GB, "
            f"the GPU of this machine has {here / _GB:.1f}"
        )
    return f"about {needed / _GB:.1f} GB of {what} per worker; no limit known (give --memory GB)"
