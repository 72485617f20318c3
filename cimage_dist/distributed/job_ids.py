"""Names of jobs: the same experiment gets the same name, so that submitting it twice does not train it twice."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence

from cimage_dist.config import Config, EvalConfig, fingerprint


def base_id(verb: str, cfg: Config, extras: Sequence[str] = ()) -> str:
    """`<verb>-<data>-<fingerprint>-s<seed>`; what else tells two jobs apart (run.dir, flags, how to score) follows as eight hex digits."""
    others = list(extras)
    if cfg.run.dir:
        others.append(f"run.dir={cfg.run.dir}")
    if verb != "pretrain" and cfg.eval != EvalConfig():
        others.append(f"eval={dataclasses.asdict(cfg.eval)}")
    name = re.sub(r"[^A-Za-z0-9_]+", "-", cfg.data.name)
    digest = f"-{hashlib.blake2b(repr(sorted(others)).encode(), digest_size=4).hexdigest()}" if others else ""
    return f"{verb}-{name}-{fingerprint(cfg)}-s{cfg.run.seed}{digest}"


def attempt_id(base: str, attempt: int) -> str:
    return base if attempt == 1 else f"{base}-try{attempt}"


def attempt_of(job_id: str, base: str) -> int | None:
    """1 for the base itself, n for `<base>-try<n>`, None for the job of another experiment."""
    if job_id == base:
        return 1
    found = re.fullmatch(re.escape(base) + r"-try([1-9]\d*)", job_id)
    return int(found[1]) if found else None


def last_attempt(base: str, job_ids: Iterable[str]) -> int:
    """The highest attempt among the jobs of a cluster; 0 where there is none."""
    return max((attempt_of(job_id, base) or 0 for job_id in job_ids), default=0)
