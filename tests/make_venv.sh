#!/usr/bin/env bash
# Makes build/venv with what tests/requirements.txt lists, and prints its path. Does nothing where it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=$PWD/build/venv
readonly STAMP=$VENV/installed-requirements.txt

if ! cmp -s tests/requirements.txt "$STAMP"; then
  python3 -m venv "$VENV" >&2
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --requirement tests/requirements.txt >&2
  cp tests/requirements.txt "$STAMP"
fi
echo "$VENV"
