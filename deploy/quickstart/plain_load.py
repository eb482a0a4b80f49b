#!/usr/bin/env python3
"""Loads a safetensors file as an engine without a service would: each tensor as an array in this process's own memory.

    plain_load.py FILE        prints one line of JSON
"""

import json
import sys
import time

started = time.perf_counter()
from safetensors.numpy import load_file  # noqa: E402  (its import is part of what is measured)

imported = time.perf_counter()
tensors = load_file(sys.argv[1])
loaded = time.perf_counter()
print(json.dumps({
    "tensors": len(tensors),
    "bytes": sum(array.nbytes for array in tensors.values()),
    "import_seconds": imported - started,
    "load_seconds": loaded - imported,
}))
