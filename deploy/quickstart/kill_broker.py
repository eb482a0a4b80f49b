#!/usr/bin/env python3
"""Kills the broker under engines that read, and says as JSON what became of it.

    kill_broker.py BIN_FOLDER MODEL_FOLDER ENGINE_PID...     the socket is $WEIGHTBROKER_SOCKET

Exits 1 if an engine died, or a file of the model was opened.
"""

import ctypes
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import time

IN_OPEN = 0x20


class OpenWatch:
    """Sees which files of a folder are opened, by whomever."""

    def __init__(self, folder):
        libc = ctypes.CDLL(None, use_errno=True)
        self._folder = pathlib.Path(folder)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if libc.inotify_add_watch(self._descriptor, os.fsencode(folder), IN_OPEN) < 0:
            sys.exit(f"{folder} cannot be watched: {os.strerror(ctypes.get_errno())}")

    def opened(self):
        names = set()
        try:
            events = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return names
        while events:
            _, _, _, length = struct.unpack_from("iIII", events)
            names.add(events[16:16 + length].rstrip(b"\0").decode())
            events = events[16 + length:]
        return names - {""}

    def opened_bytes(self):
        """The size of what has been opened: as much could have been read."""
        return sum((self._folder / name).stat().st_size for name in self.opened())


def run_json(*command):
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return json.loads(finished.stdout.splitlines()[0])


def is_alive(pid):
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state not in "ZX"


def main():
    folder, model, engines = pathlib.Path(sys.argv[1]), sys.argv[2], [int(pid) for pid in sys.argv[3:]]
    health = [folder / "weightbroker", "health", "--json"]
    before = run_json(*health)
    watch = OpenWatch(model)

    killed = time.monotonic()
    os.kill(int(before["process_id"]), signal.SIGKILL)
    after = run_json(*health)
    serving_seconds = time.monotonic() - killed
    third = run_json(folder / "engine", "--model", model, "--torch_version", "any", "--fallback", "fail", "--json")

    alive = sum(is_alive(pid) for pid in engines)
    opened_bytes = watch.opened_bytes()
    print(json.dumps({
        "serving_seconds": serving_seconds,
        "engines": len(engines),
        "engines_alive": alive,
        "third_attach_seconds": third["attach_seconds"],
        "third_source": third["source"],
        "checkpoint_bytes": opened_bytes,
    }))
    same_broker = after["process_id"] == before["process_id"]
    if same_broker or alive < len(engines) or opened_bytes > 0 or third["source"] != "attached":
        sys.exit("quickstart: the weights did not outlive the broker as they must")


if __name__ == "__main__":
    main()
