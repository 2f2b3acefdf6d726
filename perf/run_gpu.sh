#!/usr/bin/env bash
# One sitting on a machine with GPUs: the GPU test tiers, the demo, replays, and the perf suite.
#   perf/run_gpu.sh OUT_DIR [TRACE]
# Every step is bounded in time; logs go to OUT_DIR, a summary to OUT_DIR/summary.txt and the terminal.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
trace=${2:-tests/data/demo_routing.jsonl}
layer=()
[[ $# -gt 1 ]] || layer=(--layer 0) # the log that nvep ships has four
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 NVEP_DEVICE=cuda
mpirun=(mpirun)
mpirun --version 2>/dev/null | grep -q 'Open MPI' && mpirun+=(--allow-run-as-root --oversubscribe --bind-to none)
: >"$out/summary.txt"

step() { # name, seconds, command...
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
  {
    echo "== $name: exit $status, $((SECONDS - begin)) s: $*"
    tail -n "${KEEP:-3}" "$out/$name.log" | cut -c1-160
  } | tee -a "$out/summary.txt"
}

date -u +%Y-%m-%dT%H:%MZ | tee -a "$out/summary.txt"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee -a "$out/summary.txt"
KEEP=12 step tests 280 "$python" -m pytest -o minversion=7 tests/gpu tests/multi_gpu -q --maxfail=10
for ranks in 1 2 4 8; do KEEP=1 step "demo-$ranks" 60 "$python" -m nvep.cli demo --ranks "$ranks" --tokens 48; done
KEEP=1 step demo-mpi-2 60 "${mpirun[@]}" -n 2 "$python" -m nvep.cli demo --tokens 48
for ranks in 2 4 8; do KEEP=1 step "replay-$ranks" 60 "$python" -m nvep.cli replay "$trace" "${layer[@]}" --ranks "$ranks"; done
KEEP=1 step replay-sentinel-8 60 "$python" -m nvep.cli replay "$trace" "${layer[@]}" --ranks 8 --protocol sentinel
KEEP=1 step demo-sentinel-4 60 "$python" -m nvep.cli demo --ranks 4 --tokens 48 --protocol sentinel
KEEP=1 step replay-mpi-2 60 "${mpirun[@]}" -n 2 "$python" -m nvep.cli replay "$trace" "${layer[@]}"
KEEP=70 step bench 240 "$python" -m nvep.cli bench --json "$out/bench.json"
KEEP=30 step bench-ranks-8 60 "$python" -m nvep.cli bench --ranks 8 --tokens 1 8 32 128 512 --json "$out/bench-8.json"
KEEP=8 step bench-mpi-2 90 "${mpirun[@]}" -n 2 "$python" -m nvep.cli bench --tokens 1 128 1024 --protocol fence sentinel
KEEP=8 step bench-flushed 60 "$python" -m nvep.cli bench --flush-l2 --tokens 1 32 128 512
KEEP=4 step bench-recorded 60 "$python" -m nvep.cli bench --trace "$trace" "${layer[@]}" --tokens 8 128 1024
KEEP=60 step bench-transports 180 "$python" -m nvep.cli bench --transport all --json "$out/bench-transports.json"
KEEP=4 step host-overhead 30 "$python" -m nvep.cli bench --host-overhead
KEEP=30 step tune 180 "$python" -m nvep.cli tune --dry-run --json "$out/tune.json"
"$python" perf/report.py "$out"/bench*.json >"$out/report.md" && echo "tables: $out/report.md" | tee -a "$out/summary.txt"
