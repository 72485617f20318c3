"""The verb of Kubernetes: `k8s render` prints the manifests of a job, `k8s wait` waits for it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from cimage_dist.cli.common import config_for, split_settings
from cimage_dist.errors import UserError

VERBS = {
    "k8s": "print the manifests that run a verb on Kubernetes, or wait for a job there: "
    "cimage k8s render pretrain configs/demo.yaml > job.yaml"
}
WITHOUT_SETTINGS: set[str] = set()
JOBS = ("ingest", "pretrain", "embed", "evaluate", "sweep")
POLL_S = 5.0


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("render", "wait"), help="what to do")
    add("job", metavar="<verb> | <kind/name>", help=f"render: {', '.join(JOBS)}; wait: rayjob/NAME")
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
    add(
        "--retries",
        type=int,
        default=0,
        metavar="N",
        help="new clusters after a failure of any kind",
    )
    add("--workers", type=int, metavar="N", help="short for resources.num_workers=N")
    add("--min-workers", type=int, metavar="N", help="short for resources.min_workers=N")
    add("--cpus-per-pod", type=int, metavar="N", help="CPUs of a worker pod")
    add("--gpus-per-pod", type=int, metavar="N", help="GPUs of a worker pod")
    add("--memory-per-pod", metavar="SIZE", help="memory of a worker pod, e.g. 400Gi")


def do_k8s(args: argparse.Namespace) -> Any:
    return _wait(args) if args.action == "wait" else _render(args)


def _render(args: argparse.Namespace) -> Any:
    from cimage_dist.deploy.manifests import write
    from cimage_dist.deploy.render import Request, render

    if args.job not in JOBS:
        raise UserError(f"No job for {args.job!r}: choose from {', '.join(JOBS)}.")
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


def _wait(args: argparse.Namespace) -> Any:
    """Until the job has ended, well or not: unlike `kubectl wait`, which waits for one outcome."""
    from cimage_dist.deploy.manifests import kubectl

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
