"""The factor reconstruction term (§5.3) against hand-computed values, and what it does to
gradients.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config import Config, LossConfig, ModelConfig
from cimage_dist.config_loading import load_config
from cimage_dist.losses import factor_loss, target_factors
from cimage_dist.nn.model import FactorDecoder, build_model
from cimage_dist.train.step import loss_terms
from cimage_dist.types import Batch, CIScores, EdgeList
from tests.settings import ROUTING

FIRST = torch.tensor([True, False, False])  # factor 0 is the context, 1 and 2 are the others

# One node, three factors of two channels. Factor 0: cosine 0. Factor 1: 45 degrees. Factor 2:
# opposite.
Z = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]]], dtype=torch.float64)
PREDICTED = torch.tensor([[[0.0, 3.0], [1.0, 1.0], [0.0, -1.0]]], dtype=torch.float64)


def random_case(n: int = 5, factors: int = 4, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    z, predicted = torch.randn(2, n, factors, width, generator=generator, dtype=torch.float64)
    return z.requires_grad_(), predicted.requires_grad_()


def test_paper_direction_flat_cosine_by_hand():
    loss = factor_loss(Z, PREDICTED, FIRST, LossConfig())
    # F2 = (1, 0, 0, 2), its prediction (1, 1, 0, -1): dot product -1, norms sqrt 5 and sqrt 3.
    assert float(loss.total) == pytest.approx(1 + 1 / math.sqrt(15), abs=1e-12)
    assert loss.count == 1


def test_paper_direction_cosine_per_factor_by_hand():
    loss = factor_loss(Z, PREDICTED, FIRST, LossConfig(factor_cosine="per_factor"))
    assert float(loss.total) == pytest.approx(((1 - 1 / math.sqrt(2)) + 2) / 2, abs=1e-12)


@pytest.mark.parametrize("cosine", ["flat", "per_factor"])
def test_code_direction_predicts_the_scored_factors(cosine):
    cfg = LossConfig(factor_direction="code", factor_cosine=cosine)
    assert target_factors(FIRST, cfg).tolist() == [True, False, False]
    assert target_factors(FIRST, LossConfig()).tolist() == [False, True, True]
    assert float(factor_loss(Z, PREDICTED, FIRST, cfg).total) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_power_is_taken_before_the_mean(power):
    cfg = LossConfig(sce_power=power, factor_cosine="per_factor")
    assert float(factor_loss(Z, PREDICTED, FIRST, cfg).total) == pytest.approx(
        ((1 - 1 / math.sqrt(2)) ** power + 2**power) / 2, abs=1e-12
    )


def test_a_perfect_prediction_costs_nothing_at_any_scale_and_rounding_cannot_make_it_negative():
    z = torch.randn(50, 4, 3)
    loss = factor_loss(
        z, 7.0 * z, torch.tensor([True, False, True, False]), LossConfig(sce_power=1)
    )
    assert 0.0 <= float(loss.value()) < 1e-6  # float32


def test_weights_drop_padding_from_sum_and_count():
    z, predicted = random_case()
    context = torch.tensor([True, False, True, False])
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    got = factor_loss(z, predicted, context, LossConfig(sce_power=2), weight)
    kept = weight.bool()
    want = factor_loss(z[kept], predicted[kept], context, LossConfig(sce_power=2))
    assert got.count == want.count == 3
    torch.testing.assert_close(got.total, want.total, rtol=0, atol=1e-14)
    got.total.backward()
    assert z.grad is not None and float(z.grad[~kept].abs().max()) == 0.0


def test_only_target_factors_of_the_prediction_matter():
    z, predicted = random_case()
    context = torch.tensor([True, False, True, False])
    factor_loss(z, predicted, context, LossConfig()).total.backward()
    assert z.grad is not None and predicted.grad is not None
    for grad in (z.grad, predicted.grad):
        assert float(grad[:, context].abs().max()) == 0.0
        assert float(grad[:, ~context].abs().min()) > 0.0


def test_stop_gradient_blocks_the_target_and_nothing_else():
    z, predicted = random_case()
    context = torch.tensor([True, False, True, False])
    free, stopped = (
        factor_loss(z, predicted, context, LossConfig(factor_target=kind)).total
        for kind in ("self", "detached")
    )
    assert free.item() == stopped.item()
    with_target = torch.autograd.grad(free, (z, predicted))
    without_target = torch.autograd.grad(stopped, (z, predicted), allow_unused=True)
    assert without_target[0] is None and float(with_target[0].abs().max()) > 0
    torch.testing.assert_close(without_target[1], with_target[1], rtol=0, atol=0)


@pytest.mark.parametrize("cosine", ["flat", "per_factor"])
@pytest.mark.parametrize("power", [1, 3])
def test_gradients_are_those_of_the_formula(cosine, power):
    z, predicted = random_case(n=3)
    context = torch.tensor([True, False, True, False])
    cfg = LossConfig(factor_cosine=cosine, sce_power=power)
    assert torch.autograd.gradcheck(
        lambda a, b: factor_loss(a, b, context, cfg).total, (z, predicted)
    )


def test_gradcheck_through_the_decoder():
    torch.manual_seed(0)
    decoder = FactorDecoder(
        ModelConfig(
            num_factors=4, factor_dim=3, factor_hidden=5, factor_layers=2, factor_dropout=0.0
        )
    ).double()
    context = torch.tensor([True, False, True, False])
    z, _ = random_case(n=3)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return factor_loss(rows, decoder(rows, context), context, LossConfig(sce_power=2)).value()

    assert torch.autograd.gradcheck(loss, (z,))


def test_zero_rows_have_finite_gradients():
    z, predicted = (torch.zeros(2, 3, 2, requires_grad=True) for _ in range(2))
    loss = factor_loss(z, predicted, FIRST, LossConfig(sce_power=2))
    loss.total.backward()
    assert loss.value().item() == 1.0
    assert (
        z.grad is not None
        and torch.isfinite(z.grad).all()
        and predicted.grad is not None
        and torch.isfinite(predicted.grad).all()
    )


@pytest.mark.parametrize(
    "context", [torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)]
)
@pytest.mark.parametrize("direction", ["paper", "code"])
def test_an_empty_side_gives_zero_with_zero_gradients(context, direction):
    z, predicted = random_case()
    loss = factor_loss(z, predicted, context, LossConfig(factor_direction=direction))
    loss.value().backward()
    assert float(loss.value()) == 0.0 and loss.count == 5
    for leaf in (z, predicted):
        assert leaf.grad is not None and float(leaf.grad.abs().max()) == 0.0


def test_decoder_sees_visible_factors_only():
    torch.manual_seed(0)
    decoder = FactorDecoder(
        ModelConfig(num_factors=3, factor_dim=2, factor_hidden=7, factor_layers=3)
    ).eval()
    visible = torch.tensor([True, False, True])
    z = torch.randn(4, 3, 2)
    changed = z.clone()
    changed[:, 1] = 100.0
    torch.testing.assert_close(decoder(z, visible), decoder(changed, visible), rtol=0, atol=0)
    assert not torch.equal(decoder(z, visible), decoder(z, torch.ones(3, dtype=torch.bool)))
    assert [tuple(layer.weight.shape) for layer in decoder.layers] == [(7, 6), (7, 7), (6, 7)]


def toy_batch() -> Batch:
    src, dst = torch.tensor([1, 0, 2, 1, 3, 2, 4, 3]), torch.tensor([0, 1, 1, 2, 2, 3, 3, 4])
    return Batch(
        x=torch.randn(5, 6, generator=torch.Generator().manual_seed(0)),
        edges=EdgeList(src, dst, 5),
        pairs=torch.tensor([[0, 1], [2, 3], [0, 4], [1, 3]]),
        num_pos=2,
        nodes=torch.arange(5),
        modularity=EdgeList(src, dst, 5),
        global_pos=2,
        global_neg=2,
        global_nodes=5,
    )


def objective_gradients(
    cfg: Config, context: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = build_model(6, cfg).train()
    scores = CIScores(context.double(), context, 0.0, 0.0, context.double(), 0, "test")
    terms = loss_terms(model, toy_batch(), cfg, scores, Comm())
    terms["factor"].backward()
    return terms, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("full", [True, False])
def test_every_parameter_of_the_model_is_attached_when_a_context_is_empty(full):
    """The encoder and the factor decoder get zero gradients, not missing ones: DDP waits for every
    parameter.
    """
    cfg = load_config(
        overrides=[
            *ROUTING,
            "model.num_factors=4",
            "model.factor_dim=3",
            "model.factor_hidden=8",
            "model.dropout=0",
            "loss.factor_weight=1",
        ]
    )
    terms, grads = objective_gradients(cfg, torch.full((4,), full))
    assert float(terms["factor"]) == 0.0
    assert {name for name in grads if name.startswith("factors.")} == {
        f"factors.layers.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")
    }
    assert {name for name in grads if name.startswith("encoder.")} == {
        "encoder.linear.weight",
        "encoder.linear.bias",
        "encoder.norm.weight",
        "encoder.norm.bias",
    }
    assert all(float(grad.abs().max()) == 0.0 for grad in grads.values())


@pytest.mark.parametrize("direction", ["paper", "code"])
def test_the_step_gives_the_decoder_the_right_side(direction):
    """The hidden factors are the target of the loss and invisible to the decoder, in either
    direction.
    """
    cfg = load_config(
        overrides=[
            *ROUTING,
            "model.num_factors=4",
            "model.factor_dim=3",
            "model.factor_hidden=8",
            "model.dropout=0",
            "model.factor_dropout=0",
        ]
    )
    cfg = dataclasses.replace(
        cfg, loss=LossConfig(factor_weight=1.0, redundancy_weight=0.0, factor_direction=direction)
    )
    context = torch.tensor([True, True, False, False])
    seen: list[torch.Tensor] = []
    model = build_model(6, cfg).train()
    assert model.factors is not None
    model.factors.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    scores = CIScores(context.double(), context, 0.0, 0.0, context.double(), 0, "test")
    terms = loss_terms(model, toy_batch(), cfg, scores, Comm())
    assert torch.equal(seen[0], context if direction == "paper" else ~context)
    assert float(terms["factor"]) > 0
