"""A weightbroker service of one's own, in a temporary folder, for checks from outside.

    with Service(bin_dir, model_roots={"models": folder}) as service:
        service.run("weightbroker", "list")
"""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

SKIP = 77  # what ctest takes for "skipped"


def require_tools(*names):
    """Ends the check if one of the tools is missing: as skipped, or as failed where tools must be there."""
    missing = [name for name in names if shutil.which(name) is None]
    if not missing:
        return
    print(f"missing: {', '.join(missing)} (tests/run.sh installs everything)")
    sys.exit(1 if os.environ.get("WEIGHTBROKER_REQUIRE_TOOLS") else SKIP)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Service:
    def __init__(self, bin_dir, model_roots, flags=()):
        self.bin_dir = pathlib.Path(bin_dir)
        self.folder = tempfile.TemporaryDirectory(prefix="wb-", dir="/tmp")  # short: a socket's path has 107 bytes
        self.socket = f"{self.folder.name}/weightbroker.sock"
        self.metrics_port = free_port()
        self.log = pathlib.Path(self.folder.name) / "service.log"
        roots = [f"{name}={folder}" for name, folder in model_roots.items()]
        self.command = [self.bin_dir / "weightbrokerd", "--socket", self.socket, "--metrics_address", f"127.0.0.1:{self.metrics_port}",
                        "--model_roots", *roots, *flags]

    def __enter__(self):
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while self.run("weightbroker", "health").returncode != 0:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError("the service did not start:\n" + self.last_log)
            time.sleep(0.05)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.last_log = self.log.read_text(errors="replace")[-4000:]
        self.folder.cleanup()

    def run(self, program, *arguments, timeout=60):
        """Runs one of our programs against this service."""
        environment = dict(os.environ, WEIGHTBROKER_SOCKET=self.socket)
        return subprocess.run([self.bin_dir / program, *arguments], env=environment, capture_output=True, text=True,
                              timeout=timeout)
