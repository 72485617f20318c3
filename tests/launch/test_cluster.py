"""Real jobs on a real cluster of two nodes with a token: plain `ray job submit`, `cimage submit`,
storage, Slurm's script. Takes many minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cimage_dist.io import checkpoint
from tests.launch.conftest import BIN, ROOT, Cluster, clean_environment, run_script
from tests.procs import _free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two nodes need two CPUs"),
]

SMALL = [
    "configs/demo_sampled.yaml",
    "model.num_factors=4",
    "model.factor_dim=8",
    "model.num_layers=2",
    "cluster.init_epochs=1",
    "cluster.restarts=1",
    "train.epochs=2",
]
ENDLESS = [*SMALL[:-1], "train.epochs=1000000", "run.checkpoint_every=1", "run.log_every=1"]
NOWHERE = ["data.name=mine", "data.path=nowhere"]


def plain(cluster: Cluster, *command: str) -> subprocess.CompletedProcess[str]:
    options = ["--runtime-env", "launch/runtime_env.yaml", "--working-dir", "."]
    return cluster.run(
        str(BIN / "ray"), "job", "submit", "--address", cluster.address, *options, "--", *command
    )


def run_folders(cluster: Cluster) -> set[Path]:
    return {path.parent for path in cluster.storage.glob("runs/*/*/*/config.yaml")}


def wait_until(what: str, is_true, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds  # against a hang only
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def test_plain_ray_job_submit_trains(cluster):
    before = run_folders(cluster)
    done = plain(
        cluster,
        "cimage",
        "pretrain",
        *SMALL,
        "run.seed=10",
        "--on",
        "ray",
        "resources.num_workers=2",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run,) = run_folders(cluster) - before
    assert run.name == "seed-10" and checkpoint.load_selected(run / "ckpt", "last").step > 0
    assert f"run directory: {run}" in done.stdout


def test_cimage_submit_trains_once_and_embeds(cluster):
    """One worker on each node; the second submission finds the first; the embeddings come from a
    job too.
    """
    before, settings = run_folders(cluster), [*SMALL, "run.seed=11", "resources.num_workers=2"]
    done = cluster.cimage("submit", "pretrain", *settings, "--name", "eleven")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run,) = run_folders(cluster) - before
    steps = checkpoint.load_selected(run / "ckpt", "last").step
    assert "training on 2 Ray workers" in done.stdout and f"run directory: {run}" in done.stdout, (
        "the job's log was followed"
    )
    job_id = re.search(r"^submitted: (\S+)", done.stderr, re.M)[1]
    assert f"dashboard: {cluster.address}/#/jobs/{job_id}" in done.stderr
    assert cluster.jobs()[job_id]["name"] == "eleven"

    again = cluster.cimage("submit", "pretrain", *settings, "--json")
    assert (
        again.returncode == 0
        and json.loads(again.stdout)["submitted"] is False
        and json.loads(again.stdout)["id"] == job_id
    )
    assert [known for known in cluster.jobs() if known.startswith(job_id)] == [job_id]
    assert checkpoint.load_selected(run / "ckpt", "last").step == steps

    embedded = cluster.cimage("submit", "embed", *settings)
    assert embedded.returncode == 0, embedded.stdout[-3000:] + embedded.stderr[-3000:]
    parts = [
        np.load(path, allow_pickle=False)
        for path in sorted((run / "embeddings").glob("part-*.npy"))
    ]
    z = np.concatenate(parts)
    nodes = json.loads((run / "env.json").read_text())["graph"]["nodes"]
    assert z.shape == (nodes, 32) and np.isfinite(z).all() and z.std() > 0


def test_a_failing_job_returns_its_own_exit_code(cluster):
    done = cluster.cimage("submit", "pretrain", *NOWHERE)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "data.path does not exist" in done.stdout and "exit code 2" in done.stderr
    assert re.search(
        r"^resume: cimage submit pretrain data.name=mine data.path=nowhere --on ray$",
        done.stderr,
        re.M,
    )
    assert plain(cluster, "cimage", "pretrain", *NOWHERE, "--on", "ray").returncode == 1, (
        "Ray's own command hides the code"
    )
    again = cluster.cimage("submit", "pretrain", *NOWHERE, "--json")
    assert (
        again.returncode == 2
        and json.loads(again.stdout)["id"].endswith("-try2")
        and json.loads(again.stdout)["exit_code"] == 2
    )


def test_the_uploaded_code_serves_where_cimage_is_not_installed(cluster):
    """launch/bin/cimage, last on the PATH: here called by its own name, since this environment has
    the real one too.
    """
    done = plain(cluster, "launch/bin/cimage", "show", "configs/demo.yaml", "--json")
    assert done.returncode == 0, done.stdout[-3000:]
    assert '"fingerprint"' in done.stdout


def test_stop_attach_and_go_on(cluster):
    before, settings = run_folders(cluster), ["pretrain", *ENDLESS, "run.seed=12"]
    sent = cluster.cimage("submit", *settings, "--detach", "--json")
    assert sent.returncode == 0, sent.stderr
    job_id = json.loads(sent.stdout)["id"]
    follower = cluster.start(str(BIN / "cimage"), "submit", *settings)
    wait_until(
        "a checkpoint",
        lambda: any(checkpoint.steps(run / "ckpt") for run in run_folders(cluster) - before),
    )
    (run,) = run_folders(cluster) - before
    stopped = cluster.cimage("jobs", "stop", job_id)
    assert stopped.returncode == 0, stopped.stderr
    out, err = follower.communicate(timeout=300)
    assert follower.returncode == 143, err
    assert (
        "the same job is there already" in err
        and "stopped, exit code 143" in err
        and "resume: cimage submit pretrain" in err
    )
    assert "training on 1 Ray workers" in out
    status = cluster.cimage("jobs", "status", job_id, "--json")
    assert json.loads(status.stdout)["status"] == "STOPPED"
    reached = max(checkpoint.steps(run / "ckpt"))

    # Without a terminal Ctrl-C stops at once; the new attempt has gone on from the checkpoint.
    second = cluster.start(str(BIN / "cimage"), "submit", *settings)
    wait_until(
        "a later checkpoint",
        lambda: (
            max(checkpoint.steps(run / "ckpt"), default=0) > reached or second.poll() is not None
        ),
    )
    second.send_signal(signal.SIGINT)
    _, err = second.communicate(timeout=300)
    assert second.returncode == 143, err
    jobs = {
        known: job["status"] for known, job in cluster.jobs().items() if known.startswith(job_id)
    }
    assert jobs == {job_id: "STOPPED", f"{job_id}-try2": "STOPPED"}
    steps = [
        json.loads(line)["step"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if '"train"' in line
    ]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > reached


def test_no_token_or_a_wrong_one_is_refused(cluster, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    known = cluster.jobs()
    for changes, message in (
        ({"RAY_AUTH_MODE": "disabled"}, "it asks for a token"),
        ({"RAY_AUTH_TOKEN_PATH": str(wrong)}, "the token is not the cluster's"),
        ({"RAY_AUTH_TOKEN_PATH": ""}, "No authentication token"),
    ):
        for argv in (["submit", "pretrain", *SMALL, "run.seed=13"], ["jobs", "list"]):
            done = cluster.cimage(*argv, **changes)
            assert done.returncode == 2 and message in done.stderr, done.stderr
            assert "Traceback" not in done.stderr and "0" * 64 not in done.stderr
    assert cluster.run(str(BIN / "ray"), "job", "list", RAY_AUTH_MODE="disabled").returncode != 0
    assert cluster.jobs() == known


def test_the_dashboard_listens_on_loopback_only_and_the_token_is_nowhere_to_be_read(cluster):
    port = int(cluster.address.rsplit(":", 1)[1])
    listening = [
        line.split()[1]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    assert [place for place in listening if int(place.split(":")[1], 16) == port] == [
        f"0100007F:{port:04X}"
    ]
    assert (cluster.folder / "token").stat().st_mode & 0o077 == 0
    token = cluster.token.encode()
    for log in cluster.folder.rglob("*.log"):
        assert token not in log.read_bytes(), log
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert token not in command.read_bytes(), command
        except OSError:
            continue  # has ended meanwhile


CHECK = """
import sys
from pathlib import Path
import ray
from cimage_dist.errors import UserError
from cimage_dist.distributed.session import check_storage
ray.init(log_to_driver=False, logging_level="ERROR")
print("nodes", sum(node["Alive"] for node in ray.nodes()))
try:
    check_storage(sys.argv[1])
    print("fine")
except UserError as error:
    print(f"refused: {error}")
"""


def gcs_address(cluster: Cluster) -> str:
    return (cluster.folder / "ray" / "ray_current_cluster").read_text().strip()


def check_storage_of(cluster: Cluster, folder: Path) -> str:
    done = cluster.run(
        sys.executable,
        "-c",
        CHECK,
        str(folder),
        RAY_ADDRESS=gcs_address(cluster),
        RAY_TMPDIR=str(cluster.folder),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_storage_is_checked_from_every_node(cluster):
    folder = cluster.storage / "checked"
    assert check_storage_of(cluster, folder) == "nodes 2\nfine\n"
    assert list(folder.iterdir()) == [], "nothing is left behind"
    (cluster.storage / "a-file").write_text("")
    assert "refused: The run directory" in check_storage_of(cluster, cluster.storage / "a-file")


def test_a_node_that_does_not_share_the_storage_is_named(cluster, tmp_path):
    """A third node with an empty file system mounted where the others have the run directory."""
    folder = cluster.storage / "unshared"
    folder.mkdir()
    mount = f"mount -t tmpfs none {folder}"
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mount namespaces are not allowed here")
    kinds = (
        "dashboard-agent-listen",
        "dashboard-agent-grpc",
        "metrics-export",
        "runtime-env-agent",
    )
    ports = " ".join(f"--{kind}-port={_free_port()}" for kind in kinds)
    start = (
        f"{mount} && exec {BIN / 'ray'} start --block --address={gcs_address(cluster)} "
        f"--node-ip-address=127.0.0.1 --num-cpus=1 --object-store-memory=100000000 {ports}"
    )
    env = cluster.environment(RAY_TMPDIR=str(cluster.folder))
    log = tmp_path / "third.log"

    def begin() -> subprocess.Popen[bytes]:
        with log.open("w") as output:
            node = subprocess.Popen(
                ["unshare", "-m", "sh", "-c", start],
                env=env,
                start_new_session=True,
                stdout=output,
                stderr=output,
            )
        wait_until(
            "a third node",
            lambda: "nodes alive: 3" in cluster.script("status").stdout or node.poll() is not None,
        )
        return node

    third = begin()
    if third.poll() is not None:
        third = begin()  # Ray gives a node 30 s, which a busy machine can exceed
    try:
        assert third.poll() is None, log.read_text()
        answer = check_storage_of(cluster, folder)
        assert "These nodes cannot write the run directory" in answer and "CIMAGE_STORAGE" in answer
        assert answer.count(", node ") == 1, "only the third is named"
        other = cluster.storage / "shared"
        assert check_storage_of(cluster, other) == "nodes 3\nfine\n"
    finally:
        third.terminate()
        third.wait(timeout=60)
        wait_until("two nodes again", lambda: "nodes alive: 2" in cluster.script("status").stdout)


FAKE_SRUN = """\
#!/usr/bin/env bash
# Every "node" is a process here. Options end where the command begins.
while [[ $1 == --* ]]; do shift; done
trap 'kill -TERM "${children[@]}" 2> /dev/null' TERM
children=()
for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do
  SLURM_NODEID=$i "$@" > "$FAKE_LOGS/node-$i.log" 2>&1 &
  children+=($!)
done
wait; wait
"""


def test_the_slurm_script_runs_the_same_line_and_leaves_other_clusters_alone(cluster, tmp_path):
    """Slurm itself is played by a script that starts the nodes here; all else is real. A second
    local cluster comes and goes, too.
    """
    (tmp_path / "srun").write_text(FAKE_SRUN)
    (tmp_path / "srun").chmod(0o755)
    submit_dir = cluster.storage / "slurm"
    submit_dir.mkdir()
    shutil.copytree(ROOT / "configs", submit_dir / "configs")
    own = {
        "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_SUBMIT_DIR": str(submit_dir),
        "CIMAGE_BIND_IP": "127.0.0.1",
        "CIMAGE_RAY_TMP": str(cluster.folder.parent / "sl"),
        "FAKE_LOGS": str(tmp_path),
        "HOME": str(cluster.storage),
    }

    def sbatch(*line: str) -> subprocess.CompletedProcess[str]:
        argv = ["bash", str(ROOT / "launch" / "slurm.sbatch"), *line]
        return subprocess.run(
            argv,
            env=clean_environment() | own,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    done = sbatch("cimage", "pretrain", *SMALL, "--on", "ray", "resources.num_workers=2")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run,) = (path.parent for path in submit_dir.glob("runs/*/*/*/config.yaml"))
    assert checkpoint.load_selected(run / "ckpt", "last").step > 0
    assert (
        not list(submit_dir.glob(".cimage-ray-*")) and not (cluster.folder.parent / "sl").exists()
    ), "token and Ray's files are removed"
    failing = sbatch("cimage", "pretrain", *NOWHERE, "--on", "ray")
    assert failing.returncode == 2 and "data.path does not exist" in failing.stderr, failing.stderr[
        -3000:
    ]

    other = ["--dir", str(cluster.folder.parent / "o")]
    assert run_script("start", "--nodes", "1", *other).returncode == 0
    assert run_script("start", "--nodes", "1", *other).returncode == 2, "one cluster in a folder"
    assert run_script("stop", *other).returncode == 0
    assert run_script("status", *other).returncode == 1
    assert "nodes alive: 2" in cluster.script("status").stdout


def test_stopping_leaves_no_process_behind(tmp_path):
    folder = Path("/tmp") / f"cim-{os.getpid()}"
    try:
        started = run_script(
            "start", "--nodes", "2", "--dir", str(folder), "--storage", str(tmp_path)
        )
        assert started.returncode == 0, started.stderr
        env = run_script("env", "--dir", str(folder)).stdout
        assert (
            f"RAY_AUTH_TOKEN_PATH={folder}/token" in env
            and (folder / "token").read_text() not in env
        )
        assert processes_of(folder)
    finally:
        stopped = run_script("stop", "--dir", str(folder))
    assert stopped.returncode == 0 and not (folder / "token").exists()
    wait_until("the watchers that Ray leaves to notice", lambda: not processes_of(folder), 30)
    shutil.rmtree(folder)


def processes_of(folder: Path) -> list[str]:
    """Processes that were started with this cluster's folder in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"RAY_TMPDIR={folder}\0".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
