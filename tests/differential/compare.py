"""Compares our verdicts on safetensors files with those of the safetensors package.

    compare.py SAFETENSORS_VERDICTS [--files N] [--seed N] [--keep FOLDER]

Every file that one accepts and the other refuses must fall under a rule of docs/checkpoint-rules.md: our message says
which, and the rule's own check of the file must agree. What we accept and the package refuses is always a fault. Where
both accept, tensors, types, shapes, bytes and metadata must be the same."""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile

import safetensors

from files import Source, pack, split

CASES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "safetensors")
MAX_DEPTH = 64
MAX_RANK = 64


def pairs_of(header):
    """The header's JSON, each object as a list of its pairs, so that nothing is lost."""
    return json.loads(header.decode("utf-8", "surrogatepass"), object_pairs_hook=Pairs)


class Pairs(list):
    """An object."""


def values(node):
    yield node
    for child in ([value for _, value in node] if isinstance(node, Pairs) else node if isinstance(node, list) else []):
        yield from values(child)


def depth(node):
    if isinstance(node, Pairs):
        return 1 + max((depth(value) for _, value in node), default=0)
    if isinstance(node, list):
        return 1 + max((depth(value) for value in node), default=0)
    return 0


def tensors(root):
    return [(name, value) for name, value in root if name != "__metadata__"]


def fields(root, wanted):
    for _, tensor in tensors(root):
        if isinstance(tensor, Pairs):
            yield from (value for field, value in tensor if field == wanted)


def has_twice(header):
    return any(len({key for key, _ in node}) < len(node) for node in values(pairs_of(header)) if isinstance(node, Pairs))


def has_nul_in_name(header):
    return any("\0" in name for name, _ in tensors(pairs_of(header)))


def is_not_in_the_format(header):
    root = pairs_of(header)
    is_array = any(isinstance(value, list) and not isinstance(value, Pairs) for _, value in tensors(root))
    return is_array or any(isinstance(dtype, Pairs) for dtype in fields(root, "dtype"))


def has_number_over_63_bits(header):
    root = pairs_of(header)
    return any(isinstance(number, int) and number >= 2**63
               for wanted in ("shape", "data_offsets") for numbers in fields(root, wanted) for number in numbers)


def overflows_beside_a_zero(header):
    for shape in fields(pairs_of(header), "shape"):
        product = 64
        for dimension in shape:
            product *= max(dimension, 1)
        if 0 in shape and product >= 2**63:
            return True
    return False


def has_too_many_dimensions(header):
    return any(len(shape) > MAX_RANK for shape in fields(pairs_of(header), "shape"))


def nests_too_deep(header):
    return depth(pairs_of(header)) > MAX_DEPTH


def begins_with_white_space(header):
    return header[:1] in (b" ", b"\n", b"\t", b"\r")


# Where we are stricter: how our message says so, and what must be true of the header then.
RULES = {
    "a key twice in one object": (r"is there twice in one object", has_twice),
    # With it, the length's first byte may make the file look like one of another kind.
    "white space before the {": (r"does not begin with \{|^file: is ", begins_with_white_space),
    "a NUL in a name": (r"has a NUL in its name", has_nul_in_name),
    "an array for a tensor, an object for a dtype":
        (r"is described by an array|has an object for dtype", is_not_in_the_format),
    "a number of 2^63 or more": (r"does not fit 63 bits", has_number_over_63_bits),
    "an overflow beside a 0": (r"no whole number of bytes below 2\^60", overflows_beside_a_zero),
    "more than 64 dimensions": (r"more than 64 dimensions", has_too_many_dimensions),
    "nesting deeper than 64 levels": (r"nests deeper than 64 levels", nests_too_deep),
}


class Ours:
    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def judge(self, raw):
        self.process.stdin.write(len(raw).to_bytes(8, "little") + raw)
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the program ended with {self.process.wait()}")
        return json.loads(line)


def judge_theirs(raw):
    """Name to type, shape and bytes; or None and why it is refused."""
    try:
        return {name: tensor for name, tensor in safetensors.deserialize(raw)}, ""
    except safetensors.SafetensorError as error:
        return None, str(error)


def judge_theirs_by_path(raw, path):
    """The same for safe_open, which gives the metadata, too."""
    with open(path, "wb") as file:
        file.write(raw)
    try:
        with safetensors.safe_open(path, framework="numpy") as opened:
            shapes = {name: (opened.get_slice(name).get_dtype(), opened.get_slice(name).get_shape()) for name in opened.keys()}
            return shapes, opened.metadata() or {}
    except safetensors.SafetensorError:
        return None, None


def difference(ours, theirs, raw):
    """What is not the same in a file that both accept."""
    if ours["count"] != len(theirs) or set(ours["tensors"]) != set(theirs):
        return f"names: {sorted(ours['tensors'])} and {sorted(theirs)}"
    for name, mine in ours["tensors"].items():
        other = theirs[name]
        if mine["dtype"] != other["dtype"] or mine["shape"] != list(other["shape"]):
            return f"{name!r}: {mine} and {other['dtype']} {other['shape']}"
        if raw[mine["begin"]:mine["end"]] != bytes(other["data"]):
            return f"{name!r}: other bytes"
    return None


REPLACED = "a wrong entry that a later one of the same name replaces"


def with_last_of_each_key(raw):
    """The file as a reader sees it for whom the last of two equal keys counts."""
    header, data = split(raw)
    return pack(json.dumps(json.loads(header)).encode(), data)


def rule_of(ours, raw, judge):
    """Which rule a refusal of ours stands on; None if it is none, or does not hold for the file."""
    header = split(raw)[0]
    if ours["reason"] not in ("CHECKPOINT_MALFORMED", "CHECKPOINT_NOT_SAFETENSORS"):
        return None
    for rule, (message, holds) in RULES.items():
        if re.search(message, ours["message"]) and holds(header):
            return rule
    return REPLACED if has_twice(header) and judge(with_last_of_each_key(raw))["ok"] else None


class Comparison:
    def __init__(self, program, keep):
        self.ours = Ours(program)
        self.keep = keep
        self.counts = collections.Counter()
        self.rules = collections.Counter({rule: 0 for rule in (*RULES, REPLACED)})
        self.reasons = collections.Counter()
        self.faults = []

    def fault(self, text, raw):
        path = os.path.join(self.keep, f"fault{len(self.faults)}.safetensors")
        with open(path, "wb") as file:
            file.write(raw)
        self.faults.append(f"{text} ({path})")

    def compare(self, raw):
        ours = self.ours.judge(raw)
        theirs, why = judge_theirs(raw)
        if ours["ok"] and theirs is not None:
            self.counts["accepted by both"] += 1
            if different := difference(ours, theirs, raw):
                self.fault(f"both accept, and differ in {different}", raw)
        elif not ours["ok"] and theirs is None:
            self.counts["refused by both"] += 1
            self.reasons[ours["reason"]] += 1
        elif ours["ok"]:
            self.fault(f"only the package refuses: {why}", raw)
        elif rule := rule_of(ours, raw, self.ours.judge):
            self.counts["refused by us alone, by a rule"] += 1
            self.rules[rule] += 1
        else:
            self.fault(f"only we refuse, by no rule: {ours['reason']} {ours['message']}", raw)
        return ours, theirs

    def compare_opened(self, ours, theirs, raw, path):
        """safe_open must say what deserialize says, and the same metadata as we."""
        shapes, metadata = judge_theirs_by_path(raw, path)
        self.counts["opened by path as well"] += 1
        if (shapes is None) != (theirs is None):
            self.fault("safe_open and deserialize differ", raw)
        elif ours["ok"] and shapes is not None and metadata != ours["metadata"]:
            self.fault(f"metadata {metadata} and {ours['metadata']}", raw)

    def report(self, files, seed):
        print(f"safetensors {safetensors.__version__}, {files} files, seed {seed}")
        for what, count in sorted(self.counts.items()):
            print(f"  {count:8} {what}")
        for rule, count in self.rules.items():
            print(f"  {count:8} stricter: {rule}")
        for reason, count in sorted(self.reasons.items()):
            print(f"  {count:8} refused by both as {reason}")
        for fault in self.faults[:20]:
            print(f"FAULT: {fault}")
        print(f"  {len(self.faults):8} faults")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--keep", help="where files that show a fault go")
    arguments = parser.parse_args()
    comparison = Comparison(arguments.program, arguments.keep or tempfile.mkdtemp(prefix="wb_differential_"))
    source = Source(arguments.seed, CASES)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        path = os.path.join(folder, "file.safetensors")
        for number in range(arguments.files):
            raw = source.next()
            ours, theirs = comparison.compare(raw)
            if number % 10 == 0:
                comparison.compare_opened(ours, theirs, raw, path)
    comparison.report(arguments.files, arguments.seed)
    # A rule that nothing has put to the test may be wrong.
    untested = [rule for rule, count in comparison.rules.items() if count == 0 and rule != REPLACED]
    if untested:
        print(f"no file came under: {', '.join(untested)}")
    return 1 if comparison.faults or untested else 0


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    sys.exit(main())
