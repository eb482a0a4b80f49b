"""Writes model folders with data that is cheap to make and different wherever two ranks could be mistaken for each
other."""

import json
import os

import numpy as np
from safetensors import safe_open

import fp8_blocks

RAW_TYPES = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F8_E4M3": np.uint8}
_PERIOD = 1_000_003  # prime: rows of any length begin at different places of it


def _pools():
    random = np.random.default_rng(7)
    values = random.standard_normal(_PERIOD, np.float32) * np.exp2(random.integers(-12, 3, _PERIOD)).astype(np.float32)
    values[5000:25000] = 0
    values[30000:50000] *= np.float32(1e-6)
    values[60000:60050] = np.float32(1e-40)  # subnormal
    pools = {dtype: fp8_blocks.convert("F32", values.view(np.uint32), dtype) for dtype in ("BF16", "F16", "F32")}
    codes = random.integers(0, 256, _PERIOD, np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x42  # no NaN
    pools["F8_E4M3"] = codes
    return pools


_POOLS = _pools()


def make_data(name, dtype, shape):
    """Raw integers; other names begin at other places of the pool."""
    count = int(np.prod(shape, dtype=np.int64))
    start = sum((i + 1) * ord(c) for i, c in enumerate(name)) * 97 % _PERIOD
    pool = _POOLS[dtype]
    data = np.empty(count, RAW_TYPES[dtype])
    first = min(count, _PERIOD - start)
    data[:first] = pool[start : start + first]
    for at in range(first, count, _PERIOD):
        data[at : at + _PERIOD] = pool[: min(_PERIOD, count - at)]
    return data.reshape(shape)


def make_scales(name, shape):
    bits = make_data(name, "F32", shape)
    return (bits & 0x007FFFFF) | 0x38000000  # from 2^-15 on, all positive


class Checkpoint:
    """Tensors by name: (dtype, raw integers). `stored_shapes` says where a file has another shape than the tensor."""

    def __init__(self, config):
        self.config = config
        self.tensors = {}
        self.stored_shapes = {}

    def add(self, name, dtype, shape):
        self.tensors[name] = (dtype, make_data(name, dtype, shape))

    def add_block_fp8(self, name, shape, store_flat=False):
        self.add(name, "F8_E4M3", shape)
        scales = make_scales(name + "_scale_inv", fp8_blocks.grid(shape))
        self.tensors[name + "_scale_inv"] = ("F32", scales)
        if store_flat:
            flat = [n for n in scales.shape if n != 1]
            self.stored_shapes[name + "_scale_inv"] = flat if len(flat) < 2 else [scales.size]

    def write(self, folder, file_count=3):
        """Into several files, tensors dealt out in turn, so that weight and scale come apart."""
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(self.config, file)
        files = [{} for _ in range(file_count)]
        for i, name in enumerate(sorted(self.tensors)):
            files[i % file_count][name] = self.tensors[name]
        weight_map = {}
        for i, tensors in enumerate(files):
            file_name = f"model-{i + 1:05}-of-{file_count:05}.safetensors"
            self._write_file(os.path.join(folder, file_name), tensors)
            weight_map.update({name: file_name for name in tensors})
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {}, "weight_map": weight_map}, file)

    def _write_file(self, path, tensors):
        header, end = {}, 0
        for name, (dtype, data) in tensors.items():
            shape = self.stored_shapes.get(name, list(data.shape))
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + data.nbytes]}
            end += data.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, data in tensors.values():
                data.tofile(file)
        with safe_open(path, framework="np") as reference:  # the reference library takes it for one of its files
            assert set(reference.keys()) == set(tensors)
