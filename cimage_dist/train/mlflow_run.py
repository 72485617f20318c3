"""Metrics to MLflow, for those who keep their experiments there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cimage_dist.errors import UserError


def import_mlflow() -> Any:
    try:
        import mlflow
    except ImportError:
        raise UserError("run.mlflow is set, but the mlflow package is not installed. `pip install mlflow`, or unset run.mlflow.") from None
    return mlflow


class MlflowRun:
    """One MLflow run for a run directory; the same one again after a resume, its id is kept in the directory."""

    def __init__(self, uri: str, root: Path) -> None:
        self.client = import_mlflow().tracking.MlflowClient(tracking_uri=uri)
        note = root / "mlflow-run-id"
        if not note.is_file():
            found = self.client.get_experiment_by_name("cimage-dist")
            experiment = found.experiment_id if found else self.client.create_experiment("cimage-dist")
            note.write_text(self.client.create_run(experiment, run_name=str(root)).info.run_id)
        self.run_id = note.read_text().strip()

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.client.log_metric(self.run_id, name, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run_id)
