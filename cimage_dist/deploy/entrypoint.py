"""The command inside a RayJob: does the real command line take it, does its config load as the pod sees it, does it fit the cluster?"""

from __future__ import annotations

import argparse
import math
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.deploy.documents import Document, cluster_spec, of_kind, title
from cimage_dist.deploy.pods import GPU, limit
from cimage_dist.errors import UserError

Parse = Callable[[list[str]], argparse.Namespace]
Split = Callable[[Sequence[str]], tuple[list[str], list[str]]]
CONFIGS = "/app/configs"


def entrypoint_problems(documents: Sequence[Document], parse: Parse, split: Split) -> list[str]:
    """What would fail minutes after the pods have started; `parse` is the command line's own, `split` parts yaml files from overrides."""
    found = []
    for job in of_kind(documents, "RayJob"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                _mount(job, documents, Path(folder))
                found += [f"{title(job)}: {problem}" for problem in _check(job, Path(folder), parse, split)]
            except UserError as error:
                found.append(f"{title(job)}: entrypoint {job['spec']['entrypoint']!r}: {error}")
    return found


def _mount(job: Document, documents: Sequence[Document], root: Path) -> None:
    """The ConfigMap's files where the head would see them."""
    head = cluster_spec(job)["headGroupSpec"]["template"]["spec"]
    volume = next((item["configMap"] for item in head.get("volumes", []) if "configMap" in item), None)
    is_mounted = any(mount["mountPath"] == CONFIGS for mount in head["containers"][0].get("volumeMounts", []))
    maps = {item["metadata"]["name"]: item["data"] for item in of_kind(documents, "ConfigMap")}
    if volume is None or not is_mounted or volume["name"] not in maps:
        raise UserError(f"no ConfigMap is mounted at {CONFIGS} on the head.")
    for item in volume.get("items", []):
        if item["key"] not in maps[volume["name"]]:
            raise UserError(f"the ConfigMap {volume['name']} has no key {item['key']}, so the head would not start.")
        path = root / "configs" / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(maps[volume["name"]][item["key"]])


def _load(verb: str, root: Path, settings: Sequence[str], split: Split) -> Config:
    paths, overrides = split(settings)
    missing = [path for path in paths if not (root / path).is_file()]
    if missing:
        raise UserError(f"{', '.join(missing)} is not in the ConfigMap.")
    return config_for(verb, [str(root / path) for path in paths], overrides)


def config_for(verb: str, paths: list[str], overrides: list[str]) -> Config:
    """The config a verb starts from; the first file of a sweep is its search space."""
    if verb != "sweep":
        return load_config(*paths, overrides=overrides)
    from cimage_dist.tune.spec import load_sweep

    return load_sweep(paths, overrides).base


def _check(job: Document, root: Path, parse: Parse, split: Split) -> Iterator[str]:
    program, *words = shlex.split(job["spec"]["entrypoint"])
    if program != "cimage":
        raise UserError("it must begin with `cimage`.")
    args = parse(words)
    cfg = _load(args.verb, root, getattr(args, "settings", []), split)
    if args.verb == "pretrain" and args.on != "ray":
        yield "the entrypoint lacks `--on ray`, so the head would train alone"
    staged = _stage_settings(job)
    if staged is not None and _load("ingest", root, staged, split).data != cfg.data:
        yield f"the stage container prepares another graph ({' '.join(staged)}) than the entrypoint uses"
    yield from fit_problems(cfg, cluster_spec(job), is_whole=args.verb == "pretrain")


def _stage_settings(job: Document) -> list[str] | None:
    for container in cluster_spec(job)["headGroupSpec"]["template"]["spec"].get("initContainers", []):
        if container.get("command") == ["cimage", "ingest"]:
            return list(container.get("args", []))
    return None


def workers_per_pod(cfg: Config, container: Document) -> int:
    """Training processes that fit into a worker pod: by its CPUs, and one GPU each where they use GPUs."""
    by_cpu = int(limit(container, "cpu")) // cfg.resources.cpus_per_worker
    return min(by_cpu, int(limit(container, GPU))) if cfg.resources.device == "cuda" else by_cpu


def fit_problems(cfg: Config, spec: Document, is_whole: bool) -> Iterator[str]:
    """resources.* against the pods; `is_whole`: the command uses the cluster as one, so the replicas follow from the workers."""
    res = cfg.resources
    groups = [group for group in spec.get("workerGroupSpecs") or [] if group["template"]["spec"].get("containers")]
    if len(groups) != 1:
        yield f"one worker group with a container is expected, to compare resources.* with; there are {len(groups)}"
        return
    group, container = groups[0], groups[0]["template"]["spec"]["containers"][0]
    gpus = int(limit(container, GPU))
    if res.device == "cuda" and not gpus:
        yield "resources.device is cuda, but a worker pod has no GPU"
        return
    if gpus and res.device != "cuda":
        yield f"a worker pod has {gpus} GPUs, but resources.device is {res.device}; say cuda (the head, which decides, has none to see)"
        return
    per_pod = workers_per_pod(cfg, container)
    if not per_pod:
        yield f"a worker needs {res.cpus_per_worker} CPUs{' and a GPU' if gpus else ''}; a pod has {limit(container, 'cpu'):g} CPUs{f' and {gpus} GPUs' if gpus else ''}"
        return
    most = math.ceil(res.num_workers / per_pod)
    if group["maxReplicas"] < most:
        yield f"{res.num_workers} workers need {most} pods of {per_pod}, maxReplicas is {group['maxReplicas']}"
    elif is_whole and group["maxReplicas"] > most:
        yield f"{res.num_workers} workers fill {most} pods of {per_pod}, maxReplicas is {group['maxReplicas']}: the rest would idle"
    if is_whole and spec.get("enableInTreeAutoscaling"):
        least = math.ceil((res.min_workers or res.num_workers) / per_pod)
        if group["minReplicas"] != least:
            yield f"at least {res.min_workers or res.num_workers} workers go on (resources.min_workers), which is {least} pods of {per_pod}; minReplicas is {group['minReplicas']}"
