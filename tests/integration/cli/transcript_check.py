#!/usr/bin/env python3
"""Runs every command that the documents show with its output, against a service with one small model.

    transcript_check.py BIN_DIR PAGE...

A fence marked `console` is a transcript: lines that begin with "$ " are commands, the lines after each are its output. Its
commands must succeed (or fail, where an error is shown), and every label of the output shown (a line's first word or JSON
key) must be in the real output. Values differ, and "..." stands for anything. A shell function that a page defines can be
used below, and /srv/models stands for the service's model root. Where there is no grpcurl, grpcurl.sh says what it is told.
Fences marked `sh` are not run.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

import checkpoints
from service import Service, require_tools

LABEL = re.compile(r'[\s"{}\[\],]*([A-Za-z_][\w.]*)')
HEXADECIMAL = re.compile(r"[0-9a-f]{8,}")
FUNCTION = re.compile(r"^\w+\(\) \{")
GRPCURL = shlex.quote(str(pathlib.Path(__file__).resolve().parent / "grpcurl.sh"))
ALWAYS_DEFINED = [] if shutil.which("grpcurl") else [f'grpcurl() {{ {GRPCURL} "$@"; }}']


def transcripts(page):
    """Yields (line number, command, output lines)."""
    number, inside, command, output, at = 0, False, None, [], 0
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.startswith("```"):
            if command is not None:
                yield at, command, output
            inside, command = not inside and line == "```console", None
        elif inside and line.startswith("$ "):
            if command is not None:
                yield at, command, output
            at, command, output = number, line[2:], []
        elif inside and command is not None and command.endswith("\\"):
            command = command[:-1] + line.lstrip("> ")
        elif inside and command is not None:
            output.append(line)


def labels(lines):
    found = (LABEL.match(line) for line in lines)
    return {match[1] for match in found if match and not HEXADECIMAL.fullmatch(match[1])}


def shows_an_error(shown):
    return any(line.startswith("error:") or '"code":' in line for line in shown)


def fault_of(service, definitions, command, shown):
    environment = dict(os.environ, WEIGHTBROKER_SOCKET=service.socket, PATH=f"{service.bin_dir}:{os.environ['PATH']}")
    script = "\n".join([*definitions, command.replace("/srv/models", service.models)])
    run = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    real = run.stdout + run.stderr
    if shows_an_error(shown) != (run.returncode != 0):
        return f"exit code {run.returncode}: {real[-800:]}"
    missing = labels(shown) - labels(real.splitlines())
    return f"shown but not printed: {sorted(missing)}; printed:\n{real[-1500:]}" if missing else None


def main():
    require_tools("buf", "bash")
    checked, faults = 0, []
    with tempfile.TemporaryDirectory() as models:
        folder = pathlib.Path(models) / "all-MiniLM-L6-v2"
        checkpoints.write_checkpoint(folder, {"model_type": "bert"}, checkpoints.plain_tensors())
        with Service(sys.argv[1], {"models": models}) as service:
            service.models = models
            for page in map(pathlib.Path, sys.argv[2:]):
                definitions = list(ALWAYS_DEFINED)
                for number, command, shown in transcripts(page):
                    if FUNCTION.match(command):
                        definitions.append(command)
                        continue
                    checked += 1
                    if fault := fault_of(service, definitions, command, shown):
                        faults.append(f"{page.name}:{number}: {command}\n    {fault}")
    print("\n".join(faults))
    print(f"transcripts: {checked} commands, {len(faults)} faults")
    return 1 if faults or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
