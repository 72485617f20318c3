"""Few labelled nodes: the linear probe on our embedding beside a graph convolutional network
trained on the same labels (paper, figure on low labels).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.config import Config, run_dir
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.eval.controls import choose, pagerank_features, smooth_features
from cimage_dist.eval.probe import linear_probe
from cimage_dist.io.artifacts import RunDir
from cimage_dist.pipeline import stages
from cimage_dist.types import NodeSplit, Topology

RATIOS = (0.01, 0.02, 0.05, 0.10)
_EPOCHS, _HIDDEN, _LR, _DECAY, _DROPOUT = 200, 64, 0.01, 5e-4, 0.5


def ratio_split(y: Tensor, ratio: float, seed: int) -> NodeSplit:
    """`ratio` of the labelled nodes for training, the rest for test, by a keyed draw.

    None for validation: labels to choose an epoch by are labels too, and as few as the paper takes
    (0.2 % of the nodes) choose at random.
    """
    known = (y >= 0).nonzero().squeeze(1)
    order = known[
        torch.argsort(
            keyed.bits(keyed.stream(seed, "split", 1_000_000 + round(1000 * ratio)), known)
        )
    ]
    count = max(1, round(ratio * known.numel()))
    train, val, test = (torch.zeros(y.numel(), dtype=torch.bool) for _ in range(3))
    train[order[:count]] = True
    test[order[count:]] = True
    return NodeSplit(train, val, test)


def gcn_accuracy(x: Tensor, y: Tensor, topology: Topology, split: NodeSplit, seed: int) -> float:
    """Test accuracy, in percent, of a two-layer GCN after its last epoch: 64 hidden units,
    else the usual settings of the method's authors."""
    from torch_geometric.nn import GCNConv

    edges = torch.stack([topology.indices.to(torch.int64), topology.rows()])
    words = (
        x.to_sparse_coo().coalesce()
    )  # of bags of words, 1 % is not zero: a tenth of the time and less

    def dropped() -> Tensor:
        """Dropout of the input; of what is zero, nothing can be dropped."""
        return torch.sparse_coo_tensor(
            words.indices(),
            F.dropout(words.values(), _DROPOUT),
            words.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed.derive(seed, keyed.STREAM["probe"]) & (2**62 - 1))
        first, second = (
            GCNConv(x.shape[1], _HIDDEN, cached=True),
            GCNConv(_HIDDEN, int(y.max()) + 1, cached=True),
        )
        groups = [
            {"params": first.parameters(), "weight_decay": _DECAY},
            {"params": second.parameters(), "weight_decay": 0.0},
        ]
        optimizer = torch.optim.Adam(groups, lr=_LR)
        for _ in range(_EPOCHS):
            optimizer.zero_grad()
            hidden = F.dropout(F.relu(first(dropped(), edges)), _DROPOUT)
            F.cross_entropy(second(hidden, edges)[split.train], y[split.train]).backward()
            optimizer.step()
        with torch.no_grad():
            hits = second(F.relu(first(words, edges)), edges).argmax(1) == y
    return 100 * float(hits[split.test].double().mean())


def low_label_scores(cfg: Config, graph: Graph) -> dict[str, dict[str, float | None]]:
    """{"1": {"ours", "smoothed", "pagerank", "gcn"}, ...}: test accuracies by percent of labelled
    nodes.

    All on the same split of this seed. Hops and α of the controls are those chosen on the config's
    own training and validation nodes, as the settings of our embedding may have been.
    """
    y = graph.labels()
    if y is None:
        raise UserError(f"Graph {graph.name!r} has no labels.")
    x, topology = graph.features(), graph.topology()
    choice = choose(x, topology, y, stages.node_split_or_reason(graph, cfg)[0])
    rows = {
        "ours": stages.load_embeddings(RunDir(run_dir(cfg))),
        "smoothed": smooth_features(x, topology, choice.hops),
        "pagerank": pagerank_features(x, topology, choice.alpha),
    }
    found: dict[str, dict[str, float | None]] = {}
    for ratio in RATIOS:
        split = ratio_split(y, ratio, cfg.run.seed)
        scores = {
            name: linear_probe(z, y, split, cfg.eval, cfg.run.seed, graph.num_classes).test
            for name, z in rows.items()
        }
        gcn = gcn_accuracy(x, y, topology, split, cfg.run.seed)
        found[f"{100 * ratio:g}"] = {**scores, "gcn": gcn}
    return found
