"""Where the training loop's output goes. Every rank calls a sink at the same steps; only the main
one writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from torch import Tensor

from cimage_dist.config import RunConfig
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts, checkpoint, mirror
from cimage_dist.io.artifacts import RunDir
from cimage_dist.train.progress import Progress


def import_mlflow() -> Any:
    try:
        import mlflow
    except ImportError:
        raise UserError(
            "run.mlflow is set, but the mlflow package is not installed. `pip install mlflow`, "
            "or unset run.mlflow."
        ) from None
    return mlflow


class MlflowRun:
    """One MLflow run for a run directory; the same one again after a resume, its id is kept in the
    directory.
    """

    def __init__(self, uri: str, root: Path) -> None:
        self.client = import_mlflow().tracking.MlflowClient(tracking_uri=uri)
        note = root / "mlflow-run-id"
        if not note.is_file():
            found = self.client.get_experiment_by_name("cimage-dist")
            experiment = (
                found.experiment_id if found else self.client.create_experiment("cimage-dist")
            )
            note.write_text(self.client.create_run(experiment, run_name=str(root)).info.run_id)
        self.run_id = note.read_text().strip()

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.client.log_metric(self.run_id, name, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


class Sink(Protocol):
    def note(self, text: str) -> None: ...
    def restore(self) -> checkpoint.Checkpoint | None: ...
    def log(self, kind: str, step: int, metrics: dict[str, Any]) -> None: ...
    def tick(
        self, step: int, total: int, metrics: dict[str, float], stage: str = "pretrain"
    ) -> None: ...
    def store(self, name: str, tensors: dict[str, Tensor]) -> None: ...
    def fetch(self, name: str) -> dict[str, Tensor] | None: ...
    def save(
        self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], is_best: bool
    ) -> None: ...
    def stop_signal(self) -> int: ...


class MemorySink:
    """Keeps records in memory and nothing on disk: for the Python interface without a directory,
    and for tests.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.stored: dict[str, dict[str, Tensor]] = {}
        self.best: tuple[int, dict[str, Tensor], dict[str, Any]] | None = None
        self.progress = progress or Progress(quiet=True)

    def note(self, text: str) -> None:
        self.progress.note(text)

    def restore(self) -> checkpoint.Checkpoint | None:
        return None

    def log(self, kind: str, step: int, metrics: dict[str, Any]) -> None:
        if "described" in metrics:
            self.note(f"{kind}: {metrics['described']}")
        self.records.append({"kind": kind, "step": step, **metrics})

    def tick(
        self, step: int, total: int, metrics: dict[str, float], stage: str = "pretrain"
    ) -> None:
        self.progress.update(step, total, metrics, stage)

    def store(self, name: str, tensors: dict[str, Tensor]) -> None:
        self.stored[name] = tensors

    def fetch(self, name: str) -> dict[str, Tensor] | None:
        return self.stored.get(name)

    def save(
        self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], is_best: bool
    ) -> None:
        if is_best:
            self.best = (
                step,
                {name: value.detach().clone() for name, value in tensors.items()},
                meta,
            )

    def stop_signal(self) -> int:
        return 0


class LocalSink:
    """Writes a run directory: metrics.jsonl, TensorBoard events, checkpoints. Use as a context
    manager.

    While open it holds the directory's lock and turns SIGINT and SIGTERM into a request to stop
    after the current step.
    """

    def __init__(
        self,
        run: RunDir,
        cfg: RunConfig,
        is_main: bool = True,
        progress: Progress | None = None,
        catch_signals: bool = True,
        lock_patience_s: float = 0.0,
    ) -> None:
        self.run, self.cfg, self.is_main = run, cfg, is_main
        self.progress = progress or Progress(quiet=True)
        self.catch_signals, self.lock_patience_s = catch_signals, lock_patience_s
        self._signal = 0
        self._old_handlers: dict[int, Any] = {}
        self._lock = contextlib.ExitStack()
        self._trainer = ""  # by which storage knows this process
        self._file: Any = None
        self._board: Any = None
        self._mlflow: MlflowRun | None = None

    def __enter__(self) -> LocalSink:
        if self.is_main:
            if self.cfg.mlflow:
                import_mlflow()
            self.run.root.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(
                artifacts.locked(
                    self.run.root / ".lock",
                    patience_s=self.lock_patience_s,
                    busy=f"Another process is training in {self.run.root}. Wait for it, or give "
                    "this run another run.dir or run.seed.",
                )
            )
            self._lock.enter_context(mirror.working(self.run.root))
            self._trainer = mirror.claim(self.run.root)
        if self.catch_signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self.progress.close()
        for resource in (self._file, self._board, self._mlflow):
            if resource is not None:
                with contextlib.suppress(
                    OSError
                ):  # of a full disk, which was reported when the record was written
                    resource.close()
        with self._lock, contextlib.suppress(*((UserError, OSError) if exc[0] else ())):
            self.publish()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait
        self._signal = number

    def publish(self) -> None:
        """Commit to object storage what was written, where the run is there."""
        if self.is_main:
            mirror.publish(self.run.root, self._trainer)

    def note(self, text: str) -> None:
        if self.is_main:
            self.progress.note(text)

    def stop_signal(self) -> int:
        return self._signal

    def restore(self) -> checkpoint.Checkpoint | None:
        """The newest whole checkpoint; records made after it are dropped, because those steps run
        again.
        """
        found = checkpoint.load_latest(self.run.checkpoints)
        if self.is_main:
            self._drop_records_after(found.step if found else 0)
        return found

    def _drop_records_after(self, step: int) -> None:
        if not self.run.metrics.is_file():
            return
        # A refresh is logged under the number of steps done before it, after the checkpoint of
        # that number.
        kept = [
            record
            for record in artifacts.read_metrics(self.run.metrics, skip_damaged=True)
            if record["step"] < step
            or (record["step"] == step and record["kind"] not in ("ci", "encoder", "clusters"))
        ]
        artifacts.write_text(self.run.metrics, "".join(json.dumps(r) + "\n" for r in kept))

    def log(self, kind: str, step: int, metrics: dict[str, Any]) -> None:
        if not self.is_main:
            return
        if "described" in metrics:
            self.note(f"{kind}: {metrics['described']}")
        if self._file is None:
            self._file = self.run.metrics.open("a")
            if self.cfg.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.run.tensorboard), purge_step=step)
            if self.cfg.mlflow:
                self._mlflow = MlflowRun(self.cfg.mlflow, self.run.root)
        self._file.write(json.dumps({"kind": kind, "step": step, **metrics}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
        if self._mlflow is not None:
            self._mlflow.log(
                {
                    f"{kind}/{name}": float(value)
                    for name, value in metrics.items()
                    if isinstance(value, (int, float))
                },
                step,
            )

    def tick(
        self, step: int, total: int, metrics: dict[str, float], stage: str = "pretrain"
    ) -> None:
        if self.is_main:
            self.progress.update(step, total, metrics, stage)

    def store(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Keep tensors that belong to the run rather than to a step."""
        if self.is_main:
            artifacts.write_tensors(self.run.root / name, tensors)
            self.publish()

    def fetch(self, name: str) -> dict[str, Tensor] | None:
        """What `store` kept; None where there is nothing, or it is damaged and must be made
        again.
        """
        try:
            return artifacts.read_tensors(self.run.root / name)
        except (UserError, KeyError, TypeError):
            return None  # its manifest is damaged

    def save(
        self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], is_best: bool
    ) -> None:
        if not self.is_main:
            return
        if self._file is not None:
            os.fsync(self._file.fileno())
        folder = self.run.checkpoints
        checkpoint.save(folder, step, tensors, meta)
        if is_best:
            checkpoint.point(folder, "BEST", step)
        checkpoint.prune(folder, self.cfg.keep_checkpoints)
        self.publish()
