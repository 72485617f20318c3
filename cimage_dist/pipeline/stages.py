"""The stages behind the verbs. Each reads the previous stage's files from the run directory, writes
its own, and skips finished work.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cimage_dist.comm import Comm
from cimage_dist.config import (
    Config,
    ModelConfig,
    choices,
    describe_encoder,
    describe_objective,
    fingerprint,
    run_dir,
)
from cimage_dist.config_loading import load_config, to_yaml
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.splits import node_split, settled, training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.score import make_validator
from cimage_dist.io import artifacts, checkpoint, mirror, storage
from cimage_dist.io.artifacts import RunDir
from cimage_dist.io.checkpoint import (
    RowFiles,
    add_parquet,
    describe_parts,
    load_rows,
    open_rows,
    step_of,
)
from cimage_dist.io.mirror import open_run
from cimage_dist.nn.inference import embed_graph
from cimage_dist.nn.model import CimageModel, build_model, model_from_weights, needs_moments
from cimage_dist.pipeline import embedding
from cimage_dist.pipeline.embedding import PART_ROWS, Execute, Tick
from cimage_dist.train.loop import worker
from cimage_dist.train.progress import LENGTH, Progress, announce, changed_training, steps_on
from cimage_dist.train.sink import LocalSink, Sink
from cimage_dist.train.teleport import fit_to_graph
from cimage_dist.train.trainer import Trainer, pick_device
from cimage_dist.types import LinkSplit, NodeSplit


def prepare_run(cfg: Config, graph: Graph) -> RunDir:
    """Create the run directory, or check that the existing one belongs to this config and graph.

    More steps than before, by train.epochs or train.steps, continue the run; any other change of
    the science asks for another directory.
    """
    run = open_run(cfg)
    if run.config.is_file():
        old = load_config(run.config)
        keys = changed_training(old, cfg, graph)
        if set(keys) <= set(LENGTH) and steps_on(cfg, graph) >= steps_on(old, graph):
            keys = []
        if keys:
            raise UserError(
                f"{run.root} holds a run with other settings (different: {', '.join(keys)}). "
                "Choose another run.dir, or delete that folder to start again."
            )
        check_graph(run, graph)
    try:
        artifacts.write_text(run.config, to_yaml(cfg))
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"The run directory {run.root} cannot be made: a file is in its way. Choose another "
            "run.dir."
        ) from None
    if not run.environment.is_file():
        write_environment(run, cfg, graph_facts(graph))
    return run


def graph_facts(graph: Graph) -> dict[str, Any]:
    """By what a run knows its graph again."""
    return {
        "name": graph.name,
        "fingerprint": graph.fingerprint,
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
    }


def write_environment(run: RunDir, cfg: Config, graph: dict[str, Any]) -> None:
    artifacts.write_json(
        run.environment, storage.describe() | {"graph": graph, "fingerprint": fingerprint(cfg)}
    )


def check_graph(run: RunDir, graph: Graph) -> None:
    """The graph must be the one the run was trained on."""
    if run.environment.is_file():
        known = artifacts.read_json(run.environment, "the run's environment record")["graph"][
            "fingerprint"
        ]
        if known != graph.fingerprint:
            raise UserError(
                f"{run.root} was trained on another version of graph {graph.name!r}. Restore "
                "that graph, or delete the run and train again."
            )


def discard_run(run: RunDir, cfg: Config) -> None:
    """Forget a run that failed before its first checkpoint, so that fixed settings may use the
    directory. Its metrics stay to be read.

    A directory in which another process is training is left alone.
    """
    with suppress(UserError), LocalSink(run, cfg.run, catch_signals=False):
        if checkpoint.steps(run.checkpoints):
            return
        for path in (run.config, run.environment):
            path.unlink(missing_ok=True)
        for folder in (run.splits, run.root / "pseudo-labels"):
            shutil.rmtree(folder, ignore_errors=True)


def node_split_or_reason(graph: Graph, cfg: Config) -> tuple[NodeSplit | None, str]:
    """The node split, or None and why there is none: labels are optional, and too few of them only
    cost the node scores.

    A split that was asked for by name or came with the data and cannot be had is an error.
    """
    y = graph.labels()
    if y is None or not bool((y >= 0).any()):
        return None, "the graph has no labels"
    try:
        return node_split(graph, cfg.data, cfg.run.seed), ""
    except UserError as error:
        if cfg.data.split != "auto" or graph.masks:
            raise
        return None, str(error)


def save_splits(run: RunDir, cfg: Config, graph: Graph, links: LinkSplit | None) -> None:
    """Record the node and edge splits as npy files; they follow from the config, the graph and the
    seed.
    """
    parts: dict[str, np.ndarray] = {}
    split, _ = node_split_or_reason(graph, cfg)
    if split is not None:
        parts |= {
            "node_train": split.train.numpy(),
            "node_val": split.val.numpy(),
            "node_test": split.test.numpy(),
        }
    if links is not None:
        parts |= {
            f"link_{name}": getattr(links, name).numpy()
            for name in ("val_pos", "val_neg", "test_pos", "test_neg")
        }
    if parts and not run.splits.is_dir():
        with artifacts.committed_dir(run.splits) as tmp:
            for name, value in parts.items():
                np.save(tmp / f"{name}.npy", value, allow_pickle=False)


class Outcome:
    """A run directory made ready, and after training the summary of what happened."""

    def __init__(self, run: RunDir, total_steps: int) -> None:
        self.run = run
        newest = checkpoint.load_latest(run.checkpoints)
        self.first_step = newest.step if newest else 0
        self.summary: dict[str, Any] = {}
        known = {}
        with suppress(UserError):  # absent, or damaged: written again when training is over
            known = artifacts.read_json(run.summary, "the summary")
        # A run that became longer, or whose newest checkpoints are gone, is not over.
        self.is_finished = known.get("steps") == self.first_step == total_steps


def summary_of(
    cfg: Config,
    saved: checkpoint.Checkpoint,
    graph: Graph,
    num_edges: int,
    first_step: int,
    seconds: float,
    records: Iterable[dict[str, Any]],
) -> dict[str, Any]:
    """What summary.json says of a run that ended with `saved`, trained on `num_edges` directed
    edges; `records`: its metrics.
    """
    encoder = model_from_weights(cfg, checkpoint.model_weights(saved.tensors)).encoder
    used, length = encoder.cfg, {}
    if encoder.edges is not None:
        found = round(float(encoder.edge_length), 3)
        length = {"edge_length": {"value": found, "by": "the edges that are predicted"}}
    return {
        "run_dir": mirror.shown(run_dir(cfg)),
        "fingerprint": fingerprint(cfg),
        "epochs": cfg.epochs if cfg.steps is None else None,
        "steps": saved.step,
        "steps_now": saved.step - first_step,
        "seconds": round(seconds, 2),
        "objective": describe_objective(cfg),
        "encoder": describe_encoder(cfg.model, used, len(cfg.sampler.fanouts)),
        "chosen": choices(cfg.model, used) | length | _chosen_clusters(records),
        "holdout_edges": settled(cfg.data, graph).holdout_edges,
        "edges_trained_on": num_edges // 2,
        "edges_held_out": (graph.num_edges - num_edges) // 2,
        "best": saved.meta["best"],
    }


def _chosen_clusters(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """{"clusters": {"value", "by"}} of the pseudo-labels, where the run has made any."""
    found = [record for record in records if record["kind"] == "clusters"]
    last = found[-1] if found else None
    return {} if last is None else {"clusters": {"value": last["clusters"], "by": last["by"]}}


@contextmanager
def summarised(cfg: Config, graph: Graph) -> Iterator[Outcome]:
    """Prepare the run directory, let the caller train into it, then write summary.json from the
    newest checkpoint.
    """
    cfg.check_fanouts()
    run = open_run(cfg)
    is_new = not run.config.is_file()
    with mirror.edited(run.root):
        prepare_run(cfg, graph)
    try:
        topology, links = training_graph(graph, cfg.data, cfg.run.seed)
        with mirror.edited(run.root):
            save_splits(run, cfg, graph, links)
        outcome = Outcome(run, steps_on(cfg, graph))
        began = time.perf_counter()
        yield outcome
    except UserError:
        if is_new:
            discard_run(run, cfg)
        raise
    with mirror.edited(run.root):
        saved = checkpoint.load_selected(run.checkpoints, "last")
        outcome.summary = summary_of(
            cfg,
            saved,
            graph,
            topology.num_edges,
            outcome.first_step,
            time.perf_counter() - began,
            artifacts.read_metrics(run.metrics, skip_damaged=True),
        )
        if outcome.summary["steps_now"] or not run.summary.is_file():
            artifacts.write_json(run.summary, outcome.summary)


def train(cfg: Config, comm: Comm, sink: Sink, graph: Graph) -> Trainer:
    """Collective: the worker with the validation this config asks for."""
    cfg.check_fanouts()
    topology, links = training_graph(graph, cfg.data, cfg.run.seed)
    return worker(cfg, comm, sink, graph, make_validator(cfg, graph, topology, links, comm))


def pretrain(cfg: Config, progress: Progress, graph: Graph | None = None) -> dict[str, Any]:
    """Train in this process and write the run directory; a finished run is left alone. Returns the
    summary.
    """
    graph = graph or open_graph(cfg.data)
    with (
        summarised(cfg, graph) as outcome,
        mirror.leased(outcome.run.root),
        LocalSink(outcome.run, cfg.run, progress=progress) as sink,
    ):
        if outcome.first_step:
            place = mirror.shown(outcome.run.root)
            progress.note(f"resuming {place} from step {outcome.first_step}")
        announce(cfg, graph, progress)
        train(cfg, Comm(), sink, graph)
    return outcome.summary


def load_model(cfg: Config, graph: Graph) -> tuple[CimageModel, checkpoint.Checkpoint]:
    """The trained model of a run, with the checkpoint it came from.

    The settings must be those of the training, else scores would be wrong in silence: with
    data.holdout_edges=link added afterwards, link prediction would be scored on edges that were
    trained on. Only how to score (eval.*) and what to select may change.
    """
    run = open_run(cfg)
    if not run.config.is_file():
        raise UserError(
            f"No run in {mirror.shown(run.root)}. Run `cimage pretrain` with the same config first."
        )
    keys = [
        key
        for key in changed_training(load_config(run.config), cfg, graph)
        if not key.startswith("eval.") and key not in (*LENGTH, "train.select")
    ]
    if keys:
        raise UserError(
            f"{run.root} was trained with other settings (different: {', '.join(keys)}). Give "
            f"those of the training ({run.config}), or another run.dir."
        )
    check_graph(run, graph)
    saved = checkpoint.load_selected(run.checkpoints, cfg.train.select)
    model = model_from_weights(cfg, checkpoint.model_weights(saved.tensors))
    return model.to(pick_device(cfg)), saved


def untrained_model(cfg: Config, graph: Graph, used: ModelConfig | None = None) -> CimageModel:
    """The model as it is before the first step; `used`: the encoder's settings on this graph, where
    they are known already.
    """
    if used is None:
        topology, _ = training_graph(graph, cfg.data, cfg.run.seed)
        used = fit_to_graph(cfg, graph, topology, Comm()).model
    cfg = dataclasses.replace(cfg, model=used)
    moments = graph.feature_moments() if needs_moments(cfg) else None
    return build_model(graph.num_features, cfg, moments).to(pick_device(cfg)).eval()


def embed(
    cfg: Config,
    graph: Graph | None = None,
    parquet: bool = False,
    note: Callable[[str], None] = lambda text: None,
    nodes: Path | None = None,
    execute: Execute | None = None,
    tick: Tick = lambda done, total: None,
    part_rows: int = PART_ROWS,
) -> Path:
    """Write embeddings/part-00000.npy, ... (float32 [N, D], row i is node i) with a manifest;
    parquet beside them on request.

    With a file of `nodes` only those, by sampled neighbourhoods, in a folder of their own.
    `execute` makes the parts, on other machines perhaps; without it a graph of one part is embedded
    in memory.
    """
    graph = graph or open_graph(cfg.data)
    run = open_run(cfg)
    with mirror.edited(run.root):
        model, saved = load_model(cfg, graph)
        chosen = None if nodes is None else embedding.read_nodes(nodes, graph.num_nodes, graph.ids)
        folder = (
            run.embeddings
            if chosen is None
            else run.node_embeddings / embedding.nodes_digest(chosen)
        )
        if step_of(folder) == saved.step:
            note(f"embeddings of step {saved.step} are there already")
        elif execute is None and chosen is None and graph.num_nodes <= part_rows:
            topology, _ = training_graph(graph, cfg.data, cfg.run.seed)
            z = embed_graph(model.encoder, graph.stored_rows(), topology).numpy()
            with artifacts.committed_dir(folder) as tmp:
                files = RowFiles(tmp, z.shape[0], z.shape[1], part_rows)
                files.write(0, [z])
                body = describe_parts(
                    saved.step,
                    graph.fingerprint,
                    files,
                    artifacts.describe_files(tmp, [files.name(0)]),
                )
                artifacts.write_json(tmp / artifacts.MANIFEST, body)
        else:
            execute = execute or embedding.here(cfg, graph)
            embedding.make_embeddings(
                cfg, model, saved.step, graph, folder, execute, note, tick, chosen, part_rows
            )
        if parquet:
            add_parquet(folder, None if graph.ids is None else graph.ids.values)
        return folder


def embedded_step(run: RunDir) -> int | None:
    """Checkpoint step of the embeddings present, or None when there are none (or they are
    damaged).
    """
    return step_of(run.embeddings)


def embedded(cfg: Config, note: Callable[[str], None]) -> tuple[Graph, RowFiles]:
    """The graph and the embeddings of a run, which are made where they are absent or old."""
    graph = open_graph(cfg.data)
    run = open_run(cfg)
    _, saved = load_model(cfg, graph)
    if embedded_step(run) != saved.step:
        embed(cfg, graph, note=note)
    return graph, open_rows(run.embeddings)


def load_embeddings(run: RunDir) -> Tensor:
    """float32 [N, D]; `rows.open_rows` leaves them on disk until rows are asked for."""
    return torch.from_numpy(load_rows(run.embeddings))
