"""A plan as a few tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


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
    graph, steps, batch, model, needs = (
        plan[name] for name in ("graph", "steps", "batch", "model", "resources")
    )
    low, high = steps["edges_per_worker"]
    gpus = f"{needs['gpus']:,} GPUs, " if needs["gpus"] else ""
    return [
        (
            "graph",
            f"{graph['name']}: {graph['nodes']:,} nodes, {graph['undirected_edges']:,} "
            f"undirected edges, {graph['features']:,} features ({graph['from']})",
        ),
        (
            "store",
            f"{readable(graph['store_bytes'])} on every machine, mapped once and shared by its "
            "workers",
        ),
        ("needs", f"{needs['workers']:,} workers: {gpus}{needs['cpus']:,} CPUs"),
        ("global batch", f"{steps['global_batch_edges']:,} edges; {low:,} to {high:,} per worker"),
        (
            "steps",
            f"{steps['total_steps']:,} of {steps['batches_per_step']:,} batches each; "
            f"{steps['batches_per_epoch']:,} batches per epoch, {steps['passes']:,g} epochs in all",
        ),
        (
            "mini-batch",
            f"{batch['nodes']:,} nodes, {batch['messages']:,} messages, {batch['pairs']:,} "
            f"pairs per worker ({batch['found_by']})",
        ),
        (
            "model",
            f"{model['parameters']:,} parameters; a checkpoint takes "
            f"{readable(model['checkpoint_bytes'])}",
        ),
    ]


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
    return lines


def _memory_table(memory: dict[str, Any]) -> Table:
    is_split = memory["device_bytes"] is not None
    table = Table("memory of one worker", "where", "when", "size", box=None, pad_edge=False)
    table.columns[-1].justify = "right"
    for part in memory["parts"]:
        table.add_row(
            part["name"],
            part["where"] if is_split else "memory",
            part["phase"],
            readable(part["size"]),
        )
    if is_split:
        table.add_row(
            "[bold]most at a time[/bold]",
            "device",
            "",
            f"[bold]{readable(memory['device_bytes'])}[/bold]",
        )
    table.add_row(
        "[bold]most at a time[/bold]",
        "host" if is_split else "memory",
        "",
        f"[bold]{readable(memory['host_bytes'])}[/bold]",
    )
    return table


def _collectives_table(step: dict[str, Any]) -> Table:
    table = Table("collective of a step", "type", "times", "each", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for call in step["calls"]:
        table.add_row(
            call["operation"], call["dtype"], str(call["times"]), readable(call["bytes_each"])
        )
    if not step["calls"]:
        table.add_row("none: one worker", "", "", "")
    return table
