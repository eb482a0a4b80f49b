#!/usr/bin/env python3
"""Has strict schemas judge the manifests for Kubernetes, and what must hold of ours beyond them.

    manifests_check.py SOURCE_DIR
"""

import json
import pathlib
import re
import subprocess
import sys

SOURCE = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(SOURCE / "tests/integration/cli"))
from service import require_tools  # noqa: E402

try:
    import jsonschema
    import kubernetes_validate
    import yaml
except ImportError:
    require_tools("a Python that has kubernetes-validate")  # ends the check

FOLDER = SOURCE / "deploy/kubernetes"
VERSIONS = ("1.28", "1.34")  # the oldest and a new one that the manifests are to suit
MONITORING = json.loads((pathlib.Path(__file__).parent / "monitoring.schema.json").read_text())


def manifests():
    for path in sorted(FOLDER.glob("*.yaml")):
        if path.name != "kustomization.yaml":
            for document in yaml.safe_load_all(path.read_text()):
                yield path, document


def check_schema(path, document):
    if document["apiVersion"].startswith("monitoring."):
        jsonschema.Draft7Validator(MONITORING).validate(document)
        return
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def pod_of(document):
    return document["spec"]["template"]["spec"] if document["kind"] == "DaemonSet" else document["spec"]


def check_pod(path, document):
    """What of a node is taken: its sockets' folders and the models, and nothing that the scheduler counts."""
    pod = pod_of(document)
    for forbidden in ("hostIPC", "hostPID", "hostNetwork"):
        assert not pod.get(forbidden), f"{path.name}: {forbidden}"
    for container in pod["containers"]:
        resources = container.get("resources", {})
        assert "nvidia.com/gpu" not in json.dumps(resources), f"{path.name}: takes a GPU from the scheduler"
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"] is True, path.name
        assert not security.get("privileged"), f"{path.name}: privileged"
    for volume in pod["volumes"]:
        if "hostPath" in volume:
            assert volume["hostPath"]["type"] in ("Directory", "DirectoryOrCreate"), f"{path.name}: {volume}"


def check_two_daemonsets(documents):
    keeper, broker = documents["weightbroker-keeper"], documents["weightbroker-broker"]
    assert keeper["spec"]["updateStrategy"] == {"type": "OnDelete"}, "the keeper is replaced by hand alone"
    assert broker["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0, "one broker is in office at a time"
    assert "--no_broker" in pod_of(keeper)["containers"][0]["args"]
    assert "livenessProbe" not in pod_of(keeper)["containers"][0], "a probe that kills the keeper takes the weights"
    container = pod_of(broker)["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["exec"]["command"][:2] == ["/usr/bin/weightbroker", "health"], probe
    mounts = [{mount["name"]: mount["mountPath"] for mount in pod_of(each)["containers"][0]["volumeMounts"]}
              for each in (keeper, broker)]
    assert mounts[0] == mounts[1], f"keeper and broker see other paths: {mounts}"
    paths = [{volume["name"]: volume.get("hostPath") for volume in pod_of(each)["volumes"]} for each in (keeper, broker)]
    assert paths[0] == paths[1], f"keeper and broker mount other folders: {paths}"


def check_configuration(config_map, names):
    """The files in the ConfigMap have keys that the service knows."""
    keys = json.loads(config_map["data"]["weightbroker.json"]).keys()
    known = set(re.findall(r"^\| `(\w+)` \|", (SOURCE / "docs/configuration.md").read_text(), re.M))
    assert keys <= known, f"unknown keys: {keys - known}"
    schema = json.loads((SOURCE / "deploy/desired/desired.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(json.loads(config_map["data"]["sets.json"]))


def check_rules(rule):
    groups = [group for name in ("recording.rules.yml", "alerts.rules.yml")
              for group in yaml.safe_load((SOURCE / "deploy/prometheus" / name).read_text())["groups"]]
    assert rule["spec"]["groups"] == groups, "prometheusrule.yaml has other rules than deploy/prometheus"
    subprocess.run([sys.executable, FOLDER / "make_prometheusrule.py", "--check"], check=True, timeout=60)


def check_strictness():
    """That the schemas refuse what they should."""
    broken = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "dataa": {}}
    try:
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)
    except kubernetes_validate.ValidationError:
        return
    raise AssertionError("a key that is spelled wrong was not found")


def main():
    check_strictness()
    documents, kinds = {}, {}
    for path, document in manifests():
        check_schema(path, document)
        if document["kind"] in ("DaemonSet", "Pod"):
            check_pod(path, document)
        documents[document["metadata"]["name"]] = document
        kinds.setdefault(document["kind"], []).append(document)
    check_two_daemonsets({document["metadata"]["name"]: document for document in kinds["DaemonSet"]})
    check_configuration(kinds["ConfigMap"][0], documents)
    check_rules(kinds["PrometheusRule"][0])
    listed = {line.strip(" #-") for line in (FOLDER / "kustomization.yaml").read_text().splitlines() if ".yaml" in line}
    present = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "engine-pod.yaml"}
    assert listed == present, f"kustomization.yaml lists other files than there are: {listed ^ present}"
    print(f"manifests: {sum(map(len, kinds.values()))} of {len(kinds)} kinds are valid for Kubernetes {' and '.join(VERSIONS)}")


if __name__ == "__main__":
    main()
