#!/usr/bin/env bash
# A real Ray cluster of several nodes on this machine, for trying things out:
#   launch/local_cluster.sh start [--nodes N] [--cpus-per-node N] [--storage DIR] [--dashboard-host HOST] [--dashboard-port PORT]
#   eval "$(launch/local_cluster.sh env)"     # address and token file for cimage submit, cimage jobs, ray job
#   launch/local_cluster.sh status | stop
# Token authentication is on, the dashboard listens on 127.0.0.1 unless --dashboard-host says
# otherwise (Ray's other ports listen on the machine's address, behind the token), ports are free
# ones. All its files are in one folder (CIMAGE_CLUSTER_DIR or --dir, default /tmp/cimage-ray-<uid>;
# keep it short, Ray's sockets lie below), and only processes started by this script are ever ended:
# other Ray instances are not touched.
set -euo pipefail

usage() { sed -n '2,5p' "$0" | cut -c3-; }
die() { echo "local_cluster.sh: $*" >&2; exit 2; }

dir=${CIMAGE_CLUSTER_DIR:-/tmp/cimage-ray-$(id -u)}
nodes=2
cpus=1
storage=${CIMAGE_STORAGE:-$PWD}
dashboard_host=127.0.0.1
dashboard_port=0

action=${1:-}
[[ $# -gt 0 ]] && shift
while [[ $# -gt 0 ]]; do
  [[ $# -ge 2 ]] || die "$1 needs a value"
  case $1 in
    --nodes) nodes=$2 ;;
    --cpus-per-node) cpus=$2 ;;
    --storage) storage=$2 ;;
    --dir) dir=$2 ;;
    --dashboard-host) dashboard_host=$2 ;;
    --dashboard-port) dashboard_port=$2 ;;
    *) usage >&2; die "unknown option $1" ;;
  esac
  shift 2
done
[[ $nodes =~ ^[1-9][0-9]*$ ]] || die "--nodes must be a positive number, got $nodes"
[[ $cpus =~ ^[1-9][0-9]*$ ]] || die "--cpus-per-node must be a positive number, got $cpus"
[[ $dashboard_port =~ ^[0-9]+$ ]] || die "--dashboard-port must be a number, got $dashboard_port"
[[ $dir == /* ]] || dir=$PWD/$dir
[[ ${#dir} -le 40 ]] || die "$dir is too long for Ray's sockets: choose a folder of at most 40 characters"

find_ray() {
  local own
  own=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/ray
  ray=$(command -v ray || true)
  [[ -n $ray ]] || ray=$own
  [[ -x $ray ]] || die "no ray on the PATH and none in .venv: activate the environment that has cimage-dist"
  bin=$(cd "$(dirname "$ray")" && pwd)
  python=$bin/python
}

# A process is ours if it has the number and the start time that were written down.
started_at() { ps -o lstart= -p "$1" 2>/dev/null || true; }
is_alive() {
  local pid when
  [[ -f $1 ]] || return 1
  { read -r pid; read -r when; } < "$1"
  [[ -n $when && $(started_at "$pid" | xargs) == "$when" ]]
}
any_alive() {
  local file
  for file in "$dir"/node-*.pid; do
    is_alive "$file" && return 0
  done
  return 1
}

free_ports() {
  "$python" - "$1" <<'PY'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*[s.getsockname()[1] for s in sockets])
PY
}

# Each node's own, so that two nodes or two clusters do not meet.
agent_ports() {
  echo "--dashboard-agent-listen-port=$1 --dashboard-agent-grpc-port=$2 --metrics-export-port=$3 --runtime-env-agent-port=$4"
}

# How many nodes are alive, asked from the dashboard. The token is read from its file: arguments can
# be seen by everybody.
alive_nodes() {
  "$python" - "$dir" <<'PY'
import json, pathlib, sys, urllib.request
folder = pathlib.Path(sys.argv[1])
token, address = (folder / "token").read_text().strip(), (folder / "address").read_text().strip()
request = urllib.request.Request(f"{address}/nodes?view=summary", headers={"Authorization": f"Bearer {token}"})
try:
    with urllib.request.urlopen(request, timeout=10) as answer:
        summary = json.load(answer)["data"]["summary"]
    print(sum(node["raylet"].get("state") == "ALIVE" for node in summary))
except (OSError, KeyError, ValueError):
    print(0)
PY
}

# start_node NAME COUNT ray-start-arguments...: in a session of its own, so that all its processes
# can be distinguished from others, until COUNT nodes are alive. Ray gives a node's agents 15 s to
# come up, which a busy machine can exceed: three tries.
start_node() {
  local name=$1 count=$2 attempt pid
  shift 2
  for attempt in 1 2 3; do
    env -u RAY_ADDRESS -u RAY_API_SERVER_ADDRESS -u RAY_AUTH_TOKEN \
      PATH="$bin:$PATH" RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$dir/token" RAY_TMPDIR="$dir" RAY_USAGE_STATS_ENABLED=0 \
      CIMAGE_STORAGE="$storage" \
      setsid "$ray" start --block --node-ip-address=127.0.0.1 --num-cpus="$cpus" --object-store-memory=268435456 "$@" \
      < /dev/null > "$dir/$name.log" 2>&1 &
    pid=$!
    { echo "$pid"; started_at "$pid" | xargs; } > "$dir/$name.pid"
    while is_alive "$dir/$name.pid"; do
      [[ $(alive_nodes) -lt $count ]] || return 0
      sleep 0.5
    done
    # shellcheck disable=SC2046  # one number per word
    kill -KILL $(session_of "$pid") 2> /dev/null || true
    echo "$name did not come up (try $attempt of 3): $(tail -n 1 "$dir/$name.log")" >&2
  done
  return 1
}

start() {
  find_ray
  if any_alive; then
    echo "a cluster is running in $dir already; stop it first, or choose another --dir" >&2
    exit 2
  fi
  [[ -d $storage ]] || die "the storage folder $storage does not exist"
  storage=$(cd "$storage" && pwd)
  mkdir -p "$dir"
  [[ -O $dir && ! -L $dir ]] || die "$dir belongs to somebody else: choose another --dir"
  chmod 700 "$dir"
  rm -rf "$dir"/node-*.pid "$dir"/node-*.log "$dir/ray"
  (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$dir/token")

  local ports port i
  read -r -a ports <<< "$(free_ports $((3 + 4 * nodes)))"
  port=${ports[0]}
  [[ $dashboard_port != 0 ]] || dashboard_port=${ports[1]}
  echo "http://127.0.0.1:$dashboard_port" > "$dir/address"
  trap 'echo "local_cluster.sh: not started; see the logs in $dir" >&2; end_nodes' ERR INT TERM
  # shellcheck disable=SC2046  # one option per word
  start_node node-0 1 --head --port="$port" --ray-client-server-port="${ports[2]}" --temp-dir="$dir/ray" \
    --dashboard-host="$dashboard_host" --dashboard-port="$dashboard_port" --disable-usage-stats $(agent_ports "${ports[@]:3:4}")
  for ((i = 1; i < nodes; i++)); do
    # shellcheck disable=SC2046
    start_node "node-$i" $((i + 1)) --address="127.0.0.1:$port" $(agent_ports "${ports[@]:3 + 4 * i:4}")
  done
  trap - ERR INT TERM
  echo "$nodes nodes with $cpus CPUs each at $(cat "$dir/address"); runs and data go to $storage" >&2
  echo "next: eval \"\$($0 env --dir $dir)\"" >&2
}

# The processes of a node's session: `setsid` made the node's number the session's.
session_of() { ps -e -o pid=,sid= | awk -v sid="$1" '$2 == sid { print $1 }'; }

# All are asked at once, workers first; what is left after half a minute is killed.
end_nodes() {
  local file pid left i
  local pids=()
  for file in "$dir"/node-*.pid; do
    is_alive "$file" && read -r pid < "$file" && pids=("$pid" "${pids[@]}")
    rm -f "$file"
  done
  [[ ${#pids[@]} -gt 0 ]] || return 0
  kill -TERM "${pids[@]}" 2> /dev/null || true
  for ((i = 0; i < 120; i++)); do
    left=$(for pid in "${pids[@]}"; do session_of "$pid"; done)
    [[ -n $left ]] || return 0
    sleep 0.25
  done
  # shellcheck disable=SC2086  # one number per word
  kill -KILL $left 2> /dev/null || true
}

stop() {
  if ! any_alive; then
    echo "no cluster is running in $dir" >&2
  fi
  end_nodes
  rm -rf "$dir/ray" "$dir/token" "$dir/address" "$dir"/ray_current_cluster
  echo "stopped" >&2
}

status() {
  any_alive || { echo "no cluster is running in $dir" >&2; exit 1; }
  find_ray
  local file pid
  echo "address: $(cat "$dir/address")"
  echo "nodes alive: $(alive_nodes)"
  for file in "$dir"/node-*.pid; do
    read -r pid < "$file"
    is_alive "$file" && echo "$(basename "${file%.pid}"): process $pid" || echo "$(basename "${file%.pid}"): gone, see ${file%.pid}.log"
  done
}

print_env() {
  any_alive || { echo "no cluster is running in $dir" >&2; exit 1; }
  printf 'export RAY_API_SERVER_ADDRESS=%q\nexport RAY_AUTH_MODE=token\nexport RAY_AUTH_TOKEN_PATH=%q\nunset RAY_AUTH_TOKEN\n' "$(cat "$dir/address")" "$dir/token"
}

case $action in
  start) start ;;
  stop) stop ;;
  status) status ;;
  env) print_env ;;
  -h | --help | help) usage ;;
  *) usage >&2; die "say start, stop, status or env" ;;
esac
