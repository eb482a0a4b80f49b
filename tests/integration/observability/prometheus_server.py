"""A Prometheus of one's own that scrapes one target every second, in a temporary folder.

    with Prometheus(target="127.0.0.1:9464", rule_files=[...]) as prometheus:
        prometheus.query("up")
"""

import json
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request

JOB = "weightbroker"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Prometheus:
    def __init__(self, target, rule_files):
        self.folder = tempfile.TemporaryDirectory(prefix="wb-prometheus-")
        folder = pathlib.Path(self.folder.name)
        self.port = free_port()
        # Prometheus reads YAML, of which JSON is a part.
        (folder / "prometheus.yml").write_text(json.dumps({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in rule_files],
            "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [target]}]}],
        }))
        self.log = folder / "log"
        self.command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                        f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"]

    def __enter__(self):
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = self.log.read_text(errors="replace")
                self.__exit__()
                raise RuntimeError(f"prometheus did not start:\n{text[-3000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def _ready(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def _get(self, path, **parameters):
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode(errors='replace')}") from error

    def query(self, expression):
        """The series that an expression has now. Fails if it does not parse."""
        return self._get("query", query=expression)["result"]

    def rules(self):
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def firing(self):
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"}
