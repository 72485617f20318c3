# syntax=docker/dockerfile:1
# One image for laptop, `ray job submit` and Kubernetes. Its tag says what is inside; k8s/ expects
# these two:
#   docker build -t cimage-dist:0.1.0-ray2.60.0-cpu .
#   docker build -t cimage-dist:0.1.0-ray2.60.0-cu130 --build-arg VARIANT=cu130 .
# The steps are in launch/install.sh, so that they can be run and tested without Docker.

FROM python:3.11.14-slim-bookworm AS build
# cpu, or a CUDA build of torch. The CUDA wheels bring their own libraries: the node needs only its
# driver.
ARG VARIANT=cpu
# Where torch and pyg-lib come from; override for mirrors.
ARG TORCH_INDEX=https://download.pytorch.org/whl/${VARIANT}
ARG PYG_INDEX=https://data.pyg.org/whl/torch-2.13.0+${VARIANT}.html
ARG PYG_LIB="pyg-lib>=0.7"
ENV PATH=/opt/cimage/bin:$PATH PIP_CACHE_DIR=/var/cache/pip
RUN python -m venv /opt/cimage
WORKDIR /src
# From what changes least to what changes most: torch, the other packages, our code.
COPY launch/install.sh launch/install.sh
RUN --mount=type=cache,target=/var/cache/pip launch/install.sh torch
COPY pyproject.toml constraints.txt ./
RUN --mount=type=cache,target=/var/cache/pip launch/install.sh dependencies
COPY README.md LICENSE ./
COPY k8s k8s
COPY cimage_dist cimage_dist
RUN --mount=type=cache,target=/var/cache/pip launch/install.sh package check

FROM python:3.11.14-slim-bookworm
LABEL org.opencontainers.image.title="cimage-dist" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/cimage/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/tmp/numba \
    RAY_USAGE_STATS_ENABLED=0 \
    HOME=/home/cimage
# A fixed number, so that `runAsNonRoot` can be checked and files on shared storage keep their
# owner.
RUN groupadd --gid 1000 cimage \
    && useradd --uid 1000 --gid 1000 --create-home cimage \
    && install --directory --owner=1000 --group=1000 /app /app/data /app/runs
COPY --from=build /opt/cimage /opt/cimage
WORKDIR /app
COPY configs configs
USER 1000:1000
# KubeRay puts its own command here; by hand: docker run --rm cimage-dist:0.1.0-ray2.60.0-cpu doctor
ENTRYPOINT ["cimage"]
CMD ["--help"]
