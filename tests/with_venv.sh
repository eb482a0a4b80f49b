#!/usr/bin/env bash
# Runs a Python program with what tests/requirements.txt lists, where tests/make_venv.sh has installed it, or else with the
# system's Python:   tests/with_venv.sh PROGRAM.py ARGUMENT...
set -euo pipefail
python=$(dirname "$0")/../build/venv/bin/python
[[ -x $python ]] || python=python3
exec "$python" "$@"
