"""The Python interface, by the conventions of scikit-learn:
`Pretrainer(epochs=50).fit_transform(graph)`.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cimage_dist.comm import Comm
from cimage_dist.config import Config, DataConfig
from cimage_dist.config_loading import (
    changed_settings,
    load_config,
    settings_of,
    to_yaml,
    with_settings,
)
from cimage_dist.data.ingest import store_place
from cimage_dist.data.memory import write_graph
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts, checkpoint
from cimage_dist.io.artifacts import RunDir
from cimage_dist.io.checkpoint import Checkpoint
from cimage_dist.io.mirror import edited, open_place, open_run
from cimage_dist.nn.inference import embed_graph
from cimage_dist.nn.model import CimageModel, model_from_weights
from cimage_dist.pipeline import stages
from cimage_dist.pipeline.evaluation import as_graph, evaluate
from cimage_dist.train.progress import Progress, announce, in_notebook
from cimage_dist.train.sink import MemorySink
from cimage_dist.train.trainer import pick_device
from cimage_dist.types import CIScores

__all__ = ["Pretrainer", "evaluate"]

_OWN = ("cfg", "workers", "progress")
_NOWHERE = Path("memory")


class Pretrainer:
    """Self-supervised pre-training of node embeddings.

    `cfg` is a Config or a yaml file, and settings are keywords: `Pretrainer(epochs=20)`,
    `Pretrainer(train__epochs=20)` or `Pretrainer(**{"train.epochs": 20})`. `fit` trains in this
    process and keeps everything in memory, or with `workers` on so many Ray workers. `save` writes
    a run directory, and `load` reads one, whether made here or by `cimage pretrain`. `progress`:
    None shows it in a notebook.

    Learned attributes: `model_`, `history_` (metric records), `ci_scores_` (None without a factor
    loss), `step_` (the checkpoint in use), `config_` (the settings with the graph they were used
    on), `summary_` (what was trained, on how many edges, how long).
    """

    def __init__(
        self,
        cfg: Config | str | Path | None = None,
        *,
        workers: int | None = None,
        progress: bool | None = None,
        **settings: Any,
    ) -> None:
        base = load_config(cfg) if isinstance(cfg, str | Path) else cfg or Config()
        self.cfg = with_settings(base, settings) if settings else base
        self.workers, self.progress = workers, progress

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """`cfg`, `workers` and `progress`; `deep` adds every setting by its dotted key."""
        own = {name: getattr(self, name) for name in _OWN}
        return own | (settings_of(self.cfg) if deep else {})

    def set_params(self, **params: Any) -> Self:
        """Change settings, named as in the constructor; what was learned stays until `fit`."""
        for name in _OWN:
            if name in params:
                setattr(self, name, params.pop(name))
        if params:
            self.cfg = with_settings(self.cfg, params)
        return self

    def fit(self, graph: Any, y: Any = None) -> Self:
        """Train on a Graph, or on what `Graph.from_edges` and torch_geometric call a graph.

        `y` is for scikit-learn's habit only: labels belong to the graph, and training does not
        read them.
        """
        graph = as_graph(graph, self.cfg.data)
        shown = in_notebook() if self.progress is None else self.progress
        progress = Progress(quiet=not shown)
        if self.workers is not None:
            return self._fit_on_ray(graph, progress)
        cfg = replace(self.cfg, data=self._data_of(graph))
        sink = MemorySink(progress)
        announce(self.cfg, graph, progress)
        began = time.perf_counter()
        try:
            trainer = stages.train(self.cfg, Comm(), sink, graph)
        finally:
            progress.close()
        last = best = Checkpoint(_NOWHERE, trainer.step, *trainer.state())
        if sink.best is not None and cfg.train.select == "val":
            best = Checkpoint(_NOWHERE, *sink.best)
        self.history_ = sink.records
        seconds = time.perf_counter() - began
        edges = trainer.topology.num_edges
        self.summary_ = stages.summary_of(cfg, last, graph, edges, 0, seconds, sink.records)
        self._graph, self._labels = _facts(graph), sink.stored.get("pseudo-labels")
        return self._use(cfg, last, best)

    def _fit_on_ray(self, graph: Graph, progress: Progress) -> Self:
        """The run directory is run.dir where that is set (several machines must all see it)."""
        from cimage_dist.distributed.driver import launch

        with tempfile.TemporaryDirectory(prefix="cimage-") as folder:
            store = graph.path or write_graph(graph, Path(folder) / "graph")
            place = self.cfg.run.dir or f"{folder}/run"
            cfg = replace(
                with_settings(self.cfg, {"resources.num_workers": self.workers}),
                data=replace(self.cfg.data, name=graph.name, path=str(store)),
                run=replace(self.cfg.run, dir=place),
            )
            launch(cfg, progress)
            self._read(open_run(cfg))
        self._graph = _facts(graph)
        self.config_ = replace(self.cfg, data=self._data_of(graph))
        return self

    def _data_of(self, graph: Graph) -> DataConfig:
        """The data section by which the graph can be opened again; of a graph in memory its name
        alone.
        """
        if graph.path is None:
            return replace(self.cfg.data, name=graph.name, path=None)
        try:
            if Path(store_place(self.cfg.data)).resolve() == graph.path.resolve():
                return self.cfg.data
        except UserError:
            pass  # the section names no graph that exists
        return replace(self.cfg.data, name=graph.name, path=str(graph.path.resolve()))

    def _use(self, cfg: Config, last: Checkpoint, best: Checkpoint) -> Self:
        """From checkpoints: the weights of `best`; `last` is where training would continue."""
        self.config_, self._last, self._best = cfg, last, best
        weights = checkpoint.model_weights(best.tensors)
        self.model_: CimageModel = model_from_weights(cfg, weights).to(pick_device(cfg))
        self.step_ = best.step
        plain = last.meta["scores"]
        self.ci_scores_: CIScores | None = (
            checkpoint.unpack_record(CIScores, "scores", last.tensors, plain) if plain else None
        )
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
        if (
            self.cfg.data.holdout_edges == "auto"
            and graph.fingerprint != self._graph["fingerprint"]
        ):
            topology = graph.topology()  # of another graph nothing needs to be held out
        else:
            topology, _ = training_graph(graph, self.cfg.data, self.cfg.run.seed)
        return embed_graph(self.model_.encoder, graph.rows(), topology)

    def transform(self, graph: Any) -> NDArray[np.float32]:
        """`embed` as a numpy array."""
        return self.embed(graph).numpy()

    def fit_transform(self, graph: Any, y: Any = None) -> NDArray[np.float32]:
        graph = as_graph(graph, self.cfg.data)
        return self.fit(graph).transform(graph)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """What exported tables call the columns of the embedding: z0, z1, ..."""
        self._check_fitted()
        used = self.model_.encoder.cfg
        return np.array([f"z{i}" for i in range(used.num_factors * used.factor_dim)], dtype=object)

    def save(self, path: str | Path, graph: Any = None) -> Path:
        """Write a run directory, which `load`, `cimage embed`, `evaluate` and `report` read;
        `path` may be the URL of one on object storage.

        A graph that was made in memory is written beside it where it is given here, for the
        command line; a graph of a store is found by its path.
        """
        self._check_fitted()
        run = open_place(path)
        with edited(run.root):
            self._write(run, graph)
        return run.root

    def _write(self, run: RunDir, graph: Any) -> None:
        facts = self._graph
        is_kept = graph is not None and bool(facts.get("in_memory"))
        graph = as_graph(graph, self.cfg.data) if is_kept else None
        if is_kept and graph.fingerprint != facts["fingerprint"]:
            raise UserError("The model was fitted on another graph than the one to save.")
        store = self.config_.data.path
        _clear(run, keep_graph=store is not None and Path(store).resolve() == run.graph.resolve())
        if is_kept:
            facts = stages.graph_facts(Graph.open(write_graph(graph, run.graph)))
        artifacts.write_text(run.config, to_yaml(self.config_))
        stages.write_environment(run, self.config_, facts)
        for saved in (self._best, self._last):
            checkpoint.save(run.checkpoints, saved.step, saved.tensors, saved.meta)
        if self._best is not self._last:
            checkpoint.point(run.checkpoints, "BEST", self._best.step)
        if self._labels is not None:
            artifacts.write_tensors(run.root / "pseudo-labels", self._labels)
        lines = [json.dumps(record) + "\n" for record in self.history_]
        artifacts.write_text(run.metrics, "".join(lines))
        if self.summary_:
            artifacts.write_json(run.summary, self.summary_ | {"run_dir": str(run.root)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` or `cimage pretrain` wrote."""
        run = open_place(path)
        if not run.config.is_file():
            raise UserError(
                f"No run in {run.root}: there is no {run.config}. Give a folder written by "
                "Pretrainer.save or `cimage pretrain`."
            )
        self = cls(load_config(run.config))
        self._read(run)
        return self

    def _read(self, run: RunDir) -> None:
        cfg = load_config(run.config)
        if run.graph.is_dir():
            cfg = replace(cfg, data=replace(cfg.data, path=str(run.graph.resolve())))
        if not checkpoint.steps(run.checkpoints):
            raise UserError(
                f"No saved model in {run.root}: `cimage pretrain {run.root}` has not reached its "
                "first checkpoint."
            )
        best = checkpoint.load_selected(run.checkpoints, cfg.train.select)
        last = checkpoint.load_latest(run.checkpoints) or best
        self.history_ = artifacts.read_metrics(run.metrics, skip_damaged=True)
        self.summary_ = (
            artifacts.read_json(run.summary, "the run's summary") if run.summary.is_file() else {}
        )
        self._graph = artifacts.read_json(run.environment, "the run's record")["graph"]
        self._labels = artifacts.read_tensors(run.root / "pseudo-labels")
        self._use(cfg, last, last if best.step == last.step else best)

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise UserError("This Pretrainer is not fitted yet. Call fit(graph) first.")

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import Tags, TargetTags, TransformerTags

        return Tags(None, TargetTags(required=False), TransformerTags(preserves_dtype=[]))

    def _state(self) -> str:
        return f"fitted, step {self.step_}" if hasattr(self, "step_") else "not fitted"

    def __repr__(self) -> str:
        return f"Pretrainer({self._state()})"

    def _repr_html_(self) -> str:
        rows = [["settings", "defaults", ""]]
        if changed := changed_settings(self.cfg):
            rows = [[key, value, f"default {usual}"] for key, value, usual in changed]
        if self.workers is not None:
            rows.append(["workers", str(self.workers), "on Ray"])
        if self.__sklearn_is_fitted__():
            graph, train = self._graph, [r for r in self.history_ if r["kind"] == "train"]
            rows += [
                ["graph", graph["name"], f"{graph['nodes']:,} nodes, {graph['edges'] // 2:,} edges"]
            ]
            if self.summary_:
                rows += [["trained", self.summary_["objective"], self.summary_["encoder"]]]
            if train:
                rows += [["loss", f"{train[-1]['loss']:.4g}", f"at step {train[-1]['step']}"]]
        cells = "".join(
            "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
        )
        return f"<b>Pretrainer</b> ({escape(self._state())})<table>{cells}</table>"


def _facts(graph: Graph) -> dict[str, Any]:
    return stages.graph_facts(graph) | ({"in_memory": True} if graph.path is None else {})


def _clear(run: RunDir, keep_graph: bool) -> None:
    """Remove what another model left in a folder: it must not be taken for this one's."""
    labels = run.root / "pseudo-labels"
    for folder in (run.checkpoints, run.embeddings, run.node_embeddings, labels, run.graph):
        if folder.is_dir() and not (keep_graph and folder == run.graph):
            artifacts.remove_dir(folder)
    for file in (run.evaluation, run.report, run.page, run.summary):
        file.unlink(missing_ok=True)
