"""The plan of a run: sizes, steps, memory and communication of one worker, before anything starts;
and the plan as a few tables on the terminal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cimage_dist.ci import packed_size
from cimage_dist.ci.hsic import repeats_for
from cimage_dist.config import Config
from cimage_dist.errors import UserError
from cimage_dist.nn.inference import num_stages
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
from cimage_dist.train.step import batches_per_epoch
from cimage_dist.train.teleport import FALLBACK

_GB = 1e9


def make_plan(cfg: Config, memory_gb: float | None = None) -> dict[str, Any]:
    """Check the config, play a few steps of it, and scale them up. `memory_gb`: what a worker may
    use (on its device, where that is a GPU).
    """
    size = graph_size(cfg.data)
    edges = training_edges(size, cfg.data)
    hops, has_edge_loss = len(cfg.sampler.fanouts), cfg.loss.structure_weight > 0
    model = cfg.model.sized(size.features, size.nodes, edges, hops, has_edge_loss)
    if model.teleport is None:
        model = replace(model, teleport=FALLBACK)  # what it will be makes no difference to a plan
    cfg = replace(cfg, model=model, data=cfg.data.settled(size.classes > 0, size.edges // 2))
    check(cfg, size, edges)
    per_epoch = batches_per_epoch(cfg, size.nodes, edges)
    total_steps = cfg.total_steps(per_epoch)
    res = cfg.resources
    # An elastic run that has shrunk has the same global batch on fewer workers: that is when memory
    # is short.
    shrunk = replace(cfg, resources=replace(res, num_workers=res.min_workers or res.num_workers))
    rows, found_by = rows_per_step(shrunk, size, edges, per_epoch)
    played = play(cfg, size.features, num_clusters(cfg, size), rows, size.entries_per_node)
    use_cuda = res.device == "cuda" or (res.device == "auto" and torch.cuda.is_available())
    memory = estimate(shrunk, size, edges, rows, played, use_cuda)
    world = res.num_workers
    global_batch = cfg.sampler.batch_edges
    if not cfg.sampler.fanouts:
        global_batch = math.ceil(masked_edges(cfg, size.nodes, edges) / per_epoch)
    most = slices(global_batch, shrunk.resources.num_workers)[1]
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
            "edges_per_worker": [slices(global_batch, world)[0], most],
            "batches_per_epoch": per_epoch,
            "passes": round(total_steps * cfg.train.accumulate / per_epoch, 3),
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
        "validation": _validation(cfg, size, edges, total_steps, played),
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
    keys = ("operation", "times", "bytes_each", "dtype")
    rows = [(call.operation, times, call.size, call.dtype) for call, times in groups]
    return {
        "calls": [dict(zip(keys, row, strict=True)) for row in rows],
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
    world, ci = cfg.resources.num_workers, cfg.ci
    width, scored = cfg.model.num_factors * cfg.model.factor_dim, score_width(cfg)
    sample, bank = refresh_rows(cfg, size)
    # rows with their label and global id (16 bytes); the bank's rows with their label
    gathered = sample * (4 * scored + 16) + bank * (4 * width + 8)
    embedded = min(2 * ci.max_samples, size.nodes) if cfg.sampler.fanouts else size.nodes
    blocks = sample // ci.block_size * repeats_for(sample, ci.block_size, ci.repeats)
    done = summarise(played.refresh, world)
    return {
        "every_steps": ci.every_steps,
        "sample": sample,
        "blocks": blocks,
        "collectives": done["number"],
        "bytes_reduced": done["bytes_reduced"],
        "bytes_gathered": 0 if world == 1 else gathered,
        "flops_all_workers": 2 * blocks * packed_size(ci.block_size) * scored**2,
        "nodes_embedded_per_worker": slices(embedded, world)[1],
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


def _validation(
    cfg: Config, size: GraphSize, edges: int, total_steps: int, played: Played
) -> dict[str, Any] | None:
    """Encoding all nodes, a share on each worker. Seconds are of one core like this machine's; the
    fits of the probe, or the ranking of the held-out edges, come on top.
    """
    every = cfg.train.validate_every
    if every == 0:
        return None
    world, width = cfg.resources.num_workers, cfg.model.num_factors * cfg.model.factor_dim
    own, stages = slices(size.nodes, world)[1], num_stages(cfg.model)
    sent = stages * (edges / world + own)
    return {
        "every_steps": every,
        "times": math.ceil(total_steps / every),
        "rows_per_worker": own,
        "messages_per_worker": math.ceil(edges / world),
        "bytes_received_per_rank": 4 * width * (stages - 1) * (size.nodes - own),
        "core_seconds_per_worker": float(f"{own * played.row_s + sent * played.message_s:.2g}"),
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


def readable(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def print_plan(plan: dict[str, Any]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in [*_size_lines(plan), *_communication_lines(plan)]:
        table.add_row(name, text)
    console.print(table)
    console.print()
    console.print(_memory_table(plan["memory"]))
    console.print()
    console.print(_collectives_table(plan["step_collectives"]))
    for note in plan["notes"]:
        console.print(f"note: {note}", highlight=False)
    console.print(f"[bold]{plan['verdict']}[/bold]", highlight=False)


def _size_lines(plan: dict[str, Any]) -> list[tuple[str, str]]:
    names = ("graph", "steps", "batch", "model", "resources")
    graph, steps, batch, model, needs = (plan[name] for name in names)
    low, high = steps["edges_per_worker"]
    gpus = f"{needs['gpus']:,} GPUs, " if needs["gpus"] else ""
    lines = {
        "graph": f"{graph['name']}: {graph['nodes']:,} nodes, {graph['undirected_edges']:,} "
        f"undirected edges, {graph['features']:,} features ({graph['from']})",
        "store": f"{readable(graph['store_bytes'])} on every machine, mapped once and shared by "
        "its workers",
        "needs": f"{needs['workers']:,} workers: {gpus}{needs['cpus']:,} CPUs",
        "global batch": f"{steps['global_batch_edges']:,} edges; {low:,} to {high:,} per worker",
        "steps": f"{steps['total_steps']:,} of {steps['batches_per_step']:,} batches each; "
        f"{steps['batches_per_epoch']:,} batches per epoch, {steps['passes']:,g} epochs in all",
        "mini-batch": f"{batch['nodes']:,} nodes, {batch['messages']:,} messages, "
        f"{batch['pairs']:,} pairs per worker ({batch['found_by']})",
        "model": f"{model['parameters']:,} parameters; a checkpoint takes "
        f"{readable(model['checkpoint_bytes'])}",
    }
    return list(lines.items())


def _communication_lines(plan: dict[str, Any]) -> list[tuple[str, str]]:
    step, refresh = plan["step_collectives"], plan["refresh"]
    per_step = (
        f"{step['number']} collectives, {readable(step['bytes_reduced'])} reduced; "
        f"{readable(step['bytes_sent_per_rank'])} sent per rank in a ring"
    )
    lines = [("each step", per_step)]
    redundancy = plan["redundancy"]
    if redundancy:
        text = (
            "two views encoded in each batch; products of "
            f"{redundancy['rows_per_worker']:,} rows by {redundancy['channels']:,}² channels, "
            f"{redundancy['flops_per_worker'] / 1e9:,.1f} GFLOP per worker"
        )
        lines.append(("redundancy", text))
    if refresh:
        text = (
            f"every {refresh['every_steps']:,} steps ({plan['steps']['refreshes']:,} times): "
            f"about {refresh['collectives']} collectives, {readable(refresh['bytes_reduced'])} "
            "reduced, "
            f"{readable(refresh['bytes_gathered'])} gathered; "
            f"{refresh['nodes_embedded_per_worker']:,} nodes embedded per worker, "
            f"{refresh['flops_all_workers'] / 1e9:,.1f} GFLOP of products over all workers"
        )
        lines.append(("refresh", text))
    if validation := plan["validation"]:
        text = (
            f"every {validation['every_steps']:,} steps ({validation['times']:,} times): "
            f"{validation['rows_per_worker']:,} nodes encoded per worker, "
            f"{readable(validation['bytes_received_per_rank'])} received; about "
            f"{validation['core_seconds_per_worker']:g} s on a core like this one, and the scoring"
        )
        lines.append(("validation", text))
    return lines


def _memory_table(memory: dict[str, Any]) -> Table:
    is_split = memory["device_bytes"] is not None
    table = Table("memory of one worker", "where", "when", "size", box=None, pad_edge=False)
    table.columns[-1].justify = "right"
    for part in memory["parts"]:
        where = part["where"] if is_split else "memory"
        table.add_row(part["name"], where, part["phase"], readable(part["size"]))
    for where in ("device", "host") if is_split else ("host",):
        most = f"[bold]{readable(memory[f'{where}_bytes'])}[/bold]"
        table.add_row("[bold]most at a time[/bold]", where if is_split else "memory", "", most)
    return table


def _collectives_table(step: dict[str, Any]) -> Table:
    table = Table("collective of a step", "type", "times", "each", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for call in step["calls"]:
        size = readable(call["bytes_each"])
        table.add_row(call["operation"], call["dtype"], str(call["times"]), size)
    if not step["calls"]:
        table.add_row("none: one worker", "", "", "")
    return table
