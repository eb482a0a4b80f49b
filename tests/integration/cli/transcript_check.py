#!/usr/bin/env python3
"""Runs every command that the documents show with its output, against a service with one small model.

    transcript_check.py BIN_DIR PAGE...

A fence marked `console` is a transcript: lines that begin with "$ " are commands, the lines after each are its output. Its
commands must succeed, and every label of the output shown (a line's first word or JSON key) must be in the real output.
Values differ, and "..." stands for anything. Fences marked `sh` are not run.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import checkpoints
from service import Service, require_tools

LABEL = re.compile(r"[A-Za-z_][\w.]*")


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
    found = (LABEL.search(line) for line in lines if line.strip() not in ("...", "…"))
    return {match[0] for match in found if match}


def fault_of(service, command, shown):
    environment = dict(os.environ, WEIGHTBROKER_SOCKET=service.socket, METRICS_PORT=str(service.metrics_port),
                       MODELS=service.models, PATH=f"{service.bin_dir}:{os.environ['PATH']}")
    run = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=environment, capture_output=True, text=True,
                         timeout=120)
    real = run.stdout + run.stderr
    if "# fails" not in command and run.returncode not in (0, 141):  # 141: cut short by head
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
                for number, command, shown in transcripts(page):
                    checked += 1
                    if fault := fault_of(service, command, shown):
                        faults.append(f"{page.name}:{number}: {command}\n    {fault}")
    print("\n".join(faults))
    print(f"transcripts: {checked} commands, {len(faults)} faults")
    return 1 if faults or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
