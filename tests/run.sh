#!/usr/bin/env bash
# Installs what is needed, builds the release preset, and runs every test. Exits 0 only if all of it went well.
#
#   tests/run.sh                       everything
#   tests/run.sh -L unit               arguments go to ctest: here only the tests labelled unit
#   WEIGHTBROKER_SKIP_INSTALL=1 ...    leaves the machine's packages alone
#
# The last lines are ctest's own summary.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -z ${WEIGHTBROKER_SKIP_INSTALL:-} ]]; then
  deploy/install_dependencies.sh --with-tests
fi
venv=$(tests/make_venv.sh)
export PATH="$venv/bin:$PATH"
# Everything that a test could want has just been installed: where a tool is missing all the same, fail instead of skip.
export WEIGHTBROKER_REQUIRE_TOOLS=1

# Torch for the engine's side: 530 MB to fetch, 540 MB to keep, once; and a real model of 90 MB.
torch=$(tests/fetch_torch.sh)
tests/fetch_minilm.sh >/dev/null

cmake --preset release -DWEIGHTBROKER_TORCH="$torch"
cmake --build --preset release
ctest --preset release "$@"
