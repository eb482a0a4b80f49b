#!/usr/bin/env bash
# Fetches the part of PyPI's torch that a C++ program needs on a machine without a GPU, and prints its folder, for
# -DWEIGHTBROKER_TORCH. Does nothing where it is there already.
#
# PyPI's wheel is built for CUDA: 530 MB, 1.1 GB unpacked, and 2.7 GB of NVIDIA's libraries that it depends on. Of these a
# program that computes on the CPU loads libtorch_cpu, libc10 and libgomp, and of NVIDIA's the runtime and CUPTI: what
# stays in build/torch is 540 MB.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly TORCH_VERSION=2.11.0
readonly CUDA_TOOLKIT_VERSION=13.0.2  # what that version of torch asks for
readonly TARGET=$PWD/build/torch
readonly STAMP=$TARGET/fetched

wanted="torch $TORCH_VERSION cuda-toolkit $CUDA_TOOLKIT_VERSION"
if [[ $(cat "$STAMP" 2>/dev/null) != "$wanted" ]]; then
  rm -rf "$TARGET"
  mkdir -p "$TARGET"
  scratch=$(mktemp -d "$PWD/build/torch-wheel.XXXXXX")
  trap 'rm -rf "$scratch"' EXIT
  {
    python3 -m venv "$scratch/venv"
    pip=("$scratch/venv/bin/python" -m pip --quiet --disable-pip-version-check)
    "${pip[@]}" download --no-deps --no-cache-dir --only-binary :all: --dest "$scratch" "torch==$TORCH_VERSION"
    "$scratch/venv/bin/python" - "$scratch"/torch-*.whl "$TARGET" <<'PYTHON'
import sys, zipfile
WANTED = ("torch/include/", "torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "torch/lib/libgomp")
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.startswith(WANTED)])
PYTHON
    rm -f "$scratch"/torch-*.whl
    "${pip[@]}" install --no-cache-dir --target "$TARGET" "cuda-toolkit[cudart,cupti]==$CUDA_TOOLKIT_VERSION"
  } >&2
  echo "$wanted" >"$STAMP"
fi
echo "$TARGET/torch"
