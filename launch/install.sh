#!/usr/bin/env bash
# The install steps of the image, one per layer; the Dockerfile calls them, and they run as well in
# any virtual environment:
#   VARIANT=cpu launch/install.sh torch dependencies package check
# VARIANT: cpu, or a CUDA build of torch such as cu130 (with pyg-lib, the fastest neighbour
# sampler).
# TORCH_INDEX, PYG_INDEX: other places to find those wheels; set but empty, the default package
# index is used. PyG's page is made for one torch version, and lists the pyg-lib built for it;
# PYG_LIB pins it further, e.g. pyg-lib==0.7.0+pt212cu130.
# PYTHON: the interpreter to install for.
set -euo pipefail

PYTHON=${PYTHON:-python}
VARIANT=${VARIANT:-cpu}
TORCH_VERSION=2.13.0
EXTRAS=tune,ogb
TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/$VARIANT}
PYG_LIB=${PYG_LIB:-pyg-lib>=0.7}
PYG_INDEX=${PYG_INDEX-https://data.pyg.org/whl/torch-$TORCH_VERSION+$VARIANT.html}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

pip_install() { "$PYTHON" -m pip install --disable-pip-version-check --no-compile "$@"; }

# torch first and alone: the rest then finds its requirement met and brings no second copy.
torch() {
  if [[ -n $TORCH_INDEX ]]; then
    pip_install --extra-index-url "$TORCH_INDEX" "torch==$TORCH_VERSION+$VARIANT"
  else
    pip_install "torch==$TORCH_VERSION"
  fi
}

# What pyproject.toml asks for, at the versions of constraints.txt, before the code: a change of
# code leaves this layer alone.
dependencies() {
  local wanted
  wanted=$(mktemp)
  "$PYTHON" - "$here/pyproject.toml" "$EXTRAS" > "$wanted" <<'PY'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = list(project["dependencies"])
for extra in sys.argv[2].split(","):
    wanted += project["optional-dependencies"][extra]
print("\n".join(wanted))
PY
  pip_install -c "$here/constraints.txt" -r "$wanted"
  rm -f "$wanted"
  if [[ $VARIANT != cpu ]]; then
    pip_install -c "$here/constraints.txt" ${PYG_INDEX:+--find-links "$PYG_INDEX"} --only-binary pyg-lib "$PYG_LIB"
  fi
}

package() { pip_install --no-deps "$here"; }

# The tools the manifests call, from a folder without the sources: nothing may depend on the
# checkout.
check() {
  "$PYTHON" -m pip check
  local bin
  bin=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
  cd "$(mktemp -d)"
  "$bin/ray" --version
  "$bin/cimage" doctor
  if command -v kubectl > /dev/null; then "$bin/cimage" k8s render pretrain > /dev/null; fi
}

[[ $# -gt 0 ]] || { sed -n '2,8p' "$0" | cut -c3- >&2; exit 2; }
for step in "$@"; do
  case $step in
    torch | dependencies | package | check) "$step" ;;
    *) echo "install.sh: no step '$step'; there are torch, dependencies, package, check" >&2; exit 2 ;;
  esac
done
