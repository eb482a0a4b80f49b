#!/usr/bin/env python3
"""Other loaders of safetensors, one sample in a fresh process, for load_bench.

    rival.py probe                                       which arms can run here, with versions, and why others cannot
    rival.py sample --arm A --folder F --device cuda:0   one sample as a line of JSON

Each arm is called as its own documentation says for all files of a model at once, with its defaults. It ends with every
tensor in a dictionary and the device synchronized. `load_seconds` runs from there being a context and every module to
that, allocation of memory included; `exec_seconds` from --started_at, which the caller took before it started this
process. With --digests each tensor's wbd1 digest (docs/manifest-format.md) is computed after that, from the bytes where
they are, and written to a file as JSON.
"""

import argparse
import glob
import importlib
import importlib.metadata
import json
import os
import sys
import time

MASK = 0xFFFFFFFF
WORD = 2**64
STEPS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)


def now():
    return time.clock_gettime(time.CLOCK_MONOTONIC)


# ---- the arms: each gives a dictionary of all tensors, and whatever must live as long


def safetensors_mapped(files, device):
    """load_file as it is. On the CPU it maps the files: what it gives are views of the page cache, which others share
    and the kernel may take back."""
    from safetensors.torch import load_file

    tensors = {}
    for path in files:
        tensors.update(load_file(path, device=device))
    return tensors, None


def safetensors_resident(files, device):
    """load_file, and a copy of each tensor, so that its bytes are this process's own."""
    from safetensors.torch import load_file

    tensors = {}
    for path in files:
        for name, tensor in load_file(path, device=device).items():
            tensors[name] = tensor.clone()
    return tensors, None


def safetensors_pread(files, device):
    """load_file, told to read the bytes instead of mapping the files."""
    from safetensors.torch import load_file

    tensors = {}
    for path in files:
        tensors.update(load_file(path, device=device, backend="pread"))
    return tensors, None


def fastsafetensors(files, device, nogds=False):
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(None, device, nogds=nogds or device == "cpu")
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device()
    return {name: buffers.get_tensor(name) for name in loader.get_keys()}, (loader, buffers)


def fastsafetensors_nogds(files, device):
    """Without GPUDirect Storage: reads into pinned memory and copies."""
    return fastsafetensors(files, device, nogds=True)


def fastsafetensors_buffered(files, device):
    """Through the page cache, as its own message advises where O_DIRECT does not pay."""
    os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
    return fastsafetensors(files, device, nogds=True)


def instanttensor(files, device):
    from instanttensor import safe_open

    with safe_open(list(files), framework="pt", device=device) as opened:
        return dict(opened.tensors()), None


def instanttensor_buffered(files, device):
    """Through the page cache, which its documentation recommends where the files are in it."""
    from instanttensor import BackendPolicy, safe_open

    with safe_open(list(files), framework="pt", device=device, backend=BackendPolicy.BUFFERED) as opened:
        return dict(opened.tensors()), None


def runai_streamer(files, device):
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(files), device=device)
        return dict(streamer.get_tensors()), None


def runai_streamer_buffered(files, device):
    """Through the page cache."""
    os.environ["RUNAI_STREAMER_FS_STRATEGY"] = "sync_buffered"
    return runai_streamer(files, device)


# name -> function, module, distribution, devices that it is for
ARMS = {
    "safetensors_mapped": (safetensors_mapped, "safetensors.torch", "safetensors", ("cpu",)),
    "safetensors_resident": (safetensors_resident, "safetensors.torch", "safetensors", ("cpu",)),
    "safetensors": (safetensors_mapped, "safetensors.torch", "safetensors", ("cuda",)),
    "safetensors_pread": (safetensors_pread, "safetensors.torch", "safetensors", ("cpu", "cuda")),
    "fastsafetensors": (fastsafetensors, "fastsafetensors", "fastsafetensors", ("cpu", "cuda")),
    "fastsafetensors_nogds": (fastsafetensors_nogds, "fastsafetensors", "fastsafetensors", ("cuda",)),
    "fastsafetensors_buffered": (fastsafetensors_buffered, "fastsafetensors", "fastsafetensors", ("cpu", "cuda")),
    "instanttensor": (instanttensor, "instanttensor", "instanttensor", ("cuda",)),
    "instanttensor_buffered": (instanttensor_buffered, "instanttensor", "instanttensor", ("cuda",)),
    "runai_streamer": (runai_streamer, "runai_model_streamer", "runai-model-streamer", ("cpu", "cuda")),
    "runai_streamer_buffered": (
        runai_streamer_buffered,
        "runai_model_streamer",
        "runai-model-streamer",
        ("cpu", "cuda"),
    ),
}


# ---- the digest


class Digester:
    """wbd1 with a few operations on vectors of 64-bit integers, which wrap around as the definition wants it."""

    def __init__(self, torch, device):
        self.torch = torch
        # On the CPU what is between two operations stays in a core's cache.
        self.chunk_words = 1 << 16 if device == "cpu" else 1 << 23
        index = torch.arange(1, self.chunk_words + 1, dtype=torch.int64, device=device)
        self.keys = [index * self.signed(step) for step in STEPS]

    @staticmethod
    def signed(value):
        value %= WORD
        return value - WORD if value >= WORD // 2 else value

    def lanes(self, words, first_word):
        lanes = []
        high = (words >> 32) & MASK
        for lane, addend in ((0, words), (1, (words << 32) | high)):
            x = words ^ (self.keys[lane][: words.numel()] + self.signed(first_word * STEPS[lane]))
            x = (x & MASK) * ((x >> 32) & MASK) + addend
            x ^= (x >> 32) & MASK
            lanes.append(x.sum().item())
        return lanes

    def hex(self, tensor):
        torch = self.torch
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        size = data.numel()
        if size % 8 or data.data_ptr() % 8:
            padded = torch.zeros((size + 7) // 8 * 8, dtype=torch.uint8, device=data.device)
            padded[:size] = data
            data = padded
        words = data.view(torch.int64)
        sums = [0, 0]
        for first in range(0, words.numel(), self.chunk_words):
            for lane, value in enumerate(self.lanes(words[first : first + self.chunk_words], first)):
                sums[lane] = (sums[lane] + value) % WORD
        first = spread(sums[0] + spread(size + STEPS[0]))
        second = spread(sums[1] + first)
        return first.to_bytes(8, "little").hex() + second.to_bytes(8, "little").hex()


def spread(x):
    x %= WORD
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD % WORD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 % WORD
    return x ^ (x >> 33)


# ---- what a process has used


def numbers_of(path, names):
    found = {}
    with open(path) as file:
        for line in file:
            key, _, value = line.partition(":")
            if key in names:
                found[key] = int(value.split()[0])
    return found


def forget_peak():
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # then the peak is the process's, which is said to be no less


def usage():
    io = numbers_of("/proc/self/io", ("read_bytes", "rchar"))
    memory = numbers_of("/proc/self/status", ("VmHWM", "VmRSS"))
    times = os.times()
    return {
        "cpu_seconds": times.user + times.system,
        "storage_read_bytes": io.get("read_bytes", -1),
        "read_call_bytes": io.get("rchar", -1),
        "peak_resident_bytes": memory.get("VmHWM", 0) * 1024,
        "resident_bytes": memory.get("VmRSS", 0) * 1024,
    }


# ---- commands


def version_of(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def probe(flags):
    kind = flags.device.split(":")[0]
    report = {"python": sys.version.split()[0], "arms": {}}
    try:
        import torch

        report["torch"] = torch.__version__
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU")
    except Exception as error:  # whatever keeps it from being imported is the reason
        report["absent"] = f"{type(error).__name__}: {error}"
        print(json.dumps(report))
        return
    for name, (_, module, distribution, kinds) in ARMS.items():
        if kind not in kinds:
            if not any(other[1] == module and kind in other[3] for other in ARMS.values()):
                report["arms"][name] = {"absent": f"it loads to {', '.join(kinds)} only"}
            continue
        try:
            importlib.import_module(module)
            report["arms"][name] = {"version": version_of(distribution)}
        except Exception as error:
            report["arms"][name] = {"absent": f"{type(error).__name__}: {error}"}
    print(json.dumps(report))


def sample(flags):
    import torch

    function, module, _, _ = ARMS[flags.arm]
    importlib.import_module(module)
    on_gpu = flags.device != "cpu"
    if on_gpu:
        torch.zeros(1, device=flags.device)
        torch.cuda.synchronize()
    files = sorted(glob.glob(os.path.join(flags.folder, "*.safetensors")))
    forget_peak()
    before, ready = usage(), now()
    tensors, _kept = function(files, flags.device)
    if on_gpu:
        torch.cuda.synchronize()
    end = now()
    after = usage()
    result = {
        "load_seconds": end - ready,
        "exec_seconds": end - flags.started_at,
        "bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
        "tensors": len(tensors),
        "peak_resident_bytes": after["peak_resident_bytes"],
        "resident_before_bytes": before["resident_bytes"],
    }
    for key in ("cpu_seconds", "storage_read_bytes", "read_call_bytes"):
        result[key] = after[key] - before[key]
    if flags.digests:
        digester = Digester(torch, flags.device)
        with open(flags.digests, "w") as file:
            json.dump({name: digester.hex(tensor) for name, tensor in tensors.items()}, file)
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # what the loaders do at the end of their process is not of interest


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("probe", "sample"))
    parser.add_argument("--arm", choices=sorted(ARMS))
    parser.add_argument("--folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--started_at", type=float, default=now())
    parser.add_argument("--digests")
    flags = parser.parse_args()
    (probe if flags.command == "probe" else sample)(flags)


if __name__ == "__main__":
    main()
