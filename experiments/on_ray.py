"""Cells of a benchmark as Ray tasks: the command runs wherever the cluster has room. The folder it
is given in is on a file system all nodes mount.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from cimage_dist.config import Config
from cimage_dist.distributed.session import start_ray
from experiments.run import Execute, here, wants_workers


def on_ray() -> tuple[Execute, int]:
    """(how to run a command on the cluster, how many fit at a time)."""
    start_ray(Config())
    folder, address = str(Path.cwd()), ray.get_runtime_context().gcs_address
    task: Any = ray.remote(max_retries=2)(here)

    def execute(command: list[str]) -> tuple[int, str]:
        # A run of several workers asks this cluster for their room itself: with a share of its own
        # it could wait for that for ever.
        found: tuple[int, str] = ray.get(
            task.options(num_cpus=0 if wants_workers(command) else 1).remote(
                command, folder, {"RAY_ADDRESS": address}
            )
        )
        return found

    return execute, max(1, int(ray.cluster_resources().get("CPU", 1)))
