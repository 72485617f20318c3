"""How many trials run at a time: as many as the cluster holds when the searcher asks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cimage_dist.config_loading import load_config
from cimage_dist.distributed import tune
from cimage_dist.tune.ledger import Ledger
from cimage_dist.tune.plan import Plan

from .conftest import MakeSweep, end, write_base


def test_the_searcher_follows_the_room(make_sweep: MakeSweep, ledger: Ledger) -> None:
    sweep = make_sweep()
    write_base(sweep, ledger)
    steward = SimpleNamespace(
        sweep=sweep, ledger=ledger, plan=Plan(sweep, ledger), elapsed=0.0, names={}
    )
    room = [2]
    searcher = tune.PlanSearcher(steward, lambda: room[0])

    def asked(count: int) -> list[str]:
        found = [searcher.suggest(f"id{len(ledger.trials)}-{i}") for i in range(count)]
        return [job["trial"] for job in found if job]

    first = asked(4)
    assert len(first) == 2, "no more than there is room for"
    room[0] = 3
    assert len(asked(4)) == 1, "a node came"
    end(ledger, ledger.trials[first[0]])
    room[0] = 2
    assert asked(4) == [], "a node went: what runs stays, nothing new begins"
    end(ledger, ledger.trials[first[1]])
    assert len(asked(4)) == 1


@pytest.mark.parametrize(
    ("settings", "have", "trials"),
    [
        ([], {"CPU": 7.0}, 7),
        (["resources.num_workers=2"], {"CPU": 7.0}, 3),
        (["resources.num_workers=2", "resources.cpus_per_worker=4"], {"CPU": 7.0}, 1),
        ([], {"CPU": 7.0, "GPU": 2.0}, 2),
        (["resources.device=cpu"], {"CPU": 7.0, "GPU": 2.0}, 7),
    ],
)
def test_room_is_what_the_cluster_holds(settings, have, trials, make_sweep, monkeypatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(tune.ray, "cluster_resources", lambda: have)
    room = tune.Room(make_sweep(), load_config(overrides=settings))
    assert room() == trials
    have["CPU"] = 1.0
    assert room() == trials, "the cluster is not asked each time"
    clock[0] += 10.0
    assert room() == 1


def test_room_as_asked(make_sweep: MakeSweep) -> None:
    sweep = make_sweep("search: random\nconcurrent: 5\nspace:\n  model.num_factors: [4, 8]\n")
    assert tune.Room(sweep, load_config())() == 5
