#!/usr/bin/env bash
# Builds and runs everything that needs a GPU, on a machine that needs no network. What it needs: the packages of
# deploy/install_dependencies.sh, a CUDA toolkit, and for the parts with torch a python3 that has torch and transformers.
#
#   tests/gpu/run.sh                    build, tests, bench
#   tests/gpu/run.sh build              only that; also: tests, bench, and several of them in this order
#   tests/gpu/run.sh tests -R Vmm       what follows goes to ctest
#
# WEIGHTBROKER_BUILD_TARGETS   what to build, instead of all that the chosen parts need
# WEIGHTBROKER_MINILM          a folder with all-MiniLM-L6-v2; else a model of its shape is made with random weights
# WEIGHTBROKER_REQUIRE_GPUS    how many GPUs must be there; by default as many as nvidia-smi lists. A test that needs no
#                              more of them fails instead of being skipped
# GPU_BENCH_FLAGS              for gpu_attach_bench, for instance "--gib 1,24 --rounds 1"
# GPU_PUBLISH_FLAGS            for publish_bench, for instance "--gib 8"; by default 60, for which it needs 122 GiB
# GPU_STANDBY_FLAGS            for standby_bench, for instance "--gib 8 --samples 20"; by default 100 GiB mapped and 8 GiB
#                              of its own held by the active engine, 200 kills and 20 stops, in at most 400 s
# GPU_LOAD_FLAGS               for load_bench, for instance "--gib 8 --rounds 2"; by default 30 GiB in /dev/shm. Other
#                              loaders take part if python3 can import them: PYTHONPATH may name a folder of theirs
# GPU_RANKS_FLAGS              for gpu_ranks_bench, for instance "--gib 8 --rounds 1"; by default 100 GiB on each GPU
# GPU_CHAOS_FLAGS              for weightbroker-chaos, for instance "--events 60 --engines 4"; by default 1,000 events
# OUT                          where JSON of the benchmarks, ctest's JUnit file and a log of each step go; else build/gpu
#
# Exits 0 only if all that was run went well.
set -uo pipefail
cd "$(dirname "$0")/../.."

readonly BUILD=$PWD/build/release
readonly RESULTS=${OUT:-$PWD/build/gpu}
mkdir -p "$RESULTS" build
export PATH=/usr/local/cuda/bin:$PATH
export PYTHONUNBUFFERED=1

parts=()
while [[ $# -gt 0 && $1 =~ ^(build|tests|bench)$ ]]; do
  parts+=("$1")
  shift
done
[[ ${#parts[@]} -gt 0 ]] || parts=(build tests bench)
readonly ctest_arguments=("$@")

failed=()
# step NAME COMMAND...: runs it, with its output shown and kept.
step() {
  local name=$1 started=$SECONDS
  shift
  echo "==== $name"
  if "$@" > >(tee "$RESULTS/$name.log") 2>&1; then
    echo "==== $name: done after $((SECONDS - started)) s"
  else
    echo "==== $name: FAILED after $((SECONDS - started)) s"
    failed+=("$name")
  fi
}

wants() { [[ " ${parts[*]} " == *" $1 "* ]]; }

describe_machine() {
  nvidia-smi --query-gpu=index,uuid,name,driver_version,memory.total,memory.used,mig.mode.current --format=csv
  nvcc --version | tail -n 2
  g++ --version | head -n 1
  python3 -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
  true
}

torch_folder() { python3 -c 'import torch; print(torch.__path__[0])' 2>/dev/null; }

configure() {
  local arguments=(--preset release -DWEIGHTBROKER_CUDA=ON)
  local torch
  if torch=$(torch_folder); then
    arguments+=(-DWEIGHTBROKER_TORCH="$torch")
  else
    echo "python3 has no torch: the parts with torch are left out"
  fi
  cmake "${arguments[@]}"
}

# Targets that are there: those with torch may not be.
existing() {
  local known name
  known=$(cmake --build --preset release --target help)
  for name in "$@"; do
    grep -q "^$name:" <<<"$known" && echo "$name"
  done
}

compile() {
  local targets
  if [[ -n ${WEIGHTBROKER_BUILD_TARGETS:-} ]]; then
    read -r -a targets <<<"$WEIGHTBROKER_BUILD_TARGETS"
  else
    mapfile -t targets < <(existing \
      gpu_attach_bench gpu_ranks_bench fp8_bench load_bench publish_bench standby_bench weightbroker-chaos torch_engine $(gpu_tests))
  fi
  cmake --build --preset release --target "${targets[@]}" -- -k 0
}

# Every test that carries the label, wherever it is declared.
gpu_tests() {
  ctest --test-dir "$BUILD" -L '^gpu$' --show-only=json-v1 | python3 -c '
import json, sys
print("\n".join(test["name"] for test in json.load(sys.stdin)["tests"]))'
}

# The model for torch_engine, and what transformers makes of the sentences with it.
prepare_model() {
  local inputs=$PWD/build/gpu_minilm.json
  if [[ -n ${WEIGHTBROKER_MINILM:-} ]]; then
    python3 tests/torch/transformers_reference.py --model "$WEIGHTBROKER_MINILM" --output "$inputs" || return 1
  else
    export WEIGHTBROKER_MINILM=$PWD/build/gpu_minilm
    python3 tests/torch/transformers_reference.py --new_model "$WEIGHTBROKER_MINILM" --output "$inputs" || return 1
  fi
  export WEIGHTBROKER_MINILM_INPUTS=$inputs
}

run_tests() {
  if torch_folder >/dev/null; then
    prepare_model || return 1
  fi
  WEIGHTBROKER_REQUIRE_GPUS=${WEIGHTBROKER_REQUIRE_GPUS:-$(nvidia-smi -L | grep -c '^GPU')} \
    ctest --test-dir "$BUILD" -L '^gpu$' --output-on-failure --test-output-size-passed 100000 --output-junit "$RESULTS/gpu_tests.xml" "${ctest_arguments[@]}"
}

run_ranks_bench() {
  local folder=$1 flags=()
  read -r -a flags <<<"${GPU_RANKS_FLAGS:-}"
  torch_folder >/dev/null || flags+=(--arms ours)
  "$BUILD/bin/gpu_ranks_bench" --json --folder "$folder" "${flags[@]}" >"$RESULTS/gpu_ranks.json"
  local status=$?
  rm -rf "$folder" "$folder".*
  return "$status"
}

# Of the model for it nothing is a hole.
run_load_bench() {
  local folder=$1 status flags=() several=()
  read -r -a flags <<<"${GPU_LOAD_FLAGS:---gib 30 --rounds 3}"
  local gpus
  gpus=$(nvidia-smi -L | grep -c '^GPU')
  [[ $gpus -gt 1 ]] && several=(--tp "$gpus")
  "$BUILD/bin/load_bench" --json --gpu --folder "$folder" --quantize fp8_block "${several[@]}" "${flags[@]}" \
    >"$RESULTS/gpu_load.json"
  status=$?
  rm -rf "$folder"
  [[ $status -eq 0 ]] && python3 bench/load/table.py "$RESULTS/gpu_load.json"
}

run_bench() {
  local folder=/dev/shm/weightbroker_gpu_bench  # the files have holes: they take some MiB
  local flags=()
  read -r -a flags <<<"${GPU_BENCH_FLAGS:-}"
  torch_folder >/dev/null || flags+=(--arms "vmm,ipc,tensors")
  "$BUILD/bin/fp8_bench" --json >"$RESULTS/gpu_fp8.json" || return 1
  cat "$RESULTS/gpu_fp8.json"
  "$BUILD/bin/gpu_attach_bench" --json --folder "$folder" "${flags[@]}" >"$RESULTS/gpu_attach.json" || return 1
  python3 bench/gpu/table.py "$RESULTS/gpu_attach.json"
  rm -rf "$folder"
  run_ranks_bench "$folder" || return 1
  run_load_bench "$folder" || return 1
  read -r -a flags <<<"${GPU_PUBLISH_FLAGS:-}"
  "$BUILD/bin/publish_bench" --json --folder "$folder" "${flags[@]}" >"$RESULTS/gpu_publish.json" || return 1
  rm -rf "$folder"
  read -r -a flags <<<"${GPU_STANDBY_FLAGS:---gib 100 --tensors 6000 --files 161 --hang_samples 20 --limit_seconds 400}"
  "$BUILD/bin/standby_bench" --json --gpu --folder "$folder" "${flags[@]}" >"$RESULTS/gpu_standby.json" || return 1
  rm -rf "$folder"
  run_chaos
}

run_chaos() {
  local flags
  read -r -a flags <<<"${GPU_CHAOS_FLAGS:---events 1000 --engines 8 --seed 2}"
  "$BUILD/bin/weightbroker-chaos" --gpu "${flags[@]}" | tee "$RESULTS/gpu_chaos.log"
  local status=${PIPESTATUS[0]}
  tail -n 1 "$RESULTS/gpu_chaos.log" >"$RESULTS/gpu_chaos.json"
  return "$status"
}

step machine describe_machine
if wants build; then
  step configure configure
  [[ ${#failed[@]} -gt 0 ]] || step compile compile
fi
if wants tests && [[ ${#failed[@]} -eq 0 ]]; then step tests run_tests; fi
if wants bench && [[ ${#failed[@]} -eq 0 ]]; then step bench run_bench; fi

if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "all well: ${parts[*]}; results in $RESULTS"
