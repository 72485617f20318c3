"""L2-regularised multinomial logistic regression, trained to convergence for a grid of strengths.

For every strength C (scikit-learn's meaning):

    min_{W, b}  C · Σ_i −log softmax(W x_i + b)[y_i] + ½ ‖W‖²,   b is not penalised.

Shapes: n rows, F columns, M classes. Rows are float arrays or scipy CSR matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.nn.model import Adam

STRENGTHS = tuple(10.0**e for e in range(-3, 4))  # the one grid, for every method and every control
ABSENT = -1e6  # bias of a class that the training rows do not have
_MOST_REDUCED = 4096  # rows up to which the n × n Gram matrix is decomposed
_MOST_DOUBLE = 10_000_000  # entries up to which the fit is in float64
_BLOCK_ROWS = 2048  # of the sums that ranks share; their order is the same on any number of them
_MOST_EXACT = 200_000  # training rows up to which L-BFGS sees all of them
_GRADIENT = 1e-6  # largest gradient entry of the mean loss at convergence
_EPOCHS, _STEPS, _BATCH, _RATE = 20, 2000, 4096, 0.3  # of the mini-batch fit

Rows = Any  # float ndarray [n, F], or scipy.sparse.csr_matrix of that shape
Array = np.ndarray


@dataclass(frozen=True)
class Path:
    """One linear classifier for every strength: weight float32 [S, M, F], bias float32 [S, M]."""

    strengths: tuple[float, ...]
    weight: Array
    bias: Array

    def logits(self, x: Rows) -> Array:
        """float32 [S, n, M]."""
        stacked = self.weight.reshape(-1, self.weight.shape[2])
        found = np.asarray(x @ stacked.T).reshape(x.shape[0], *self.bias.shape)
        return found.transpose(1, 0, 2) + self.bias[:, None, :]

    def scores(self, x: Rows, y: Array) -> tuple[Array, Array]:
        """(hits int64 [S], summed cross-entropy float64 [S]) on labelled rows."""
        logits = self.logits(x)
        hits = (logits.argmax(2) == y).sum(1)
        return hits, _cross_entropy(logits.astype(np.float64), y)


def _cross_entropy(logits: Array, y: Array) -> Array:
    top = logits.max(2)
    own = np.take_along_axis(logits, y[None, :, None], axis=2)[:, :, 0]
    return (np.log(np.exp(logits - top[:, :, None]).sum(2)) + top - own).sum(1)


def unit_rows(z: Tensor | Rows, ids: Tensor | None = None) -> Rows:
    """z/max(‖z‖, 1e-12) of the named rows, float32; a sparse tensor or scipy matrix gives CSR."""
    if isinstance(z, Tensor) and z.layout == torch.strided:
        found = z.detach() if ids is None else z.detach()[ids.to(z.device)]
        return F.normalize(found.float(), dim=1, eps=1e-12).cpu().numpy()
    x = to_csr(z)
    x = (x if ids is None else x[ids.cpu().numpy()]).astype(np.float32)
    norm = np.sqrt(np.asarray(x.multiply(x).sum(1)).reshape(-1))
    return (sparse.diags_array(1 / np.maximum(norm, 1e-12)) @ x).tocsr()


def to_csr(z: Tensor | Rows) -> sparse.csr_matrix:
    if not isinstance(z, Tensor):
        return sparse.csr_matrix(z)
    entries = z.detach().cpu().to_sparse_coo().coalesce()
    at = entries.indices().numpy()
    return sparse.csr_matrix((entries.values().float().numpy(), (at[0], at[1])), shape=z.shape)


def logistic_path(
    x: Rows,
    y: Array,
    num_classes: int,
    strengths: Sequence[float] = STRENGTHS,
    most_exact: int = _MOST_EXACT,
    comm: Comm | None = None,
) -> Path:
    """The optimum for every strength, ascending; each starts from the one before. Collective with
    a comm: all ranks have the same rows, and share the work where `is_divided`.

    x [n, F], y int64 [n]. Centring x changes nothing but the bias and helps the solver. With fewer
    rows than columns the optimum is a combination of the rows, W = B x (representer theorem), so
    the fit is in the coordinates of the eigenvectors of the Gram matrix: n × n numbers instead of
    n × F. Above `most_exact` rows: keyed mini-batches, see `_by_batches`.
    """
    strengths = tuple(sorted(strengths))
    classes, y = np.unique(y, return_inverse=True)
    weight = np.zeros((len(strengths), num_classes, x.shape[1]), dtype=np.float32)
    bias = np.full((len(strengths), num_classes), ABSENT, dtype=np.float32)
    bias[:, classes] = 0.0
    if len(classes) > 1:
        if x.shape[0] > most_exact:
            weight[:, classes], bias[:, classes] = _by_batches(x, y, len(classes), strengths)
        else:
            weight[:, classes], bias[:, classes] = _exact(
                x, y, len(classes), strengths, comm or Comm()
            )
    return Path(strengths, weight, bias)


def is_divided(num_rows: int, width: int) -> bool:
    """Whether sums over the rows are made block by block, which several ranks can share."""
    return max(width, _BLOCK_ROWS) < num_rows <= _MOST_EXACT


def _blocks(num_rows: int, width: int) -> list[slice]:
    count = -(-num_rows // _BLOCK_ROWS) if is_divided(num_rows, width) else 1
    return [slice(num_rows * i // count, num_rows * (i + 1) // count) for i in range(count)]


def _exact(
    x: Rows, y: Array, num_classes: int, strengths: tuple[float, ...], comm: Comm
) -> tuple[Array, Array]:
    """(weight [S, M, F], bias [S, M])."""
    num_rows, width = x.shape
    if num_rows * min(num_rows, width) <= _MOST_DOUBLE:
        x = x.astype(np.float64)
    mean = np.asarray(x.mean(0)).reshape(-1)
    basis = None
    rows, centre = x, mean
    if num_rows < width and num_rows <= _MOST_REDUCED:
        gram = x @ x.T
        gram = np.asarray(gram.toarray() if sparse.issparse(gram) else gram, dtype=np.float64)
        gram = gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()
        value, vector = np.linalg.eigh(gram)
        kept = value > 1e-10 * max(value[-1], 1e-300)
        root = np.sqrt(value[kept])
        rows, basis = vector[:, kept] * root, vector[:, kept] / root
        centre = np.zeros(rows.shape[1])
    coefficient = np.zeros((rows.shape[1], num_classes))
    bias = np.zeros(num_classes)
    weights, biases = [], []
    for strength in strengths:
        coefficient, bias = _minimise(rows, centre, y, coefficient, bias, strength, comm)
        # The columns of `basis` sum to 0: its eigenvectors are orthogonal to the constant one.
        found = coefficient if basis is None else np.asarray(x.T @ (basis @ coefficient))
        weights.append(found.T)
        biases.append(bias - mean @ found)
    return np.stack(weights), np.stack(biases)


def _minimise(
    x: Rows, centre: Array, y: Array, weight: Array, bias: Array, strength: float, comm: Comm
) -> tuple[Array, Array]:
    """L-BFGS from (weight [F, M], bias [M]) on the objective divided by C·n; rows x − centre.

    Rank 0 searches; at every point it asks for, each rank sums over its own blocks of rows.
    """
    from scipy.optimize import minimize

    (num_rows, width), num_classes = x.shape, bias.size
    decay = 1.0 / (strength * num_rows)
    blocks = _blocks(num_rows, width)
    if len(blocks) == 1:
        comm = Comm()
    own = [(x[rows], y[rows]) for rows in blocks[slice(*comm.slice_of(len(blocks)))]]

    def sums(flat: Array) -> Array:
        """[blocks, 1 + F·M + M]: what each block of rows adds to the loss and to its slope."""
        w = flat[: width * num_classes].reshape(width, num_classes)
        b = flat[width * num_classes :]
        made = [_block_sums(rows, centre, labels, w, b, num_rows) for rows, labels in own]
        found = torch.from_numpy(np.stack(made) if made else np.empty((0, 1 + flat.size)))
        return comm.share_rows(found, len(blocks)).numpy()

    def tell(is_found: bool, flat: Array) -> tuple[bool, Array]:
        sent = comm.broadcast(torch.from_numpy(np.concatenate([[float(is_found)], flat]))).numpy()
        return bool(sent[0]), sent[1:]

    def objective(flat: Array) -> tuple[float, Array]:
        tell(False, flat)
        total = sums(flat).sum(0)
        w = flat[: width * num_classes]
        total[1 : 1 + w.size] += decay * w
        return total[0] / num_rows + 0.5 * decay * np.vdot(w, w), total[1:]

    flat = np.concatenate([weight.reshape(-1), bias])
    if comm.is_main:
        limits = {"maxiter": 2000, "maxfun": 4000, "gtol": _GRADIENT, "ftol": 1e-12}
        flat = minimize(objective, flat, jac=True, method="L-BFGS-B", options=limits).x
        tell(True, flat)
    else:
        is_found = False
        while not is_found:
            is_found, flat = tell(False, flat)
            if not is_found:
                sums(flat)
    return flat[: width * num_classes].reshape(width, num_classes), flat[width * num_classes :]


def _block_sums(x: Rows, centre: Array, y: Array, w: Array, b: Array, num_rows: int) -> Array:
    """Of rows x − centre [n, F]: Σ_i −log softmax(W x_i + b)[y_i], then its slope in W [F, M] and
    in b [M], these two divided by all rows; flat.
    """
    at = np.arange(x.shape[0])
    logits = np.asarray(x @ w.astype(x.dtype, copy=False), dtype=np.float64) + (b - centre @ w)
    logits -= logits.max(1, keepdims=True)
    own = logits[at, y].sum()
    share = np.exp(logits)
    total = share.sum(1, keepdims=True)
    loss = np.log(total).sum() - own
    share /= total
    share[at, y] -= 1.0
    share /= num_rows
    pull = share.sum(0)
    turned = np.asarray(x.T @ share.astype(x.dtype, copy=False), dtype=np.float64)
    return np.concatenate([[loss], (turned - np.outer(centre, pull)).reshape(-1), pull])


def _by_batches(
    x: Rows, y: Array, num_classes: int, strengths: tuple[float, ...]
) -> tuple[Array, Array]:
    """(weight [S, M, F], bias [S, M]) by Adam on keyed batches, the rate falling to 0 by a cosine.

    20 epochs, and at least 2000 steps. All strengths see the same batches: one product of the batch
    with S·M weight rows per step.
    """
    num_rows, width = x.shape
    count = len(strengths)
    with torch.inference_mode(False), torch.enable_grad():
        mean = torch.from_numpy(np.asarray(x.mean(0), dtype=np.float32).reshape(-1))
        labels = torch.from_numpy(y)
        decay = torch.tensor([1.0 / (c * num_rows) for c in strengths]).view(-1, 1, 1)
        weight = torch.zeros(count, num_classes, width, requires_grad=True)
        bias = torch.zeros(count, num_classes, requires_grad=True)
        optimizer = Adam([weight, bias], lr=_RATE)
        per_epoch = -(-num_rows // _BATCH)
        epochs = max(_EPOCHS, -(-_STEPS // per_epoch))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
        for epoch in range(epochs):
            key = keyed.stream(0, "probe", 1_000_000 + epoch)
            for ids in keyed.bits(key, torch.arange(num_rows)).argsort().split(_BATCH):
                batch = x[ids.numpy()]
                dense = batch.toarray() if sparse.issparse(batch) else batch
                rows = torch.from_numpy(np.ascontiguousarray(dense, dtype=np.float32)) - mean
                logits = F.linear(rows, weight.view(-1, width), bias.view(-1))
                logits = logits.view(-1, count, num_classes).transpose(1, 2)
                target = labels[ids, None].expand(-1, count)
                loss = F.cross_entropy(logits, target, reduction="sum") / len(ids)
                optimizer.zero_grad()
                (loss + 0.5 * (decay * weight * weight).sum()).backward()
                optimizer.step()
                schedule.step()
        found = weight.detach()
        return found.numpy(), (bias.detach() - found @ mean).numpy()
