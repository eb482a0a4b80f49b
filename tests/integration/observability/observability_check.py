#!/usr/bin/env python3
"""A real Prometheus scrapes a real service under load: metrics, rules, alerts and dashboard are what they claim to be.

    observability_check.py BIN_DIR SOURCE_DIR

- promtool finds no fault in the metrics, the rules, and the alerts' cases;
- every series of docs/metrics.md is there;
- every query of the dashboard and every recording rule has data, but for those of faults, which are listed below;
- the dashboard satisfies dashboard.schema.json;
- every alert has a runbook and a case; those whose fault can be caused here fire for real, and clear.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

SOURCE = pathlib.Path(sys.argv[2])
sys.path.insert(0, str(SOURCE / "tests/integration/cli"))

from prometheus_server import JOB, Prometheus  # noqa: E402
from service import Service, require_tools  # noqa: E402

RULES = SOURCE / "deploy/prometheus"
DASHBOARD = SOURCE / "deploy/grafana/dashboards/weightbroker.json"
# What a machine without a faulty GPU has none of. Everything else must have data.
FAULT_SERIES = ("weightbroker_device_faults_total",)
# Alerts whose fault is caused here. The others' cases are in alerts.test.yml alone: bits that flip, GPUs that fail, and
# loads of minutes are not to be had in a test.
CAUSED = {"WeightbrokerDown", "WeightbrokerNotReady", "WeightbrokerFingerprintMismatches", "WeightbrokerExportsRefused",
          "WeightbrokerMemoryPressure", "WeightbrokerRestartLoop", "WeightbrokerStuckLease"}
PATIENCE = 120


def promtool(*arguments, text=None):
    run = subprocess.run(["promtool", *map(str, arguments)], input=text, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, f"promtool {arguments}: {run.stdout}{run.stderr}"
    return run.stdout + run.stderr


def wait_until(what, condition):
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        time.sleep(0.25)
    return found


def alert_names():
    return set(re.findall(r"- alert: (\w+)", (RULES / "alerts.rules.yml").read_text()))


def check_files():
    promtool("check", "rules", RULES / "recording.rules.yml", RULES / "alerts.rules.yml")
    promtool("check", "config", RULES / "prometheus.yml")
    promtool("test", "rules", RULES / "alerts.test.yml")
    names = alert_names()
    cases = set(re.findall(r"alertname: (\w+)", (RULES / "alerts.test.yml").read_text()))
    assert cases == names, f"alerts without a case, or cases without an alert: {cases ^ names}"
    runbooks = set(re.findall(r"^## (\w+)$", (SOURCE / "docs/runbooks.md").read_text(), re.M))
    assert names <= runbooks, f"alerts without a section in docs/runbooks.md: {names - runbooks}"
    assert CAUSED <= names, f"no such alerts: {CAUSED - names}"


def check_dashboard_schema():
    try:
        import jsonschema
    except ImportError:
        require_tools("a Python that has jsonschema")  # ends the check
    schema = json.loads((pathlib.Path(__file__).parent / "dashboard.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(json.loads(DASHBOARD.read_text()))


def panel_queries():
    """Yields (panel's title, expression as Grafana would send it)."""
    dashboard = json.loads(DASHBOARD.read_text())
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identifiers)) == len(identifiers), "two panels have one id"
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], (target["expr"].replace("$job", JOB).replace("$instance", ".+")
                                   .replace("$__rate_interval", "30s"))


def documented_series():
    page = (SOURCE / "docs/metrics.md").read_text()
    return re.findall(r"^\| `((?:weightbroker|process)_\w+)` \|", page, re.M)


def accelerated(folder):
    """The alerts with their times shortened, so that they fire and clear within a test."""
    text = (RULES / "alerts.rules.yml").read_text()
    text = re.sub(r"for: \d+m", "for: 1s", text)
    text = re.sub(r"\[\d+[mh]\]", "[20s]", text)
    path = pathlib.Path(folder) / "alerts.rules.yml"
    path.write_text(text)
    return path


class Load:
    """Calls the service as engines and operators do, again and again, until it is stopped."""

    def __init__(self, service, *commands):
        self._service, self._commands = service, commands
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._stop.is_set():
            for command in self._commands:
                self._service.run("weightbroker", *command)
            self._stop.wait(0.2)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


ANY = ("--torch_version", "any")


def start_engine(service, model):
    return subprocess.Popen(
        [service.bin_dir / "engine", "--socket", service.socket, "--model", model, *ANY, "--fallback", "fail", "--hold_seconds", "600"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def check_data(service, prometheus):
    expected = [name for name in documented_series() if name not in FAULT_SERIES]
    missing = wait_for_all(expected, lambda name: prometheus.query(f'{{__name__=~"{name}(_count|_sum)?"}}'))
    assert not missing, f"rows of docs/metrics.md without a series: {missing}"
    empty = wait_for_all(list(panel_queries()), lambda panel: prometheus.query(panel[1]) or is_of_faults(panel[1]))
    assert not empty, f"panels without data: {empty}"
    records = [rule for rule in prometheus.rules() if rule["type"] == "recording"]
    empty = wait_for_all([rule["name"] for rule in records], prometheus.query)
    assert not empty, f"recording rules without data: {empty}"
    faulty = [(rule["name"], rule.get("lastError")) for rule in prometheus.rules() if rule["health"] != "ok"]
    assert not faulty, f"rules that cannot be computed: {faulty}"
    with urllib.request.urlopen(f"http://127.0.0.1:{service.metrics_port}/metrics", timeout=30) as response:
        said = promtool("check", "metrics", text=response.read().decode())
    assert not said.strip(), f"promtool check metrics: {said}"
    print(f"data: {len(documented_series())} rows of the table, {len(list(panel_queries()))} queries of panels, "
          f"{len(records)} recording rules; promtool has no complaint")


def wait_for_all(things, has_data):
    """Those of the things that have no data when patience is over."""
    deadline = time.monotonic() + PATIENCE
    while things and time.monotonic() < deadline:
        things = [thing for thing in things if not has_data(thing)]
        time.sleep(0.25)
    return things


def is_of_faults(expression):
    return any(name in expression for name in FAULT_SERIES)


def expect_firing(prometheus, *names):
    wait_until(f"{names} fire", lambda: set(names) <= prometheus.firing())
    print(f"fired: {', '.join(names)}")


def expect_clear(prometheus, *names):
    wait_until(f"{names} clear", lambda: not set(names) & prometheus.firing())
    print(f"cleared: {', '.join(names)}")


def broker_pid(service):
    return int(json.loads(service.run("weightbroker", "health", "--json").stdout)["process_id"])


def restart_brokers_until(service, prometheus, alert):
    deadline = time.monotonic() + PATIENCE
    while alert not in prometheus.firing():
        assert time.monotonic() < deadline, f"{alert} does not fire"
        before = broker_pid(service)
        subprocess.run(["kill", "-KILL", str(before)], check=True)
        wait_until("another broker answers", lambda: broker_pid(service) != before)
        time.sleep(1.5)  # for a scrape to see it
    print(f"fired: {alert}")


def run_rehearsal(models, service, prometheus):
    expect_firing(prometheus, "WeightbrokerNotReady")
    registered = service.run("weightbroker", "register", "models:small", *ANY, "--devices", "host")
    assert registered.returncode == 0, registered.stderr
    expect_clear(prometheus, "WeightbrokerNotReady")
    fingerprint = json.loads(service.run("weightbroker", "list", "--json").stdout)["weight_sets"][0]["fingerprint"]

    engine = start_engine(service, "models:small")
    try:
        wait_until("the engine holds a lease",
                   lambda: json.loads(service.run("weightbroker", "health", "--json").stdout)["lease_count"] == 1)
        usual = [("export", "models:small", *ANY), ("verify", "models:small", *ANY), ("fingerprint", "models:small", *ANY),
                 ("register", "models:small", *ANY, "--devices", "host"), ("list",)]
        faults = [("export", "models:small", "--torch_version", "2.11.0"), ("export", "models:other", *ANY),
                  ("unregister", fingerprint), ("register", "models:large", *ANY, "--devices", "host")]
        # There is room for one of the two: each makes the other go.
        evictions = [("register", f"models:{name}", *ANY, "--devices", "host") for name in ("first", "second")]
        causes = ("WeightbrokerFingerprintMismatches", "WeightbrokerExportsRefused", "WeightbrokerMemoryPressure",
                  "WeightbrokerStuckLease")
        with Load(service, *usual, *evictions, *faults):
            wait_until("an eviction is counted", lambda: prometheus.query("weightbroker_evictions_total > 0"))
            check_data(service, prometheus)
            expect_firing(prometheus, *causes)
        with Load(service, *usual):
            expect_clear(prometheus, *causes)
        restart_brokers_until(service, prometheus, "WeightbrokerRestartLoop")
        expect_clear(prometheus, "WeightbrokerRestartLoop")
        assert engine.poll() is None, "the engine has ended"
    finally:
        engine.terminate()
        engine.wait()


def main():
    require_tools("prometheus", "promtool")
    check_files()
    check_dashboard_schema()
    with tempfile.TemporaryDirectory() as models, tempfile.TemporaryDirectory() as rules:
        tool = pathlib.Path(sys.argv[1]) / "weightbroker"
        for name, size in {"small": "4MB", "other": "4MB", "first": "40MB", "second": "40MB", "large": "1GB"}.items():
            subprocess.run([tool, "mkcheckpoint", f"{models}/{name}", "--model", "llama", "--bytes", size, "--sparse"],
                           check=True, stdout=subprocess.DEVNULL)
        service = Service(sys.argv[1], {"models": models}, flags=("--memory_limit", "64MiB", "--eviction", "idle"))
        target = f"127.0.0.1:{service.metrics_port}"
        with Prometheus(target, [RULES / "recording.rules.yml", accelerated(rules)]) as prometheus:
            expect_firing(prometheus, "WeightbrokerDown")
            with service:
                expect_clear(prometheus, "WeightbrokerDown")
                run_rehearsal(models, service, prometheus)
            expect_firing(prometheus, "WeightbrokerDown")
    print("observability: files, series, queries, alerts are as they claim")


if __name__ == "__main__":
    main()
