#!/usr/bin/env python3
"""Uses a running service as an operator would with general tools: buf over the Unix socket, promtool on the metrics.

    api_check.py BIN_DIR

No generated code of ours is involved: everything that buf knows comes from reflection.
"""

import base64
import json
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

import checkpoints
from service import Service, require_tools

API = "weightbroker.v1.WeightBrokerService"
ADMIN_API = "weightbroker.v1.WeightBrokerAdminService"
GROUP_API = "weightbroker.v1.WeightBrokerGroupService"
METHODS = {
    API: {"Register", "Fingerprint", "Export", "Health"},
    ADMIN_API: {"ListWeightSets", "Unregister"},
    GROUP_API: {"JoinGroup", "ListGroups", "RemoveGroup"},
    "grpc.health.v1.Health": {"Check", "Watch"},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo"},
}


def buf(service, *arguments):
    command = ["buf", "curl", "--unix-socket", service.socket, "--http2-prior-knowledge", "--protocol", "grpc",
               "--reflect-protocol", "grpc-v1alpha", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def messages(text):
    """buf prints one JSON value for each message, one after the other."""
    decoder, found = json.JSONDecoder(), []
    text = text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found


def call(service, method, request):
    run = buf(service, "--data", json.dumps(request), f"http://localhost/{method}")
    assert run.returncode == 0, f"{method} failed: {run.stderr}"
    return messages(run.stdout)


def call_refused(service, method, request):
    """Gives the error's code, message, and the google.rpc.ErrorInfo in it."""
    run = buf(service, "--data", json.dumps(request), f"http://localhost/{method}")
    assert run.returncode != 0, f"{method} was not refused: {run.stdout}"
    error = messages(run.stderr)[0]
    infos = [detail for detail in error.get("details", []) if detail["type"] == "google.rpc.ErrorInfo"]
    assert len(infos) == 1, f"{method}: expected one google.rpc.ErrorInfo: {error}"
    return error["code"], error["message"], base64.b64decode(infos[0]["value"] + "==")


def check_reflection(service):
    listed = set(buf(service, "--list-services", "http://localhost").stdout.split())
    assert METHODS.keys() <= listed, f"services that are not listed: {METHODS.keys() - listed}"
    methods = set(buf(service, "--list-methods", "http://localhost").stdout.split())
    expected = {f"{name}/{method}" for name, names in METHODS.items() for method in names}
    assert expected <= methods, f"methods that are not listed: {expected - methods}"
    for name in METHODS:
        (answer,) = call(service, "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                         {"fileContainingSymbol": name})
        assert answer.get("fileDescriptorResponse"), f"{name} is listed but cannot be described: {answer}"


def check_health(service, expected_sets, status):
    (health,) = call(service, f"{API}/Health", {})
    assert len(health.get("weightSets", [])) == expected_sets, f"expected {expected_sets} weight sets: {health}"
    assert health["status"] == status, f"expected {status}: {health}"
    (standard,) = call(service, "grpc.health.v1.Health/Check", {})
    assert standard["status"] == "SERVING", f"expected to be live: {standard}"


def check_register(service, spec, environment):
    *progress, last = call(service, f"{API}/Register", {"spec": spec, "environment": environment, "wait": True})
    assert all("progress" in message for message in progress), f"expected progress: {progress}"
    weight_set = last["weightSet"]
    assert weight_set["state"] == "WEIGHT_SET_STATE_RESIDENT", f"expected it to be resident: {weight_set}"
    return weight_set


def check_fingerprint(service, spec, environment, fingerprint):
    (same,) = call(service, f"{API}/Fingerprint", {"spec": spec, "environment": environment})
    assert same["fingerprint"] == fingerprint and same["resident"], f"expected {fingerprint} to be resident: {same}"
    assert len(same["components"]) > 5, f"expected the components: {same}"
    (other,) = call(service, f"{API}/Fingerprint", {"spec": spec, "environment": {"torchVersion": "2.11.0"}})
    assert not other.get("resident"), f"expected another fingerprint: {other}"
    (difference,) = other["differences"]
    assert (difference["requested"], difference["resident"]) == ("2.11.0", "any"), f"expected both values: {difference}"


def check_export(service, spec, environment, tensors):
    first, *rest = call(service, f"{API}/Export", {"spec": spec, "environment": environment, "hold": False})
    header = first["header"]
    assert "ticket" not in header and "leaseId" not in header, f"a look must grant nothing: {header.keys()}"
    names = [tensor["name"] for message in rest for tensor in message.get("manifest", {}).get("tensors", [])]
    assert names == sorted(tensors), f"expected every tensor, sorted: {names}"
    assert int(header["tensorCount"]) == len(tensors), f"expected {len(tensors)} tensors: {header}"


def check_mismatch(service, spec):
    code, message, info = call_refused(service, f"{API}/Export", {"spec": spec, "environment": {"torchVersion": "2.11.0"}})
    assert code == "failed_precondition", f"expected failed_precondition: {code}"
    assert b"FINGERPRINT_MISMATCH" in info and b"weightbroker" in info, f"expected reason and domain: {info}"
    for wanted in ("torch_version", "2.11.0", "any"):
        assert wanted in message, f"expected the message to name {wanted}: {message}"
        assert wanted.encode() in info, f"expected the metadata to name {wanted}: {info}"


def scrape(service):
    with urllib.request.urlopen(f"http://127.0.0.1:{service.metrics_port}/metrics", timeout=10) as response:
        return response.read().decode()


def samples(text):
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            found[series] = float(value)
    return found


def total(found, name, **labels):
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(value for series, value in found.items()
               if series.split("{")[0] == name and all(label in series for label in wanted))


def check_metrics(before, after_text):
    checked = subprocess.run(["promtool", "check", "metrics"], input=after_text, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0 and not checked.stderr.strip(), f"promtool: {checked.stdout}{checked.stderr}"
    before, after = samples(before), samples(after_text)
    moved = {
        ("weightbroker_loads_total", "result", "resident"): 1,
        ("weightbroker_exports_total", "result", "looked"): 1,
        ("weightbroker_refusals_total", "reason", "FINGERPRINT_MISMATCH"): 1,
        ("weightbroker_rpcs_total", "method", "Register"): 1,
        ("weightbroker_rpcs_total", "method", "Fingerprint"): 2,
        ("weightbroker_rpcs_started_total", "method", "Register"): 2,
        ("weightbroker_registrations_total", "result", "started"): 1,
        ("weightbroker_registrations_total", "result", "hit"): 1,
        ("weightbroker_fingerprint_checks_total", "result", "match"): 1,
        ("weightbroker_fingerprint_checks_total", "result", "mismatch"): 1,
        ("weightbroker_export_refusals_total", "reason", "FINGERPRINT_MISMATCH"): 1,
        ("weightbroker_load_phase_seconds_count", "phase", "read"): 1,
    }
    for (name, label, value), least in moved.items():
        change = total(after, name, **{label: value}) - total(before, name, **{label: value})
        assert change >= least, f"expected {name}{{{label}={value}}} to have moved by {least}, not {change}"
    assert total(after, "weightbroker_weight_sets", state="RESIDENT") == 1, "expected one resident set in the metrics"
    resident = total(after, "weightbroker_resident_bytes")
    assert resident > 0, "expected resident bytes in the metrics"
    assert total(after, "weightbroker_weight_set_bytes") == resident, "expected the set's bytes to be all that there are"
    assert total(after, "weightbroker_device_resident_bytes", device="host") == resident, "expected all of them on the host"
    assert total(after, "weightbroker_load_read_bytes_total") > 0, "expected the bytes that the load has read"
    assert total(after, "weightbroker_ready") == 1 and total(before, "weightbroker_ready") == 0, "expected it to have become ready"


def main():
    require_tools("buf", "promtool")
    environment = {"torchVersion": "any"}
    with tempfile.TemporaryDirectory() as models:
        tensors = checkpoints.plain_tensors()
        checkpoints.write_checkpoint(pathlib.Path(models) / "tiny", {"model_type": "llama"}, tensors)
        spec = {"model": "models:tiny"}
        with Service(sys.argv[1], {"models": models}) as service:
            before = scrape(service)
            check_reflection(service)
            check_health(service, 0, "STATUS_IDLE")
            weight_set = check_register(service, spec, environment)
            check_register(service, spec, environment)  # finds what is there
            check_fingerprint(service, spec, environment, weight_set["fingerprint"])
            check_export(service, spec, environment, tensors)
            check_mismatch(service, spec)
            check_health(service, 1, "STATUS_READY")
            check_metrics(before, scrape(service))
            listed = call(service, f"{ADMIN_API}/ListWeightSets", {})[0]["weightSets"]
            assert [entry["fingerprint"] for entry in listed] == [weight_set["fingerprint"]], f"expected one: {listed}"
            call(service, f"{ADMIN_API}/Unregister", {"fingerprint": weight_set["fingerprint"]})
            check_health(service, 0, "STATUS_IDLE")
    print("api: reflection, health, register, fingerprint, export, mismatch, metrics and unregister are as expected")


if __name__ == "__main__":
    main()
