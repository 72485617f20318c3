"""The verb of Kubernetes: manifests for people who do not use kustomize."""

from __future__ import annotations

import argparse
from typing import Any

from cimage_dist.cli.common import split_settings
from cimage_dist.errors import UserError

VERBS = {"k8s": "print the manifests that run a verb on Kubernetes: cimage k8s render pretrain configs/demo.yaml > job.yaml"}
WITHOUT_SETTINGS: set[str] = set()


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("render",), help="what to do")
    parser.add_argument(
        "job", metavar="<verb>", choices=("pretrain", "embed", "evaluate", "sweep"), help="what the job runs: pretrain, embed, evaluate or sweep"
    )
    parser.add_argument("--overlay", choices=("cpu-small", "gpu", "gpu-elastic"), default="cpu-small", help="the size to start from (k8s/overlays)")
    parser.add_argument("--name", help="of the RayJob; default from verb, data, fingerprint and seed, so that the same job keeps its name")
    parser.add_argument("--namespace", help="default cimage")
    parser.add_argument("--image", help="with its tag or digest; default cimage-dist of this version")
    parser.add_argument("--storage", metavar="CLAIM", help="the ReadWriteMany claim that holds data and runs; default cimage-storage")
    parser.add_argument("--fetch", metavar="URL", help="copy raw files from this folder of an object store first, e.g. s3://bucket/raw")
    parser.add_argument("--queue", help="a Kueue LocalQueue to wait in")
    parser.add_argument("--workers", type=int, metavar="N", help="short for resources.num_workers=N")
    parser.add_argument("--min-workers", type=int, metavar="N", help="short for resources.min_workers=N")
    parser.add_argument("--cpus-per-pod", type=int, metavar="N", help="CPUs of a worker pod")
    parser.add_argument("--gpus-per-pod", type=int, metavar="N", help="GPUs of a worker pod")
    parser.add_argument("--memory-per-pod", metavar="SIZE", help="memory of a worker pod, e.g. 400Gi")


def do_k8s(args: argparse.Namespace) -> Any:
    from cimage_dist.deploy.documents import cluster_spec, of_kind, write
    from cimage_dist.deploy.entrypoint import config_for, entrypoint_problems
    from cimage_dist.deploy.render import Request, render
    from cimage_dist.deploy.rules import problems

    settings = [*args.settings]
    settings += [f"resources.num_workers={args.workers}"] if args.workers is not None else []
    settings += [f"resources.min_workers={args.min_workers}"] if args.min_workers is not None else []
    inner = args.parse([args.job, *settings])
    paths, overrides = split_settings(inner.settings)
    cfg = config_for(args.job, paths, overrides)
    if args.overlay != "cpu-small" and cfg.resources.device == "auto":
        # The driver decides for all, and it runs on the head, which has no GPU to see.
        settings.append("resources.device=cuda")
        cfg = config_for(args.job, paths, [*overrides, settings[-1]])
    words = [args.job, *settings, *(["--on", "ray"] if hasattr(inner, "on") else [])]
    request = Request(
        words=tuple(words),
        settings=tuple(settings),
        files=tuple(paths),
        overlay=args.overlay,
        name=args.name,
        namespace=args.namespace,
        image=args.image,
        storage=args.storage,
        fetch=args.fetch,
        queue=args.queue,
        cpus_per_pod=args.cpus_per_pod,
        gpus_per_pod=args.gpus_per_pod,
        memory_per_pod=args.memory_per_pod,
    )
    documents = render(request, cfg)
    (job,) = of_kind(documents, "RayJob")
    wrong = [*problems(documents, cluster_spec(job)["rayVersion"]), *entrypoint_problems(documents, args.parse, split_settings)]
    if wrong:
        raise UserError("This cannot run:\n  " + "\n  ".join(wrong))
    if not args.json:
        print(write(documents), end="")
    return {"name": job["metadata"]["name"], "entrypoint": job["spec"]["entrypoint"], "documents": documents}
