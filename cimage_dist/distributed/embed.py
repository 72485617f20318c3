"""Embeddings on Ray: every part is a task, made again elsewhere when a worker or a node is lost."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cimage_dist.config import Config, is_url
from cimage_dist.distributed.session import start_ray, uses_gpu
from cimage_dist.distributed.train import absolute
from cimage_dist.errors import UNWRITABLE, UserError
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.embedding import PART_ROWS, Bench, Facts, Task
from cimage_dist.train.progress import Progress


@functools.lru_cache(maxsize=1)
def _bench(root: str, plan: str) -> Bench:
    """Kept by a worker process as long as the plan stays the same: the graph is mapped and the
    weights are loaded once.
    """
    bench = Bench(Path(root))
    torch.set_num_threads(bench.cfg.resources.threads)
    return bench


def _make(root: str, plan: str, stage: int, index: int) -> Facts | str:
    """What a Ray worker runs. A mistake of the user is returned, not raised: its message must not
    drown in a traceback.
    """
    try:
        return _bench(root, plan).make(stage, index)
    except UserError as error:
        return str(error)
    except OSError as error:
        if error.errno in UNWRITABLE:
            return (
                f"{error.strerror}: {error.filename or root}. Make room or get access "
                "there; the parts that are done are kept."
            )
        raise


def _run(cfg: Config, root: Path, tasks: Sequence[Task]) -> Iterator[tuple[Task, Facts]]:
    """At most resources.num_workers tasks at a time, on whichever nodes; in the order in which they
    finish.
    """
    start_ray(cfg)
    res = cfg.resources
    place: dict[str, Any] = {}
    if is_url(cfg.run.dir or ""):
        # Parts are made from rows of others, which are in this machine's working copy.
        here = ray.get_runtime_context().get_node_id()
        place["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
    make = ray.remote(_make).options(
        num_cpus=res.cpus_per_worker,
        num_gpus=int(uses_gpu(cfg)),
        max_retries=res.max_failures,
        **place,
    )
    plan = (root / "plan.json").read_text()
    waiting, running = list(reversed(tasks)), dict[Any, Task]()
    try:
        while waiting or running:
            while waiting and len(running) < res.num_workers:
                task = waiting.pop()
                running[make.remote(str(root), plan, *task)] = task
            ready, _ = ray.wait(list(running), num_returns=1)
            task = running.pop(ready[0])
            yield task, _result(ready[0], task, res.max_failures)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _result(reference: Any, task: Task, max_failures: int) -> Facts:
    try:
        found: Facts | str = ray.get(reference)
    except RayTaskError:
        raise  # an exception of our own code
    except RayError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"Part {task[1]} of pass {task[0] + 1} was lost with its worker {max_failures + 1} "
            f"times ({reason}). "
            "The parts that are done are kept: the same command continues. Give workers more "
            "memory, or raise resources.max_failures."
        ) from None
    if isinstance(found, str):
        raise UserError(found)
    return found


def embed(
    cfg: Config,
    progress: Progress,
    parquet: bool = False,
    nodes: Path | None = None,
    part_rows: int = PART_ROWS,
) -> Path:
    """`stages.embed` with the parts made by Ray workers. The run directory must lie where every
    node sees it; of a run on object storage all workers are on this node.
    """
    cfg = absolute(cfg)
    nodes = None if nodes is None else nodes.resolve()
    try:
        return stages.embed(
            cfg,
            parquet=parquet,
            note=progress.note,
            nodes=nodes,
            execute=functools.partial(_run, cfg),
            tick=lambda done, total: progress.update(done, total, {}, "embed"),
            part_rows=part_rows,
        )
    finally:
        progress.close()
