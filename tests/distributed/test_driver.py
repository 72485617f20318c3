"""What the driver does before any Ray: a finished run is over, work that is not shared is named."""

from __future__ import annotations

import pytest

from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.distributed import driver
from cimage_dist.distributed.driver import Follower
from cimage_dist.io.artifacts import RunDir
from cimage_dist.pipeline import stages
from cimage_dist.train.progress import Progress, announce

SMALL = ["data.name=sbm", "data.sbm.num_nodes=80", "data.sbm.num_blocks=2", "train.epochs=2"]


class Notes(Progress):
    def __init__(self):
        super().__init__(quiet=True)
        self.said = []

    def note(self, text):
        self.said.append(text)


def test_a_finished_run_starts_no_ray(tmp_path, monkeypatch):
    def config(*more):
        where = [f"data.store_dir={tmp_path}", f"run.dir={tmp_path / 'run'}"]
        return load_config(overrides=[*SMALL, *where, *more])

    class Started(Exception):
        pass

    def start(cfg):
        raise Started

    monkeypatch.setattr(driver, "start_ray", start)
    stages.pretrain(config(), Progress(quiet=True))
    notes = Notes()
    summary = driver.launch(config("resources.num_workers=2"), notes)
    assert summary["steps_now"] == 0 and summary["steps"] == 2
    assert "is finished; nothing was started" in notes.said[0]
    file = tmp_path / "run" / "summary.json"
    whole = file.read_text()
    for content, more in (("{", "train.epochs=2"), (whole, "train.epochs=3")):
        file.write_text(content)
        with pytest.raises(Started):
            driver.launch(config(more), notes)


def test_the_driver_tells_the_end_from_what_workers_log(tmp_path):
    notes = Notes()
    follower = Follower(RunDir(tmp_path), notes, log_every=10)
    for step in (10, 20, 30, 40):
        follower._show({"kind": "train", "step": step, "total_steps": 100, "seconds": 30.0})
    assert len(notes.said) == 1
    assert notes.said[0].startswith("100 steps of 3 s as measured here: ends about ")
    assert notes.said[0].endswith("in 4 min")  # 80 steps


@pytest.mark.parametrize(
    ("more", "warns"),
    [
        ([], False),
        (["resources.num_workers=2"], True),
        (["resources.num_workers=2", "sampler.fanouts=[5,5]"], False),
    ],
)
def test_workers_that_share_no_encoding_are_warned_of(more, warns, tmp_path):
    cfg = load_config(overrides=[*SMALL, f"data.store_dir={tmp_path}", *more])
    notes = Notes()
    announce(cfg, open_graph(cfg.data), notes)
    assert any("sampler.fanouts" in text for text in notes.said) == warns
