"""The GPU backend of routing against the autograd of plain float64 operations, in Triton's
interpreter, and compiled ahead of time.

Triton decides once, when it is first imported, whether its functions are interpreted
(TRITON_INTERPRET=1) or compiled. Both kinds are tested, each in a process of its own, so that
neither the variable nor the import reaches the process of the other tests. Functions named
`check_*` run there; their exceptions come back.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from cimage_dist.nn.kernels.triton import routing as routing_triton
from cimage_dist.nn.routing import Routing

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
FIRST = 2
PATHS: dict[str, dict[str, int]] = {
    "resident": {},
    "streamed": {"_TILE_MESSAGES": 2},
    "hubs": {"_TILE_MESSAGES": 2, "_HUB_DEGREE": 2, "_HUB_PARTS": 3},
    "runs": {"_TILE_MESSAGES": 4, "_RUN": 2},
    "chunks": {"_SCRATCH_CELLS": 200, "_HUB_DEGREE": 5, "_HUB_PARTS": 2},
}


def _prepare_process(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)


def _process(**environment: str) -> Iterator[Callable[..., None]]:
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), _prepare_process, (environment,)
    ) as pool:
        yield lambda check, *args, **options: pool.submit(check, *args, **options).result()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., None]]:
    yield from _process(TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    yield from _process(
        TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))
    )


def plain(
    l: Tensor,  # noqa: E741
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    rounds: int,
    temperature: float,
    self_init: bool,
    through_all: bool,
) -> Tensor:
    """The rounds of the specification, one tensor operation at a time."""
    degrees = indptr.diff()
    own, near = l[FIRST : FIRST + len(degrees)], l[indices[indptr[0] : indptr[-1]].long()]
    dst = torch.repeat_interleave(torch.arange(len(degrees), device=l.device), degrees)
    p = (
        torch.softmax((near * own[dst]).sum(-1) / temperature, -1)
        if self_init
        else torch.full_like(near[..., 0], 1 / l.shape[1])
    )
    for t in range(rounds):
        p = p.detach() if t == rounds - 1 and not through_all else p
        a = own.index_add(
            0,
            dst,
            (
                (p if weight is None else p * weight[indptr[0] : indptr[-1], None]).unsqueeze(-1)
                * near
            ).to(own.dtype),
        )
        p = torch.softmax((near * F.normalize(a, dim=-1, eps=1e-12)[dst]).sum(-1) / temperature, -1)
    return a


def routing(
    l_NKC: Tensor,
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    rounds: int,
    temperature: float = 1.0,
    self_init: bool = False,
    through_all: bool = True,
    unit: bool = False,
) -> Routing:
    """A call on rows that are normalised already, unless `unit`."""
    return Routing(
        l_NKC,
        indptr,
        indices,
        weight,
        first=FIRST,
        iterations=rounds,
        temperature=temperature,
        self_init=self_init,
        through_all=through_all,
        unit=unit,
    )


def graph(num_factors: int, channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """10 rows, 7 of them targets: degrees 0 and 1, repeated neighbours, a zero row and a zero
    factor that send and receive.
    """
    generator = torch.Generator().manual_seed(num_factors + 100 * channels)
    l_NKC = F.normalize(
        torch.randn(10, num_factors, channels, dtype=torch.float64, generator=generator), dim=-1
    )
    l_NKC[3], l_NKC[4, 0] = 0, 0
    indptr = torch.tensor([0, 0, 3, 4, 10, 10, 12, 15])
    indices = torch.randint(0, 10, (15,), generator=generator)
    indices[:7] = torch.tensor([5, 5, 3, 4, 9, 9, 9])
    return l_NKC, indptr, indices, torch.rand(15, dtype=torch.float64, generator=generator) * 2


def hub_graph(num_factors: int, channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """3,000 rows, 2,000 of them targets: one has 3,000 neighbours, and every 20th message comes
    from row 7.
    """
    generator = torch.Generator().manual_seed(0)
    degrees = torch.randint(0, 40, (2000,), generator=generator)
    degrees[5] = 3000
    indices = torch.randint(0, 3000, (int(degrees.sum()),), generator=generator)
    indices[::20] = 7
    l_NKC = F.normalize(
        torch.randn(3000, num_factors, channels, dtype=torch.float64, generator=generator), dim=-1
    )
    weight = torch.rand(len(indices), dtype=torch.float64, generator=generator)
    return l_NKC, F.pad(degrees.cumsum(0), (1, 0)), indices, weight


def check_against_autograd(
    num_factors: int = 3,
    channels: int = 5,
    rounds: int = 3,
    self_init: bool = False,
    through_all: bool = True,
    weighted: bool = True,
    path: str = "resident",
    dtype: torch.dtype = torch.float64,
    ids: torch.dtype = torch.int64,
    tolerance: float = 1e-12,
    times: int = 1,
    device: str = "cpu",
    make: Callable[[int, int], tuple[Tensor, ...]] = graph,
) -> None:
    """Values and gradients; `times`: the same bits every time."""
    l_NKC, indptr, indices, weight = make(num_factors, channels)
    stored = l_NKC.to(device, dtype)
    weights = (
        weight.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        if weighted
        else None
    )
    grad = torch.randn(
        len(indptr) - 1, num_factors, channels, generator=torch.Generator().manual_seed(0)
    ).to(device, dtype)
    leaf = stored.double().requires_grad_()
    leaf_weight = None if weights is None else weights.double().requires_grad_()
    indptr, indices = indptr.to(device), indices.to(device)
    expected = plain(leaf, indptr, indices, leaf_weight, rounds, 0.7, self_init, through_all)
    wanted = torch.autograd.grad(
        expected, [leaf] if leaf_weight is None else [leaf, leaf_weight], grad.double()
    )
    call = routing(stored, indptr, indices.to(ids), weights, rounds, 0.7, self_init, through_all)
    with ExitStack() as stack:
        for name, value in PATHS[path].items():
            stack.enter_context(mock.patch.object(routing_triton, name, value))
        runs = [
            (routing_triton.forward(call), *routing_triton.backward(grad, call))
            for _ in range(times)
        ]
    for again in runs[1:]:
        assert all(
            torch.equal(got, same)
            for got, same in zip(runs[0], again, strict=True)
            if got is not None
        )
    out, grad_l, grad_weight = runs[0]
    assert out.dtype == grad_l.dtype == dtype
    assert (grad_weight is None) == (weights is None)
    for got, want in zip((out, grad_l, grad_weight), (expected, *wanted), strict=False):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def check_opposite_neighbours() -> None:
    """Two neighbours that cancel leave ‖a‖ = 0: q is 0 and its gradient passes the floor 1e-12
    undivided by a norm.
    """
    l_NKC, _, _, _ = graph(2, 3)
    l_NKC[FIRST], l_NKC[6] = 0, -l_NKC[5]
    indptr, indices = torch.tensor([0, 2]), torch.tensor([5, 6])
    leaf = l_NKC.clone().requires_grad_()
    grad = torch.randn(1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (wanted,) = torch.autograd.grad(
        plain(leaf, indptr, indices, None, 2, 1.0, False, True), leaf, grad
    )
    assert wanted.abs().max() > 1e9
    for hub_degree in (1, 2):
        with mock.patch.object(routing_triton, "_HUB_DEGREE", hub_degree):
            got, _ = routing_triton.backward(grad, routing(l_NKC, indptr, indices, None, 2))
        torch.testing.assert_close(
            got, wanted, rtol=1e-7, atol=0
        )  # the kernels' floor is a float32 number


def check_part_of_a_larger_graph() -> None:
    """`indptr` may be a piece of a longer one: it need not begin at 0, and the weights of other
    messages get gradient 0.
    """
    l_NKC, indptr, indices, weight = graph(3, 2)
    piece, grad = indptr[2:5], torch.ones(2, 3, 2, dtype=torch.float64)
    leaf, leaf_weight = l_NKC.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = plain(leaf, piece, indices, leaf_weight, 2, 1.0, False, True)
    wanted = torch.autograd.grad(expected, (leaf, leaf_weight), grad)
    call = routing(l_NKC, piece, indices, weight, 2)
    torch.testing.assert_close(routing_triton.forward(call), expected, rtol=0, atol=1e-12)
    for got, want in zip(routing_triton.backward(grad, call), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def check_nothing_to_do() -> None:
    """No target, and targets without any message."""
    l_NKC, _, _, _ = graph(3, 2)
    for num_targets in (0, 4):
        call = routing(
            l_NKC,
            torch.zeros(num_targets + 1, dtype=torch.int64),
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, dtype=torch.float64),
            3,
        )
        assert torch.equal(routing_triton.forward(call), l_NKC[FIRST : FIRST + num_targets])
        grad_l, grad_weight = routing_triton.backward(
            torch.ones(num_targets, 3, 2, dtype=torch.float64), call
        )
        want = torch.zeros_like(l_NKC)
        want[FIRST : FIRST + num_targets] = 1
        assert torch.equal(grad_l, want)
        assert grad_weight.shape == (0,)


def check_rows_of_any_length() -> None:
    """`unit`: the gradient goes through the normalisation of the rows; at a zero factor it is that
    of x / 1e-12.
    """
    l_NKC, indptr, indices, weight = graph(3, 4)
    x = l_NKC * torch.arange(1.0, 11.0, dtype=torch.float64).view(-1, 1, 1)
    leaf = x.clone().requires_grad_()
    grad = torch.randn(7, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    unit = F.normalize(leaf, dim=-1, eps=1e-12)
    expected = plain(unit, indptr, indices, weight, 3, 1.0, False, True)
    (wanted,) = torch.autograd.grad(expected, leaf, grad)
    call = routing(x, indptr, indices, weight, 3, unit=True)
    torch.testing.assert_close(routing_triton.forward(call), expected, rtol=0, atol=1e-12)
    got, _ = routing_triton.backward(grad, call)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


KERNELS = {
    "route_targets",
    "route_targets_grad",
    "pull_hubs",
    "hub_message_grads",
    "sum_runs",
    "sum_partial_runs",
}


def check_compiles(
    arch: int,
    dtype: torch.dtype,
    num_factors: int,
    channels: int,
    rounds: int,
    through_all: bool,
    folder: str,
) -> None:
    """Every kernel, with the arguments that `forward` and `backward` give it, down to machine code
    that fits in the registers.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", arch, 32)
    device = {
        "get_current_device": lambda: arch,
        "get_current_stream": lambda device: 0,
        "get_current_target": lambda: target,
    }
    triton.runtime.driver.set_active(
        SimpleNamespace(**device)
    )  # what a launch asks of the device before it compiles
    compiled = []

    def compile_only(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: compiled.append(
            kernel.run(*args, grid=grid, warmup=True, **options)
        )

    l_NKC, indptr, indices, weight = graph(num_factors, channels)
    call = routing(
        l_NKC.to(dtype),
        indptr,
        indices.int(),
        weight.float() if through_all else None,
        rounds,
        self_init=not through_all,
        through_all=through_all,
    )
    with (
        mock.patch.object(triton.JITFunction, "__getitem__", compile_only),
        mock.patch.object(routing_triton, "_HUB_DEGREE", 5),
    ):
        routing_triton.forward(call)
        routing_triton.backward(l_NKC[:7].to(dtype), call)
    assert {kernel.metadata.name for kernel in compiled} == KERNELS
    for kernel in compiled:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        # Before 3.7 triton lays tiles out less well: correct, but some registers spill.
        assert "STACK:0" in usage or TorchVersion(triton.__version__) < "3.7", (
            f"{kernel.metadata.name} spills registers on sm_{arch}: {usage}"
        )


@needs_triton
@pytest.mark.parametrize(
    ("rounds", "self_init", "through_all"),
    [
        (1, False, True),
        (1, True, True),
        (1, True, False),
        (2, True, True),
        (3, False, False),
        (4, True, False),
        (5, False, True),
    ],
)
def test_rounds(interpreted, rounds, self_init, through_all):
    interpreted(check_against_autograd, rounds=rounds, self_init=self_init, through_all=through_all)


@needs_triton
@pytest.mark.parametrize("channels", [1, 5, 32])
@pytest.mark.parametrize("num_factors", [1, 3, 16])
def test_shapes(interpreted, num_factors, channels):
    interpreted(check_against_autograd, num_factors=num_factors, channels=channels, rounds=2)


@needs_triton
@pytest.mark.parametrize("self_init", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_paths_through_the_kernels(interpreted, path, self_init):
    """Messages in one tile or several, hubs over several programs, sources over several, targets in
    chunks.
    """
    interpreted(
        check_against_autograd,
        path=path,
        self_init=self_init,
        through_all=self_init,
        ids=torch.int32,
    )


@needs_triton
@pytest.mark.parametrize("path", ["streamed", "hubs"])
def test_all_messages_weigh_one_without_weights(interpreted, path):
    interpreted(check_against_autograd, path=path, weighted=False)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)  # numbers of 24 and of 8 bits
def test_storage_and_the_same_bits_twice(interpreted, dtype, tolerance):
    interpreted(
        check_against_autograd, dtype=dtype, tolerance=tolerance, rounds=2, path="chunks", times=2
    )


@needs_triton
@pytest.mark.parametrize(
    "check",
    [
        check_opposite_neighbours,
        check_part_of_a_larger_graph,
        check_nothing_to_do,
        check_rows_of_any_length,
    ],
)
def test_corners(interpreted, check):
    interpreted(check)


@needs_triton
@pytest.mark.parametrize(
    ("arch", "dtype", "rounds", "through_all"),
    [(80, torch.float32, 5, True), (90, torch.bfloat16, 1, False)],
)
def test_kernels_compile_without_a_device(compiled, tmp_path, arch, dtype, rounds, through_all):
    compiled(check_compiles, arch, dtype, 16, 32, rounds, through_all, str(tmp_path))


def test_triton_is_not_imported_before_it_is_needed():
    code = (
        "import sys; from cimage_dist.nn.kernels.triton import routing as routing_triton; "
        "routing_triton.is_available(None); print('triton' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


@pytest.mark.parametrize(
    ("variable", "installed", "available"),
    [("1", True, True), ("0", True, torch.cuda.is_available()), ("1", False, False)],
)
def test_availability(monkeypatch, variable, installed, available):
    monkeypatch.setenv("TRITON_INTERPRET", variable)
    monkeypatch.setattr(routing_triton, "find_spec", lambda name: object() if installed else None)
    assert routing_triton.is_available(torch.float32) == available


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_paths_on_the_gpu(dtype, tolerance, path):
    for num_factors, channels in ((3, 5), (16, 32)):
        check_against_autograd(
            num_factors,
            channels,
            rounds=4,
            self_init=True,
            path=path,
            dtype=dtype,
            tolerance=tolerance,
            times=3,
            device="cuda",
        )


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("through_all", [False, True])
def test_hubs_on_the_gpu(through_all):
    """With the constants as they are; sums of 3,000 terms in float32."""
    check_against_autograd(
        16,
        32,
        rounds=5,
        through_all=through_all,
        dtype=torch.float32,
        tolerance=1e-3,
        times=3,
        device="cuda",
        make=hub_graph,
    )
