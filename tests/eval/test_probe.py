"""The linear probe: what it learns, what it must not read, and that it is a function of its
arguments.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

from cimage_dist.config import EvalConfig
from cimage_dist.errors import UserError
from cimage_dist.eval import probe
from cimage_dist.eval.logistic import STRENGTHS, logistic_path, unit_rows
from cimage_dist.eval.probe import linear_probe, make_pool, pool_score
from cimage_dist.nn.model import Adam
from cimage_dist.types import NodeSplit

NUM_NODES, DIM, NUM_CLASSES = 600, 16, 4
PROBES = ["logistic", "epochs"]


def embedding(noise: float = 0.001) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(NUM_NODES) % NUM_CLASSES
    z = (
        torch.nn.functional.one_hot(y, DIM).float()
        + noise * torch.randn(NUM_NODES, DIM, generator=generator) / DIM**0.5
    )
    return z * torch.rand(NUM_NODES, 1, generator=generator).add(0.1), y


def split(num_train: int = 100, num_val: int = 100) -> NodeSplit:
    ids = torch.arange(NUM_NODES)
    return NodeSplit(
        ids < num_train,
        (ids >= num_train) & (ids < num_train + num_val),
        ids >= num_train + num_val,
    )


@pytest.mark.parametrize("kind", PROBES)
def test_separable_classes_are_learned_completely(kind: str) -> None:
    z, y = embedding()
    result = linear_probe(z, y, split(), EvalConfig(probe=kind), seed=0)
    assert (result.val, result.test) == (100.0, 100.0)
    assert result.pred is not None and torch.equal(result.pred, y)


def test_shuffled_labels_score_at_chance() -> None:
    z, y = embedding()
    y = y[torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(1))]
    result = linear_probe(z, y, split(200, 100), EvalConfig(), seed=0)
    assert result.test is not None
    assert abs(result.test - 25.0) < 4 * 2.5  # four standard errors of 300 test nodes


@pytest.mark.parametrize("kind", PROBES)
def test_test_labels_do_not_reach_training_or_selection(kind: str) -> None:
    z, y = embedding(noise=3.0)
    cfg = EvalConfig(probe=kind)
    poisoned = y.clone()
    poisoned[split().test] = torch.randint(
        0, 1000, (int(split().test.sum()),), generator=torch.Generator().manual_seed(2)
    )
    clean = linear_probe(z, y, split(), cfg, seed=0, read_test=False)
    dirty = linear_probe(z, poisoned, split(), cfg, seed=0, read_test=False)
    assert clean == dirty and clean.test is None and clean.pred is None
    with_test, with_poison = (
        linear_probe(z, labels, split(), cfg, seed=0) for labels in (y, poisoned)
    )
    assert torch.equal(with_test.pred, with_poison.pred)
    assert (with_test.val, with_test.epoch, with_test.strength) == (
        clean.val,
        clean.epoch,
        clean.strength,
    )
    assert with_poison.val == clean.val


def test_only_labels_under_the_masks_are_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = embedding()
    asked: list[Tensor] = []
    original = probe._labelled
    monkeypatch.setattr(
        probe, "_labelled", lambda mask, labels: asked.append(mask) or original(mask, labels)
    )
    linear_probe(z, y, split(), EvalConfig(), seed=0, read_test=False)
    assert len(asked) == 2 and not any(bool((mask & split().test).any()) for mask in asked)


def test_epochs_same_seed_same_result_and_global_random_state_is_left_alone() -> None:
    z, y = embedding(noise=3.0)
    cfg = EvalConfig(probe="epochs", probe_epochs=20, probe_batch=33)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    a = linear_probe(z, y, split(), cfg, seed=7)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    b = linear_probe(z, y, split(), cfg, seed=7)
    assert (a.val, a.test, a.epoch) == (b.val, b.test, b.epoch) and torch.equal(a.pred, b.pred)
    other = linear_probe(z, y, split(), cfg, seed=8)
    assert not torch.equal(a.pred, other.pred)


def test_first_best_validation_epoch_is_kept() -> None:
    z, y = embedding(noise=3.0)
    cfg = EvalConfig(probe="epochs", probe_lr_max=0.5, probe_lr_min=0.0)
    result = linear_probe(z, y, split(), cfg, seed=0)
    # Stopping at the reported epoch gives the same model; stopping one earlier scores lower on
    # validation.
    again = linear_probe(
        z,
        y,
        split(),
        EvalConfig(probe="epochs", probe_lr_max=0.5, probe_lr_min=0.0, probe_epochs=result.epoch),
        seed=0,
    )
    assert (again.val, again.test, again.epoch) == (
        result.val,
        result.test,
        result.epoch,
    ) and torch.equal(again.pred, result.pred)
    assert 1 < result.epoch < cfg.probe_epochs
    earlier = linear_probe(
        z,
        y,
        split(),
        EvalConfig(
            probe="epochs", probe_lr_max=0.5, probe_lr_min=0.0, probe_epochs=result.epoch - 1
        ),
        seed=0,
    )
    assert earlier.val is not None and result.val is not None and earlier.val < result.val


def test_validation_accuracy_is_that_of_the_predictions() -> None:
    z, y = embedding(noise=3.0)
    result = linear_probe(z, y, split(), EvalConfig(), seed=0)
    val = split().val
    assert result.pred is not None and result.val == pytest.approx(
        100 * float((result.pred[val] == y[val]).float().mean())
    )


def test_without_validation_nodes_the_last_epoch_counts() -> None:
    z, y = embedding()
    result = linear_probe(z, y, split(100, 0), EvalConfig(probe="epochs", probe_epochs=40), seed=0)
    assert (
        result.val is None and result.epoch == 40 and result.test is not None and result.test > 99
    )


def test_without_test_nodes_the_test_score_is_none() -> None:
    z, y = embedding()
    y[split().test] = -1
    result = linear_probe(z, y, split(), EvalConfig(), seed=0)
    assert result.test is None and result.val is not None


def test_unknown_labels_are_skipped() -> None:
    z, y = embedding()
    y[::3] = -1
    result = linear_probe(z, y, split(), EvalConfig(), seed=0)
    assert (result.val, result.test) == (100.0, 100.0)


def test_rows_are_normalised() -> None:
    z, y = embedding(noise=3.0)
    scaled = z * torch.logspace(-2, 2, NUM_NODES)[:, None]
    a, b = (linear_probe(x, y, split(), EvalConfig(), seed=0) for x in (z, scaled))
    assert a.val == pytest.approx(b.val, abs=1.0) and a.test == pytest.approx(b.test, abs=0.5)


def test_schedule_follows_cosine_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = embedding()
    rates: list[float] = []
    step = Adam.step
    monkeypatch.setattr(
        Adam, "step", lambda self, *a: (rates.append(self.param_groups[0]["lr"]), step(self, *a))[1]
    )
    linear_probe(
        z,
        y,
        split(),
        EvalConfig(probe="epochs", probe_lr_max=0.1, probe_lr_min=0.001, probe_epochs=152),
        seed=0,
    )
    assert [rates[i] for i in (0, 50, 150)] == pytest.approx(
        [0.1] * 3
    )  # periods of 50 and 100 epochs
    assert rates[25] == pytest.approx(0.0505) and rates[100] == pytest.approx(0.0505)
    assert min(rates) >= 0.001


@pytest.mark.parametrize("kind", PROBES)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_works_inside_gradient_free_code(context: type, kind: str) -> None:
    z, y = embedding()
    with context():
        inside = z * 1.0
        result = linear_probe(inside, y, split(), EvalConfig(probe=kind), seed=0)
    assert result.test == 100.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types(dtype: torch.dtype) -> None:
    z, y = embedding()
    assert linear_probe(z.to(dtype), y, split(), EvalConfig(), seed=0).test == 100.0


def test_zero_rows_and_attached_embeddings_are_legal() -> None:
    z, y = embedding()
    z[0] = 0.0
    result = linear_probe(z.requires_grad_(), y, split(), EvalConfig(), seed=0)
    assert z.grad is None and result.pred is not None and not result.pred.requires_grad


def test_bad_input_is_explained() -> None:
    z, y = embedding()
    with pytest.raises(UserError, match="none of the 100 training nodes has a label"):
        linear_probe(z, torch.full_like(y, -1), split(), EvalConfig(), seed=0)
    with pytest.raises(UserError, match="600 entries for 599 embedding rows"):
        linear_probe(z[1:], y, split(), EvalConfig(), seed=0)
    with pytest.raises(UserError, match="matrix"):
        linear_probe(z[0], y, split(), EvalConfig(), seed=0)


def test_the_strength_is_the_best_over_the_draws() -> None:
    z, y = embedding(noise=3.0)
    result = linear_probe(z, y, split(), EvalConfig(), seed=0)
    pooled = pool_score(z, make_pool(y, split()))
    assert result.pool == pooled and result.strength == pooled.strength and result.epoch is None
    path = logistic_path(
        unit_rows(z, split().train.nonzero()[:, 0]), y[split().train].numpy(), NUM_CLASSES
    )
    hits, _ = path.scores(unit_rows(z, split().val.nonzero()[:, 0]), y[split().val].numpy())
    assert result.val == pytest.approx(float(hits[STRENGTHS.index(pooled.strength)]))


def test_choice_prefers_hits_then_cross_entropy_then_the_smaller_strength() -> None:
    assert probe._choose(np.array([5, 7, 7, 7]), np.array([1.0, 3.0, 2.0, 2.0])) == 2


def test_the_logistic_probe_draws_nothing_from_the_seed_or_the_global_state() -> None:
    z, y = embedding(noise=3.0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    a, b = (linear_probe(z, y, split(), EvalConfig(), seed=seed) for seed in (7, 8))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(a.pred, b.pred) and a.strength == b.strength


def test_without_validation_nodes_folds_of_the_training_nodes_choose() -> None:
    z, y = embedding(noise=3.0)
    first = linear_probe(z, y, split(40, 0), EvalConfig(), seed=0)
    assert first.val is None and first.strength in STRENGTHS
    again = linear_probe(z, y, split(40, 0), EvalConfig(), seed=0)
    assert first.strength == again.strength and first.test == again.test
    assert linear_probe(z, y, split(4, 0), EvalConfig(), seed=0).strength == 1.0, (
        "one node per class: nothing can choose"
    )
    y[:4] = torch.tensor([0, 0, 1, 2])
    assert linear_probe(z, y, split(4, 0), EvalConfig(), seed=0).test is not None, (
        "classes of one node are never held out"
    )


def test_classes_without_training_nodes_are_never_predicted() -> None:
    z, y = embedding()
    parts = split()
    y[parts.train & (y == 3)] = -1
    result = linear_probe(z, y, parts, EvalConfig(), seed=0, num_classes=NUM_CLASSES)
    assert 3 not in result.pred and result.test == pytest.approx(75.0)
    y[parts.train & (y != 1)] = -1
    assert set(
        linear_probe(z, y, parts, EvalConfig(), seed=0, num_classes=NUM_CLASSES).pred.tolist()
    ) == {1}


@pytest.mark.parametrize("form", ["coo", "csr", "scipy"])
@pytest.mark.parametrize("kind", PROBES)
def test_sparse_rows_score_as_dense_ones(form: str, kind: str) -> None:
    z, y = embedding(noise=3.0)
    z = torch.where(z.abs() > 0.15, z, 0.0)
    cfg = EvalConfig(probe=kind, probe_epochs=20)
    forms = {
        "coo": z.to_sparse_coo,
        "csr": z.to_sparse_csr,
        "scipy": lambda: sparse.csr_matrix(z.numpy()),
    }
    dense, thin = (linear_probe(x, y, split(10, 100), cfg, seed=0) for x in (z, forms[form]()))
    assert thin.strength == dense.strength and torch.equal(thin.pred, dense.pred)
