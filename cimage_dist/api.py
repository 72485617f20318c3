"""The Python interface: `Pretrainer(cfg).fit(graph).embed(graph)`, in the manner of
scikit-learn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.config_loading import load_config, to_yaml
from cimage_dist.data.splits import training_graph
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts, checkpoint
from cimage_dist.io.artifacts import RunDir
from cimage_dist.nn.inference import embed_graph
from cimage_dist.nn.model import CimageModel, model_from_weights
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.evaluation import as_graph, evaluate
from cimage_dist.pipeline.length import announce
from cimage_dist.train.progress import Progress
from cimage_dist.train.sink import MemorySink
from cimage_dist.types import CIScores

__all__ = ["Pretrainer", "evaluate"]


class Pretrainer:
    """Self-supervised pre-training of node embeddings.

    `Pretrainer(cfg).fit(graph)` trains in this process and keeps everything in memory; `save`
    writes what `load` reads. Learned attributes: `model_`, `history_` (metric records),
    `ci_scores_` (None without a factor loss), `step_` (the checkpoint in use), `graph_`
    (fingerprint of the graph).
    """

    def __init__(self, cfg: Config | None = None, progress: bool = False) -> None:
        self.cfg = cfg or Config()
        self.progress = progress

    def fit(self, graph: Any) -> Pretrainer:
        """Train on a Graph or a torch_geometric Data; returns self."""
        graph = as_graph(graph, self.cfg.data)
        sink = MemorySink(Progress(quiet=not self.progress))
        announce(self.cfg, graph, sink.progress)
        try:
            trainer = stages.train(self.cfg, Comm(), sink, graph)
        finally:
            sink.progress.close()
        self.graph_ = graph.fingerprint
        self.model_: CimageModel = trainer.model.eval()
        self.history_ = sink.records
        self.ci_scores_: CIScores | None = trainer.scores
        self.step_ = trainer.step
        if self.cfg.train.select == "val" and sink.best is not None:
            self.step_, tensors, _ = sink.best
            checkpoint.unpack_model(self.model_, tensors, Path("memory"))
        return self

    def embed(self, graph: Any) -> Tensor:
        """float32 [num_nodes, K*c]; row i is node i. Any graph with the same features will do."""
        graph = as_graph(graph, self.cfg.data)
        self._check_fitted()
        width = self.model_.encoder.linear.in_features
        if graph.num_features != width:
            raise UserError(
                f"The model was trained on {width} features, graph {graph.name!r} has "
                f"{graph.num_features}."
            )
        if self.cfg.data.holdout_edges == "auto" and graph.fingerprint != self.graph_:
            topology = graph.topology()  # of another graph nothing needs to be held out
        else:
            topology, _ = training_graph(graph, self.cfg.data, self.cfg.run.seed)
        return embed_graph(self.model_.encoder, graph.features(), topology)

    def save(self, path: str | Path) -> Path:
        """Write config and weights into a folder."""
        self._check_fitted()
        run = RunDir(path)
        artifacts.write_text(run.config, to_yaml(self.cfg))
        tensors, meta = checkpoint.pack_model(self.model_), {"graph": self.graph_}
        if self.ci_scores_ is not None:
            found, meta["scores"] = checkpoint.pack_record("scores", self.ci_scores_)
            tensors |= found
        checkpoint.save(run.root / "model", self.step_, tensors, meta)
        return run.root

    @classmethod
    def load(cls, path: str | Path) -> Pretrainer:
        """Read what `save` wrote."""
        run = RunDir(path)
        self = cls(load_config(run.config))
        saved = checkpoint.load_latest(run.root / "model")
        if saved is None:
            raise UserError(
                f"No saved model in {run.root}. Use Pretrainer.save first; runs of `cimage "
                "pretrain` are read by `cimage embed`."
            )
        self.model_ = model_from_weights(self.cfg, checkpoint.model_weights(saved.tensors))
        self.step_, self.history_, self.ci_scores_ = saved.step, [], None
        self.graph_ = saved.meta.get("graph")
        if "scores" in saved.meta:
            plain = saved.meta["scores"]
            self.ci_scores_ = checkpoint.unpack_record(CIScores, "scores", saved.tensors, plain)
        return self

    def _check_fitted(self) -> None:
        if not hasattr(self, "model_"):
            raise UserError("This Pretrainer is not fitted yet. Call fit(graph) first.")

    def __repr__(self) -> str:
        state = f"fitted, step {self.step_}" if hasattr(self, "step_") else "not fitted"
        return f"Pretrainer({state})"
