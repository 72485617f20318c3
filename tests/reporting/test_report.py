"""Score tables and the report, from files made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cimage_dist.config import Config
from cimage_dist.config_loading import load_config, to_yaml
from cimage_dist.errors import UserError
from cimage_dist.io.artifacts import RunDir, read_metrics, write_json, write_text
from cimage_dist.reporting.terminal import footnotes, print_scores, score_table, write_report

FEW = {"2": {"mean": 80.04, "std": 1.26, "scores": [79.0, 81.0, 80.1]}}
RESULT: dict[str, Any] = {
    "node": {"pool": 80.5, "pool_se": 0.25, "val": 81.234, "test": 79.5},
    "few_labels": FEW,
    "cluster": {"acc": 60.0, "nmi": 40.126, "modularity": 0.4},
    "link": {"auc": 95.0, "ap": 94.555},
    "controls": {
        "raw": {
            "node": {"val": 50.0, "test": 49.0},
            "few_labels": {"2": {"mean": 30.0, "std": 0.0, "scores": [30.0]}},
            "cluster": None,
            "link": None,
        },
        "smoothed": {
            "node": {"val": None, "test": 70.0},
            "cluster": {"acc": 55.0, "nmi": 35.0},
            "link": {"auc": 80.0, "ap": 81.0},
            "hops": 4,
        },
    },
    "graph": "toy",
    "seed": 3,
    "edges": "5% and 10% of the edges were held out of training",
    "step": 20,
    "run_dir": "runs/toy",
}
TABLE = [
    ["2 labels per class", "30.0 ± 0.0", "-", "80.0 ± 1.3"],
    ["node probe, draws of train + val", "-", "-", "80.50 ± 0.25"],
    ["node probe, val", "50.00", "-", "81.23"],
    ["node probe, test", "49.00", "70.00", "79.50"],
    ["clustering ACC", "-", "55.00", "60.00"],
    ["clustering NMI", "-", "35.00", "40.13"],
    ["link AUC", "-", "80.00", "95.00"],
    ["link AP", "-", "81.00", "94.56"],
]


def test_table() -> None:
    assert score_table(RESULT) == (["", "raw", "smoothed", "CIMAGE"], TABLE)


def test_table_without_labels_links_controls() -> None:
    bare = {
        "node": None,
        "node_reason": "the graph has no labels",
        "cluster": None,
        "link": None,
        "link_reason": "trained on all edges",
    }
    assert score_table(bare) == (["", "this embedding"], [])
    notes = footnotes(bare)
    assert (
        "no node scores: the graph has no labels" in notes
        and "no link scores: trained on all edges" in notes
    )
    assert not any("raw" in note or "few labels" in note for note in notes)


def test_footnotes() -> None:
    notes = footnotes(RESULT)
    assert notes[0] == "graph toy, seed 3, 5% and 10% of the edges were held out of training"
    assert any("edge decoder" in note and "cosine" in note for note in notes)
    assert any("mean ± std over 3 random label draws" in note for note in notes)
    assert not any(note.startswith("no ") for note in notes)


def test_footnotes_say_what_the_controls_are() -> None:
    chosen: dict[str, Any] = {
        "raw": {},
        "smoothed": {"hops": 4, "chosen_by": "pool"},
        "pagerank": {"alpha": 0.1, "steps": 10, "chosen_by": "pool"},
        "pca": {"width": 512, "of": "pagerank"},
        "untrained": {},
    }
    result = RESULT | {
        "controls": chosen,
        "controls_best": {"any": "pagerank", "same_width": "pca"},
    }
    notes = footnotes(result)
    (about,) = [note for note in notes if note.startswith("raw: ")]
    assert (
        "over 4 hops" in about
        and "10 steps" in about
        and "a = 0.1" in about
        and "512 principal components of pagerank" in about
    )
    assert "our encoder before training" in about
    assert any("chosen on the draws" in note for note in notes)
    assert "best control by the draws of train + val: pagerank, of our width or less pca" in notes
    fixed = {
        name: found | ({"chosen_by": "fixed"} if "chosen_by" in found else {})
        for name, found in chosen.items()
    }
    assert any(
        "fixed, as neither labels nor held-out edges can choose" in note
        for note in footnotes(result | {"controls": fixed, "controls_best": {"any": None}})
    )


def test_few_labels_that_could_not_be_had() -> None:
    none: dict[str, Any] = {
        "mean": None,
        "std": None,
        "scores": [],
        "reason": "500 training nodes per class are too many",
    }
    result = RESULT | {"few_labels": {"500": none, **FEW}}
    assert score_table(result)[1][0] == ["500 labels per class", "-", "-", "-"]
    notes = footnotes(result)
    assert "no score with 500 labels per class: 500 training nodes per class are too many" in notes
    assert any("over 3 random label draws" in note for note in notes)
    assert not any("over 0" in note for note in footnotes(RESULT | {"few_labels": {"500": none}}))


def test_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    print_scores(RESULT)
    out = capsys.readouterr().out
    for row in TABLE:
        line = next(line for line in out.splitlines() if row[0] in line)
        assert [cell.strip() for cell in line.strip("│").split("│")] == row
    assert "run directory: runs/toy" in out


def test_printed_in_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number on the line of its score, whole; standard errors give way."""
    monkeypatch.setenv("COLUMNS", "80")
    print_scores(RESULT)
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    for row in TABLE:
        numbers = [cell.partition(" ±")[0] for cell in row[1:]]
        assert any(line.split()[-len(numbers) :] == numbers for line in out.splitlines())
    assert "standard errors: with --json" in out


def record(step: int, **terms: float) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "loss": 1.0 / step,
        **terms,
        "total_steps": 20,
        "lr": 0.01,
        "edges_per_s": 1e4,
        "seconds": 0.1,
    }


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A finished run of 20 steps with scores, as its files."""
    run = RunDir(tmp_path / "run")
    write_text(
        run.config,
        to_yaml(
            load_config(
                overrides=[
                    "data.name=sbm",
                    "train.epochs=20",
                    "run.seed=3",
                    "sampler.fanouts=[5,5]",
                ]
            )
        ),
    )
    packages = {"torch": "2.0", "ogb": None}
    graph = {"name": "toy", "nodes": 1234, "edges": 20000}
    write_json(
        run.environment,
        {
            "python": "3.11",
            "platform": "Linux",
            "packages": packages,
            "cpu_count": 2,
            "graph": graph,
        },
    )
    write_json(
        run.summary, {"steps": 20, "fingerprint": "abc", "edges_held_out": 1500, "best": None}
    )
    lines = [record(step) for step in range(1, 21)] + [
        {"kind": "val", "step": s, "score": v} for s, v in ((10, 70.0), (20, 65.5))
    ]
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    write_json(run.evaluation, RESULT)
    return run


def test_report(run: RunDir) -> None:
    path = write_report(run)
    assert path == run.report
    text = path.read_text()
    assert text.startswith(f"# Run {run.root}\n")
    assert (
        "Graph **toy**: 1,234 nodes, 10,000 undirected edges. 20 steps, fingerprint `abc`, seed 3."
        in text
    )
    assert "1,500 edges were held out of training" in text
    assert (
        "|  | raw | smoothed | CIMAGE |\n|---|---|---|---|\n| 2 labels per class | 30.0 ± 0.0 | "
        "- | 80.0 ± 1.3 |" in text
    )
    assert (
        "| step | loss | lr | edges_per_s |" in text
        and "| 1 | 1 | 0.01 | 1e+04 |" in text
        and "| 20 | 0.05 | 0.01 | 1e+04 |" in text
    )
    assert text.count("| 0.01 | 1e+04 |") == 11  # every second step, and the last
    assert "Validation: best 70.00 at step 10, last 65.50." in text
    changed = text.partition("## Settings that differ from the defaults")[2].partition(
        "## Environment"
    )[0]
    rows = [
        "| `data.name` | sbm | digits |",
        "| `sampler.fanouts` | [5, 5] | [] |",
        f"| `train.epochs` | 20 | {Config().train.epochs} |",
        "| `run.seed` | 3 | 0 |",
    ]
    assert [line for line in changed.splitlines() if line.startswith("| `")] == rows
    assert "Python 3.11, Linux, 2 CPUs; torch 2.0." in text and "ogb" not in text
    assert "run `cimage evaluate` again" not in text


def test_report_before_evaluation(run: RunDir) -> None:
    run.evaluation.unlink()
    assert (
        "Not evaluated yet: `cimage evaluate` with the same config."
        in write_report(run).read_text()
    )


def test_report_tells_old_scores(run: RunDir) -> None:
    write_json(run.evaluation, RESULT | {"step": 10})
    assert (
        "these are scores of step 10, but step 20 is the run's result now"
        in write_report(run).read_text()
    )
    # selected by validation, step 10 is the run's result
    write_text(
        run.config,
        to_yaml(
            load_config(
                overrides=["train.epochs=20", "train.validate_every=10", "train.select=val"]
            )
        ),
    )
    write_json(
        run.summary,
        {
            "steps": 20,
            "fingerprint": "abc",
            "edges_held_out": 0,
            "best": {"score": 70.0, "step": 10},
        },
    )
    text = write_report(run).read_text()
    assert "cimage evaluate` again" not in text and "held out of training for" not in text


def test_terms_that_start_later(run: RunDir) -> None:
    write_text(
        run.metrics, "".join(json.dumps(line) + "\n" for line in [record(1), record(2, factor=0.5)])
    )
    text = write_report(run).read_text()
    assert (
        "| step | loss | factor | lr | edges_per_s |" in text
        and "| 1 | 1 | - | 0.01 | 1e+04 |" in text
        and "| 2 | 0.5 | 0.5 | 0.01 | 1e+04 |" in text
    )


def test_report_of_an_unfinished_run(run: RunDir) -> None:
    run.summary.unlink()
    with pytest.raises(UserError, match=r"No finished run in .*cimage pretrain"):
        write_report(run)


def test_metrics_still_being_written(run: RunDir, tmp_path: Path) -> None:
    write_text(run.metrics, '{"kind": "train", "step": 1}\n{"kind": "tra')
    assert read_metrics(run.metrics) == [{"kind": "train", "step": 1}]
    write_text(run.metrics, 'nonsense\n{"kind": "train", "step": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
        read_metrics(run.metrics)
    assert read_metrics(tmp_path / "absent.jsonl") == []
