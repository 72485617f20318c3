"""The fused routing operator on the CPU against plain tensor operations: values, gradients,
determinism, memory.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cimage_dist.errors import UserError
from cimage_dist.nn.kernels.cpu import routing as routing_cpu
from cimage_dist.nn.routing import route_op
from cimage_dist.types import EdgeList
from tests.nn.routed import route

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclasses.dataclass
class Case:
    """Messages into the targets `first` .. `first + targets` of n nodes; some targets get none, one
    gets a third of all, neighbours repeat.
    """

    x: torch.Tensor
    edges: EdgeList
    rows: slice


def make(
    n,
    targets,
    messages,
    k,
    c,
    seed,
    dtype=torch.float64,
    is_weighted=False,
    zero_rows=True,
    id_type=torch.int64,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    targets = min(targets, n)
    first = int(torch.randint(0, n - targets + 1, (1,), generator=generator))
    dst = torch.randint(0, targets, (messages,), generator=generator)
    dst[: messages // 3] = targets // 2
    src = torch.randint(0, n, (messages,), generator=generator)
    x = torch.randn(n, k, c, dtype=dtype, generator=generator)
    if zero_rows:
        x[n // 2] = 0
    weight = torch.rand(messages, dtype=dtype, generator=generator) + 0.5 if is_weighted else None
    return Case(
        x, EdgeList(src.to(id_type), dst.sort().values, n, weight), slice(first, first + targets)
    )


def outcome(
    case: Case,
    backend: str,
    iterations: int,
    temperature: float = 1.0,
    init: str = "uniform",
    grad: str = "full",
) -> list[torch.Tensor]:
    """Value, gradient of x and (if any) of the weights, for one random direction."""
    x = case.x.clone().requires_grad_()
    weight = None if case.edges.weight is None else case.edges.weight.clone().requires_grad_()
    edges = dataclasses.replace(case.edges, weight=weight)
    out = route(x, edges, iterations, temperature, case.rows, init=init, grad=grad, backend=backend)
    direction = torch.randn(
        out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).to(out.dtype)
    leaves = [x] if weight is None else [x, weight]
    grads = torch.autograd.grad((out * direction).sum(), leaves, allow_unused=True)
    return [
        out.detach(),
        *(
            torch.zeros_like(leaf) if g is None else g
            for g, leaf in zip(grads, leaves, strict=True)
        ),
    ]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], case: Case) -> None:
    tolerance = TOLERANCE[case.x.dtype]
    norm = case.x.norm(dim=-1, keepdim=True)
    is_zero = norm.squeeze(-1) == 0
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    # The gradient of x / ‖x‖ and its rounding grow as 1/‖x‖: compared without that factor. At a
    # zero row it is that of x / 1e-12.
    scale = torch.where(is_zero.unsqueeze(-1), 1e-12, norm)
    size = max(1.0, float((want[1] * scale).abs().max()) if want[1].numel() else 0.0)
    torch.testing.assert_close(got[1] * scale, want[1] * scale, rtol=0, atol=tolerance * size)
    for g, w in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance * 10)


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 30),
    targets=st.integers(1, 30),
    messages=st.integers(0, 120),
    k=st.integers(1, 64),
    c=st.integers(1, 64),
    iterations=st.integers(1, 10),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 4.0]),
    init=st.sampled_from(["uniform", "self"]),
    grad=st.sampled_from(["full", "last"]),
    is_weighted=st.booleans(),
    has_hubs=st.booleans(),
    id_type=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 999),
)
def test_random_graphs_agree_with_the_reference(
    n,
    targets,
    messages,
    k,
    c,
    iterations,
    temperature,
    init,
    grad,
    is_weighted,
    has_hubs,
    id_type,
    seed,
):
    case = make(n, targets, messages, k, c, seed, is_weighted=is_weighted, id_type=id_type)
    old = routing_cpu.HUB_MESSAGES
    try:
        if has_hubs:
            routing_cpu.HUB_MESSAGES = 3
        got = outcome(case, "fused", iterations, temperature, init, grad)
    finally:
        routing_cpu.HUB_MESSAGES = old
    want = outcome(case, "reference", iterations, temperature, init, grad)
    if temperature < 0.1:
        # Nearly hard assignments amplify rounding by 1/τ for each iteration; the values still have
        # to be finite.
        assert all(bool(torch.isfinite(part).all()) for part in got)
    else:
        assert_same(got, want, case)


@pytest.mark.parametrize("temperature", [0.01, 0.04])
def test_nearly_hard_assignments(temperature):
    case = make(12, 12, 60, 5, 4, seed=3)
    got, want = outcome(case, "fused", 2, temperature), outcome(case, "reference", 2, temperature)
    torch.testing.assert_close(got[0], want[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("k", "c", "iterations"), [(16, 32, 10), (32, 16, 8), (7, 5, 3), (64, 1, 4), (1, 64, 2)]
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_single_precision(k, c, iterations, is_weighted):
    case = make(40, 40, 200, k, c, seed=5, dtype=torch.float32, is_weighted=is_weighted)
    assert_same(outcome(case, "fused", iterations), outcome(case, "reference", iterations), case)


@pytest.mark.parametrize("init", ["uniform", "self"])
@pytest.mark.parametrize("hub", [3, 4096])
def test_gradcheck(init, hub, monkeypatch):
    monkeypatch.setattr(routing_cpu, "HUB_MESSAGES", hub)
    case = make(6, 5, 14, 3, 2, seed=1, is_weighted=True, zero_rows=False)
    weight = case.edges.weight.requires_grad_()

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return route(
            x,
            dataclasses.replace(case.edges, weight=w),
            3,
            0.7,
            case.rows,
            init=init,
            backend="fused",
        )

    assert torch.autograd.gradcheck(call, (case.x.requires_grad_(), weight))


def test_inputs_that_are_not_contiguous():
    case = make(10, 10, 40, 4, 6, seed=2)
    turned = dataclasses.replace(case, x=case.x.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    assert not turned.x.is_contiguous()
    x = turned.x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = route(x, case.edges, 3, targets=case.rows, backend="fused")
    grad = torch.autograd.grad(out.transpose(0, 1).square().sum(), x)[0]
    want = case.x.clone().requires_grad_()
    expected = torch.autograd.grad(
        route(want, case.edges, 3, targets=case.rows, backend="reference").square().sum(), want
    )[0]
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("room", [routing_cpu.GRADIENT_BYTES, 1 << 18])
def test_the_same_threads_give_the_same_bits(monkeypatch, room):
    """Two gradients of 2 x 300 x 16 x 8 numbers fit into the second room, three do not."""
    case = make(300, 300, 4000, 16, 8, seed=4, dtype=torch.float32, is_weighted=True)
    monkeypatch.setattr(
        routing_cpu, "HUB_MESSAGES", 700
    )  # the busiest target is a hub of several blocks
    monkeypatch.setattr(routing_cpu, "GRADIENT_BYTES", room)
    want, threads = outcome(case, "reference", 4), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results = [outcome(case, "fused", 4) for _ in range(3)]
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
            assert_same(results[0], want, case)
    finally:
        torch.set_num_threads(threads)


def test_half_precision_is_storage_only():
    case = make(30, 30, 120, 8, 8, seed=6, dtype=torch.float32)
    half = dataclasses.replace(case, x=case.x.bfloat16())
    got = outcome(half, "fused", 3)
    want = outcome(dataclasses.replace(case, x=half.x.float()), "reference", 3)
    assert got[0].dtype == got[1].dtype == torch.bfloat16
    torch.testing.assert_close(got[0].float(), want[0], rtol=0.01, atol=0.01)  # 8 bits of mantissa


def test_nothing_is_kept_but_the_inputs():
    """What autograd holds between the passes is the operator's own inputs."""
    case = make(50, 50, 400, 4, 4, seed=7)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        x = case.x.requires_grad_()
        route_op(x, case.edges.pointers(50), case.edges.src, None, 0, 5, 1.0, False, True, True)
    places = {t.data_ptr() for t in held}
    assert places <= {x.data_ptr(), case.edges.pointers(50).data_ptr(), case.edges.src.data_ptr()}


def test_the_operator_obeys_the_rules_of_torch_library():
    case = make(8, 8, 20, 3, 2, seed=8, zero_rows=False, is_weighted=True)
    args = (
        case.x.requires_grad_(),
        case.edges.pointers(8),
        case.edges.src,
        case.edges.weight.requires_grad_(),
        0,
        2,
        1.0,
        False,
        True,
        True,
    )
    torch.library.opcheck(route_op, args)


def test_one_node_under_compile():
    """Traced whole, without a break in the graph; the same values and gradients."""
    case = make(10, 10, 30, 4, 4, seed=9, zero_rows=False)
    plain = case.x.clone().requires_grad_()
    traced = case.x.clone().requires_grad_()
    indptr = case.edges.pointers(10)

    def call(x: torch.Tensor) -> torch.Tensor:
        return (
            route_op(x, indptr, case.edges.src, None, 0, 3, 1.0, False, True, True).square().sum()
        )

    call(plain).backward()
    torch.compile(call, backend="aot_eager", fullgraph=True)(traced).backward()
    assert torch.equal(plain.grad, traced.grad)


def test_asking_for_what_is_not_there(monkeypatch):
    case = make(4, 4, 6, 2, 2, seed=0)
    monkeypatch.setattr(routing_cpu, "_TYPES", ())
    with pytest.raises(UserError, match=r"routing_backend.*triton"):
        route(case.x, case.edges, 2, backend="fused")
    assert torch.isfinite(route(case.x, case.edges, 2, targets=case.rows)).all()


def test_messages_in_any_order():
    case = make(20, 20, 100, 4, 4, seed=11, is_weighted=True)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    edges = EdgeList(case.edges.src[order], case.edges.dst[order], 20, case.edges.weight[order])
    assert case.edges.by_target is case.edges
    got, want = (route(case.x, each, 3, backend="fused") for each in (edges, case.edges))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_importing_the_package_does_not_load_the_compiler():
    code = (
        "import sys, cimage_dist.nn.encoder; sys.exit(any(name in sys.modules for name in "
        "('numba', 'llvmlite', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
