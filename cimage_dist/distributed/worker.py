"""What Ray's workers run: the training loop with a sink that all ranks share, and parts of an
embedding. Nothing here starts anything; `driver.py` does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.util.metrics import Gauge
from torch import Tensor

from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.errors import UNWRITABLE, Interrupted, UserError
from cimage_dist.io import checkpoint, mirror
from cimage_dist.io.artifacts import RunDir
from cimage_dist.io.mirror import open_place, open_run
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.embedding import Bench, Facts
from cimage_dist.train.sink import LocalSink

STOP = "STOP"  # the mark by which the driver asks the workers to save and stop
_LOOK_EVERY_S = 1.0  # for that mark
_LOCK_PATIENCE_S = (
    60.0  # a worker that Ray gave up may live on for a while and hold the run directory
)


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
        """The signal that the driver got, through a file in the run directory."""
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


def train_worker(job: dict[str, Any]) -> dict[str, Any]:
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


@functools.lru_cache(maxsize=1)
def _bench(root: str, plan: str) -> Bench:
    """Kept by a worker process as long as the plan stays the same: the graph is mapped and the
    weights are loaded once.
    """
    bench = Bench(Path(root))
    torch.set_num_threads(bench.cfg.resources.threads)
    return bench


def make_part(root: str, plan: str, stage: int, index: int) -> Facts | str:
    """A part of a pass. A mistake of the user is returned, not raised: its message must not
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
