"""Ray Train around the worker: the same loop and the same run directory on several processes or machines."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor

from cimage_dist import checkpoint, stages
from cimage_dist.artifacts import RunDir
from cimage_dist.comm import Comm
from cimage_dist.config import Config, load_config, run_dir
from cimage_dist.errors import UserError
from cimage_dist.eval.report import read_metrics
from cimage_dist.graph.ingest import open_graph
from cimage_dist.train.loop import SHOWN, pick_device
from cimage_dist.train.progress import Progress
from cimage_dist.train.sink import LocalSink


class RaySink(LocalSink):
    """A run directory on storage that every node sees, written by rank 0; every rank reports to Ray at the same steps.

    Resuming uses the directory's newest whole checkpoint, which rank 0 chooses: Ray's own record can be one report behind.
    """

    def __init__(self, run: RunDir, cfg: Config, comm: Comm) -> None:
        super().__init__(run, cfg.run, is_main=comm.is_main, catch_signals=False)
        self.comm = comm

    def restore(self) -> checkpoint.Checkpoint | None:
        """Collective: rank 0 picks the newest whole checkpoint and all load that one."""
        found = super().restore() if self.is_main else None
        path = self.comm.broadcast_object(str(found.path) if found else None)
        if path is None or found is not None:
            return found
        return checkpoint.load(Path(path))

    def log(self, kind: str, step: int, metrics: dict[str, Any]) -> None:
        super().log(kind, step, metrics)
        ray.train.report({"kind": kind, "step": step, **{name: value for name, value in metrics.items() if isinstance(value, (int, float, str))}})

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], is_best: bool) -> None:
        """Collective: nobody goes on before the checkpoint is on storage."""
        super().save(step, tensors, meta, is_best)
        self.comm.barrier()


def absolute(cfg: Config) -> Config:
    """Workers run in other directories: every path becomes absolute."""

    def full(path: str | None) -> str | None:
        return None if path is None else str(Path(path).resolve())

    data, cluster = cfg.data, cfg.cluster
    root = full(data.root or os.environ.get("CIMAGE_DATA_ROOT"))
    return dataclasses.replace(
        cfg,
        data=dataclasses.replace(data, path=full(data.path), root=root, store_dir=str(Path(data.store_dir).resolve())),
        cluster=dataclasses.replace(cluster, labels_path=full(cluster.labels_path)),
        run=dataclasses.replace(cfg.run, dir=str(run_dir(cfg).resolve())),
        resources=dataclasses.replace(cfg.resources, threads=cfg.resources.threads or cfg.resources.cpus_per_worker),
    )


def _train_worker(job: dict[str, Any]) -> str | None:
    """What each Ray worker runs; the run directory holds the config.

    A mistake of the user is returned, not raised: trying again would not mend it.
    """
    cfg = load_config(job["config"])
    comm = Comm.from_environment()
    complaint: str | None = None
    sink = RaySink(RunDir(run_dir(cfg)), cfg, comm)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(sink)
            graph = open_graph(cfg.data)
        except UserError as error:
            complaint = str(error)
        complaint = _first_complaint(complaint, comm)
        if complaint is None:
            try:
                stages.train(cfg, comm, sink, graph)
            except UserError as error:
                complaint = str(error)
    return complaint


def _first_complaint(own: str | None, comm: Comm) -> str | None:
    """Collective: what the lowest rank complains of. A folder or a lock can fail on one rank only, and the others would wait for it."""
    has_one = comm.gather_rows(torch.tensor([int(own is not None)]))
    return comm.broadcast_object(own, source=int(has_one.nonzero()[0])) if bool(has_one.any()) else None


class Follower(threading.Thread):
    """Shows on the driver what rank 0 writes to metrics.jsonl."""

    def __init__(self, run: RunDir, progress: Progress) -> None:
        super().__init__(daemon=True)
        self.files, self.progress = run, progress
        self.is_done = threading.Event()

    def run(self) -> None:
        seen = len(read_metrics(self.files.metrics))
        is_last = False
        while not is_last:
            is_last = self.is_done.wait(0.5)
            records = read_metrics(self.files.metrics)
            for record in records[seen:]:
                if record["kind"] == "train":
                    self.progress.update(record["step"], record["total_steps"], {name: record[name] for name in SHOWN if name in record})
            seen = len(records)
        self.progress.close()


def launch(cfg: Config, progress: Progress) -> dict[str, Any]:
    """Train on resources.num_workers Ray workers and return the summary, as `stages.pretrain` does for one process."""
    cfg = absolute(cfg)
    with stages.summarised(cfg, open_graph(cfg.data)) as outcome:
        start_ray(cfg)
        progress.note(f"training on {cfg.resources.num_workers} Ray workers into {outcome.run.root}")
        follower = Follower(outcome.run, progress)
        follower.start()
        try:
            _fit(cfg, outcome.run)
        finally:
            follower.is_done.set()
            follower.join()
    return outcome.summary


def start_ray(cfg: Config) -> None:
    """Join the cluster named by RAY_ADDRESS, or start Ray here for this run only; fail at once where the workers do not fit."""
    res = cfg.resources
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    free = ray.cluster_resources()
    wanted = {"CPU": res.num_workers * res.cpus_per_worker, "GPU": res.num_workers if pick_device(cfg).type == "cuda" else 0}
    for kind, count in wanted.items():
        if free.get(kind, 0) < count:
            raise UserError(
                f"{res.num_workers} workers need {count} {kind}s, the Ray cluster has {free.get(kind, 0):g}. Lower resources.num_workers or resources.cpus_per_worker."
            )


def _fit(cfg: Config, run: RunDir) -> None:
    res = cfg.resources
    use_gpu = pick_device(cfg).type == "cuda"
    trainer = TorchTrainer(
        cast(Any, _train_worker),
        train_loop_config={"config": str(run.config)},
        scaling_config=ScalingConfig(
            num_workers=res.num_workers, use_gpu=use_gpu, resources_per_worker={"CPU": res.cpus_per_worker} | ({"GPU": 1} if use_gpu else {})
        ),
        # On GPUs too: labels, counts and decisions travel as CPU tensors.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo", timeout_s=res.timeout_s),
        run_config=RunConfig(name="ray", storage_path=str(run.root), failure_config=FailureConfig(max_failures=res.max_failures)),
    )
    complaint = cast(Any, trainer.fit()).return_value
    if complaint:
        raise UserError(complaint)
