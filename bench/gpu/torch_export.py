#!/usr/bin/env python3
"""One handle for each tensor through torch's own CUDA IPC, which is how daemons that hold weights hand them over today.

    torch_export.py export --tensors_json F     holds the tensors; for each path read from stdin writes handles there
    torch_export.py import --handles F ...      one sample, as gpu_attach_sample takes it

The exporter prints "ready", then "ok" for each path; it ends with its input. It hands the tensors out anew for each
importer, as torch wants it: what an importer has taken is counted in a file that the two share.
"""

import argparse
import ctypes
import json
import pickle
import sys
import time


def seconds_since(start):
    return time.clock_gettime(time.CLOCK_MONOTONIC) - start


def make_tensor(torch, tensor):
    """Its first bytes from the file, and zeros where the file has a hole, or where there is none."""
    if tensor["path"] is None:
        return torch.zeros(tensor["size_bytes"], dtype=torch.uint8, device="cuda")
    with open(tensor["path"], "rb") as file:
        file.seek(tensor["offset_bytes"])
        page = file.read(min(tensor["size_bytes"], 4096))
    made = torch.zeros(tensor["size_bytes"], dtype=torch.uint8, device="cuda")
    made[: len(page)] = torch.frombuffer(bytearray(page), dtype=torch.uint8)
    return made


def export(flags):
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    with open(flags.tensors_json) as file:
        tensors = [make_tensor(torch, tensor) for tensor in json.load(file)]
    torch.cuda.synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        # reduce_tensor calls UntypedStorage._share_cuda_ and says how to rebuild what it shared.
        shared = [reduce_tensor(tensor) for tensor in tensors]
        with open(line.strip(), "wb") as file:
            pickle.dump([args for _, args in shared], file)
        print("ok", flush=True)


class Toucher:
    """The kernel of touch_pages.cu through the driver, as page_toucher.cc has it."""

    def __init__(self, image):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        with open(image, "rb") as file:
            self.image = file.read()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), self.image))
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(self.function), module, b"touch_pages"))

    @staticmethod
    def check(result):
        if result != 0:
            raise RuntimeError(f"the CUDA driver answered {result}")

    def touch(self, torch, tensors):
        addresses = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64).cuda()
        sizes = torch.tensor([t.numel() * t.element_size() for t in tensors], dtype=torch.int64).cuda()
        total = torch.zeros(1, dtype=torch.int64, device="cuda")
        values = [ctypes.c_uint64(x) for x in (addresses.data_ptr(), sizes.data_ptr(), len(tensors), total.data_ptr())]
        parameters = (ctypes.c_void_p * 4)(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        torch.cuda.synchronize()
        self.check(self.cuda.cuLaunchKernel(self.function, 1024, 1, 1, 64, 1, 1, 0, None, parameters, None))
        return total.item() & (2**64 - 1)


def sample(flags):
    times = {"exec": seconds_since(flags.started_at)}

    def mark(step):
        times[step] = seconds_since(flags.started_at)

    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    mark("cu_init")  # torch has been imported; it initializes CUDA with the context
    torch.zeros(1, device="cuda").item()
    mark("context")
    toucher = Toucher(flags.image)
    mark("kernel_loaded")
    if flags.barrier:
        print("ready", flush=True)
        sys.stdin.readline()
    mark("connected")
    with open(flags.handles, "rb") as file:
        shared = pickle.load(file)
    mark("manifest")
    tensors = [rebuild_cuda_tensor(*args) for args in shared]
    mark("pointers")
    mark("bound")
    times["checksum"] = f"{toucher.touch(torch, tensors):016x}"
    mark("touched")
    print(json.dumps(times), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["export", "import"])
    parser.add_argument("--tensors_json")
    parser.add_argument("--handles")
    parser.add_argument("--image")
    parser.add_argument("--barrier", action="store_true", help="print a line and wait for one before opening handles")
    parser.add_argument("--started_at", type=float)
    flags = parser.parse_args()
    export(flags) if flags.what == "export" else sample(flags)


if __name__ == "__main__":
    main()
