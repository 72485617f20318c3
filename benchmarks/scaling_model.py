"""An alpha-beta model of a training step on many GPUs: what 8 to 1,024 of them would reach on
papers100M.

    python benchmarks/scaling_model.py            print the assumptions and the tables
    python benchmarks/scaling_model.py render     the same into docs/SCALING.md
    python benchmarks/scaling_model.py measure    constants of this machine into
                                                  benchmarks/results/scaling_constants.json

What a step computes, keeps and sends is counted from the code (`cimage_dist/planning`); how fast it
goes is measured where this machine can show (sampling, reading rows, the CPU parts of a refresh)
and assumed where it cannot (the GPU and the network).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cimage_dist.ci import packed_size
from cimage_dist.ci.hsic import repeats_for
from cimage_dist.config_loading import load_config
from cimage_dist.planning.memory import num_clusters, refresh_rows, score_width
from cimage_dist.planning.play import hop_rows, play
from cimage_dist.planning.sizes import graph_size, neighbourhood, training_edges

ROOT = Path(__file__).parents[1]
CONSTANTS = ROOT / "benchmarks" / "results" / "scaling_constants.json"
DOCUMENT = ROOT / "docs" / "SCALING.md"
BEGIN, END = "<!-- scaling_model.py: begin -->", "<!-- scaling_model.py: end -->"
CONFIGS = [
    ROOT / "configs" / "large" / "papers100m.yaml",
    ROOT / "configs" / "resources" / "cluster.yaml",
]
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
WEAK_EDGES = 1024


@dataclass(frozen=True)
class Hardware:
    """Assumed: published peaks, and shares of them that such kernels usually reach. Bandwidths in
    bytes/s and one direction, latencies in s.
    """

    name: str
    memory: float
    nvlink: float
    network: float
    pcie: float
    per_machine: int = 8
    memory_share: float = 0.3
    link_share: float = 0.7
    launch: float = 3e-3
    nccl_call: float = 20e-6
    nvlink_hop: float = 2e-6
    network_hop: float = 5e-6
    tcp_hop: float = 30e-6
    tcp: float = 1.25e9


A100 = Hardware(
    "A100 80 GB SXM, HDR InfiniBand", memory=2.0e12, nvlink=300e9, network=25e9, pcie=32e9
)
H100 = Hardware(
    "H100 80 GB SXM, NDR InfiniBand", memory=3.35e12, nvlink=450e9, network=50e9, pcie=64e9
)
MEANINGS = {
    "memory": "device memory, GB/s, published peak",
    "memory_share": "share of it that gathers of rows reach",
    "nvlink": "NVLink, GB/s in one direction, published peak",
    "network": "InfiniBand per GPU, GB/s, published peak",
    "pcie": "PCIe, GB/s, published peak",
    "link_share": "share of NVLink, InfiniBand and PCIe peaks that is reached",
    "per_machine": "GPUs per machine",
    "launch": "ms per step for starting kernels and for Python",
    "nccl_call": "µs per NCCL call",
    "nvlink_hop": "µs per hop over NVLink",
    "network_hop": "µs per hop over InfiniBand",
    "tcp_hop": "µs per hop of a CPU collective (gloo over TCP)",
    "tcp": "TCP per machine, GB/s (10 Gbit Ethernet)",
}
_SCALE = {
    "memory": 1e-9,
    "nvlink": 1e-9,
    "network": 1e-9,
    "pcie": 1e-9,
    "tcp": 1e-9,
    "launch": 1e3,
    "nccl_call": 1e6,
    "nvlink_hop": 1e6,
    "network_hop": 1e6,
    "tcp_hop": 1e6,
}


def hops(operation: str, world: int) -> int:
    """One after another: a gather passes every rank, the other operations climb a tree and come
    down.
    """
    return world - 1 if operation == "all_gather" else 2 * math.ceil(math.log2(world))


class Model:
    """Seconds of each part of a step, for W GPUs with s seed edges each."""

    def __init__(self, measured: dict[str, float]) -> None:
        self.measured = measured
        self.cfg = cfg = load_config(*CONFIGS)
        self.size = graph_size(cfg.data)
        self.edges = training_edges(self.size, cfg.data)
        self.width = cfg.model.num_factors * cfg.model.factor_dim
        self.played = play(cfg, self.size.features, num_clusters(cfg, self.size), self.rows(1024))

    def rows(self, share: float) -> dict[str, float]:
        nodes, messages = neighbourhood(
            4 * share, self.cfg.sampler.fanouts, self.size.nodes, self.edges
        )
        return {
            "pairs": 2 * share,
            "positives": share,
            "endpoints": 2 * share,
            **hop_rows(nodes, messages),
        }

    def traffic(self, rows: dict[str, float]) -> float:
        """Bytes through device memory: each layer gathers its messages' rows once forward and twice
        backward; what is kept is touched six times.
        """
        reach = self.cfg.model.num_layers + self.cfg.model.tail
        gathered = sum(rows[f"messages within {depth}"] for depth in range(reach)) * self.width * 4
        return 3 * gathered + 6 * self.played.kept.at(rows)

    def sampling(self, rows: dict[str, float]) -> float:
        hops = len(self.cfg.sampler.fanouts)
        return (
            rows[f"messages within {hops - 1}"]
            * self.measured["sampling_s_per_message"]
            / max(1, self.cfg.sampler.loader_processes)
        )

    def row_bytes(self, rows: dict[str, float]) -> float:
        return rows[f"nodes within {len(self.cfg.sampler.fanouts)}"] * self.size.features * 2

    def reading(self, rows: dict[str, float]) -> float:
        return (
            self.row_bytes(rows)
            / self.measured["rows_bytes_per_s"]
            / max(1, self.cfg.sampler.loader_processes)
        )

    def transfer(self, rows: dict[str, float], on: Hardware) -> float:
        return self.row_bytes(rows) / (on.link_share * on.pcie)

    def reduction(self, world: int, on: Hardware) -> float:
        """NCCL: a ring inside the machine, then a tree between machines on which each GPU carries
        its part.
        """
        inside = min(world, on.per_machine)
        machines = world // inside
        total = 0.0
        for call in self.played.step:
            if call.dtype != "int64":
                total += (
                    on.nccl_call
                    + 2 * (inside - 1) * on.nvlink_hop
                    + 2 * math.ceil(math.log2(machines)) * on.network_hop
                )
                total += 2 * (inside - 1) / inside * call.size / (on.link_share * on.nvlink)
                total += (
                    2
                    * (machines - 1)
                    / machines
                    * call.size
                    / inside
                    / (on.link_share * on.network)
                )
        return total

    def agreement(self, world: int, on: Hardware) -> float:
        """Counts and decisions are CPU tensors (int64) and go through gloo."""
        return on.tcp_hop * sum(
            hops(call.operation, world) for call in self.played.step if call.dtype == "int64"
        )

    def refresh(self, world: int, on: Hardware) -> float:
        """Per step: embedding, the sample's gather over TCP, statistics shared out, and one solve
        on every rank's CPU.
        """
        ci, (sample, bank) = self.cfg.ci, refresh_rows(self.cfg, self.size)
        blocks = sample // ci.block_size * repeats_for(sample, ci.block_size, ci.repeats)
        flops = 2 * blocks * packed_size(ci.block_size) * score_width(self.cfg) ** 2
        embedded = self.rows(min(2 * sample, self.size.nodes) / world / 4)
        moved = (sample + bank) * self.width * 4 / on.tcp
        calls = on.tcp_hop * sum(hops(call.operation, world) for call in self.played.refresh)
        seconds = (
            flops / world / self.measured["hsic_flops_per_s"]
            + self.measured["solve_s"]
            + moved
            + calls
        )
        data = self.sampling(embedded) + self.reading(embedded) + self.transfer(embedded, on)
        return (
            seconds + data + self.traffic(embedded) / 3 / (on.memory_share * on.memory)
        ) / ci.every_steps

    def step(self, world: int, share: float, on: Hardware) -> dict[str, float]:
        rows = self.rows(share)
        parts = {
            "sampling": self.sampling(rows),
            "reading": self.reading(rows),
            "transfer": self.transfer(rows, on),
            "GPU": on.launch + self.traffic(rows) / (on.memory_share * on.memory),
            "reduction": self.reduction(world, on),
            "agreement": self.agreement(world, on),
            "refresh": self.refresh(world, on),
        }
        # Loader processes sample and read ahead, so the slower of that and everything else sets the
        # pace.
        ahead = parts["sampling"] + parts["reading"]
        parts["step"] = max(ahead, sum(parts.values()) - ahead)
        return parts


def fill(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False)


def table(
    model: Model, on: Hardware, title: str, share_of: Any, gpus: tuple[int, ...] = GPUS
) -> str:
    names = ["sampling", "reading", "transfer", "GPU", "reduction", "agreement", "refresh", "step"]
    lines = [
        fill(f"**{title}, {on.name}**; ms per step"),
        "",
        "| GPUs | edges per GPU | "
        + " | ".join(names)
        + " | edges/s | efficiency | hours per epoch |",
        "|" + "--:|" * (len(names) + 5),
    ]
    first: float | None = None
    for world in gpus:
        share = share_of(world)
        parts = model.step(world, share, on)
        rate = world * share / parts["step"]
        first = first or rate / world
        cells = [f"{1e3 * parts[name]:.2f}" for name in names]
        lines.append(
            f"| {world:,} | {share:,.0f} | "
            + " | ".join(cells)
            + f" | {rate:,.0f} | {rate / world / first:.0%} | "
            f"{model.edges / 2 / rate / 3600:,.1f} |"
        )
    return "\n".join(lines)


def tables(constants: dict[str, Any]) -> str:
    model = Model(constants["measured"])
    batch = model.cfg.sampler.batch_edges
    measured = [f"| `{name}` | {value:.3g} |" for name, value in constants["measured"].items()]
    assumed = []
    for name, meaning in MEANINGS.items():
        shown = [f"{getattr(on, name) * _SCALE.get(name, 1):g}" for on in (A100, H100)]
        assumed.append(f"| `{name}` | {shown[0]} | {shown[1]} | {meaning} |")
    step = model.played
    weak = f"Weak scaling, {WEAK_EDGES:,} edges per GPU"
    sent = ", ".join(f"{call.operation} {call.size:,} B {call.dtype}" for call in sorted(step.step))
    return "\n".join(
        [
            fill(
                f"Counted from the code: {step.parameters:,} parameters; each step {sent}; "
                f"{len(step.refresh)} collectives in a refresh."
            ),
            "",
            fill(f"Measured ({constants['machine']}; `{constants['command']}`):"),
            "",
            "| constant | value |",
            "|--|--:|",
            *measured,
            "",
            "Assumed:",
            "",
            f"| constant | {A100.name} | {H100.name} | meaning |",
            "|--|--:|--:|--|",
            *assumed,
            "",
            table(
                model,
                A100,
                f"Strong scaling, global batch {batch:,} as in `configs/large/papers100m.yaml`",
                lambda world: batch / world,
            ),
            *(
                "\n" + table(model, on, weak, lambda world: WEAK_EDGES, GPUS[::3])
                for on in (A100, H100)
            ),
        ]
    )


def cpu_seconds(call: Any, repeats: int = 5) -> float:
    """Of the quickest of several calls on one thread, after one to warm up: what other processes
    take does not count.
    """
    call()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def measure_sampling() -> float:
    """Seconds per message of a batch of seed edges, one process, fan-outs of the config."""
    from sampling import random_graph

    from cimage_dist.sampling.loader import BatchSource

    cfg = load_config(*CONFIGS)
    indptr, indices = random_graph(1_000_000, 28)
    source = BatchSource(
        indptr,
        indices,
        fanouts=cfg.sampler.fanouts,
        batch_edges=256,
        seed=0,
        hide_rate=cfg.sampler.hide_rate,
        backend="csr",
    )
    messages = source[0].edges.src.numel()
    return cpu_seconds(lambda: source[0]) / messages


def measure_rows() -> float:
    """Bytes per second of gathering half-precision rows from a mapped file that is in the page
    cache, as a loader process does.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.save(path, np.zeros((1_000_000, 128), dtype=np.float16))
        x = np.load(path, mmap_mode="r")
        gids = np.random.default_rng(0).integers(0, len(x), 200_000)
        return gids.size * 128 * 2 / cpu_seconds(lambda: x[gids])


def measure_refresh() -> tuple[float, float]:
    """(flop/s of the HSIC statistics, seconds of one choice of the partition) at the config's
    width.
    """
    from ci_refresh import synthetic

    from cimage_dist.ci.hsic import block_statistics
    from cimage_dist.ci.partition import choose_partition

    cfg = load_config(*CONFIGS)
    width = score_width(cfg)
    h, labels, gids = synthetic(4000, width, cfg.model.num_factors, 7)
    stats = block_statistics(h.flatten(1), labels, gids, seed=0, block_size=cfg.ci.block_size)
    seconds = cpu_seconds(
        lambda: block_statistics(h.flatten(1), labels, gids, seed=0, block_size=cfg.ci.block_size),
        2,
    )
    rate = 2 * stats.num_blocks * packed_size(cfg.ci.block_size) * width**2 / seconds
    previous = choose_partition(stats, cfg.model.num_factors)
    return rate, cpu_seconds(
        lambda: choose_partition(stats, cfg.model.num_factors, previous=previous), 3
    )


def measure() -> None:
    from hardware import headline

    torch.set_num_threads(1)
    hsic, solve = measure_refresh()
    found = {
        "sampling_s_per_message": measure_sampling(),
        "rows_bytes_per_s": measure_rows(),
        "hsic_flops_per_s": hsic,
        "solve_s": solve,
    }
    constants = {
        "machine": headline(1),
        "command": "python benchmarks/scaling_model.py measure",
        "measured": {name: float(f"{v:.3g}") for name, v in found.items()},
    }
    CONSTANTS.write_text(json.dumps(constants, indent=2) + "\n")
    print(json.dumps(constants, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "action", nargs="?", default="print", choices=("print", "measure", "render")
    )
    action = parser.parse_args().action
    if action == "measure":
        measure()
        return
    text = tables(json.loads(CONSTANTS.read_text()))
    if action == "print":
        print(text)
        return
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
