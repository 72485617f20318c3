"""One routing layer: plain tensor operations against the fused operator, on the same data in the
same run.

    python benchmarks/routing.py [--threads 2] [--cases cora photo computers large] [--out
    routing.json]

Graphs are drawn with the number of nodes and edges of the dataset named and a heavy-tailed degree.
`computers` and `large` (200,000 nodes, 4 million messages) run fused only. Peak memory is that of a
process of its own for each case and form, above what it held before the call (Linux). The encoder
line is six layers with T = 8 at Cora's size, forward and backward. The roofline at the end sets the
fused rates against the machine's own, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hardware import best_seconds, cache_gbytes, facts, headline, memory_gbytes, peak_gflops

from cimage_dist.io.storage import keep_freed_memory
from cimage_dist.nn.routing import RoutingConv
from cimage_dist.types import EdgeList

# nodes, directed messages, factors, channels, iterations, forms
CASES: dict[str, tuple[int, int, int, int, int, tuple[str, ...]]] = {
    "cora": (2_708, 10_556, 16, 32, 10, ("reference", "fused")),
    "photo": (7_650, 238_162, 32, 16, 8, ("reference", "fused")),
    "computers": (13_752, 491_722, 32, 16, 8, ("fused",)),
    "large": (200_000, 4_000_000, 16, 16, 3, ("fused",)),
}


def problem(name: str) -> tuple[torch.Tensor, EdgeList, int]:
    """Random factors and messages sorted by target, in both directions; degrees fall off as a
    Pareto tail of index 2.5.
    """
    nodes, messages, factors, channels, iterations, _ = CASES[name]
    rng = np.random.default_rng(0)
    weight = rng.pareto(2.5, nodes) + 0.3
    a, b = rng.choice(nodes, (2, messages // 2), p=weight / weight.sum())
    src, dst = np.concatenate([a, b]), np.concatenate([b, a])
    order = np.argsort(dst, kind="stable")
    x = torch.randn(nodes, factors, channels, generator=torch.Generator().manual_seed(0))
    return (
        x,
        EdgeList(torch.from_numpy(src[order]), torch.from_numpy(dst[order]), nodes),
        iterations,
    )


def both_ways(
    x: torch.Tensor,
    grad: torch.Tensor,
    edges: EdgeList,
    iterations: int,
    form: Any,
    layers: int = 1,
) -> torch.Tensor:
    out, conv = x.requires_grad_(), RoutingConv(x.shape[1], iterations, backend=form)
    for _ in range(layers):
        out = conv.route(out, edges)
    return torch.autograd.grad(out, x, grad)[0]


def time_case(name: str, form: Any) -> dict[str, float]:
    x, edges, iterations = problem(name)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    repeats = 10 if name == "cora" else 3
    with torch.no_grad():
        conv = RoutingConv(x.shape[1], iterations, backend=form)
        forward = best_seconds(lambda: conv.route(x, edges), repeats)
    return {
        "forward_s": forward,
        "both_s": best_seconds(lambda: both_ways(x, grad, edges, iterations, form), repeats),
    }


def resident(what: str) -> float:
    """VmRSS or VmHWM (its peak) of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return (
        float(next(line.split()[1] for line in status.splitlines() if line.startswith(what))) / 1e3
    )


def peak_in_this_process(name: str, form: str, layers: int, iterations: int | None) -> float:
    """MB above what the process held before one forward and backward pass."""
    x, edges, default = problem(name)
    grad = torch.randn(x.shape)
    few = EdgeList(torch.tensor([1, 2]), torch.tensor([0, 1]), 8)
    both_ways(x[:8].clone(), grad[:8], few, 2, form)  # loads and compiles
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    both_ways(x, grad, edges, iterations or default, form, layers)
    return resident("VmHWM") - before


def elsewhere(
    task: str, name: str, form: str, threads: int, layers: int = 1, iterations: int = 0
) -> Any:
    """The outcome of a task in a process of its own: what one form leaves behind must not burden
    the next.
    """
    command = [
        sys.executable,
        __file__,
        "--threads",
        str(threads),
        "--task",
        task,
        name,
        form,
        str(layers),
        str(iterations),
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run_task(task: str, name: str, form: str, layers: int, iterations: int) -> Any:
    if task == "peak":
        return peak_in_this_process(name, form, layers, iterations or None)
    keep_freed_memory()
    return time_case(name, form)


def roofline(name: str, seconds: dict[str, float]) -> dict[str, float]:
    """Rates of the fused forward pass, from the arithmetic and the reads it cannot do without.

    Per message and iteration 4·D floating-point operations (score and sum; the first iteration has
    no score), and each row is read twice from a cache: D numbers for the score, D for the sum. Once
    per layer it comes from memory.
    """
    nodes, messages, factors, channels, iterations, _ = CASES[name]
    width = factors * channels
    flops = messages * width * (4 * iterations - 2)
    near = messages * width * 4 * (2 * iterations - 1)
    far = (messages + 2 * nodes) * width * 4
    return {
        "gflops": flops / seconds["forward_s"] / 1e9,
        "cache_gb_s": near / seconds["forward_s"] / 1e9,
        "memory_gb_s": far / seconds["forward_s"] / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--task", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.task:
        task, name, form, layers, iterations = args.task
        print(json.dumps(run_task(task, name, form, int(layers), int(iterations))))
        return
    print(headline(args.threads))
    result: dict[str, Any] = {"machine": facts(args.threads), "cases": {}}
    for name in args.cases:
        nodes, messages, factors, channels, iterations, forms = CASES[name]
        print(
            f"\n{name}: {nodes:,} nodes, {messages:,} messages, K {factors}, C {channels}, T "
            f"{iterations}, one layer"
        )
        rows = {
            form: elsewhere("time", name, form, args.threads)
            | {"peak_mb": elsewhere("peak", name, form, args.threads)}
            for form in forms
        }
        for form, row in rows.items():
            print(
                f"  {form:10} forward {row['forward_s'] * 1e3:8.1f} ms   forward+backward "
                f"{row['both_s'] * 1e3:8.1f} ms   peak {row['peak_mb']:8.0f} MB"
            )
        if len(rows) == 2:
            ratio = {key: rows["reference"][key] / rows["fused"][key] for key in rows["fused"]}
            print(
                f"  {'ratio':10} forward {ratio['forward_s']:8.1f} x    forward+backward "
                f"{ratio['both_s']:8.1f} x    peak {ratio['peak_mb']:8.1f} x"
            )
        result["cases"][name] = rows | {"roofline": roofline(name, rows["fused"])}
    if "cora" in args.cases:
        encoder = {
            form: elsewhere("peak", "cora", form, args.threads, 6, 8)
            for form in ("reference", "fused")
        }
        print(
            f"\nsix layers, T 8, Cora's size, peak: reference {encoder['reference']:.0f} MB, "
            f"fused {encoder['fused']:.0f} MB, ratio "
            f"{encoder['reference'] / encoder['fused']:.1f} x"
        )
        result["encoder_peak_mb"] = encoder
    best = {"gflops": peak_gflops(), "cache_gb_s": cache_gbytes(), "memory_gb_s": memory_gbytes()}
    print(f"\nroofline, fused forward: {'':12}{'GFLOP/s':>10}{'cache GB/s':>12}{'memory GB/s':>13}")
    cases = {name: case["roofline"] for name, case in result["cases"].items()}
    for name, rates in {"the machine at its best": best, **cases}.items():
        gflops, cache, memory = (rates[key] for key in best)
        print(f"  {name:35}{gflops:10.0f}{cache:12.0f}{memory:13.1f}")
    result["machine_best"] = best
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
