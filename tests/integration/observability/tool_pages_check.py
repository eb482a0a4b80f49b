#!/usr/bin/env python3
"""The tool for scripts and shells: status, top, completion, man page.

    tool_pages_check.py BIN_DIR SOURCE_DIR
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(sys.argv[2]) / "tests/integration/cli"))
import checkpoints  # noqa: E402
from service import Service  # noqa: E402

TOOL = pathlib.Path(sys.argv[1]) / "weightbroker"


def output(*arguments):
    return subprocess.run([TOOL, *arguments], capture_output=True, text=True, timeout=60, check=True).stdout


def commands():
    return re.findall(r"^  ([a-z]+) +\S", output("--help").split("Subcommands:")[1], re.M)


def flags(command):
    return set(re.findall(r"^ +(?:-\w,)?(--[a-z0-9_]+)", output(command, "--help"), re.M))


def check_man_page():
    page = output("man")
    plain = page.replace("\\-", "-")
    for command in commands():
        assert f"\n.SS {command}\n" in plain, f"the man page lacks {command}"
        section = plain.split(f"\n.SS {command}\n")[1].split("\n.SS ")[0]
        missing = {flag for flag in flags(command) if flag not in section}
        assert not missing, f"the man page lacks of {command}: {missing}"
    if shutil.which("groff"):
        run = subprocess.run(["groff", "-man", "-z", "-ww", "-Tutf8"], input=page, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0 and not run.stderr, f"groff: {run.stderr}"


def complete(*words):
    script = 'source <("$0" completion); COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _weightbroker; printf "%s\\n" "${COMPREPLY[@]}"'
    run = subprocess.run(["bash", "-c", script, TOOL, *words], capture_output=True, text=True, timeout=60, check=True)
    assert not run.stderr, run.stderr
    return set(run.stdout.split())


def check_completion():
    assert complete("weightbroker", "") == {*commands(), "--help", "--version"}
    assert complete("weightbroker", "re") == {"register"}
    for command in commands():
        missing = flags(command) - complete("weightbroker", command, "--")
        assert not missing, f"completion lacks of {command}: {missing}"


def check_status(service, code, status):
    run = service.run("weightbroker", "status")
    assert run.returncode == code and run.stdout.startswith(f"{status}: "), f"expected {status}, {code}: {run}"
    said = json.loads(service.run("weightbroker", "status", "--json").stdout)
    assert (said["status"], said["ready"]) == (status, code == 0), f"expected {status}: {said}"


def check_top(service):
    run = service.run("weightbroker", "top", "--count", "2", "--interval", "0.1")
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^\d\d:\d\d:\d\d  broker \d+, 0 leases, 0 loads$", run.stdout, re.M)) == 2, run.stdout
    assert "\x1b" not in run.stdout, "what only a terminal understands was written to a pipe"
    looks = service.run("weightbroker", "top", "--count", "3", "--interval", "0.1", "--json").stdout.splitlines()
    assert [json.loads(look)["status"] for look in looks] == ["STATUS_READY"] * 3, looks


def check_without_a_service(folder):
    environment = dict(os.environ, WEIGHTBROKER_SOCKET=f"{folder}/none.sock")
    for arguments in (("status",), ("top", "--count", "2", "--interval", "0.1")):
        run = subprocess.run([TOOL, *arguments], env=environment, capture_output=True, text=True, timeout=60)
        assert run.returncode == 4 and "SERVICE_UNAVAILABLE" in run.stderr, f"{arguments}: {run}"


def main():
    check_man_page()
    check_completion()
    with tempfile.TemporaryDirectory() as models:
        check_without_a_service(models)
        checkpoints.write_checkpoint(pathlib.Path(models) / "tiny", {"model_type": "llama"}, checkpoints.plain_tensors())
        with Service(sys.argv[1], {"models": models}) as service:
            check_status(service, 1, "IDLE")
            registered = service.run("weightbroker", "register", "models:tiny", "--torch_version", "any")
            assert registered.returncode == 0, registered.stderr
            check_status(service, 0, "READY")
            check_top(service)
    print(f"tool: man page and completion have {len(commands())} commands; status and top are as they should be")


if __name__ == "__main__":
    main()
