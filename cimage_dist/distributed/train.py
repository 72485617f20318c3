"""Ray Train around the worker: the same loop and the same run directory on several processes or
machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.metrics import Gauge
from torch import Tensor

from cimage_dist.comm import Comm
from cimage_dist.config import Config, is_url, run_dir
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.store import Graph
from cimage_dist.distributed.follow import STOP, Follower, _in_a_thread, _signals_to
from cimage_dist.distributed.session import check_storage, start_ray, uses_gpu
from cimage_dist.errors import UNWRITABLE, Interrupted, UserError
from cimage_dist.io import checkpoint, mirror
from cimage_dist.io.artifacts import RunDir
from cimage_dist.io.mirror import open_place, open_run
from cimage_dist.io.storage import open_storage
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.length import announce
from cimage_dist.train.progress import Progress
from cimage_dist.train.sink import LocalSink

_RAY = "ray"  # in the run directory: what Ray records, and its Result
_LOOK_EVERY_S = 1.0  # for a request to stop
_LOCK_PATIENCE_S = (
    60.0  # a worker that Ray gave up may live on for a while and hold the run directory
)
# Ray's own defaults notice a frozen worker after ten minutes and give workers that have no room, as
# after the loss of their node, a minute. The user's environment wins.
_ALERT = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15"}
_RESIZE_EVERY_S = float(
    os.environ.get("CIMAGE_RESIZE_EVERY_S", "30")
)  # an elastic run looks for new nodes


class RaySink(LocalSink):
    """A run directory on storage that every node sees, written by rank 0; every rank reports to Ray
    with each checkpoint.

    Not with each record: a report makes all ranks meet in an actor of Ray's, which on busy machines
    takes a tenth of a second. Resuming uses the directory's newest whole checkpoint, which rank 0
    chooses: Ray's own record can be one report behind.
    """

    def __init__(self, run: RunDir, cfg: Config, comm: Comm) -> None:
        super().__init__(
            run,
            cfg.run,
            is_main=comm.is_main,
            catch_signals=False,
            lock_patience_s=_LOCK_PATIENCE_S,
        )
        self.comm = comm
        self._looked = 0.0
        self._unwritten: str | None = None
        self._gauges: dict[str, Gauge] = {}
        self._record: dict[str, Any] = {}  # the newest values of each name, for the next report

    def restore(self) -> checkpoint.Checkpoint | None:
        """Collective: rank 0 picks the newest whole checkpoint and all load that one."""
        found: checkpoint.Checkpoint | None = None

        def choose() -> None:
            nonlocal found
            if self.is_main:
                found = LocalSink.restore(self)
                self._note_attempt(found.step if found else 0)

        self._together(choose, "The list of starts")
        name = self.comm.broadcast_object(found.path.name if found else None)
        if name is None or found is not None:
            return found
        mirror.refresh(self.run.root)
        return checkpoint.load(self.run.checkpoints / name)

    def _note_attempt(self, step: int) -> None:
        """One line for each start of the workers: after which step, how many, when."""
        with (self.run.root / "attempts.jsonl").open("a") as file:
            file.write(
                json.dumps(
                    {
                        "after_step": step,
                        "workers": self.comm.world,
                        "unix_time": round(time.time(), 1),
                    }
                )
                + "\n"
            )

    def log(self, kind: str, step: int, metrics: dict[str, Any]) -> None:
        try:
            if self._unwritten is None:
                super().log(kind, step, metrics)
        except OSError as error:
            # The others would wait for this rank: all learn of it at the next checkpoint, which is
            # not written, so that no record is missing.
            self._unwritten = f"The metrics of step {step} cannot be written: {unwritable(error)}"
        plain = {
            name: value for name, value in metrics.items() if isinstance(value, (int, float, str))
        }
        if self.is_main:
            self._export(kind, plain)
            self._record |= plain

    def _export(self, kind: str, values: dict[str, Any]) -> None:
        """Ray's Prometheus endpoint shows them as ray_cimage_<kind>_<name>."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                key = f"cimage_{kind}_{name}".replace("/", "_")
                if key not in self._gauges:
                    self._gauges[key] = Gauge(
                        key, description=f"{name} of the newest {kind} record", tag_keys=("run",)
                    )
                self._gauges[key].set(float(value), tags={"run": str(self.run.root)})

    def save(
        self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], is_best: bool
    ) -> None:
        """Collective: nobody continues before the checkpoint is on storage."""
        self._together(
            functools.partial(super().save, step, tensors, meta, is_best),
            f"The checkpoint of step {step}",
        )
        made = None
        if self.is_main:
            newest = (self.run.checkpoints / "LATEST").read_text().strip()
            made = ray.train.Checkpoint(str(self.run.checkpoints / newest))
        ray.train.report(
            self._record | {"step": step, "checkpoint_path": made.path if made else ""},
            checkpoint=made,
            checkpoint_upload_fn=None if mirror.is_copy(self.run.root) else _link,
        )

    def store(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Collective, for the same reason."""
        self._together(functools.partial(super().store, name, tensors), f"The run's {name}")

    def _together(self, write: Callable[[], None], what: str) -> None:
        """Collective: rank 0 writes. Where storage is full or forbidden all stop with the same
        words; no new attempt would fix that.
        """
        complaint = self._unwritten
        if complaint is None:
            try:
                write()
            except UserError as error:
                complaint = f"{what} cannot be written: {error}"
            except OSError as error:
                complaint = f"{what} cannot be written: {unwritable(error)}"
        complaint = _first_complaint(complaint, self.comm)
        if complaint:
            raise UserError(
                f"{complaint} Earlier checkpoints are whole: the same command continues from the "
                "newest."
            )

    def stop_signal(self) -> int:
        """What the driver was told, through a file in the run directory."""
        now = time.monotonic()
        if self.is_main and now - self._looked > _LOOK_EVERY_S:
            self._looked = now
            with contextlib.suppress(OSError, ValueError):
                self._signal = int(mirror.read_mark(self.run.root, STOP) or 0)
        return self._signal


def _link(made: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
    """Ray's own checkpoint, which it prunes by itself: links to the files of ours, not a copy."""
    folder = Path(ray.train.get_context().get_storage().experiment_fs_path) / name
    shutil.copytree(made.path, folder, copy_function=_link_or_copy, dirs_exist_ok=True)
    return ray.train.Checkpoint(str(folder))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # some shared file systems have no links
        shutil.copyfile(source, target)


def unwritable(error: OSError) -> str:
    """What the owner of the storage can fix, in words. Any other fault is raised again: it may
    pass, and Ray tries again.
    """
    if error.errno not in UNWRITABLE:
        raise error
    return (
        f"{error.strerror}: {error.filename or 'a file of the run directory'}. Make room or "
        "get access there."
    )


def absolute(cfg: Config) -> Config:
    """Workers run in other directories: every path becomes absolute."""

    def full(path: str | None) -> str | None:
        return path if path is None or "://" in path else str(Path(path).resolve())

    data, cluster = cfg.data, cfg.cluster
    root = full(data.root or os.environ.get("CIMAGE_DATA_ROOT"))
    return dataclasses.replace(
        cfg,
        data=dataclasses.replace(
            data,
            path=full(data.path),
            root=root,
            store_dir=str(Path(data.store_dir).resolve()),
            stage_dir=full(data.stage_dir),
        ),
        cluster=dataclasses.replace(cluster, labels_path=full(cluster.labels_path)),
        run=dataclasses.replace(
            cfg.run, dir=cfg.run.dir if is_url(cfg.run.dir or "") else str(run_dir(cfg).resolve())
        ),
        resources=dataclasses.replace(
            cfg.resources, threads=cfg.resources.threads or cfg.resources.cpus_per_worker
        ),
    )


def _train_worker(job: dict[str, Any]) -> dict[str, Any]:
    """What each Ray worker runs; the run directory holds the config.

    A mistake of the user and a wish to stop are returned, not raised: trying again would not fix
    them.
    """
    cfg = load_config(open_place(job["run"]).config)
    comm = Comm.from_environment()
    complaint: str | None = None
    sink = RaySink(open_run(cfg), cfg, comm)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(sink)
            graph = open_graph(cfg.data)
        except UserError as error:
            complaint = str(error)
        except OSError as error:
            complaint = unwritable(error)
        complaint = _first_complaint(complaint, comm)
        if complaint is None:
            try:
                stages.train(cfg, comm, sink, graph)
            except UserError as error:
                complaint = str(error)
            except Interrupted as stop:
                return {"signum": stop.signum, "step": stop.step}
    return {"complaint": complaint}


def _first_complaint(own: str | None, comm: Comm) -> str | None:
    """Collective: what the lowest rank complains of. A folder or a lock can fail on one rank only,
    and the others would wait for it.
    """
    has_one = comm.gather_rows(torch.tensor([int(own is not None)]))
    return (
        comm.broadcast_object(own, source=int(has_one.nonzero()[0]))
        if bool(has_one.any())
        else None
    )


def launch(cfg: Config, progress: Progress) -> dict[str, Any]:
    """Train on resources.num_workers Ray workers and return the summary, as `stages.pretrain` does
    for one process.
    """
    cfg = absolute(cfg)
    graph = open_graph(cfg.data)
    with stages.summarised(cfg, graph) as outcome:
        if outcome.is_finished:
            place = mirror.shown(outcome.run.root)
            progress.note(f"{place} is finished; nothing was started")
        else:
            with mirror.leased(outcome.run.root):
                _train_on_ray(cfg, graph, outcome.run, progress)
    return outcome.summary


def _train_on_ray(cfg: Config, graph: Graph, run: RunDir, progress: Progress) -> None:
    start_ray(cfg)
    if len([node for node in ray.nodes() if node["Alive"]]) > 1:
        check_storage(mirror.shown(run.root))
    res = cfg.resources
    workers = (
        f"{res.min_workers} to {res.num_workers}"
        if 0 < res.min_workers < res.num_workers
        else str(res.num_workers)
    )
    progress.note(f"training on {workers} Ray workers into {mirror.shown(run.root)}")
    announce(cfg, graph, progress)
    follower = Follower(run, progress, cfg.run.log_every)
    follower.start()
    try:
        with _signals_to(run):
            _fit(cfg, run)
    finally:
        follower.is_done.set()
        follower.join()


def scaling(cfg: Config) -> Any:
    """A fixed number of workers, or a range between which Ray moves as nodes come and go."""
    res, use_gpu = cfg.resources, uses_gpu(cfg)
    is_elastic = 0 < res.min_workers < res.num_workers
    return cast(Any, ScalingConfig)(
        num_workers=(res.min_workers, res.num_workers) if is_elastic else res.num_workers,
        use_gpu=use_gpu,
        resources_per_worker={"CPU": res.cpus_per_worker} | ({"GPU": 1} if use_gpu else {}),
        elastic_resize_monitor_interval_s=_RESIZE_EVERY_S,
    )


def _fit(cfg: Config, run: RunDir) -> None:
    res = cfg.resources
    use_gpu = uses_gpu(cfg)
    storage = _ray_storage(run)
    os.environ |= _ALERT | os.environ
    # Workers answer this from a thread of their own, however long a step, a checkpoint or a
    # validation takes: only one that is frozen or gone is silent.
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(res.lost_after_s)
    trainer = TorchTrainer(
        cast(Any, _train_worker),
        train_loop_config={"run": mirror.shown(run.root)},
        scaling_config=scaling(cfg),
        # On GPUs too: labels, counts and decisions travel as CPU tensors.
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo", timeout_s=res.timeout_s
        ),
        run_config=cast(Any, RunConfig)(
            name=_RAY,
            **storage,
            # Of the newest state alone: ours are beside it, and resuming reads those.
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            failure_config=FailureConfig(max_failures=res.max_failures),
            worker_runtime_env={"env_vars": _network()},
        ),
    )
    try:
        told = _in_a_thread(trainer)
    except WorkerGroupError as error:
        if death := next(
            (
                str(failure)
                for failure in error.worker_failures.values()
                if hasattr(failure, "health_check_failure")
            ),
            None,
        ):
            raise UserError(
                f"Workers died more than resources.max_failures ({res.max_failures}) times: "
                "killed, out of memory, or with their node. "
                "The same command continues from the newest checkpoint. The last death: "
                f"{' '.join(death.split())[:600]}"
            ) from None
        raise  # their own exception, which is a bug
    if told.get("complaint"):
        raise UserError(told["complaint"])
    if "signum" in told:
        raise Interrupted(told["signum"], told["step"])


def _ray_storage(run: RunDir) -> dict[str, Any]:
    """Where Ray keeps its own record of the run: beside ours. One of an earlier start, perhaps of
    another version of Ray, is not continued.
    """
    if not mirror.is_copy(run.root):
        shutil.rmtree(run.root / _RAY, ignore_errors=True)
        return {"storage_path": str(run.root)}
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    found, folder = open_storage(mirror.shown(run.root))
    with contextlib.suppress(FileNotFoundError):
        found.rm(f"{folder}/{_RAY}", recursive=True)
    return {"storage_path": folder, "storage_filesystem": PyFileSystem(FSSpecHandler(found))}


def _network() -> dict[str, str]:
    """Which interface collectives use, where the user named one."""
    return {
        name: os.environ[name]
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if name in os.environ
    }
