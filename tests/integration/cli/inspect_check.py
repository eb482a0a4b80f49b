#!/usr/bin/env python3
"""Runs `weightbroker inspect` on every test file, and holds its verdicts against the EXPECTED.tsv beside them.

    inspect_check.py WEIGHTBROKER TEST_DATA

TEST_DATA/safetensors: each file by itself, and as the only shard of a checkpoint.
TEST_DATA/quant_configs: each config.json beside weights that fit it.
"""

import csv
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import checkpoints

ACCEPTED, REFUSED = 0, 3  # exit codes
BLOCK_128 = [128, 128]

# What the table leaves to policy, decided: see docs/checkpoint-rules.md.
QUANT_POLICY = {
    "q09_block_gdn_ignore.json": "ACCEPT fp8",  # at TP 1 no architecture is refused
    "q13_block_kimi_k2.json": "ACCEPT fp8",
    "q15_block_method_upper.json": "ACCEPT fp8",
    "q29_block_64.json": "REFUSE",
    "q99_method_none_string.json": "REFUSE",
}


class Checker:
    def __init__(self, tool):
        self.tool = tool
        self.faults = []
        self.checks = 0

    def inspect(self, *arguments):
        """Runs the tool; gives the exit code and the parsed JSON."""
        command = [self.tool, "inspect", *map(str, arguments), "--json"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        try:
            verdict = json.loads(run.stdout)
        except json.JSONDecodeError:
            verdict = {"ok": None, "message": f"no JSON on stdout; stderr: {run.stderr.strip()[:300]}"}
        return run.returncode, verdict

    def expect(self, case, condition, what, verdict):
        self.checks += 1
        if not condition:
            self.faults.append(f"{case}: {what}; got {json.dumps(verdict)[:600]}")

    def expect_accepted(self, case, *arguments):
        code, verdict = self.inspect(*arguments)
        accepted = code == ACCEPTED and verdict["ok"] is True
        self.expect(case, accepted, f"expected to be accepted, exit code {code}", verdict)
        self.expect(case, not accepted or isinstance(verdict.get("tensors"), int), "expected a number of tensors", verdict)
        self.expect(case, not accepted or isinstance(verdict.get("bytes"), int), "expected a number of bytes", verdict)
        return verdict

    def expect_refused(self, case, *arguments):
        code, verdict = self.inspect(*arguments)
        refused = code == REFUSED and verdict["ok"] is False
        self.expect(case, refused, f"expected to be refused, exit code {code}", verdict)
        reason = verdict.get("reason") or ""
        self.expect(case, not refused or re.fullmatch(r"[A-Z][A-Z0-9_]+", reason), "expected an UPPER_SNAKE reason", verdict)
        self.expect(case, not refused or len(verdict.get("message") or "") > 20, "expected a message", verdict)
        return verdict


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def check_safetensors(checker, data, scratch):
    expected = {row["case"]: row["expected"] for row in rows(data / "EXPECTED.tsv")}
    files = {path.stem: path for path in data.glob("*.safetensors")}
    checker.expect("safetensors", expected.keys() == files.keys(), "a file without a row, or a row without a file",
                   sorted(expected.keys() ^ files.keys()))
    for case, path in sorted(files.items()):
        folder = scratch / case
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        shutil.copy(path, folder / "model.safetensors")
        match expected.get(case):
            case "accept":
                checker.expect_accepted(case, "--file", path)
            case "reject":
                verdict = checker.expect_refused(case, "--file", path)
                checker.expect(case, str(path.name) in str(verdict.get("message")), "expected the message to name the file", verdict)
                checker.expect_refused(case + " as a checkpoint", folder)
            case "accept-container":
                checker.expect_accepted(case, "--file", path)
                verdict = checker.expect_refused(case + " as a checkpoint", folder)
                checker.expect(case, verdict.get("reason") == "DTYPE_UNSUPPORTED", "expected DTYPE_UNSUPPORTED", verdict)
                dtype = case.split("_dtype_")[1]
                checker.expect(case, dtype in str(verdict.get("message")), f"expected the message to name {dtype}", verdict)
            case "reject-checkpoint":
                checker.expect_accepted(case, "--file", path)
                checker.expect_refused(case + " as a checkpoint", folder)
            case "either":
                code, verdict = checker.inspect("--file", path)
                decided = (code, verdict["ok"]) in [(ACCEPTED, True), (REFUSED, False)]
                checker.expect(case, decided, f"expected a verdict, exit code {code}", verdict)
            case other:
                checker.expect(case, False, f"EXPECTED.tsv has an unknown word {other!r}", {})


def tensors_for(name, config):
    """Weights that fit a config: block FP8 where it declares that, BF16 otherwise."""
    quantization = config.get("quantization_config")
    if name == "q03_null_but_fp8_weights.json":
        return checkpoints.block_fp8_tensors(BLOCK_128)
    if not isinstance(quantization, dict):
        return checkpoints.plain_tensors()
    ignored = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or []
    method = str(quantization.get("quant_method", "")).lower()
    if method == "fp8" and "weight_block_size" in quantization:
        block = quantization["weight_block_size"]
        usable = isinstance(block, list) and all(isinstance(edge, int) and edge > 0 for edge in block)
        return checkpoints.block_fp8_tensors(block if usable else BLOCK_128, ignored)
    return checkpoints.plain_tensors(ignored)


def check_quant_configs(checker, data, scratch):
    for row in rows(data / "EXPECTED.tsv"):
        name, expected = row["file"], row["expected"]
        if expected.startswith("SIDE FILE"):
            continue
        config = json.loads((data / name).read_text())
        folder = checkpoints.write_checkpoint(scratch / name, config, tensors_for(name, config))
        shutil.copy(data / name, folder / "config.json")
        for side_file in data.glob(name.removesuffix(".json") + ".*.json"):
            shutil.copy(side_file, folder / side_file.name.removeprefix(name.removesuffix(".json") + "."))
        expected = QUANT_POLICY.get(name, expected)
        if expected.startswith("REFUSE"):
            checker.expect_refused(name, folder)
        else:
            method = "none" if "none" in expected.split()[1] else "fp8"
            verdict = checker.expect_accepted(name, folder)
            checker.expect(name, quantization_method(verdict) == method, f"expected quantization {method}", verdict)


def quantization_method(verdict):
    quantization = verdict.get("quantization")
    return quantization.get("method") if isinstance(quantization, dict) else quantization


def check_ignored_module_in_fp8(checker, scratch):
    """An ignore list that the tensors contradict: the gate is what stands between that and wrong numbers."""
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": BLOCK_128,
                                      "modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}}
    folder = checkpoints.write_checkpoint(scratch / "contradicted", config, checkpoints.block_fp8_tensors(BLOCK_128))
    verdict = checker.expect_refused("an ignored module in FP8", folder)
    named = "model.layers.0.mlp.down_proj" in str(verdict.get("message"))
    checker.expect("an ignored module in FP8", named, "expected the message to name the tensor", verdict)


def main():
    tool, data = sys.argv[1], pathlib.Path(sys.argv[2])
    checker = Checker(tool)
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        check_safetensors(checker, data / "safetensors", scratch)
        check_quant_configs(checker, data / "quant_configs", scratch)
        check_ignored_module_in_fp8(checker, scratch)
    for fault in checker.faults:
        print("FAULT", fault)
    print(f"inspect: {checker.checks} checks, {len(checker.faults)} faults")
    return 1 if checker.faults else 0


if __name__ == "__main__":
    sys.exit(main())
