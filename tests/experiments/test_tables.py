"""Tables from yaml: what is refused, which runs are needed and shared, how results become rows, and
a small table end to end.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.errors import UserError
from experiments import work
from experiments.__main__ import main
from experiments.cell import cell_command
from experiments.document import document
from experiments.low_labels import gcn_accuracy, low_label_scores, ratio_split
from experiments.processes import KeptProcesses
from experiments.render import paired, render_table, spread
from experiments.run import make, missing
from experiments.spec import Cell, Table, load_table, load_tables
from tests.conftest import small_sbm_settings

ROOT = Path(__file__).parents[2]
MODEL = [
    "model.num_factors=4",
    "model.factor_dim=4",
    "model.num_layers=1",
    "model.routing_iterations=2",
    "eval.probe_epochs=20",
    "train.epochs=4",
]


@pytest.fixture
def project(tmp_path: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and a table of two rows and two seeds on it."""
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {}
    for text in [*small_sbm_settings(store_dir), *MODEL]:
        key, _, value = text.partition("=")
        *path, name = key.split(".")
        section = settings
        for part in path:
            section = section.setdefault(part, {})
        section[name] = json.loads(value) if value.isdigit() else value
    for folder in ("configs/node", "experiments/tables", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "configs/node/blocks.yaml").write_text(json.dumps(settings))
    write(tmp_path)
    (tmp_path / "docs/RESULTS.md").write_text(
        "# Results\n\n<!-- bench: begin (python -m experiments --render) -->\n<!-- bench: end "
        "-->\nafter\n"
    )
    return tmp_path


def write(project: Path, name: str = "small", **changes: Any) -> Path:
    body = {
        "title": "A small table",
        "config": "configs/node/{dataset}.yaml",
        "seeds": {"blocks": 2},
        "rows": {"shipped": [], "with clusters": ["loss.cluster_weight=0.2"]},
        "scores": {"node.test": "test"},
        "against": "shipped",
        "controls": True,
        "published": {"shipped": {"blocks": 12.34}},
    }
    path = project / "experiments" / "tables" / f"{name}.yaml"
    path.write_text(
        json.dumps({key: value for key, value in (body | changes).items() if value is not None})
    )
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"colour": 1}, "unknown key 'colour'"),
        ({"title": None}, "title is missing"),
        ({"rows": None}, "rows is missing"),
        (
            {"rows": {"shipped": ["loss.cluster_weight"]}},
            "rows.shipped must be a list of key=value",
        ),
        ({"rows": {"shipped": ["loss.cluster_wait=1"]}}, "cluster_wait"),
        ({"against": "other"}, "against is 'other'"),
        ({"published": {"other": {"blocks": 1.0}}}, "published.other is no row"),
        ({"seeds": {"blocks": 0}}, "seeds.blocks=0"),
        ({"seeds": {"nothing": 1}}, "configs/node/nothing.yaml"),
        ({"rows": ["shipped"]}, "rows, seeds and configs must map"),
        ({"configs": {"other": "configs/node/{dataset}.yaml"}}, "configs.other is no dataset"),
        ({"extra": "colours"}, "extra is 'colours'"),
    ],
)
def test_a_wrong_table_is_refused_before_anything_runs(project, changes, said):
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        load_table(write(project, **changes))


def test_shipped_tables_load(monkeypatch):
    monkeypatch.chdir(ROOT)
    tables = load_tables(Path("experiments/tables"))
    assert [t.name for t in tables][:4] == ["node", "link", "link_parts", "ten"]
    by_name = {t.name: t for t in tables}
    same = next(
        c
        for c in by_name["workers"].cells()
        if c.dataset == "cora" and "train.epochs=30" in c.overrides
    )
    assert same.folder == "node/cora/model.edge_factors=0", "the same run as in the main table"
    ten, appendix = by_name["ten"], by_name["appendix"]
    assert len(ten.seeds) == 10 and ten.config_of("acm") == "configs/own/acm.yaml"
    assert {c.folder for c in by_name["node"].cells()} < {c.folder for c in ten.cells()}, (
        "runs are shared"
    )
    assert {c.folder for c in by_name["ten_few"].cells()} == {c.folder for c in ten.cells()}
    assert {c.task for c in appendix.cells()} == {"paper-node"}, (
        "apart from the runs of configs/node"
    )
    whole = {c.folder for c in by_name["parts"].cells()} & {
        c.folder for c in by_name["partition"].cells()
    }
    assert len(whole) == len(by_name["partition"].seeds), "the whole objective is trained once"


def test_some_datasets_may_have_another_config(project):
    (project / "configs/own").mkdir()
    (project / "configs/own/mine.yaml").write_text(
        (project / "configs/node/blocks.yaml").read_text()
    )
    own = {"mine": "configs/own/{dataset}.yaml"}
    table = load_table(write(project, seeds={"blocks": 1, "mine": 1}, configs=own, published=None))
    assert {c.folder for c in table.cells() if not c.overrides} == {
        "node/blocks/as-shipped",
        "own/mine/as-shipped",
    }
    fill(table, project / "results", "shipped", [80.0, 90.0])
    text = "\n".join(render_table(table, project / "results"))
    assert "Files: `experiments/results/node/`, `experiments/results/own/`;" in text


def test_settings_that_are_refused_one_by_one(project):
    """Turning off the only loss is refused; with another turned on it is a row like others."""
    off = [f"loss.{name}_weight=0" for name in ("redundancy", "structure", "factor")]
    table = load_table(
        write(project, rows={"shipped": [], "modularity alone": [*off, "loss.cluster_weight=1"]})
    )
    name = next(c.folder for c in table.cells() if c.overrides)
    assert "loss.redundancy_weight=0" in name and "loss.structure_weight=0" in name


def test_tables_share_runs_and_early_seeds_come_first(project):
    first = load_table(write(project))
    second = load_table(
        write(
            project,
            "other",
            rows={"again": [], "more": ["loss.cluster_weight=0.3"]},
            against=None,
            published=None,
        )
    )
    cells = missing([first, second], project / "results")
    assert len(cells) == 6 and [c.seed for c in cells] == [0, 0, 0, 1, 1, 1]


def result(seed: int, test: float, raw: float = 50.0) -> dict[str, Any]:
    return {
        "seed": seed,
        "node": {"val": 1.0, "test": test},
        "controls": {"raw": {"node": {"test": raw}}},
        "commit": "abc",
        "config_fingerprint": "x",
    }


def fill(table: Table, folder: Path, row: str, scores: list[float]) -> None:
    for cell, score in zip(
        [c for c in table.cells() if c.overrides == table.rows[row][c.dataset]],
        scores,
        strict=False,
    ):
        path = cell.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result(cell.seed, score)))


def test_a_table_in_markdown(project):
    table = load_table(write(project, seeds={"blocks": 4}))
    assert "Not begun: `small`" in document([table], project / "results")
    fill(table, project / "results", "shipped", [80.0, 82.0, 81.0, 83.0])
    fill(table, project / "results", "with clusters", [79.0, 80.0, 80.5])
    text = "\n".join(render_table(table, project / "results"))
    assert "| **shipped** | 81.50 ± 1.12 (4) |" in text and "| shipped, published | 12.34 |" in text
    assert "| raw features | 50.00 ± 0.00 (4) |" in text
    assert "untrained encoder" not in text, "no row for a control without results"
    assert (
        "shipped minus with clusters, seed by seed: blocks +1.17 ± 0.44 (3 seeds, p = 0.118)"
        in text
    )
    assert (
        "1 of 8 runs are still to be made" in text
        and "7 of 7 runs were scored by the earlier probe" in text
    )


def test_paired_differences():
    from scipy.stats import ttest_1samp

    ours, other = (
        [result(s, v) for s, v in enumerate([3.0, 4.0, 6.0, 5.0])],
        [result(s, v) for s, v in enumerate([1.0, 3.5, 4.0])],
    )
    found = paired(ours, other, "node.test")
    assert found is not None and found.seeds == 3 and found.mean == pytest.approx(1.5)
    assert found.p == pytest.approx(float(ttest_1samp([2.0, 0.5, 2.0], 0).pvalue))
    assert paired(ours[:1], other[:1], "node.test") is None
    same = paired(ours[:3], ours[:3], "node.test")
    assert same is not None and same.mean == 0 and same.p == 1
    assert spread([None]) == "-" and spread([1.0, None, 3.0]) == "2.00 ± 1.00 (2)"


def test_rows_may_differ_by_dataset(project):
    seeds = {"blocks": 1, "more": 1}
    (project / "configs/node/more.yaml").write_text(
        (project / "configs/node/blocks.yaml").read_text()
    )
    rows = {
        "shipped": [],
        "weighted": {"blocks": ["loss.cluster_weight=0.3"], "more": "loss.cluster_weight=0.4"},
    }
    table = load_table(write(project, seeds=seeds, rows=rows, published=None, against=None))
    assert [(c.dataset, c.overrides) for c in table.cells()] == [
        ("blocks", ()),
        ("blocks", ("loss.cluster_weight=0.3",)),
        ("more", ()),
        ("more", ("loss.cluster_weight=0.4",)),
    ]
    fill(table, project / "results", "weighted", [80.0, 90.0])
    assert "| **weighted** | 80.00 (1) | 90.00 (1) |" in "\n".join(
        render_table(table, project / "results")
    )
    with pytest.raises(UserError, match=r"rows\.weighted has nothing for more"):
        load_table(
            write(
                project,
                seeds=seeds,
                rows=rows | {"weighted": {"blocks": []}},
                published=None,
                against=None,
            )
        )


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
