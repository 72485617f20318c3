"""Linear probe on frozen embeddings (§9.1). Shapes: N nodes, F embedding width, M classes.

A validation score of low noise: keyed draws from the training and validation nodes together.

Shapes: P pooled nodes, R draws, F embedding width, M classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.config import EvalConfig
from cimage_dist.errors import UserError
from cimage_dist.eval.logistic import STRENGTHS, Path, Rows, is_divided, logistic_path, unit_rows
from cimage_dist.nn.model import Adam
from cimage_dist.types import NodeSplit

_T_0, _T_MULT = 50, 2  # cosine restarts of §9.1
_PREDICT_ROWS = 65_536
_FOLDS = 5
_FIXED = 1.0  # strength where neither validation nodes nor folds can choose one


@dataclass(frozen=True)
class ProbeResult:
    """Accuracies in percent, None where the mask has no labelled node or test labels were not read.

    `epoch` (from 1) is the choice of eval.probe=epochs, `strength` (C) that of eval.probe=logistic;
    the other is None. `pool`: the score by which C was chosen, where there are validation nodes.
    `pred` int64 [N]: the predicted class of every node, None unless test labels were read.
    """

    val: float | None
    test: float | None
    epoch: int | None
    pred: Tensor | None
    strength: float | None = None
    pool: PoolScore | None = None


def linear_probe(
    z: Tensor | Rows,
    y: Tensor,
    split: NodeSplit,
    cfg: EvalConfig,
    seed: int,
    num_classes: int | None = None,
    read_test: bool = True,
) -> ProbeResult:
    """Softmax regression on unit rows: logits = W z/max(‖z‖, 1e-12) + b.

    eval.probe=logistic: the optimum with L2 penalty for every strength C of one grid
    (`logistic.STRENGTHS`); C is that of the highest score over the draws from training and
    validation nodes (`pool.pool_score`; one validation set of a few hundred nodes chooses at
    random). Without validation nodes: by keyed stratified cross-validation inside the training
    nodes (`_by_folds`), C = 1 where no class has two nodes.
    eval.probe=epochs: Adam with cosine restarts; the first best validation epoch, the last one
    without validation nodes.

    z [N, F] of any float type, dense or sparse; y int64 [N] with -1 for unknown. With
    `read_test=False` no test label is read, not even for the class count, so the validation score
    may steer pre-training. The outcome is a function of the arguments; the global random state is
    neither read nor changed.
    """
    _check(z, y, split)
    if isinstance(z, Tensor):
        z = z.detach()
    train, val = _labelled(split.train, y), _labelled(split.val, y)
    if train.numel() == 0:
        raise UserError(
            f"linear probe: none of the {int(split.train.sum())} training nodes has a label. "
            "Give a split whose training nodes are labelled."
        )
    if num_classes is None:
        num_classes = 1 + max(int(y[ids].max()) for ids in (train, val) if ids.numel())
    if cfg.probe == "logistic":
        result, weight, bias = _logistic(z, y, split, train, val, num_classes, seed)
    else:
        result, weight, bias = _epochs(z, y, train, val, num_classes, cfg, seed)
    if not read_test:
        return result
    pred = _predict(z, weight, bias)
    test = _labelled(split.test, y)
    hits = int((pred[test.to(pred.device)] == y[test].to(pred.device)).sum())
    test_acc = 100.0 * hits / test.numel() if test.numel() else None
    return replace(result, test=test_acc, pred=pred)


def _predict(z: Tensor | Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """argmax of W z/‖z‖ + b, int64 [N]; the length of a row only scales its bias."""
    parts = []
    for begin in range(0, z.shape[0], _PREDICT_ROWS):
        ids = torch.arange(begin, min(begin + _PREDICT_ROWS, z.shape[0]))
        if isinstance(z, Tensor) and z.layout == torch.strided:
            rows = F.normalize(z[begin : begin + _PREDICT_ROWS].float(), dim=1, eps=1e-12)
            parts.append(F.linear(rows, weight.to(z.device), bias.to(z.device)).argmax(1))
        else:
            logits = unit_rows(z, ids) @ weight.numpy().T + bias.numpy()
            parts.append(torch.from_numpy(logits.argmax(1)))
    return torch.cat(parts)


def _logistic(
    z: Tensor | Rows,
    y: Tensor,
    split: NodeSplit,
    train: Tensor,
    val: Tensor,
    num_classes: int,
    seed: int,
) -> tuple[ProbeResult, Tensor, Tensor]:
    """(validation score, W [M, F], b [M])."""
    x, labels = unit_rows(z, train), y[train].cpu().numpy()
    path = logistic_path(x, labels, num_classes)
    pool = make_pool(y, split) if val.numel() else None
    pooled = pool_score(z, pool) if pool else None
    best = path.strengths.index(pooled.strength) if pooled else None
    if best is None:
        best = _by_folds(x, labels, train.cpu(), num_classes, path, seed)
    accuracy = None
    if val.numel():
        hits, _ = path.scores(unit_rows(z, val), y[val].cpu().numpy())
        accuracy = 100.0 * int(hits[best]) / val.numel()
    weight, bias = torch.from_numpy(path.weight[best]), torch.from_numpy(path.bias[best])
    found = ProbeResult(accuracy, None, None, None, path.strengths[best], pooled)
    return found, weight, bias


def _choose(hits: np.ndarray, loss: np.ndarray) -> int:
    """Most hits, then lowest cross-entropy, then the smallest C."""
    return min(range(len(hits)), key=lambda at: (-int(hits[at]), float(loss[at]), at))


def _by_folds(x: Rows, y: np.ndarray, gids: Tensor, num_classes: int, path: Path, seed: int) -> int:
    """Position of the chosen C: hits and cross-entropy summed over the folds of the training nodes.

    The nodes of a class, in keyed order, go to the folds in turn; there are as many folds as the
    largest class has nodes, at most five. The only node of a class is never held out.
    """
    counts = np.bincount(y, minlength=num_classes)
    folds = min(_FOLDS, int(counts.max()))
    if folds < 2:
        return path.strengths.index(_FIXED)
    order = keyed.bits(keyed.stream(seed, "probe", 2_000_000), gids).argsort().numpy()
    by_class = order[y[order].argsort(kind="stable")]
    rank = np.empty(len(y), dtype=np.int64)
    rank[by_class] = np.arange(len(y)) - (counts.cumsum() - counts)[y[by_class]]
    fold = np.where(counts[y] > 1, rank % folds, -1)
    hits, loss = np.zeros(len(path.strengths), dtype=np.int64), np.zeros(len(path.strengths))
    for held in range(folds):
        out = fold == held
        fitted = logistic_path(x[~out], y[~out], num_classes, path.strengths)
        more_hits, more_loss = fitted.scores(x[out], y[out])
        hits, loss = hits + more_hits, loss + more_loss
    return _choose(hits, loss)


def _epochs(
    z: Tensor | Rows,
    y: Tensor,
    train: Tensor,
    val: Tensor,
    num_classes: int,
    cfg: EvalConfig,
    seed: int,
) -> tuple[ProbeResult, Tensor, Tensor]:
    """(validation score, W [M, F], b [M])."""
    if not isinstance(z, Tensor):
        z = torch.from_numpy(z.toarray() if hasattr(z, "toarray") else z)
    if z.layout != torch.strided:
        z = z.to_dense()
    y = y.to(z.device)
    # A caller may be inside no_grad or inference_mode, as embeddings usually come from there.
    with torch.inference_mode(False), torch.enable_grad():
        rows = [(_rows(z, ids), y[ids]) for ids in (train, val)]
        epoch, hits, weight, bias = _fit(*rows[0], *rows[1], num_classes, cfg, seed)
    accuracy = 100.0 * hits / val.numel() if val.numel() else None
    return ProbeResult(accuracy, None, epoch, None), weight, bias


def _fit(
    x: Tensor, y: Tensor, x_val: Tensor, y_val: Tensor, num_classes: int, cfg: EvalConfig, seed: int
) -> tuple[int, int, Tensor, Tensor]:
    """(best epoch, validation hits there, W [M, D], b [M])."""
    dim = x.shape[1]
    bound = math.sqrt(6.0 / (dim + num_classes))
    draws = keyed.uniform(
        keyed.stream(seed, "probe", 0), torch.arange(num_classes * dim, device=x.device)
    ).view(num_classes, dim)
    weight = ((2.0 * draws - 1.0) * bound).to(x.dtype).requires_grad_()
    bias = x.new_zeros(num_classes).requires_grad_()
    optimizer = Adam([weight, bias], lr=cfg.probe_lr_max, weight_decay=cfg.probe_weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, T_0=_T_0, T_mult=_T_MULT, eta_min=cfg.probe_lr_min
    )
    best_epoch, best_hits, best = cfg.probe_epochs, -1, (weight, bias)
    for epoch in range(1, cfg.probe_epochs + 1):
        for bids in _batches(
            x.shape[0], cfg.probe_batch, keyed.stream(seed, "probe", epoch), x.device
        ):
            x_batch, y_batch = (x, y) if bids is None else (x[bids], y[bids])
            optimizer.zero_grad()
            F.cross_entropy(F.linear(x_batch, weight, bias), y_batch).backward()
            optimizer.step()
        schedule.step()
        if y_val.numel():
            with torch.no_grad():
                hits = int((F.linear(x_val, weight, bias).argmax(1) == y_val).sum())
            if hits > best_hits:
                best_epoch, best_hits, best = (
                    epoch,
                    hits,
                    (weight.detach().clone(), bias.detach().clone()),
                )
    return best_epoch, best_hits, best[0].detach(), best[1].detach()


def _batches(num_rows: int, size: int, key: int, device: torch.device) -> list[Tensor | None]:
    """Row positions of each batch of one epoch; a single None stands for all rows in their own
    order.
    """
    if num_rows <= size:
        return [None]
    return list(keyed.bits(key, torch.arange(num_rows, device=device)).argsort().split(size))


def _labelled(mask: Tensor, y: Tensor) -> Tensor:
    """Nodes inside the mask whose label is known; only labels under the mask are read."""
    gids = mask.to(y.device).nonzero().squeeze(1)
    return gids[y[gids] >= 0]


def _rows(z: Tensor, gids: Tensor) -> Tensor:
    return F.normalize(z[gids.to(z.device)].float(), dim=1, eps=1e-12)


def _check(z: Tensor | Rows, y: Tensor, split: NodeSplit) -> None:
    if len(z.shape) != 2:
        raise UserError(
            f"linear probe: embeddings must be a matrix [nodes, width]; got shape {list(z.shape)}."
        )
    sizes = {
        "labels": y,
        "training mask": split.train,
        "validation mask": split.val,
        "test mask": split.test,
    }
    for name, entries in sizes.items():
        if entries.numel() != z.shape[0]:
            raise UserError(
                f"linear probe: {name}: {entries.numel()} entries for {z.shape[0]} embedding "
                "rows. Row i must belong to node i in both."
            )


MOST_DRAWS, _FEWEST_DRAWS = 10, 3
_FITTED_ROWS = 3000  # of all draws together: large ones are less noisy, and fewer do
_MOST_NODES = 50_000
_KEY = 2_000_000  # apart from the other users of the stream "split"


@dataclass(frozen=True)
class Pool:
    """nodes int64 [P] ascending, labels int64 [P], fitted bool [R, P]: the nodes of every draw."""

    nodes: Tensor
    labels: Tensor
    fitted: Tensor


@dataclass(frozen=True)
class PoolScore:
    """Mean accuracy over the draws and its standard error, percent, at the best strength."""

    mean: float
    error: float
    strength: float

    def as_dict(self) -> dict[str, float]:
        return {"pool": self.mean, "pool_se": self.error}


def make_pool(y: Tensor, split: NodeSplit, most: int = _MOST_NODES) -> Pool | None:
    """The draws of a graph's labels and split, the same for every method; None where none is left.

    P = labelled training and validation nodes, at most `most` of them (keyed). Each draw has the
    class counts of the training nodes, of no class more than half of its nodes in P, so that a
    strength which suits the draws suits the training nodes. Ten draws, down to three where they
    are large. No label of another node is read.
    """
    y = y.cpu()
    nodes = (split.train | split.val).cpu().nonzero().squeeze(1)
    nodes = nodes[y[nodes] >= 0]
    order = keyed.bits(keyed.stream(0, "split", _KEY), nodes).argsort()
    nodes = nodes[order[:most]].sort().values
    if nodes.numel() == 0:
        return None
    labels = y[nodes]
    in_pool = torch.bincount(labels)
    training = torch.bincount(labels[split.train.cpu()[nodes]], minlength=in_pool.numel())
    counts = torch.minimum(training, (in_pool + 1) // 2)
    size = int(counts.sum())
    if size == 0 or size == nodes.numel():
        return None
    number = min(MOST_DRAWS, max(_FEWEST_DRAWS, _FITTED_ROWS // size))
    draws = [_draw(nodes, labels, in_pool, counts, draw) for draw in range(1, number + 1)]
    return Pool(nodes, labels, torch.stack(draws))


def _draw(nodes: Tensor, labels: Tensor, in_pool: Tensor, counts: Tensor, draw: int) -> Tensor:
    """bool [P]: counts[c] nodes of every class c, the first ones in keyed order."""
    order = keyed.bits(keyed.stream(0, "split", _KEY + draw), nodes).argsort()
    by_class = order[labels[order].argsort(stable=True)]
    first = in_pool.cumsum(0) - in_pool
    rank = torch.arange(nodes.numel()) - first[labels[by_class]]
    fitted = torch.zeros(nodes.numel(), dtype=torch.bool)
    fitted[by_class[rank < counts[labels[by_class]]]] = True
    return fitted


def pool_score(z: Tensor | Rows, pool: Pool) -> PoolScore:
    """z [N, F], one row per node of the graph: see `score_rows`."""
    return score_rows(unit_rows(z, pool.nodes), pool)


def score_rows(x: Rows, pool: Pool, comm: Comm | None = None) -> PoolScore:
    """Collective: x [P, F], the unit rows of the pooled nodes, the same on every rank. R fits for
    every strength C of the grid, of which each rank makes its share; all ranks share each of the
    large ones:

        accuracy_r(C) = share of P \\ draw_r that the regression fitted on draw_r gets right,

    and C is the one with the highest mean over r (the smallest such C).
    """
    comm = comm or Comm()
    y, num_classes = pool.labels.numpy(), int(pool.labels.max()) + 1
    own = np.zeros((len(pool.fitted), len(STRENGTHS)))  # [R, S], other ranks' rows zero
    for draw, mask in enumerate(pool.fitted):
        fitted, is_mine = mask.numpy(), draw % comm.world == comm.rank
        shared = comm if is_divided(int(fitted.sum()), x.shape[1]) else Comm()
        if is_mine or shared is comm:
            path = logistic_path(x[fitted], y[fitted], num_classes, comm=shared)
        if is_mine:
            hits, _ = path.scores(x[~fitted], y[~fitted])
            own[draw] = 100.0 * hits / (~fitted).sum()
    by_strength = comm.sum(torch.from_numpy(own)).numpy()
    best = int(by_strength.mean(0).round(9).argmax())
    found = by_strength[:, best]
    error = float(found.std(ddof=1) / np.sqrt(len(found)))
    return PoolScore(float(found.mean()), error, STRENGTHS[best])
