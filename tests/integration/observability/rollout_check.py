#!/usr/bin/env python3
"""The rollout of the broker's DaemonSet, rehearsed with processes that have the manifests' own flags.

    rollout_check.py BIN_DIR SOURCE_DIR

A keeper without a broker; a broker of its own; a model made resident; an engine that holds it. Then, as a rollout does,
the broker is ended by SIGTERM and another is started, several times. The new broker serves the same generation and has
read no weight byte: it has opened no file of the model (inotify), and read less than the weights in all (/proc/PID/io).
No loader was started.
"""

import ctypes
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import time

SOURCE = pathlib.Path(sys.argv[2])
BIN = pathlib.Path(sys.argv[1])
WEIGHT_BYTES = 64 << 20
ROLLOUTS = 3
IN_OPEN = 0x20


class OpenWatch:
    """Sees which files of a folder are opened, by whomever."""

    def __init__(self, folder):
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(folder), IN_OPEN) >= 0, os.strerror(ctypes.get_errno())

    def opened(self):
        names = set()
        while True:
            try:
                events = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return names - {""}
            while events:
                _, _, _, length = struct.unpack_from("iIII", events)
                names.add(events[16:16 + length].rstrip(b"\0").decode())
                events = events[16 + length:]


def flags_of(manifest, folder):
    """The container's arguments, with the configuration of the ConfigMap in `folder`."""
    text = (SOURCE / "deploy/kubernetes" / manifest).read_text()
    arguments = json.loads(re.search(r"^ +args: (\[\"--config_file.*\])$", text, re.M)[1])
    return [argument.replace("/etc/weightbroker", str(folder)) for argument in arguments]


def write_configuration(folder):
    text = (SOURCE / "deploy/kubernetes/configmap.yaml").read_text()
    configuration, _ = json.JSONDecoder().raw_decode(text.split("weightbroker.json: |", 1)[1].lstrip())
    for key, value in configuration.items():
        if isinstance(value, str):
            configuration[key] = re.sub(r"^/run/(weightbroker(?:-keeper)?)/", rf"{folder}/\1/", value)
    configuration["model_roots"] = [f"models={folder}/models"]
    configuration["metrics_address"] = "127.0.0.1:0"
    (folder / "weightbroker.json").write_text(json.dumps(configuration))
    for name in ("weightbroker", "weightbroker-keeper", "models"):
        (folder / name).mkdir()
    return configuration["socket"]


class Rehearsal:
    def __init__(self, folder):
        self.folder = folder
        self.environment = dict(os.environ, WEIGHTBROKER_SOCKET=write_configuration(folder))
        self.processes = []

    def start(self, program, *arguments):
        log = open(self.folder / f"{program}.log", "ab")
        process = subprocess.Popen([BIN / program, *arguments], env=self.environment, stdout=log, stderr=log)
        log.close()
        self.processes.append(process)
        return process

    def log(self, program):
        return (self.folder / f"{program}.log").read_text(errors="replace")

    def tool(self, *arguments):
        run = subprocess.run([BIN / "weightbroker", *arguments], env=self.environment, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, f"{arguments}: {run.stdout}{run.stderr}"
        return run.stdout

    def health(self):
        return json.loads(self.tool("health", "--json", "--timeout", "60"))

    def end_all(self):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until(what, condition):
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.05)
    return found


def read_bytes(process):
    return int(re.search(r"^rchar: (\d+)$", pathlib.Path(f"/proc/{process.pid}/io").read_text(), re.M)[1])


def roll_out(rehearsal, broker, watch, before):
    broker.terminate()
    assert broker.wait(timeout=60) == 0, "the broker did not end cleanly"
    started = time.monotonic()
    following = rehearsal.start("weightbroker-broker", *flags_of("broker-daemonset.yaml", rehearsal.folder))
    health = rehearsal.health()
    seconds = time.monotonic() - started
    assert int(health["process_id"]) == following.pid, f"another broker answers: {health['process_id']}"
    (now,) = health["weight_sets"]
    for key in ("fingerprint", "generation", "resident_time", "state"):
        assert now[key] == before[key], f"{key} was {before[key]} and is {now[key]}"
    wait_until("the engine's lease is renewed", lambda: rehearsal.health()["lease_count"] == 1)
    opened, read = watch.opened(), read_bytes(following)
    assert not opened, f"files of the model were opened: {opened}"
    assert read < WEIGHT_BYTES // 8, f"the new broker has read {read} bytes"
    print(f"rollout: served after {seconds * 1000:.0f} ms, 0 files of the model opened, {read} bytes read in all, "
          f"of {WEIGHT_BYTES} that are resident")
    return following


def rehearse(rehearsal):
    model = rehearsal.folder / "models/model"
    rehearsal.tool("mkcheckpoint", str(model), "--model", "llama", "--bytes", str(WEIGHT_BYTES))
    rehearsal.start("weightbrokerd", *flags_of("keeper-daemonset.yaml", rehearsal.folder))
    wait_until("the keeper listens", lambda: (rehearsal.folder / "weightbroker-keeper/keeper.sock").exists())
    broker = rehearsal.start("weightbroker-broker", *flags_of("broker-daemonset.yaml", rehearsal.folder))
    rehearsal.tool("register", "models:model", "--torch_version", "any", "--devices", "host")
    engine = rehearsal.start("engine", "--model", "models:model", "--torch_version", "any", "--fallback", "fail", "--hold_seconds", "600")
    wait_until("the engine holds a lease", lambda: rehearsal.health()["lease_count"] == 1)
    (before,) = rehearsal.health()["weight_sets"]
    loads = rehearsal.log("weightbroker-broker").count('"event":"load.started"')
    assert loads == 1, f"expected one load, as JSON in the log: {loads}"
    watch = OpenWatch(model)
    for _ in range(ROLLOUTS):
        broker = roll_out(rehearsal, broker, watch, before)
    assert rehearsal.log("weightbroker-broker").count('"event":"load.started"') == loads, "a loader was started"
    assert engine.poll() is None, "the engine has ended"
    rehearsal.tool("verify", "models:model", "--torch_version", "any", "--digests")
    check_json_logs(rehearsal)


def check_json_logs(rehearsal):
    """The configuration says log_format json: each line is an object, the loader's, too."""
    programs = set()
    for program in ("weightbrokerd", "weightbroker-broker"):
        for line in rehearsal.log(program).splitlines():
            entry = json.loads(line)
            assert {"time", "level", "program", "pid", "event"} <= entry.keys(), line
            programs.add(entry["program"])
    assert len(programs) == 3, f"expected lines of keeper, broker and loader: {programs}"


def main():
    with tempfile.TemporaryDirectory(prefix="wb-", dir="/tmp") as folder:
        rehearsal = Rehearsal(pathlib.Path(folder))
        try:
            rehearse(rehearsal)
        except BaseException:
            for program in ("weightbrokerd", "weightbroker-broker", "engine"):
                path = rehearsal.folder / f"{program}.log"
                print(f"---- {program}\n{path.read_text(errors='replace')[-3000:] if path.exists() else 'no log'}")
            raise
        finally:
            rehearsal.end_all()


if __name__ == "__main__":
    main()
