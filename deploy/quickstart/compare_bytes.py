#!/usr/bin/env python3
"""Compares the bytes that engines saw with those that Python's safetensors reads from the file.

    compare_bytes.py FILE DUMP_DIR...

Each DUMP_DIR holds one file for each tensor, named after it, as `engine --dump_dir` writes them. No digest of ours is
involved. Exits 1 at the first difference, saying where it is.
"""

import os
import sys

import numpy
from safetensors.numpy import load_file


def first_difference(expected, found):
    if len(expected) != len(found):
        return f"expected {len(expected)} bytes, found {len(found)}"
    different = numpy.flatnonzero(expected != found)
    if different.size == 0:
        return None
    at = different[0]
    return f"byte {at}: expected {expected[at]}, found {found[at]} ({different.size} bytes differ)"


def main():
    tensors = load_file(sys.argv[1])
    for folder in sys.argv[2:]:
        found = set(os.listdir(folder))
        if found != tensors.keys():
            sys.exit(f"{folder}: these tensors are on one side only: {sorted(found ^ tensors.keys())}")
        total = 0
        for name, array in sorted(tensors.items()):
            expected = numpy.frombuffer(array.tobytes(), dtype=numpy.uint8)
            difference = first_difference(expected, numpy.fromfile(os.path.join(folder, name), dtype=numpy.uint8))
            if difference:
                sys.exit(f"{folder}: tensor {name!r}: {difference}")
            total += expected.size
        print(f"{os.path.basename(folder)}: {len(tensors)} tensors, {total:,} bytes, all equal")


if __name__ == "__main__":
    main()
