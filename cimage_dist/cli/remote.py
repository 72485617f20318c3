"""The verbs of machines elsewhere: submit, jobs (Ray jobs); k8s (Kubernetes)."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from cimage_dist.cli.common import config_for, split_settings
from cimage_dist.errors import UserError

VERBS = {
    "submit": "run a verb as a job on a Ray cluster, follow it and return its exit code; "
    "the same again attaches to the running job",
    "jobs": "list the jobs of a Ray cluster, show or follow the log of one, its status, stop it",
    "k8s": "print the manifests that run a verb on Kubernetes, or wait for a job there: "
    "cimage k8s render pretrain configs/demo.yaml > job.yaml",
}
WITHOUT_SETTINGS = {"submit", "jobs"}
NOT_JOBS = {"k8s"}  # takes settings, but works for the person at this machine
RENDERED = ("ingest", "pretrain", "embed", "evaluate", "sweep")
POLL_S = 5.0


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    if name == "k8s":
        _add_k8s(parser)
        return
    _add_flags(parser, is_submit=name == "submit")
    if name == "submit":  # PARSER: everything from the verb on, as for a sub-command
        line = "<verb> config.yaml | key=value"
        parser.add_argument("line", nargs=argparse.PARSER, metavar=line, help="what to run")
        return
    parser.add_argument("action", choices=("list", "logs", "stop", "status"), help="what to do")
    parser.add_argument("job", nargs="?", metavar="ID", help="a job, or how its id begins")
    parser.add_argument("--follow", action="store_true", help="with logs: until the job ends")


def _add_flags(parser: argparse.ArgumentParser, is_submit: bool) -> None:
    add = parser.add_argument
    add(
        "--address", metavar="URL", help="dashboard; default RAY_API_SERVER_ADDRESS, else port 8265"
    )
    add("--token-file", metavar="FILE", type=Path, help="default RAY_AUTH_TOKEN_PATH")
    if is_submit:
        how = parser.add_mutually_exclusive_group()
        how.add_argument("--detach", action="store_true", help="return when the job is accepted")
        how.add_argument("--follow", action="store_true", help="show its log to the end (default)")
        add("--name", help="a name to show in lists")
        add("--storage", metavar="DIR", help="CIMAGE_STORAGE: a folder that all nodes see")
        add("--runtime-env", metavar="FILE", type=Path, help="instead of launch/runtime_env.yaml")
        add("--again", action="store_true", help="run it again although it has succeeded")


def job_line(args: argparse.Namespace) -> tuple[list[str], argparse.Namespace]:
    """The job's words, without submit's own flags, and what the real parser makes of them."""
    from cimage_dist.__main__ import Parser

    flags = Parser("cimage submit", add_help=False, allow_abbrev=False)
    flags.argument_default = argparse.SUPPRESS
    _add_flags(flags, is_submit=True)
    for flag in ("--json", "--quiet"):
        flags.add_argument(flag, action="store_true")
    _, words = flags.parse_known_args(args.line, namespace=args)
    inner = args.parse(words)
    if not hasattr(inner, "settings") or inner.verb in NOT_JOBS:
        raise UserError(f"`cimage {inner.verb}` cannot run as a job. Submit, e.g., pretrain.")
    if hasattr(inner, "on") and not any(word.split("=")[0] == "--on" for word in words):
        words += ["--on", "ray"]
    return words, inner


def do_submit(args: argparse.Namespace) -> Any:
    words, inner = job_line(args)
    folder = Path.cwd()
    paths, overrides = split_settings(inner.settings)
    for path in map(Path, paths):
        if path.is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{path} would not be found by the job: only {folder} is uploaded. Copy it there "
                "and name it by a relative path."
            )
    cfg = config_for(inner.verb, paths, overrides)

    from cimage_dist.distributed import jobs

    skip = {*inner.settings, "--on", "ray"}
    extras = [word for word in words[1:] if word not in skip]
    extras += [f"storage={args.storage}"] if args.storage else []
    if inner.verb == "sweep":  # its space is no part of the config
        extras += [*overrides, *(Path(path).read_text() for path in paths)]
    base, entrypoint = jobs.base_id(inner.verb, cfg, extras), shlex.join(["cimage", *words])
    env, note = jobs.runtime_env(args.runtime_env, folder, args.storage), _noter(args)
    address = jobs.dashboard_address(args.address)
    client = jobs.connect(address, args.token_file)
    job = {"runtime_env": env, "metadata": {"job_name": args.name or base}}
    with jobs.reported(address):
        job_id, status = jobs.submit_once(client, base, args.again, entrypoint=entrypoint, **job)
    state = f"the same job is there already ({status.lower()})" if status else "submitted"
    link, resume = f"{address}/#/jobs/{job_id}", _resume(args, words)
    note(f"{state}: {job_id}\n  runs {entrypoint}\ndashboard: {link}")
    facts = {"id": job_id, "submitted": status is None, "entrypoint": entrypoint}
    facts |= {"dashboard": link, "resume": resume}
    if status == "SUCCEEDED":
        note(f"it has succeeded. Its log: cimage jobs logs {job_id}; --again runs it once more")
        return facts | {"status": status, "exit_code": 0}
    if args.detach:
        note(f"follow: cimage jobs logs {job_id} --follow\nstop:   cimage jobs stop {job_id}")
        note(f"resume: {resume}")
        return facts | {"status": status or "PENDING", "exit_code": None}
    return facts | _watch(args, client, job_id, resume)


def _resume(args: argparse.Namespace, words: list[str]) -> str:
    """The command that continues a stopped or failed job; the token is named by its file."""
    names = ("address", "token_file", "name", "storage", "runtime_env")
    given = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    own = [word for flag, value in given.items() if value for word in (flag, str(value))]
    return shlex.join(["cimage", "submit", *own, *words])


def _watch(args: argparse.Namespace, client: Any, job_id: str, resume: str | None) -> Any:
    from cimage_dist.distributed import jobs

    out, note = sys.stderr if args.json else sys.stdout, _noter(args)
    write = partial(print, end="", file=out, flush=True)
    follower = jobs.Follower(client, job_id, write, note)
    with jobs.reported(client.get_address()):
        job = follower.watch(ask)
    if job is None:
        note(f"the job continues: cimage jobs logs {job_id} --follow, cimage jobs stop {job_id}")
        return {"status": "RUNNING", "exit_code": None}
    facts = jobs.describe(job)
    args.exit_code = facts["exit_code"]
    why = f": {facts['message']}" if job.driver_exit_code is None and facts["message"] else ""
    if job.driver_exit_code == 127:
        why = ": the cluster has no `cimage`. Submit from a checkout, or use an image that has it"
    failed = f", exit code {args.exit_code}{why}" if args.exit_code else ""
    note(f"job {job_id} {facts['status'].lower()}{failed}")
    if resume and args.exit_code:
        note(f"resume: {resume}")
    return {"status": facts["status"], "exit_code": facts["exit_code"]}


def ask() -> str:
    """What Ctrl-C means: on a terminal as answered, a second Ctrl-C or no terminal: stop."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "stop"
    print(
        "\nstop the job [s], detach [d] or continue [Enter]? ", end="", file=sys.stderr, flush=True
    )
    try:
        answer = sys.stdin.readline() or "d"
    except KeyboardInterrupt:
        return "stop"
    return {"s": "stop", "d": "detach"}.get(answer.strip().lower()[:1], "continue")


def do_jobs(args: argparse.Namespace) -> Any:
    if args.action != "list" and not args.job:
        raise UserError(f"Which job? cimage jobs {args.action} ID. `cimage jobs list` shows them.")
    from cimage_dist.distributed import jobs

    address = jobs.dashboard_address(args.address)
    client = jobs.connect(address, args.token_file)
    with jobs.reported(address):
        if args.action == "list":
            found = jobs.list_jobs(client)
            for job in found if not args.json else ():
                name = "" if job["name"] == job["id"] else f"  ({job['name']})"
                code = "" if job["exit_code"] is None else job["exit_code"]
                print(f"{job['id']}  {job['status']:<9} {code:>3}  {job['entrypoint']}{name}")
            return {"jobs": found}
        job_id = jobs.find_job(client, args.job)
        if args.action == "status":
            facts = jobs.describe(client.get_job_info(job_id))
            shown = {name: value for name, value in facts.items() if value not in (None, "")}
            for name, value in shown.items() if not args.json else ():
                print(f"{name:<11} {value}")
            return facts
        if args.action == "stop":
            was_running = client.stop_job(job_id)
            state = "is asked to stop; it saves first" if was_running else "was not running"
            _noter(args)(f"{job_id} {state}")
            return {"id": job_id, "was_running": was_running}
    if args.follow:
        return {"id": job_id} | _watch(args, client, job_id, None)
    with jobs.reported(address):
        text = client.get_job_logs(job_id)
    print("" if args.json else text, end="")
    return {"id": job_id, "logs": text}


def _noter(args: argparse.Namespace) -> Any:
    return lambda text: None if args.quiet else print(text, file=sys.stderr, flush=True)


def _add_k8s(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("render", "wait"), help="what to do")
    add(
        "job",
        metavar="<verb> | <kind/name>",
        help=f"render: {', '.join(RENDERED)}; wait: rayjob/NAME",
    )
    sizes = ("cpu-small", "gpu", "gpu-elastic")
    add("--overlay", choices=sizes, default="cpu-small", help="the size to start from")
    extra = "a folder of k8s/components to add: rdma, priority, volcano, ..."
    add("--with", dest="extra", action="append", default=[], metavar="NAME", help=extra)
    add("--name", help="of the job; default from verb, data, fingerprint and seed")
    add("--namespace", default="cimage", help="default cimage")
    add("--image", help="with its tag or digest; default cimage-dist of this version")
    add("--storage", metavar="CLAIM", help="claim of data and runs; default cimage-storage")
    add("--fetch", metavar="URL", help="ingest: copy raw files from there first, e.g. s3://b/raw")
    add("--queue", help="a Kueue LocalQueue to wait in")
    again = "new clusters after a failure of any kind"
    add("--retries", type=int, default=0, metavar="N", help=again)
    add("--workers", type=int, metavar="N", help="short for resources.num_workers=N")
    add("--min-workers", type=int, metavar="N", help="short for resources.min_workers=N")
    add("--cpus-per-pod", type=int, metavar="N", help="CPUs of a worker pod")
    add("--gpus-per-pod", type=int, metavar="N", help="GPUs of a worker pod")
    add("--memory-per-pod", metavar="SIZE", help="memory of a worker pod, e.g. 400Gi")


def do_k8s(args: argparse.Namespace) -> Any:
    return _wait_for(args) if args.action == "wait" else _render(args)


def _render(args: argparse.Namespace) -> Any:
    from cimage_dist.deploy import Request, render, write

    if args.job not in RENDERED:
        raise UserError(f"No job for {args.job!r}: choose from {', '.join(RENDERED)}.")
    settings = [*args.settings]
    settings += [] if args.workers is None else [f"resources.num_workers={args.workers}"]
    settings += [] if args.min_workers is None else [f"resources.min_workers={args.min_workers}"]
    inner = args.parse([args.job, *settings])
    paths, overrides = split_settings(inner.settings)
    cfg = config_for(args.job, paths, overrides)
    is_on_gpus = args.overlay != "cpu-small" and args.job != "ingest"
    if is_on_gpus and cfg.resources.device == "auto":
        # The driver decides for all, and it runs on the head, which has no GPU to see.
        settings.append("resources.device=cuda")
        cfg = config_for(args.job, paths, [*overrides, settings[-1]])
    same = ("overlay", "name", "namespace", "image", "storage", "fetch", "queue", "retries")
    sizes = ("cpus_per_pod", "gpus_per_pod", "memory_per_pod")
    request = Request(
        verb=args.job,
        settings=tuple(settings),
        files=tuple(paths),
        flags=("--on", "ray") if hasattr(inner, "on") else (),
        components=tuple(args.extra),
        **{name: getattr(args, name) for name in (*same, *sizes)},
    )
    documents = render(request, cfg)
    if not args.json:
        print(write(documents), end="")
    return {"name": documents[-1]["metadata"]["name"], "documents": documents}


def _wait_for(args: argparse.Namespace) -> Any:
    """Until the job has ended, well or not: unlike `kubectl wait`, which waits for one outcome."""
    from cimage_dist.deploy import kubectl

    kind, _, name = args.job.partition("/")
    if kind not in ("job", "rayjob") or not name:
        raise UserError(f"Which job? Give rayjob/NAME or job/NAME; got {args.job!r}.")
    shown = None
    while True:
        text = kubectl("get", kind, name, "--namespace", args.namespace, "-o", "json")
        status = json.loads(text).get("status", {})
        if kind == "job":
            true = [item for item in status.get("conditions", []) if item["status"] == "True"]
            ended = {item["type"]: item.get("message", "") for item in true}
            state = next((end for end in ("Complete", "Failed") if end in ended), "Running")
            why = ended.get(state, "")
        else:
            state = status.get("jobDeploymentStatus") or "Initializing"
            why = " ".join(status.get(key, "") for key in ("jobStatus", "reason", "message"))
        if state != shown and not args.quiet:
            print(f"{args.job}: {state} {why}".rstrip(), file=sys.stderr, flush=True)
        shown = state
        if state in ("Complete", "Failed"):
            # KubeRay calls a job whose command failed "Failed" or "Complete" with jobStatus FAILED.
            is_good = state == "Complete" and status.get("jobStatus", "SUCCEEDED") == "SUCCEEDED"
            args.exit_code = 0 if is_good else 1
            return {"job": args.job, "state": state, "succeeded": is_good, "why": why.strip()}
        time.sleep(POLL_S)
