"""What a person sees of a sweep: the live table of a terminal, the lines elsewhere, the summary
at the end.
"""

from __future__ import annotations

import io
import pickle
import sys

import pytest

from cimage_dist.tune.ledger import Ledger, Trial
from cimage_dist.tune.plan import Plan
from cimage_dist.tune.results import Board, print_summary, summary

from .conftest import MakeSweep, end, write_base
from .test_plan import run_all

MANY = """
search: random
trials: 3
top: 1
fresh_seeds: 2
space:
  model.num_factors: [4, 8]
  optim.lr_max: {low: 2.0e-3, high: 0.1, log: true}
  model.dropout: [0.25, 0.75]
  mask.start_rate: [0.625]
  loss.cluster_weight: [0.3125]
  model.structure_hidden: [48]
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_table_of_a_terminal(
    make_sweep: MakeSweep, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    sweep = make_sweep()
    write_base(sweep, ledger)
    plan = Plan(sweep, ledger)
    with Board(sweep, ledger) as board:
        first, second = plan.next(0.0), plan.next(0.0)
        assert isinstance(first, Trial) and isinstance(second, Trial)
        board.started(first)
        board.reported(first.id, {"score": 71.25, "epoch": 5.0})
        copy = pickle.loads(
            pickle.dumps(board)
        )  # our own bytes: Tune does the same with its callbacks
        assert copy._live is None and copy.latest == board.latest, (
            "a display cannot be copied, what it shows can"
        )
        end(ledger, first)
        board.ended(first, ledger.outcomes[first.id])
        board.started(second)
        board._draw(is_forced=True)
    shown = screen.getvalue()
    assert first.id in shown and "done" in shown and "running" in shown and "num_factors" in shown


def test_lines_where_there_is_no_terminal(
    make_sweep: MakeSweep, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep()
    write_base(sweep, ledger)
    trial = Plan(sweep, ledger).next(0.0)
    assert isinstance(trial, Trial)
    end(ledger, trial, score=71.5)
    for quiet in (False, True):
        with Board(sweep, ledger, quiet=quiet) as board:
            board.started(trial)
            board.ended(trial, ledger.outcomes[trial.id])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(
        f"1 over: {trial.id} done  val 71.50 after 20 epochs"
    )


def test_many_settings_can_be_read_on_a_narrow_terminal(
    make_sweep: MakeSweep, ledger: Ledger, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sweep = make_sweep(MANY)
    run_all(sweep, ledger)
    print_summary(summary(sweep, ledger) | {"sweep_dir": "s"}, [d.key for d in sweep.space])
    said = capsys.readouterr().out
    assert max(len(line) for line in said.splitlines()) <= 80
    assert (
        "structure_hidden 48" in said
        and "0.3125" in said
        and "…" not in said
        and "winner: point" in said
    )
