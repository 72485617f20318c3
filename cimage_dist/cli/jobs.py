"""The verbs of Ray jobs: submit, jobs."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

from cimage_dist.cli.common import split_settings
from cimage_dist.errors import UserError

VERBS = {
    "submit": "run a verb as a job on a Ray cluster, follow it and return its exit code; the same again attaches to the running job",
    "jobs": "list the jobs of a Ray cluster, show or follow the logs of one, stop it, tell its status",
}
WITHOUT_SETTINGS = {"submit", "jobs"}
ACTIONS = ("list", "logs", "stop", "status")
NOT_JOBS = {"k8s"}
"""Take settings, but work for the person at this machine; verbs without settings cannot be jobs either."""


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    _add_cluster_flags(parser)
    if name == "submit":
        _add_submit_flags(parser)
        # PARSER: everything from the verb on, as for a sub-command.
        parser.add_argument("line", nargs=argparse.PARSER, metavar="<verb> config.yaml | key=value", help="what to run, as after `cimage`")
    else:
        parser.add_argument("action", choices=ACTIONS, help="what to do")
        parser.add_argument("job", nargs="?", metavar="ID", help="a job, or how its id begins")
        parser.add_argument("--follow", action="store_true", help="with logs: until the job ends; returns its exit code")


def _add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", metavar="URL", help="the cluster's dashboard; default RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265")
    parser.add_argument("--token-file", metavar="FILE", type=Path, help="authentication token; default RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN, ~/.ray/auth_token")


def _add_submit_flags(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--detach", action="store_true", help="return as soon as the cluster has taken the job")
    how.add_argument("--follow", action="store_true", help="show the job's log until it ends (the default)")
    parser.add_argument("--name", help="a name to show in lists")
    parser.add_argument("--storage", metavar="DIR", help="CIMAGE_STORAGE for the job: a folder all nodes see, below which relative paths are")
    parser.add_argument("--runtime-env", metavar="FILE", type=Path, help="instead of launch/runtime_env.yaml")
    parser.add_argument("--again", action="store_true", help="run anew although the same job has succeeded")


class _Flags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. `cimage submit --help` tells what can be given.")


def job_line(args: argparse.Namespace) -> tuple[list[str], argparse.Namespace]:
    """The job's own words, with submit's flags taken out wherever they stood, and what the real parser makes of them."""
    flags = _Flags(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    _add_cluster_flags(flags)
    _add_submit_flags(flags)
    for flag in ("--json", "--quiet"):
        flags.add_argument(flag, action="store_true")
    _, words = flags.parse_known_args(args.line, namespace=args)
    inner = args.parse(words)
    if not hasattr(inner, "settings") or inner.verb in NOT_JOBS:
        raise UserError(f"`cimage {inner.verb}` cannot run as a job. Submit a verb that takes settings, such as pretrain.")
    if hasattr(inner, "on") and not any(word.split("=")[0] == "--on" for word in words):
        words += ["--on", "ray"]
    return words, inner


def do_submit(args: argparse.Namespace) -> Any:
    from cimage_dist.deploy.entrypoint import config_for
    from cimage_dist.distributed import job_env, job_ids

    words, inner = job_line(args)
    folder = Path.cwd()
    paths, overrides = split_settings(inner.settings)
    job_env.check_uploaded(paths, folder)
    cfg = config_for(inner.verb, paths, overrides)
    flags = [word for word in words[1:] if word not in inner.settings and word not in ("--on", "ray")]
    if inner.verb == "sweep":  # its space is no part of the config
        flags += [*overrides, *(Path(path).read_text() for path in paths)]
    base = job_ids.base_id(inner.verb, cfg, [*flags, *([f"storage={args.storage}"] if args.storage else [])])
    runtime_env = job_env.load_runtime_env(args.runtime_env, folder, args.storage)
    address = job_env.dashboard_address(args.address)

    from cimage_dist.distributed import jobs

    client = jobs.connect(address, args.token_file)
    entrypoint = shlex.join(["cimage", *words])
    with jobs.told(address):
        sent = jobs.submit_once(client, base, entrypoint, runtime_env, {"job_name": args.name or base}, args.again)
    note = _noter(args)
    note(f"{'submitted' if sent.is_new else f'the same job is there already ({sent.status.lower()})'}: {sent.job_id}\n  runs {entrypoint}")
    note(f"dashboard: {address}/#/jobs/{sent.job_id}")
    resume = _resume(args, words)
    facts = {"id": sent.job_id, "submitted": sent.is_new, "entrypoint": entrypoint, "dashboard": f"{address}/#/jobs/{sent.job_id}", "resume": resume}
    if sent.status == "SUCCEEDED":
        note(f"it has succeeded; nothing to do. Its log: cimage jobs logs {sent.job_id}; --again would run it anew")
        return facts | {"status": sent.status, "exit_code": 0}
    if args.detach:
        note(f"follow: cimage jobs logs {sent.job_id} --follow\nstop:   cimage jobs stop {sent.job_id}\nresume: {resume}")
        return facts | {"status": sent.status, "exit_code": None}
    return facts | _watch(args, client, sent.job_id, resume)


def _resume(args: argparse.Namespace, words: list[str]) -> str:
    """The command that goes on with a stopped or failed job: submit again, without secrets (the token is named by its file)."""
    given = {"--address": args.address, "--token-file": args.token_file, "--name": args.name, "--storage": args.storage, "--runtime-env": args.runtime_env}
    own = [word for flag, value in given.items() if value for word in (flag, str(value))]
    return shlex.join(["cimage", "submit", *own, *words])


def _watch(args: argparse.Namespace, client: Any, job_id: str, resume: str | None) -> dict[str, Any]:
    from cimage_dist.distributed import job_follow, jobs

    note = _noter(args)
    out = sys.stderr if args.json else sys.stdout

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    is_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    with jobs.told(client.get_address()):
        job = job_follow.watch(job_follow.Follower(client, job_id, write, note), job_follow.ask_on_terminal if is_terminal else None)
    if job is None:
        note(f"the job goes on. Follow it again: cimage jobs logs {job_id} --follow; stop it: cimage jobs stop {job_id}")
        return {"status": "RUNNING", "exit_code": None}
    facts = jobs.describe(job)
    args.exit_code = facts["exit_code"]
    ended = f"job {job_id} {facts['status'].lower()}"
    note(ended if not args.exit_code else f"{ended}, exit code {args.exit_code}{_explain(job)}" + (f"\nresume: {resume}" if resume else ""))
    return {"status": facts["status"], "exit_code": facts["exit_code"]}


def _explain(job: Any) -> str:
    if job.driver_exit_code == 127:
        return ": the cluster has no `cimage`. Submit from a checkout, whose code is then uploaded, or use an image that has it"
    return f": {job.message}" if job.driver_exit_code is None and job.message and job.status.value == "FAILED" else ""


def do_jobs(args: argparse.Namespace) -> Any:
    if args.action != "list" and not args.job:
        raise UserError(f"Which job? cimage jobs {args.action} ID. `cimage jobs list` shows them.")
    from cimage_dist.distributed import job_env, jobs

    address = job_env.dashboard_address(args.address)
    client = jobs.connect(address, args.token_file)
    with jobs.told(address):
        if args.action == "list":
            found = jobs.list_jobs(client)
            if not args.json:
                _print_table(found)
            return {"jobs": found}
        job_id = jobs.find_job(client, args.job)
        if args.action == "status":
            facts = jobs.describe(client.get_job_info(job_id))
            if not args.json:
                print("\n".join(f"{name:<11} {value}" for name, value in facts.items() if value not in (None, "")))
            return facts
        if args.action == "stop":
            was_running = client.stop_job(job_id)
            _noter(args)(f"{job_id} {'is asked to stop; it saves first' if was_running else 'was not running'}")
            return {"id": job_id, "was_running": was_running}
    if args.follow:
        return {"id": job_id} | _watch(args, client, job_id, None)
    with jobs.told(address):
        text = client.get_job_logs(job_id)
    if not args.json:
        print(text, end="")
    return {"id": job_id, "logs": text}


def _print_table(found: list[dict[str, Any]]) -> None:
    if not found:
        print("no jobs yet")
    width = max((len(job["id"]) for job in found), default=0)
    for job in found:
        name = "" if job["name"] == job["id"] else f"  ({job['name']})"
        code = "" if job["exit_code"] is None else str(job["exit_code"])
        print(f"{job['id']:<{width}}  {job['status']:<9} {code:>3}  {job['entrypoint']}{name}")


def _noter(args: argparse.Namespace) -> Any:
    return lambda text: None if args.quiet else print(text, file=sys.stderr, flush=True)
