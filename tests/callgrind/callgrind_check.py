#!/usr/bin/env python3
"""Counts the instructions of a call with callgrind and holds them against what was recorded.

    callgrind_check.py manifest|health WORKLOAD BROKER --build_type=Release --compiler="GNU 12 x86_64" [--print]

Counts do not depend on how busy the machine is. They do on the compiler and on the libraries that are linked: with the
compiler that they were recorded with, they must be within the measurement's bound of recorded.json, and a count that is too low fails,
too, since it is to be recorded; with another compiler they must only not be far above. --print shows the count alone.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SKIP = 77
RECORDED = pathlib.Path(__file__).with_name("recorded.json")
OTHER_COMPILER_BOUND = 1.5
HEALTH_CALLS = 200


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIP)


def callgrind(out, functions, *command):
    """Counts what is done in the first of `functions`, without what is done in the others that it calls."""
    toggles = [f"--toggle-collect={function}" for function in functions]
    return ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", *toggles, *command]


def instructions(out):
    """The total of every file that callgrind wrote: one for each process."""
    total = 0
    for file in out.parent.glob(out.name + "*"):
        for line in file.read_text().splitlines():
            if line.startswith("totals:"):
                total += int(line.split()[1])
    return total


def count_manifest(workload, _broker, scratch):
    out = scratch / "callgrind.out"
    subprocess.run(callgrind(out, ["weightbroker::DecodeManifest*"], workload, "manifest"), check=True,
                   capture_output=True, timeout=250)
    return instructions(out)


def count_health(workload, broker, scratch):
    """Of one call: what the handler does, from the request to handing the response to gRPC.

    What it tells of the machine a worker reads, once a second, outside of the handler: how often that is in a run
    depends on how busy the machine is.
    """
    out, socket, log = scratch / "callgrind.out", scratch / "socket", scratch / "log"
    functions = ["weightbroker::WeightBrokerServiceImpl::Health(*"]
    command = callgrind(out, functions, broker, f"--socket={socket}", "--metrics_address=", "--log_level=error")
    with open(log, "wb") as log_file:
        service = subprocess.Popen(command, stdout=log_file, stderr=log_file)
    try:
        deadline = time.monotonic() + 120  # valgrind starts it some fifty times slower
        while not socket.exists() and service.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        subprocess.run([workload, "health", socket, str(HEALTH_CALLS)], check=True, timeout=200)
    finally:
        service.send_signal(signal.SIGTERM)
        try:
            service.wait(timeout=60)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()
    count = instructions(out)
    assert count > 0, f"nothing was counted:\n{log.read_text(errors='replace')[-2000:]}"
    return count // HEALTH_CALLS


def verdict(name, count, recorded, compiler):
    """What is wrong; empty if nothing is."""
    expected, bound = recorded["instructions"], recorded["bound"]
    if compiler != recorded["compiler"]:
        if count <= expected * OTHER_COMPILER_BOUND:
            return ""
        return f"more than {OTHER_COMPILER_BOUND} times what was recorded with {recorded['compiler']}"
    if count > expected * (1 + bound):
        return f"more than {bound:.0%} above what was recorded: find out why, or record it with its reason"
    if count < expected * (1 - bound):
        return f"more than {bound:.0%} below what was recorded: put the new number into {RECORDED.name}"
    return ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("measurement", choices=["manifest", "health"])
    parser.add_argument("workload")
    parser.add_argument("broker")
    parser.add_argument("--build_type", required=True)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--print", action="store_true")
    flags = parser.parse_args()
    if shutil.which("valgrind") is None:
        if os.environ.get("WEIGHTBROKER_REQUIRE_TOOLS"):
            sys.exit("valgrind is missing (deploy/install_dependencies.sh --with-tests installs it)")
        skip("there is no valgrind")
    if flags.build_type != "Release" and not flags.print:
        skip(f"numbers are recorded of a release build, and this one is {flags.build_type}")
    count_it = {"manifest": count_manifest, "health": count_health}[flags.measurement]
    with tempfile.TemporaryDirectory(prefix="wb-", dir="/tmp") as scratch:
        count = count_it(flags.workload, flags.broker, pathlib.Path(scratch))
    if flags.print:
        print(count)
        return
    recorded = json.loads(RECORDED.read_text())[flags.measurement]
    fault = verdict(flags.measurement, count, recorded, flags.compiler)
    print(f"{flags.measurement}: {count} instructions with {flags.compiler}, {recorded['instructions']} were recorded "
          f"with {recorded['compiler']}: {fault or 'as expected'}")
    sys.exit(1 if fault else 0)


if __name__ == "__main__":
    main()
