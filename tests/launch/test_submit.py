"""Submitting and following jobs without a cluster."""

from __future__ import annotations

import os
import signal

import pytest

from cimage_dist.cli import remote as verbs
from cimage_dist.config_loading import load_config
from cimage_dist.distributed import jobs
from cimage_dist.errors import UserError
from tests.launch.conftest import RAY_VARIABLES, FakeClient, FakeJob


@pytest.fixture(autouse=True)
def no_ray_variables(monkeypatch, tmp_path):
    for name in RAY_VARIABLES:
        monkeypatch.setenv(
            name, "x"
        )  # remembered, so that what the code under test sets is undone too
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def identity(*settings: str, verb: str = "pretrain", extras: tuple[str, ...] = ()) -> str:
    return jobs.base_id(verb, load_config(overrides=settings), extras)


def test_the_same_experiment_has_the_same_name_and_another_has_another():
    plain = identity("train.epochs=3")
    assert plain == identity(
        "train.epochs=3", "resources.num_workers=4", "data.store_dir=elsewhere", "run.log_every=1"
    )
    others = [
        identity("train.epochs=4"),
        identity("train.epochs=3", "run.seed=1"),
        identity("train.epochs=3", "run.dir=mine"),
        identity("train.epochs=3", verb="embed"),
        identity("train.epochs=3", extras=("--parquet",)),
    ]
    assert len({plain, *others}) == 6
    assert identity("data.name=ogbn-arxiv").startswith("pretrain-ogbn-arxiv-")
    scored = [identity(verb="evaluate"), identity("eval.few_labels=[7]", verb="evaluate")]
    assert scored[0] != scored[1]


@pytest.mark.parametrize(
    ("known", "again", "expected", "is_new"),
    [
        ({}, False, "a", True),
        ({"b": "RUNNING"}, False, "a", True),
        ({"a": "PENDING"}, False, "a", False),
        ({"a": "RUNNING"}, True, "a", False),
        ({"a": "SUCCEEDED"}, False, "a", False),
        ({"a": "SUCCEEDED"}, True, "a-try2", True),
        ({"a": "FAILED"}, False, "a-try2", True),
        ({"a": "FAILED", "a-try2": "RUNNING"}, False, "a-try2", False),
        ({"a": "STOPPED", "a-try2": "STOPPED"}, False, "a-try3", True),
        ({"a": "FAILED", "a-try10": "FAILED", "a-trying": "RUNNING"}, False, "a-try11", True),
    ],
)
def test_submitting_twice_runs_once(known, again, expected, is_new):
    client = FakeClient(dict(known))
    job_id, status = jobs.submit_once(client, "a", again, entrypoint="cimage show")
    assert (job_id, status) == (expected, None if is_new else known[expected])
    assert [what["submission_id"] for what in client.submitted] == ([expected] if is_new else [])


def test_two_at_the_same_moment_share_the_job():
    class Raced(FakeClient):
        def submit_job(self, **what):
            self.jobs["a"] = "RUNNING"  # the other one was faster
            raise RuntimeError(
                "Request failed with status code 500: Job with submission_id a already exists."
            )

    assert jobs.submit_once(Raced(), "a", again=False) == ("a", "RUNNING")


def test_a_refusal_of_the_server_is_told():
    class Refusing(FakeClient):
        def submit_job(self, **what):
            raise RuntimeError("no room")

    with pytest.raises(UserError, match="no room"):
        jobs.submit_once(Refusing(), "a", again=False)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 2, 2),
        ("FAILED", -9, 137),
        ("FAILED", None, 1),
        ("STOPPED", None, 143),
    ],
)
def test_exit_codes(status, code, expected):
    assert jobs.describe(FakeJob("a", status, code))["exit_code"] == expected


def test_a_job_is_found_by_the_beginning_of_its_id_and_shown_without_its_variables():
    client = FakeClient(
        {"pretrain-a": "RUNNING", "pretrain-b": "FAILED", "pretrain-b-try2": "RUNNING"}
    )
    assert jobs.find_job(client, "pretrain-b") == "pretrain-b"
    assert jobs.find_job(client, "pretrain-b-") == "pretrain-b-try2"
    for given, message in (("pretrain", "Several"), ("embed", "no job 'embed'")):
        with pytest.raises(UserError, match=message):
            jobs.find_job(client, given)
    assert "secret" not in repr(jobs.describe(FakeJob("a", "RUNNING")))


def followed(client: FakeClient, ask=lambda: "stop") -> tuple[object, str, list[str]]:
    shown: list[str] = []
    notes: list[str] = []
    return jobs.Follower(client, "a", shown.append, notes.append).watch(ask), "".join(shown), notes


def test_a_log_has_no_gap_and_no_repeat_across_lost_connections(monkeypatch):
    monkeypatch.setattr(jobs, "RETRY_S", 0.0)
    client = FakeClient({"a": "RUNNING"}, log="one\ntwo\nthree\nfour\n")
    lost = RuntimeError("WebSocket connection closed unexpectedly")

    class Ending(FakeClient):
        def get_job_info(self, job_id):
            if not self.streams:
                self.jobs[job_id] = "SUCCEEDED"
            return super().get_job_info(job_id)

    # broken in the middle of a line; refused; closed though the job runs; all but the last line
    client = Ending(
        {"a": "RUNNING"},
        [
            ["one\n", "tw", lost],
            [ConnectionError("refused")],
            ["one\ntwo\n"],
            ["one\ntwo\nth", "ree\n"],
        ],
        client.log,
    )
    job, text, notes = followed(client)
    assert text == client.log and job.status.value == "SUCCEEDED"
    assert len(notes) == 2 and all("connection lost" in note for note in notes)


def test_a_cluster_that_stays_silent_is_given_up(monkeypatch):
    monkeypatch.setattr(jobs, "RETRY_S", 0.0)
    monkeypatch.setattr(jobs, "PATIENCE_S", -1.0)
    with pytest.raises(UserError, match="cimage jobs logs a --follow"):
        followed(FakeClient({"a": "RUNNING"}, [[ConnectionError("refused")]]))


@pytest.mark.parametrize(
    ("answers", "is_stopped", "ends_with"),
    [
        (["stop"], True, "STOPPED"),
        (["detach"], False, None),
        (["continue", "stop"], True, "STOPPED"),
    ],
)
def test_ctrl_c_asks(monkeypatch, answers, is_stopped, ends_with):
    monkeypatch.setattr(jobs, "RETRY_S", 0.0)
    client = FakeClient(
        {"a": "RUNNING"},
        [
            ["one\n", KeyboardInterrupt()],
            ["one\n", KeyboardInterrupt()] if answers[0] == "continue" else ["one\n"],
            ["one\n"],
        ],
        "one\n",
    )
    job, text, _ = followed(client, lambda: answers.pop(0))
    assert text == "one\n"
    assert client.stopped == (["a"] if is_stopped else [])
    assert (job and job.status.value) == ends_with and not answers


def test_ctrl_c_while_stopping_detaches(monkeypatch):
    monkeypatch.setattr(jobs, "RETRY_S", 0.0)
    client = FakeClient({"a": "RUNNING"}, [[KeyboardInterrupt()], [KeyboardInterrupt()]])
    assert followed(client)[0] is None and client.stopped == ["a"]


def test_sigterm_stops_without_asking(monkeypatch):
    monkeypatch.setattr(jobs, "RETRY_S", 0.0)

    class Signalled(FakeClient):
        async def tail_job_logs(self, job_id):
            if not self.stopped:
                os.kill(os.getpid(), signal.SIGTERM)
            yield "one\n"

    before = signal.getsignal(signal.SIGTERM)
    client = Signalled({"a": "RUNNING"}, log="one\n")

    def ask() -> str:
        raise AssertionError("nobody is there to be asked")

    assert followed(client, ask)[0].status.value == "STOPPED" and client.stopped == ["a"]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("typed", "is_terminal", "meaning"),
    [
        ("s\n", True, "stop"),
        ("D\n", True, "detach"),
        ("\n", True, "continue"),
        ("", True, "detach"),
        ("", False, "stop"),
    ],
)
def test_the_question(monkeypatch, typed, is_terminal, meaning):
    import io

    for name in ("stdin", "stderr"):
        stream = io.StringIO(typed)
        stream.isatty = lambda: is_terminal
        monkeypatch.setattr(f"sys.{name}", stream)
    assert verbs.ask() == meaning


def test_addresses(monkeypatch):
    assert jobs.dashboard_address(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # not a dashboard
    assert jobs.dashboard_address(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "http://a:1")
    assert jobs.dashboard_address(None) == "http://a:1"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://b:2/")
    assert jobs.dashboard_address(None) == "http://b:2"
    assert jobs.dashboard_address("c:3") == "http://c:3"
    with pytest.raises(UserError, match="dashboard"):
        jobs.dashboard_address("ray://c:10001")


def test_a_token_comes_from_a_file_or_the_environment_and_none_is_refused(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="No authentication token"):
        jobs.use_token(None)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    with pytest.raises(UserError, match="absent"):
        jobs.use_token(tmp_path / "absent")
    file = tmp_path / "token"
    file.write_text(" \n")
    with pytest.raises(UserError, match="empty"):
        jobs.use_token(file)
    file.write_text("hunter2\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    jobs.use_token(file)
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(file) and "RAY_AUTH_TOKEN" not in os.environ
    jobs.use_token(None)  # now RAY_AUTH_TOKEN_PATH serves
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    jobs.use_token(None)
