"""The evaluate stage: our embedding beside controls that need no training; and the single-view
ablation, how well each group of factors alone predicts the labels (paper, table of single views).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cimage_dist.config import Config, DataConfig, ModelConfig, describe_objective, fingerprint
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.splits import settled, training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.controls import (
    STEPS,
    choose,
    pagerank_features,
    principal_components,
    smooth_features,
)
from cimage_dist.eval.probe import linear_probe
from cimage_dist.eval.score import (
    PairScore,
    link_scores,
    model_scores,
    pick_score,
    row_scores,
    score_embedding,
)
from cimage_dist.io import artifacts, mirror
from cimage_dist.io.artifacts import RunDir, value_at
from cimage_dist.io.mirror import open_run
from cimage_dist.nn.inference import embed_graph
from cimage_dist.nn.projection import settle
from cimage_dist.pipeline import stages
from cimage_dist.train.initial import number_of_clusters
from cimage_dist.types import LinkSplit, Topology

NO_HOLDOUT = (
    "trained on all edges, so no edge is left that training has not seen; train with "
    "data.holdout_edges=link"
)
UNSEEN = "link scores are honest where the embedding was made without the held-out edges"
FOREIGN = "an embedding from a file may have seen the held-out edges and brings no decoder"


def as_graph(graph: Any, data: DataConfig) -> Graph:
    """A Graph as it is; a torch_geometric Data, networkx graph, scipy adjacency or pandas edge list
    is converted, its rows scaled or made as data.normalize and data.features say.
    """
    if isinstance(graph, Graph):
        return graph
    kind = "degree" if data.features == "given" else data.features
    options: dict[str, Any] = {
        "normalize": data.normalize,
        "features": kind,
        "width": data.made_features,
    }
    if hasattr(graph, "edge_index"):
        return Graph.from_data(graph, **options)
    if any(hasattr(graph, name) for name in ("tocoo", "nodes", "iloc")):
        return Graph.from_edges(graph, **options)
    raise UserError(
        "Expected a graph from open_graph or Graph.from_edges, a torch_geometric Data, a networkx "
        f"graph or a scipy adjacency; got {type(graph).__name__}. Try open_graph(name or folder)."
    )


def evaluate(
    z: Tensor | np.ndarray,
    graph: Any,
    cfg: Config | None = None,
    tasks: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Score any embedding matrix (row i is node i) on the labels and structure of a Graph or Data;
    numbers in percent.

    `tasks`: node and cluster; of a graph without labels cluster and link. With "link" the caller
    says that the embedding has not seen the edges that `cfg` holds out (with the same run.seed):
    so it is after `Pretrainer(cfg).fit(graph).embed(graph)`.
    """
    cfg = cfg or Config()
    graph = as_graph(graph, cfg.data)
    tasks = tasks or (("node", "cluster") if graph.num_classes else ("node", "cluster", "link"))
    known = ("node", "link", "cluster")
    if unknown := sorted(set(tasks) - set(known)):
        raise UserError(f"Unknown evaluation task {unknown[0]!r}; choose from {', '.join(known)}.")
    z = check_embedding(z, graph)
    topology, links = training_graph(graph, cfg.data, cfg.run.seed)
    count = None
    if not graph.num_classes and "cluster" in tasks:
        count = number_of_clusters(cfg, graph, topology)
    scores = score_matrix(z, graph, topology, cfg, tasks, count)
    if "link" not in tasks or links is None:
        return scores | {"link": None, "link_reason": FOREIGN if links else NO_HOLDOUT}
    return scores | {"link": score_links(row_scores(z), links), "link_note": UNSEEN}


def check_embedding(z: Tensor | np.ndarray, graph: Graph, where: str = "the embedding") -> Tensor:
    if not isinstance(z, Tensor):
        z = np.asarray(z)
        if z.dtype.kind == "f":
            z = torch.as_tensor(z)
    if not isinstance(z, Tensor) or z.dim() != 2 or not z.is_floating_point():
        raise UserError(
            f"{where} must be a matrix of floats [nodes, width]; got shape {list(z.shape)} of "
            f"{z.dtype}. Row i must be node i."
        )
    if z.shape[0] != graph.num_nodes:
        raise UserError(
            f"{where} has {z.shape[0]:,} rows, but graph {graph.name!r} has {graph.num_nodes:,} "
            "nodes. Row i must be node i."
        )
    finite = z.isfinite().all(dim=1)
    if not finite.all():
        rows = (~finite).nonzero().squeeze(-1)
        raise UserError(
            f"{where} has NaN or infinite values in {rows.numel():,} rows (first: "
            f"{rows[:5].tolist()})."
        )
    return z.float()


def load_embedding_file(path: Path, graph: Graph) -> Tensor:
    """A .npy matrix from anywhere."""
    try:
        with path.open("rb") as file:
            return check_embedding(
                np.lib.format.read_array(file, allow_pickle=False), graph, f"Embedding file {path}"
            )
    except FileNotFoundError:
        raise UserError(
            f"Embedding file not found: {path}. Give a matrix saved with numpy.save."
        ) from None
    except (ValueError, OSError, EOFError) as error:
        raise UserError(
            f"Embedding file {path} cannot be read as a .npy matrix: {error}. Save it with "
            "numpy.save (no object arrays)."
        ) from None


def score_matrix(
    z: Tensor,
    graph: Graph,
    topology: Topology,
    cfg: Config,
    tasks: Sequence[str] = ("node", "cluster"),
    num_clusters: int | None = None,
) -> dict[str, Any]:
    """Scores of z [N, D] on the config's split of a graph; `num_clusters`: else the classes."""
    split, reason = stages.node_split_or_reason(graph, cfg)
    scores = score_embedding(
        z,
        graph.labels(),
        split,
        topology,
        cfg.eval,
        cfg.run.seed,
        [t for t in tasks if t != "link"],
        num_clusters,
    )
    return scores | ({"node_reason": reason} if "node_reason" in scores and reason else {})


def score_links(scores: Mapping[str, PairScore], links: LinkSplit) -> dict[str, Any]:
    """AUC and AP of the test edges by the score that ranks the validation edges best."""
    name, val = pick_score(scores, links)
    return link_scores(scores[name], links.test_pos, links.test_neg) | {
        "scorer": name,
        "val_auc": val["auc"],
        "val_edges": links.val_pos.shape[0],
    }


def evaluate_run(
    cfg: Config,
    embedding: Path | None = None,
    graph: Graph | None = None,
    note: Callable[[str], None] = lambda text: None,
    num_clusters: int | None = None,
) -> dict[str, Any]:
    """Score a run (or an embedding file under the same protocol) and write eval.json. Test data is
    read here and nowhere else.

    `num_clusters` of the clustering scores; without it the number of classes.
    """
    graph = graph or open_graph(cfg.data)
    topology, links = training_graph(graph, cfg.data, cfg.run.seed)
    tasks = ("node", "cluster")
    run = open_run(cfg)
    chosen = None
    if num_clusters is None and not graph.num_classes:
        chosen = clusters_without_labels(cfg, graph, topology, run)
        num_clusters = chosen["value"]
        note(f"clusters: {num_clusters} (by {chosen['by']})")
    if embedding is not None:
        result = score_matrix(
            load_embedding_file(embedding, graph), graph, topology, cfg, tasks, num_clusters
        ) | {"link": None, "link_reason": FOREIGN}
        return result | _facts(cfg, graph, links) | {"embedding": str(embedding)}
    model, saved = stages.load_model(cfg, graph)
    if stages.embedded_step(run) != saved.step:
        stages.embed(cfg, graph, note=note)
    note("scoring the embedding")
    z = stages.load_embeddings(run)
    result = score_matrix(z, graph, topology, cfg, tasks, num_clusters)
    result |= (
        {"link": score_links(model_scores(model, z), links)}
        if links
        else {"link": None, "link_reason": NO_HOLDOUT}
    )
    if cfg.eval.controls:
        result["controls"] = {}
        used = model.encoder.cfg
        for name, matrix, about in control_rows(cfg, graph, topology, links, used, note):
            note(f"scoring the control: {name}")
            scores = score_matrix(matrix, graph, topology, cfg, tasks, num_clusters)
            scores["link"] = score_links(row_scores(matrix), links) if links else None
            result["controls"][name] = scores | about
        result["controls_best"] = best_controls(result["controls"], z.shape[1])
    result |= _facts(cfg, graph, links) | {"step": saved.step, "run_dir": mirror.shown(run.root)}
    if chosen is not None:
        result["clusters"] = chosen
    with mirror.edited(run.root):
        artifacts.write_json(run.evaluation, result)
    return result


def clusters_without_labels(
    cfg: Config, graph: Graph, topology: Topology, run: RunDir
) -> dict[str, Any]:
    """{"value", "by"}: as many clusters as the run's pseudo-labels had, else estimated."""
    if run.summary.is_file() and not cfg.cluster.num_clusters:
        summary = artifacts.read_json(run.summary, "the run's summary")
        if found := (summary.get("chosen") or {}).get("clusters"):
            return dict(found)
    by = "cluster.num_clusters" if cfg.cluster.num_clusters else "features and edges"
    return {"value": number_of_clusters(cfg, graph, topology), "by": by}


def control_rows(
    cfg: Config,
    graph: Graph,
    topology: Topology,
    links: LinkSplit | None,
    used: ModelConfig,
    note: Callable[[str], None],
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """(name, matrix [N, ·], what was chosen for it) of every control; `used` are our encoder's
    settings.

    Hops and α are chosen on training and validation nodes, without labels on validation edges, as
    `chosen_by` records.
    """
    x, width = graph.rows(), used.num_factors * used.factor_dim
    split, _ = stages.node_split_or_reason(graph, cfg)
    note("choosing hops and teleport of the controls")
    choice = choose(x, topology, graph.labels(), split, links)
    by = {"chosen_by": choice.by}
    best = None
    yield "raw", graph.features(), {"width": x.shape[1]}
    matrix = smooth_features(x, topology, choice.hops)
    best = matrix if choice.best == "smoothed" else best
    yield "smoothed", matrix, {"width": x.shape[1], "hops": choice.hops, **by}
    matrix = pagerank_features(x, topology, choice.alpha)
    best = matrix if choice.best == "pagerank" else best
    about = {"alpha": choice.alpha, "steps": STEPS, **by}
    yield "pagerank", matrix, {"width": x.shape[1], **about}
    del matrix
    matrix = principal_components(graph.features() if best is None else best, width)
    yield "pca", matrix, {"width": matrix.shape[1], "of": choice.best}
    yield "untrained", untrained_rows(cfg, graph, topology, used), {"width": width}


def untrained_rows(cfg: Config, graph: Graph, topology: Topology, used: ModelConfig) -> Tensor:
    """The embedding [N, D] by the encoder as it is before training."""
    x, encoder = graph.rows(), stages.untrained_model(cfg, graph, used).encoder
    settle(encoder.norm, encoder.linear, x)
    return embed_graph(encoder, x, topology)


def best_controls(controls: dict[str, dict[str, Any]], width: int) -> dict[str, str | None]:
    """{"any": the control of the highest pool score, "same_width": of those not wider than ours}.

    Without labels by the AUC of the validation edges. Test scores play no part; None where there is
    neither.
    """
    known = {name: value_at(c, "node.pool") for name, c in controls.items()}
    if all(value is None for value in known.values()):
        known = {name: value_at(c, "link.val_auc") for name, c in controls.items()}
    scores = {name: value for name, value in known.items() if value is not None}
    narrow = {name: value for name, value in scores.items() if controls[name]["width"] <= width}
    return {
        key: max(found, key=lambda name: found[name], default=None)
        for key, found in (("any", scores), ("same_width", narrow))
    }


def _facts(cfg: Config, graph: Graph, links: LinkSplit | None) -> dict[str, Any]:
    data = settled(cfg.data, graph)
    held = (
        f"{data.link_val_ratio:.0%} and {data.link_test_ratio:.0%} of the edges were "
        "held out of training"
        if links
        else "trained on all edges"
    )
    return {
        "graph": graph.name,
        "fingerprint": fingerprint(cfg),
        "seed": cfg.run.seed,
        "edges": held,
        "objective": describe_objective(cfg),
    }


def view_scores(cfg: Config, graph: Graph, read_test: bool = False) -> dict[str, float] | None:
    """Validation accuracy of a linear probe on F1, on F2 and on both, in percent, with the number
    of factors in F1; test accuracy with `read_test`.

    None where there is nothing to compare: no labels to validate on, or no partition
    (loss.factor_weight=0, or all factors on one side).
    """
    split, _ = stages.node_split_or_reason(graph, cfg)
    labels = graph.labels()
    model, saved = stages.load_model(cfg, graph)
    chosen = saved.tensors.get("scores.in_context")
    if split is None or labels is None or chosen is None:
        return None
    if not 0 < int(chosen.sum()) < chosen.numel():
        return None
    topology, _ = training_graph(graph, cfg.data, cfg.run.seed)
    z = embed_graph(model.encoder, graph.rows(), topology).view(
        graph.num_nodes, cfg.model.num_factors, -1
    )
    found: dict[str, float] = {"f1_factors": float(chosen.sum())}
    for name, part in (("f1", z[:, chosen]), ("f2", z[:, ~chosen]), ("both", z)):
        result = linear_probe(
            part.flatten(1),
            labels,
            split,
            cfg.eval,
            cfg.run.seed,
            graph.num_classes,
            read_test=read_test,
        )
        score = result.test if read_test else result.val
        if score is None:
            return None
        found[name] = score
    return found
