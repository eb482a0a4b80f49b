#!/usr/bin/env bash
# Runs compare.py with a Python that has what tests/requirements.txt lists. Skipped (77) where there is none, unless
# WEIGHTBROKER_REQUIRE_TOOLS is set.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
for python in python3 "$here/../../build/venv/bin/python"; do
  if "$python" -c "import safetensors" 2>/dev/null; then exec "$python" "$here/compare.py" "$@"; fi
done
echo "no Python with safetensors: run tests/make_venv.sh"
[[ -z ${WEIGHTBROKER_REQUIRE_TOOLS:-} ]] && exit 77
exit 1
