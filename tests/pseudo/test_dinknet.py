"""Dink-Net: losses by hand, embeddings and batches against dense matrices, stopping, choice,
determinism, planted clusters.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import adjusted_rand_score

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.errors import UserError
from cimage_dist.pseudo import hard_modularity
from cimage_dist.pseudo.dinknet import DinkNetSettings, _Run, dinknet_labels, settings_for
from cimage_dist.pseudo.dinknet_model import (
    DinkNet,
    Nodes,
    clustering_loss,
    discrimination_loss,
    masked_columns,
    project_to_ball,
    row_factors,
)
from cimage_dist.pseudo.rdgae import step_on
from cimage_dist.types import Features, Topology
from tests.graphs import random_topology
from tests.pseudo.test_propagated import dense_gcn, planted, sparse

QUICK = DinkNetSettings(
    width=16, hops=3, pretrain_epochs=30, pretrain_lr=1e-2, finetune_epochs=5, restarts=5, rounds=1
)
NUM_NODES, NUM_FEATURES, WIDTH = 40, 9, 6


def toy(signed: bool = False, seed: int = 0) -> tuple[torch.Tensor, Topology, DinkNet]:
    """A random graph with isolated nodes, half-empty features with a zero row, and a network in
    double precision.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_NODES, NUM_FEATURES, dtype=torch.float64, generator=generator)
    x = x if signed else x.clamp(min=0)
    x[3] = 0
    torch.manual_seed(seed)
    model = DinkNet(NUM_FEATURES, WIDTH).double()
    torch.nn.init.normal_(model.bias)
    return x, random_topology(NUM_NODES, 45, seed), model


def scaled(x: torch.Tensor) -> torch.Tensor:
    """What the network reads: rows of bags of words sum to 1."""
    return x / x.sum(1, keepdim=True).clamp(min=1e-9) if bool((x >= 0).all()) else x


def test_discrimination_by_hand() -> None:
    """σ(ln 3) = 3/4: cross-entropies ln 4/3 for both kinds, and ln 4 where they are swapped; an
    empty slice adds nothing.
    """
    log3 = torch.tensor([math.log(3.0)], dtype=torch.float64)
    assert float(discrimination_loss(log3, -log3, 1)) == pytest.approx(math.log(4 / 3))
    assert float(discrimination_loss(-log3, log3, 1)) == pytest.approx(math.log(4))
    assert float(
        discrimination_loss(torch.cat([log3, -log3]), torch.cat([-log3, log3]), 2)
    ) == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)
    assert float(discrimination_loss(log3[:0], log3[:0], 5)) == 0.0


def test_clustering_by_hand() -> None:
    """Squared distances 0, 1, 2, 1 (mean 1) and one pair of centres at distance 1: 1 - 1; then
    centres at distance 2: 2 - 4.
    """
    h = torch.eye(2, dtype=torch.float64)
    near = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    apart = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    assert float(clustering_loss(h, near, 2, Comm())) == pytest.approx(0.0)
    assert float(clustering_loss(h, apart, 2, Comm())) == pytest.approx(2.0 - 4.0)


def test_clustering_equals_the_double_sums_with_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(30, 4, dtype=torch.float64, generator=generator)
    start = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    grads, values = [], []
    for plain in (True, False):
        c = start.clone().requires_grad_()
        double_sums = torch.cdist(h, c).square().mean() - (c[:, None] - c[None]).square().sum() / (
            5 * 4
        )
        loss = double_sums if plain else clustering_loss(h, c, 30, Comm())
        grads.append(torch.autograd.grad(loss, c)[0])
        values.append(float(loss.detach()))
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    torch.testing.assert_close(grads[0], grads[1])


def test_logits_are_the_summed_outputs_of_the_head() -> None:
    _, _, model = toy()
    pre = torch.randn(7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    activation = F.prelu(pre + model.bias, model.slope.reshape(1))
    torch.testing.assert_close(model.logits(pre), model.head(activation).sum(1))
    torch.testing.assert_close(model.activate(pre[:, 2:4], slice(2, 4)), activation[:, 2:4])


def test_projection_shortens_long_centres_only() -> None:
    centres = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    project_to_ball(centres)
    torch.testing.assert_close(centres, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_a_fifth_of_the_columns_is_masked_by_the_key() -> None:
    like = torch.ones((), dtype=torch.float64)
    a, again, other = (masked_columns(53, 0.2, key, like) for key in (1, 1, 2))
    assert a.shape == (53, 1) and a.dtype == torch.float64
    assert int((a == 0).sum()) == 10 and int((a == 1).sum()) == 43
    assert torch.equal(a, again) and not torch.equal(a, other)


def test_rows_of_bags_of_words_sum_to_one_and_signed_features_stay() -> None:
    x = torch.tensor([[1.0, 3.0], [0.0, 0.0], [0.5, 0.0]])
    for kind in (x, sparse(x)):
        assert row_factors(kind).tolist() == [0.25, 1.0, 2.0]
    signed = x.clone()
    signed[2, 1] = -0.1
    for kind in (signed, sparse(signed)):
        assert row_factors(kind).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_embedding_equals_the_dense_formula(is_sparse: bool, signed: bool) -> None:
    x, topology, model = toy(signed)
    given: Features = sparse(x) if is_sparse else x
    a = dense_gcn(topology)
    local = F.prelu(a @ scaled(x) @ model.weight + model.bias, model.slope.reshape(1))
    expected = F.normalize(local + torch.linalg.matrix_power(a, 4) @ local, dim=1).detach()
    nodes = Nodes(given, topology, Comm())
    torch.testing.assert_close(nodes.embedding(model, 4), expected)
    torch.testing.assert_close(nodes.batch_embedding(model, nodes.everything, 4), expected)


def test_hops_of_a_batch_stay_in_the_subgraph_it_induces() -> None:
    """F(X) sees all neighbours; the hops see the edges inside the batch, with its own degrees. The
    batch is not in order.
    """
    x, topology, model = toy()
    gids = torch.arange(0, NUM_NODES, 2).flip(0)
    nodes = Nodes(x, topology, Comm())
    local = F.prelu(
        dense_gcn(topology) @ scaled(x) @ model.weight + model.bias, model.slope.reshape(1)
    )[gids]
    inside = (dense_gcn(topology)[gids][:, gids] > 0).double()
    assert 0 < int(inside.sum()) - gids.numel() < topology.num_edges
    scale = inside.sum(1).rsqrt()
    hop = scale[:, None] * inside * scale
    expected = F.normalize(local + hop @ hop @ hop @ local, dim=1).detach()
    torch.testing.assert_close(nodes.batch_embedding(model, nodes.batch(gids), 3), expected)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_real_and_shuffled_rows_equal_the_dense_formula(is_sparse: bool) -> None:
    x, topology, model = toy()
    nodes = Nodes(sparse(x) if is_sparse else x, topology, Comm())
    a, rows = dense_gcn(topology), scaled(x)
    for gids in (torch.arange(NUM_NODES), torch.tensor([7, 31, 2, 2 + 17, 12])):
        batch = nodes.everything if gids.numel() == NUM_NODES else nodes.batch(gids)
        touched = (a[gids] > 0).any(0).nonzero().flatten()  # the batch and its neighbours
        order = keyed.bits(5, touched).argsort()
        assert bool((order != torch.arange(touched.numel())).any())
        shuffled = rows.clone()
        shuffled[touched] = rows[touched[order]]
        real, fake = nodes.real_and_fake(batch, model.weight, key=5)
        torch.testing.assert_close(real, (a @ rows @ model.weight)[gids])
        torch.testing.assert_close(fake, (a @ shuffled @ model.weight)[gids])


def test_batches_hold_every_node_once_in_an_order_of_the_key() -> None:
    x, topology, _ = toy()
    nodes = Nodes(x, topology, Comm())
    orders = [torch.cat([batch.gids for batch in nodes.batches(7, key)]) for key in (1, 1, 2)]
    assert [batch.gids.numel() for batch in nodes.batches(7, 1)] == [7, 7, 7, 7, 7, 5]
    assert torch.equal(orders[0].sort().values, torch.arange(NUM_NODES))
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])
    assert [
        torch.equal(batch.gids, torch.arange(NUM_NODES)) for batch in nodes.batches(NUM_NODES, 1)
    ] == [True]


def test_a_step_is_the_optimisers_and_bad_numbers_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    unused = torch.nn.Parameter(torch.tensor([1.0]))
    optimiser = torch.optim.SGD([parameter, unused], lr=0.5)
    assert step_on((parameter**2).sum(), optimiser, Comm(), "Dink-Net") == 4.0
    assert parameter.item() == 0.0 and unused.item() == 1.0
    with pytest.raises(UserError, match="diverged"):
        step_on((parameter / 0.0).sum(), optimiser, Comm(), "Dink-Net")


def run_with_history(
    settings: DinkNetSettings, seed: int = 0, clusters: int = 3
) -> tuple[torch.Tensor, list[dict[str, Any]], list[torch.Tensor], Topology]:
    """Labels, the fine-tuning ticks, and the assignments after k-means and each epoch."""
    x, topology, _ = planted()
    ticks: list[dict[str, Any]] = []
    assigned: list[torch.Tensor] = []
    run = _Run(
        x,
        topology,
        settings,
        seed,
        Comm(),
        lambda step, total, values, stage: ticks.append(
            {"step": step, "total": total, "stage": stage, **values}
        ),
    )
    plain = run.assignments
    run.assignments = lambda centres: (assigned.append(plain(centres)[0]), plain(centres))[1]
    run.pretrain(3)
    labels, _ = run.finetune(run.first_centres(clusters))
    return labels, [tick for tick in ticks if "fine" in tick["stage"]], assigned, topology


def test_fine_tuning_stops_when_assignments_rest() -> None:
    _, ticks, _, _ = run_with_history(replace(QUICK, finetune_lr=0.0))
    assert len(ticks) == 1 and ticks[0]["changed"] == 0.0 and ticks[0]["total"] == 5
    _, ticks, _, _ = run_with_history(replace(QUICK, finetune_lr=0.0, stop_below=0.0))
    assert [tick["step"] for tick in ticks] == [1, 2, 3, 4, 5]


def test_the_assignment_of_highest_modularity_is_returned() -> None:
    """Six centres for three blocks move about for long; the best partition is neither the first nor
    the last.
    """
    settings = replace(QUICK, finetune_epochs=12, stop_below=0.0, finetune_lr=5e-2)
    labels, ticks, assigned, topology = run_with_history(settings, seed=1, clusters=6)
    scores = [hard_modularity(one, topology) for one in assigned]
    assert scores[1:] == [tick["modularity"] for tick in ticks]
    assert 0 < scores.index(max(scores)) < len(scores) - 1 and hard_modularity(
        labels, topology
    ) == max(scores)
    assert torch.equal(labels, assigned[scores.index(max(scores))])
    changes = [float((a != b).double().mean()) for a, b in pairwise(assigned)]
    assert changes == [tick["changed"] for tick in ticks]


def test_centres_stay_in_the_unit_ball_and_clustering_leaves_the_encoder_alone() -> None:
    x, topology, _ = planted()
    run = _Run(
        x,
        topology,
        replace(QUICK, tradeoff=0.0, stop_below=0.0, finetune_lr=0.3),
        0,
        Comm(),
        lambda *_: None,
    )
    run.pretrain(3)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    first = run.first_centres(3)
    start = first.clone()
    run.finetune(first)
    assert (first - start).abs().max() > 0.1 and first.norm(dim=1).max() <= 1 + 1e-12
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())


def test_the_tradeoff_trains_the_encoder_on() -> None:
    x, topology, _ = planted()
    run = _Run(x, topology, replace(QUICK, tradeoff=1.0), 0, Comm(), lambda *_: None)
    run.pretrain(3)
    before = run.nodes.embedding(run.model, 3)
    run.finetune(run.first_centres(3))
    assert run.h_nD is not None and not torch.equal(run.h_nD, before)
    torch.testing.assert_close(run.h_nD, run.nodes.embedding(run.model, 3), rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings",
    [
        QUICK,
        replace(QUICK, batch=50, pretrain_epochs=8, finetune_lr=1e-3),
        replace(QUICK, batch=90, pretrain_epochs=15, whole_values=0, fit_rows=100),
    ],
    ids=["full batch", "batches", "bounded memory"],
)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_planted_blocks_are_found(settings: DinkNetSettings, is_sparse: bool) -> None:
    x, topology, y = planted(blocks=3, width=30)
    labels, confidence = dinknet_labels(
        sparse(x) if is_sparse else x, topology, 3, settings, seed=0
    )
    assert (
        labels.dtype == torch.int64
        and confidence.dtype == torch.float64
        and bool((confidence >= 0).all())
    )
    score = adjusted_rand_score(y, labels.numpy())
    assert score > 0.9
    sure = confidence >= confidence.median()
    assert adjusted_rand_score(y[sure.numpy()], labels[sure].numpy()) >= score


def test_an_embedding_read_batch_by_batch_gives_the_labels_of_a_kept_one() -> None:
    """One batch of all nodes induces the whole graph, so both paths compute the same H."""
    x, topology, _ = planted()
    kept, read = (
        dinknet_labels(x, topology, 4, replace(QUICK, whole_values=values), seed=2)
        for values in (1 << 30, 0)
    )
    assert torch.equal(kept[0], read[0])
    torch.testing.assert_close(kept[1], read[1])


def test_bounded_memory_never_makes_the_whole_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    x, topology, _ = planted()

    def refuse(*_: Any) -> None:
        raise AssertionError("the embedding of all nodes was made")

    monkeypatch.setattr(Nodes, "embedding", refuse)
    seen: list[int] = []
    plain = Nodes.batch_embedding
    monkeypatch.setattr(
        Nodes,
        "batch_embedding",
        lambda self, model, batch, hops: (
            seen.append(batch.gids.numel()),
            plain(self, model, batch, hops),
        )[1],
    )
    dinknet_labels(
        x, topology, 3, replace(QUICK, batch=50, pretrain_epochs=1, whole_values=0), seed=0
    )
    assert seen and max(seen) == 50


def test_same_seed_same_labels_and_torch_generator_untouched() -> None:
    x, topology, _ = planted()
    state = torch.get_rng_state()
    settings = replace(QUICK, pretrain_epochs=3, batch=64)
    a, b, other = (dinknet_labels(x, topology, 5, settings, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert not torch.equal(a[1], other[1])
    assert torch.equal(state, torch.get_rng_state())


def test_published_settings_and_the_rule_by_size() -> None:
    assert (settings_for("cora", 2708).width, settings_for("cora", 2708).hops) == (512, 5)
    assert (
        settings_for("citeseer", 3327).width,
        settings_for("citeseer", 3327).pretrain_epochs,
    ) == (1536, 100)
    assert settings_for("ogbn-papers100m", 111_059_956).batch == 10_240
    small, large, larger = (settings_for("mine", count) for count in (20_000, 200_000, 5_000_000))
    assert small == DinkNetSettings() and small.batch >= 20_000
    assert (large.width, large.batch, large.pretrain_epochs) == (256, 8192, 8)
    assert larger.pretrain_epochs == 1 and larger.finetune_lr * math.ceil(
        5_000_000 / 8192
    ) == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("nodes", "clusters", "words"),
    [(30, 1, "1 clusters"), (30, 31, "31 clusters of 30"), (29, 3, "29 nodes were given")],
)
def test_bad_input_is_explained(nodes: int, clusters: int, words: str) -> None:
    with pytest.raises(UserError, match=f"Dink-Net: .*{words}"):
        dinknet_labels(torch.ones(nodes, 2), random_topology(30, 60), clusters, QUICK, seed=0)


def test_features_too_large_for_the_arithmetic_are_explained() -> None:
    _, topology, _ = planted()
    x = torch.full((topology.num_nodes, 4), 1e38)
    x[0] = -x[0]
    with pytest.raises(UserError, match="huge values"):
        dinknet_labels(x, topology, 3, QUICK, seed=0)
