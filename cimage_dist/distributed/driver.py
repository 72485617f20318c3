"""Ray around the worker: the same loop and the same run directory on several processes or machines,
followed from here; and embeddings, every part of which is a task that is made again elsewhere when
a worker or a node is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import ray
from ray.exceptions import RayError, RayTaskError
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cimage_dist.config import Config, is_url, run_dir
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.store import Graph
from cimage_dist.distributed.session import check_storage, start_ray, uses_gpu
from cimage_dist.distributed.worker import STOP, make_part, train_worker
from cimage_dist.errors import Interrupted, UserError
from cimage_dist.io import mirror
from cimage_dist.io.artifacts import RunDir, read_metrics
from cimage_dist.io.storage import open_storage
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.embedding import PART_ROWS, Facts, Task
from cimage_dist.train.loop import SHOWN
from cimage_dist.train.progress import Progress, announce, estimate

_RAY = "ray"  # in the run directory: what Ray records, and its Result
# Ray's own defaults notice a frozen worker after ten minutes and give workers that have no room, as
# after the loss of their node, a minute. The user's environment wins.
_ALERT = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15"}
_RESIZE_EVERY_S = float(
    os.environ.get("CIMAGE_RESIZE_EVERY_S", "30")
)  # an elastic run looks for new nodes
_PULL_EVERY = 10  # looks at the metrics: of a run on object storage, whose workers are elsewhere


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


class _Backend(_TorchBackend):
    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Workers are killed a moment later. Ray would ask each to leave the process group first,
        and wait 30 s for the answer of one that is frozen.
        """


@dataclasses.dataclass
class _Torch(TorchConfig):
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


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
        cast(Any, train_worker),
        train_loop_config={"run": mirror.shown(run.root)},
        scaling_config=scaling(cfg),
        # On GPUs too: labels, counts and decisions travel as CPU tensors.
        torch_config=_Torch(
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
        answer = _in_a_thread(trainer)
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
    if answer.get("complaint"):
        raise UserError(answer["complaint"])
    if "signum" in answer:
        raise Interrupted(answer["signum"], answer["step"])


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


class Follower(threading.Thread):
    """Shows on the driver what rank 0 writes to metrics.jsonl."""

    def __init__(self, run: RunDir, progress: Progress, log_every: int) -> None:
        super().__init__(daemon=True)
        self.files, self.progress, self.log_every = run, progress, log_every
        self._first: int | None = None
        self._is_told = False
        self.is_done = threading.Event()

    def run(self) -> None:
        seen = len(read_metrics(self.files.metrics))
        is_last = False
        for look in itertools.count(1):
            if is_last:
                break
            is_last = self.is_done.wait(0.5)
            if look % _PULL_EVERY == 0:
                with contextlib.suppress(UserError):
                    mirror.refresh(self.files.root)
            records = read_metrics(self.files.metrics)
            for record in records[seen:]:
                if "described" in record:
                    self.progress.note(f"{record['kind']}: {record['described']}")
                elif record["kind"] == "train":
                    self._show(record)
            seen = len(records)
        self.progress.close()

    def _show(self, record: dict[str, Any]) -> None:
        step, total = record["step"], record["total_steps"]
        terms = {name: record[name] for name in SHOWN if name in record}
        self.progress.update(step, total, terms)
        if self._first is None:
            self._first = step  # a start may be in these seconds
        elif not self._is_told and self._first < step < total:
            self._is_told = True
            each = record["seconds"] / min(step - self._first, self.log_every)
            self.progress.note(estimate(total, each, each * (total - step)))


@contextlib.contextmanager
def _signals_to(run: RunDir) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks the workers to save and stop; a second SIGINT does not
    wait.
    """
    mirror.remove_mark(run.root, STOP)
    is_asked = False
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_asked = True
        mirror.write_mark(run.root, STOP, str(number))

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        mirror.remove_mark(run.root, STOP)


def _in_a_thread(trainer: TorchTrainer) -> dict[str, Any]:
    """What rank 0 returned. In the main thread Ray would take SIGINT for itself and kill the
    workers without a checkpoint.
    """
    found: list[Any] = []

    def fit() -> None:
        try:
            found.append(cast(Any, trainer.fit()).return_value)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
    if isinstance(found[0], BaseException):
        raise found[0]
    return cast(dict[str, Any], found[0])


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
    make = ray.remote(make_part).options(
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
