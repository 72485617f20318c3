"""Tables on a real Ray node: `python -m experiments --on ray` from a folder that is not the node's
own.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from tests.distributed.conftest import PATIENCE_S, Cluster

pytestmark = pytest.mark.slow

CONFIG = {
    "data": {"name": "sbm", "sbm": {"num_nodes": 600, "num_blocks": 3, "avg_degree": 8}},
    "model": {"num_factors": 4, "factor_dim": 4, "num_layers": 1, "routing_iterations": 2},
    "eval": {"probe_epochs": 20},
    "train": {"epochs": 2},
}
TABLE = {
    "title": "On Ray",
    "config": "configs/node/{dataset}.yaml",
    "seeds": {"blocks": 2},
    # More runs of several workers than fit side by side: each waits for the room of its workers
    # without holding any itself.
    "rows": {
        "one process": [],
        "two workers": [
            "sampler.fanouts=[3,3]",
            "sampler.batch_edges=512",
            "resources.num_workers=2",
        ],
    },
    "scores": {"node.test": ""},
}


def test_a_table_on_a_cluster(one_node: Cluster) -> None:
    project = one_node.folder / "project"
    for folder in ("configs/node", "experiments/tables", "docs"):
        (project / folder).mkdir(parents=True)
    (project / "configs/node/blocks.yaml").write_text(yaml.safe_dump(CONFIG))
    (project / "experiments/tables/small.yaml").write_text(yaml.safe_dump(TABLE))
    command = [sys.executable, "-m", "experiments", "small", "--on", "ray", "--jobs", "4", "--json"]
    done = subprocess.run(
        command,
        cwd=project,
        env=one_node.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["made"] == 4
    found = {
        path.parent.name: json.loads(path.read_text())
        for path in (project / "experiments/results").rglob("seed-1.json")
    }
    assert set(found) == {
        "as-shipped",
        "resources.num_workers=2+sampler.batch_edges=512+sampler.fanouts=[3,3]",
    }
    assert [result["command"].endswith("--on ray") for name, result in sorted(found.items())] == [
        False,
        True,
    ]
    (run,) = (project / "runs/experiments/node/blocks").glob("resources*/seed-1")
    assert (run / "attempts.jsonl").is_file(), "not a run of Ray Train"
