#!/usr/bin/env python3
"""The schema of the desired state and the tool's own check are of one mind about every file here.

    desired_schema_check.py BIN_DIR SOURCE_DIR
"""

import copy
import json
import pathlib
import re
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(sys.argv[2])
TOOL = pathlib.Path(sys.argv[1]) / "weightbroker"
sys.path.insert(0, str(SOURCE / "tests/integration/cli"))
from service import require_tools  # noqa: E402

try:
    import jsonschema
except ImportError:
    require_tools("a Python that has jsonschema")  # ends the check

FOLDER = SOURCE / "deploy/desired"
# What no schema can say: the tool alone refuses it.
BEYOND_THE_SCHEMA = ("an alias of no set", "a name twice", "a set twice", "a split that cannot be")


def cases():
    """Yields (what it is, document, whether it is valid)."""
    example = json.loads((FOLDER / "sets.json.example").read_text())
    yield "the example", example, True
    yield "nothing", {"version": 1, "sets": []}, True

    def changed(what, change, valid=False):
        document = copy.deepcopy(example)
        change(document, document["sets"][0])
        return what, document, valid

    yield changed("no version", lambda document, _: document.pop("version"))
    yield changed("another version", lambda document, _: document.update(version=2))
    yield changed("an unknown key", lambda document, _: document.update(set=[]))
    yield changed("an unknown key of a set", lambda _, first: first.update(dtpye="BF16"))
    for key in ("name", "model", "torch_version"):
        yield changed(f"no {key}", lambda _, first, key=key: first.pop(key))
    for key, value in {"name": "a b", "model": "", "torch_version": 2, "tensor_parallel_size": 0, "data_parallel_size": "2",
                       "quantization": "int4", "dtype": "bf16", "layout": "engine", "mtp_layers": "maybe", "ranks": [],
                       "devices": ["cpu"], "handle_kinds": ["FD"], "unquantized_modules": [1]}.items():
        yield changed(f"{key} = {value!r}", lambda _, first, key=key, value=value: first.update({key: value}))
    for key, value in {"expert_parallel_size": 1, "quantization": "none", "dtype": "F16", "mtp_layers": "drop", "ranks": [0],
                       "devices": ["host"], "handle_kinds": ["HOST_MEMFD"]}.items():
        yield changed(f"{key} = {value!r}", lambda _, first, key=key, value=value: first.update({key: value}), True)
    yield changed("devices that are no array", lambda _, first: first.update(devices="host"))
    for device, valid in {"GPU-8932f937-d72c-4106-c12f-20bd9faed9f6": True, "GPU-8932f937": False, "0": False}.items():
        yield changed(f"the device {device}", lambda _, first, device=device: first.update(devices=[device]), valid)
    yield changed("an alias without a tag", lambda document, _: document.update(aliases={"llama": "llama-8b"}))
    yield changed("an alias of no set", lambda document, _: document.update(aliases={"llama@live": "lama"}))
    yield changed("a name twice", lambda document, first: document["sets"].append(dict(first, model="models:other")))
    yield changed("a set twice", lambda document, first: document["sets"].append(dict(first, name="other")))
    yield changed("a split that cannot be", lambda _, first: first.update(expert_parallel_size=3))


def check_keys(schema):
    page = (SOURCE / "docs/desired-state.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    keys = set(schema["definitions"]["set"]["properties"])
    assert documented == keys, f"docs/desired-state.md and the schema have other keys: {documented ^ keys}"


def main():
    schema = json.loads((FOLDER / "desired.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    check_keys(schema)
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "sets.json"
        for what, document, valid in cases():
            path.write_text(json.dumps(document))
            run = subprocess.run([TOOL, "desired", "check", path, "--json"], capture_output=True, text=True, timeout=60)
            assert run.returncode == (0 if valid else 3), f"{what}: the tool exits with {run.returncode}: {run.stderr}"
            answer = json.loads(run.stdout)
            assert answer["ok"] == valid, f"{what}: {answer}"
            if not valid:
                assert answer["reason"] == "CONFIGURATION_INVALID" and str(path) in answer["message"], f"{what}: {answer}"
            assert validator.is_valid(document) == (valid or what in BEYOND_THE_SCHEMA), f"{what}: the schema disagrees"
            count += 1
    print(f"desired state: schema and tool agree on {count} files")


if __name__ == "__main__":
    main()
