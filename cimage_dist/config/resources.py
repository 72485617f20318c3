"""Where a run is kept and what it runs on: no part of the experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

from cimage_dist.config.fields import need, opt


@dataclass
class RunConfig:
    seed: int = opt(0, "seed of everything drawn in this run")
    dir: Optional[str] = opt(
        None,
        "run directory, or its URL on object storage (s3://bucket/run, gs://); unset: "
        "runs/<data.name>/<fingerprint>/seed-<seed>",
    )
    log_every: int = opt(10, "steps between lines in metrics.jsonl")
    checkpoint_every: int = opt(50, "steps between checkpoints; the last step is always saved")
    checkpoint_minutes: float = opt(
        0.0, "also save when this many minutes have passed since the last checkpoint; 0: never"
    )
    keep_checkpoints: int = opt(2, "how many recent checkpoints stay, beside the best")
    tensorboard: bool = opt(True, "write TensorBoard events")
    mlflow: Optional[str] = opt(
        None,
        "also log to MLflow: its tracking URI, e.g. sqlite:///mlflow.db or http://host:5000 "
        "(needs the mlflow package)",
    )

    def __post_init__(self) -> None:
        need(
            0 <= self.seed < 2**62, "run.seed", "must not be negative (nor 2^62 or more)", self.seed
        )
        need(
            self.checkpoint_minutes >= 0,
            "run.checkpoint_minutes",
            "must not be negative",
            self.checkpoint_minutes,
        )
        for name in ("log_every", "checkpoint_every", "keep_checkpoints"):
            need(getattr(self, name) >= 1, f"run.{name}", "must be at least 1", getattr(self, name))


@dataclass
class ResourcesConfig:
    num_workers: int = opt(1, "training processes with --on ray")
    min_workers: int = opt(
        0, "fewest workers an elastic run continues with; 0: num_workers, not elastic"
    )
    cpus_per_worker: int = opt(1, "CPUs that Ray reserves for each worker")
    threads: int = opt(
        0, "CPU threads of each process; 0: cpus_per_worker with --on ray, else torch's choice"
    )
    device: Literal["auto", "cpu", "cuda"] = opt(
        "auto", "where tensors live; auto: CUDA where there is one"
    )
    compile: bool = opt(
        False, "torch.compile the decoders; needs a C++ compiler on a CPU, Triton on a GPU"
    )
    lost_after_s: int = opt(
        25, "seconds without a sign of life after which a worker is taken for lost; all start again"
    )
    timeout_s: int = opt(
        600, "seconds after which a collective fails though all workers show signs of life"
    )
    max_failures: int = opt(
        3, "worker failures after which Ray gives up; each resumes from the last checkpoint"
    )

    def __post_init__(self) -> None:
        for name in ("num_workers", "cpus_per_worker", "lost_after_s", "timeout_s"):
            need(
                getattr(self, name) >= 1,
                f"resources.{name}",
                "must be at least 1",
                getattr(self, name),
            )
        for name in ("min_workers", "threads", "max_failures"):
            need(
                getattr(self, name) >= 0,
                f"resources.{name}",
                "must not be negative",
                getattr(self, name),
            )
        need(
            self.min_workers <= self.num_workers,
            "resources.min_workers",
            f"must not exceed resources.num_workers ({self.num_workers})",
            self.min_workers,
        )
