#!/usr/bin/env bash
# Prints how many lines of common/checkpoint, common/identity and common/quant the unit tests and the fuzz corpora reach,
# by file and by folder, and fails where it is under 90 % of a folder. Needs clang and llvm-cov; builds what it needs in
# build/coverage.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BUILD=$PWD/build/coverage
readonly FOLDERS=(common/checkpoint common/identity common/quant)
readonly TESTS=(safetensors_test checkpoint_test inspect_test identity_test fingerprint_property_test quant_test
                quant_table_test convert_test)
readonly CORPORA=(fingerprint gate index safetensors)
readonly LEAST_PERCENT=90

# llvm_tool NAME: its path, from PATH or beside clang++.
llvm_tool() {
  command -v "$1" || clang++ -print-prog-name="$1"
}

cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_FLAGS_DEBUG=-O0 \
  "-DCMAKE_CXX_FLAGS=-fprofile-instr-generate -fcoverage-mapping" -DWEIGHTBROKER_BUILD_BENCH=OFF \
  "-DWEIGHTBROKER_FUZZ_TARGETS=$(IFS=';' && echo "${CORPORA[*]}")" >/dev/null
cmake --build "$BUILD" --target "${TESTS[@]}" replay

rm -rf "$BUILD/profiles"
export LLVM_PROFILE_FILE=$BUILD/profiles/%m-%p.profraw
objects=()
for test in "${TESTS[@]}"; do
  "$BUILD/tests/$test" --gtest_brief=1
  objects+=(-object "$BUILD/tests/$test")
done
for corpus in "${CORPORA[@]}"; do
  "$BUILD/fuzz/replay" "$corpus" "tests/fuzz/corpus/$corpus" 2>/dev/null
done
objects+=(-object "$BUILD/fuzz/replay")

"$(llvm_tool llvm-profdata)" merge -sparse "$BUILD"/profiles/*.profraw -o "$BUILD/merged.profdata"
"$(llvm_tool llvm-cov)" export -summary-only -instr-profile "$BUILD/merged.profdata" "${objects[@]}" >"$BUILD/summary.json"
python3 - "$PWD" "$BUILD/summary.json" "$LEAST_PERCENT" "${FOLDERS[@]}" <<'PYTHON'
import json
import os
import sys

root, summary, least, folders = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:]
with open(summary) as file:
    files = json.load(file)["data"][0]["files"]
enough = True
for folder in folders:
    reached = lines = 0
    for file in sorted(files, key=lambda file: file["filename"]):
        name = os.path.relpath(file["filename"], root)
        if os.path.dirname(name) != folder:
            continue
        counts = file["summary"]["lines"]
        reached, lines = reached + counts["covered"], lines + counts["count"]
        print(f"  {counts['covered']:5} of {counts['count']:5}  {100 * counts['covered'] / counts['count']:6.2f} %  {name}")
    percent = 100 * reached / lines
    enough = enough and percent >= least
    print(f"{reached:7} of {lines:5}  {percent:6.2f} %  {folder}")
sys.exit(0 if enough else f"under {least} % of a folder's lines are reached")
PYTHON
