"""Running the cells of a table: in turn, in processes, end to end, with recorded commands."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import psutil
import pytest
import torch

from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.errors import UserError
from experiments import work
from experiments.__main__ import main
from experiments.cell import cell_command
from experiments.low_labels import gcn_accuracy, low_label_scores, ratio_split
from experiments.processes import KeptProcesses
from experiments.run import make
from experiments.spec import Cell, load_table
from tests.experiments.conftest import write


def test_cells_of_one_run_directory_take_turns(project):
    plain = load_table(write(project))
    extra = load_table(
        write(
            project,
            "views",
            extra="views",
            scores={"views.f1.test": "F1"},
            against=None,
            published=None,
            controls=False,
        )
    )
    cells = [*plain.cells(), *extra.cells()]
    assert len({(c.run_folder, c.seed) for c in cells}) == len(cells) / 2
    at_work: set[str] = set()
    guard, most, met = threading.Lock(), [], threading.Barrier(2)

    def execute(command: list[str]) -> tuple[int, str]:
        key = " ".join(part for part in command if part.startswith(("--seed", "--set")))
        with guard:
            assert key not in at_work, "two processes in one run directory"
            at_work.add(key)
            most.append(len(at_work))
            is_early = len(most) <= 2
        if is_early:
            met.wait(600)  # the first two are at work at once
        with guard:
            at_work.remove(key)
        return 0, ""

    assert (
        make(
            cells, project / "results", project / "runs", 4, execute, lambda done, total, what: None
        )
        == []
    )
    assert len(most) == len(cells) and max(most) > 1


def test_kept_processes(project, monkeypatch):
    """Two commands in one process; a process that dies fails its command alone and is replaced;
    none outlives the command.
    """
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    table = load_table(write(project))
    commands = [
        cell_command(cell, project / "results", project / "runs") for cell in table.cells()[:2]
    ]
    before = set(psutil.Process().children())

    def workers() -> list[psutil.Process]:
        return [
            p
            for p in psutil.Process().children()
            if p not in before and "spawn_main" in " ".join(p.cmdline())
        ]

    kept = KeptProcesses()
    try:
        assert kept(commands[0]) == (0, "")
        (child,) = workers()
        assert kept([*commands[1], "--set=loss.cluster_wait=1"])[0] == 2 and workers() == [child]
        (project / "in the way").write_text("")
        code, said = kept(
            cell_command(table.cells()[1], project / "in the way", project / "runs")
        )  # a fault nobody foresaw
        assert (
            code == 1
            and said.rstrip().splitlines()[-1].startswith("NotADirectoryError")
            and workers() == [child]
        )
        child.kill()
        code, said = kept(commands[1])
        assert code == 1 and "out of memory" in said
        assert kept(commands[1]) == (0, "")
        (other,) = workers()
        assert other != child
    finally:
        kept.close()
    assert psutil.wait_procs([other], timeout=120)[1] == []


def test_the_number_of_workers_names_a_row(project):
    table = load_table(
        write(
            project,
            rows={"one": [], "two": ["resources.num_workers=2"]},
            published=None,
            against=None,
        )
    )
    assert {c.folder.rpartition("/")[2] for c in table.cells()} == {
        "as-shipped",
        "resources.num_workers=2",
    }


def test_a_failing_run_does_not_stop_the_others(project):
    cells = load_table(write(project)).cells()
    seen = []
    bad = next(cell for cell in cells if cell.overrides)

    def execute(command: list[str]) -> tuple[int, str]:
        is_bad = f"--seed={bad.seed}" in command and command[-1] == f"--set={bad.overrides[-1]}"
        return (2, "trace\nerror: no such thing\n") if is_bad else (0, "")

    failed = make(
        cells,
        project / "results",
        project / "runs",
        2,
        execute,
        lambda done, total, what: seen.append((done, total)),
    )
    assert [(cell, said) for cell, said in failed] == [(bad, "error: no such thing")]
    assert seen[-1] == (4, 4)


def test_splits_with_few_labels():
    y = torch.arange(2000) % 4
    split = ratio_split(y, 0.05, seed=0)
    assert (int(split.train.sum()), int(split.val.sum()), int(split.test.sum())) == (100, 0, 1900)
    assert not bool(
        (split.train & split.val | split.train & split.test | split.val & split.test).any()
    )
    assert not torch.equal(split.train, ratio_split(y, 0.05, seed=1).train)


def test_the_supervised_network_learns(small_sbm):
    y = small_sbm.labels()
    assert y is not None
    split = ratio_split(y, 0.2, seed=0)
    state = torch.get_rng_state()
    found = gcn_accuracy(small_sbm.features(), y, small_sbm.topology(), split, seed=0)
    assert found > 60 and torch.equal(state, torch.get_rng_state())
    assert found == gcn_accuracy(small_sbm.features(), y, small_sbm.topology(), split, seed=0)


def test_a_table_end_to_end(project, capsys):
    assert main(["small", "--jobs", "2", "--quiet"]) == 0
    files = sorted((project / "experiments/results").rglob("seed-*.json"))
    assert [str(f.relative_to(project / "experiments/results")) for f in files] == [
        "node/blocks/as-shipped/seed-0.json",
        "node/blocks/as-shipped/seed-1.json",
        "node/blocks/loss.cluster_weight=0.2/seed-0.json",
        "node/blocks/loss.cluster_weight=0.2/seed-1.json",
    ]
    body = json.loads(files[2].read_text())
    assert list(body["few_labels"]) == ["5"]
    assert (
        body["command"]
        == "cimage pretrain configs/node/blocks.yaml loss.cluster_weight=0.2 run.seed=0"
        and body["node"]["test"] > 0
    )
    text = (project / "docs/RESULTS.md").read_text()
    assert "| **with clusters** |" in text and text.endswith("after\n")
    before = {f: f.stat().st_mtime_ns for f in files}
    capsys.readouterr()
    assert main(["small", "--json", "--quiet"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["made"] == 0
        and {f: f.stat().st_mtime_ns for f in files} == before
    )
    config = project / "configs/node/blocks.yaml"
    config.write_text(config.read_text().replace('"epochs": 4', '"epochs": 5'))
    assert main(["small", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outdated"] == [
        "node/blocks/as-shipped",
        "node/blocks/loss.cluster_weight=0.2",
    ]


def test_extras_end_to_end(project, capsys):
    write(
        project,
        "low",
        rows={"ours": []},
        seeds={"blocks": 1},
        extra="low_labels",
        against=None,
        published=None,
        controls=False,
    )
    assert main(["low", "--jobs", "1", "--quiet"]) == 0, capsys.readouterr()
    file = project / "experiments/results/node/blocks/as-shipped~low_labels/seed-0.json"
    low = json.loads(file.read_text())["low_labels"]
    assert all(list(row) == ["ours", "smoothed", "pagerank", "gcn"] for row in low.values())
    assert set(low) == {"1", "2", "5", "10"} and all(
        0 < v <= 100 for row in low.values() for v in row.values()
    )
    again = json.loads(file.read_text())["command"]
    assert again.startswith("python -m experiments.work ") and work.main(again.split()[3:]) == 0
    assert (project / "runs/again/node/blocks/as-shipped~low_labels/seed-0.json").is_file()
    assert "| blocks, GCN, supervised |" in (project / "docs/RESULTS.md").read_text()


def test_mistakes_on_the_command_line(project, capsys):
    for words, said in (
        (["none"], "No table"),
        (["--seeds", "0"], "--seeds"),
        (["--jobs", "-1"], "--jobs"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_graphs_without_classes_have_no_low_label_table(project):
    graph = open_graph(load_config("configs/node/blocks.yaml").data)
    object.__setattr__(graph, "labels", lambda: None)
    with pytest.raises(UserError, match="no labels"):
        low_label_scores(load_config("configs/node/blocks.yaml"), graph)


def test_cells_name_their_run():
    cell = Cell(
        "configs/node/cora.yaml", "cora", ("model.teleport=0.9", "cluster.from=x/y"), 3, "views"
    )
    assert (
        cell.folder == "node/cora/cluster.from=x-y+model.teleport=0.9~views"
        and cell.path(Path("r")).name == "seed-3.json"
    )
    assert (
        Cell("configs/paper/node/cora.yaml", "cora", (), 0).folder == "paper-node/cora/as-shipped"
    )


def test_recorded_commands():
    plain = Cell("configs/node/cora.yaml", "cora", ("loss.cluster_weight=0.7",), 3)
    assert (
        plain.command()
        == "cimage pretrain configs/node/cora.yaml loss.cluster_weight=0.7 run.seed=3"
    )
    several = Cell(
        "configs/node/cora.yaml",
        "cora",
        ("sampler.fanouts=[5,5,5,5,5,5]", "resources.num_workers=2"),
        0,
    )
    assert several.command().endswith(
        "yaml resources.num_workers=2 sampler.fanouts=[5,5,5,5,5,5] run.seed=0 --on ray"
    )
    views = Cell("configs/node/cora.yaml", "cora", (), 1, "views")
    assert views.command() == (
        "python -m experiments.work configs/node/cora.yaml cora --results=runs/again "
        "--runs=runs/experiments --seed=1 --extra=views"
    )
