"""Cells of a benchmark as Ray tasks: the command runs wherever the cluster has room. Results go to a file system all nodes mount."""

from __future__ import annotations

import ray

from cimage_dist.bench.run import Execute, here
from cimage_dist.config import Config
from cimage_dist.runtime.ray_session import start_ray


def on_ray(cpus: int = 1) -> tuple[Execute, int]:
    """(how to run a command on the cluster, how many fit at a time)."""
    start_ray(Config())
    task = ray.remote(num_cpus=cpus, max_retries=2)(here)

    def execute(command: list[str]) -> tuple[int, str]:
        found: tuple[int, str] = ray.get(task.remote(command))
        return found

    return execute, max(1, int(ray.cluster_resources().get("CPU", 1)) // cpus)
