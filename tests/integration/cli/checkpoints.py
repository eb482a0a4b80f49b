"""Writes small checkpoints, with nothing but Python's own library.

    write_checkpoint(folder, config={...}, tensors={"a.weight": ("BF16", [64, 64])})

Values are zeros: what is checked with these is names, types and shapes.
"""

import json
import math
import pathlib
import struct

BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "I16": 16, "BF16": 16, "F16": 16, "I32": 32, "U32": 32, "F32": 32}


def size_bytes(dtype, shape):
    return math.prod(shape) * BITS[dtype] // 8


def write_safetensors(path, tensors, fill=b"\0"):
    """`tensors` maps a name to (dtype, shape)."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in sorted(tensors.items()):
        size = size_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        file.write(fill * offset)


def write_checkpoint(folder, config, tensors):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def plain_tensors(ignored=()):
    """A one-layer model in BF16, and a weight for each module of `ignored`."""
    layer = "model.layers.0."
    tensors = {
        "lm_head.weight": ("BF16", [384, 256]),
        "model.embed_tokens.weight": ("BF16", [384, 256]),
        "model.norm.weight": ("BF16", [256]),
        layer + "input_layernorm.weight": ("BF16", [256]),
        layer + "post_attention_layernorm.weight": ("BF16", [256]),
    }
    tensors.update({name: ("BF16", shape) for name, shape in LINEAR_WEIGHTS.items()})
    tensors.update({ignored_weight(module): ("BF16", [256, 256]) for module in ignored})
    return tensors


# None of them is a whole number of 128-blocks in both dimensions, so that a grid that was rounded down would show.
LINEAR_WEIGHTS = {
    "model.layers.0.self_attn.q_proj.weight": [256, 320],
    "model.layers.0.self_attn.o_proj.weight": [320, 256],
    "model.layers.0.mlp.gate_up_proj.weight": [300, 256],
    "model.layers.0.mlp.down_proj.weight": [256, 150],
}


def ignored_weight(module):
    return module if module.endswith(".weight") else module + ".weight"


def block_fp8_tensors(block, ignored=()):
    """plain_tensors, with each linear weight that is not ignored in F8_E4M3 beside its grid of scales."""
    tensors = plain_tensors(ignored)
    for name, (rows, columns) in LINEAR_WEIGHTS.items():
        if name.removesuffix(".weight") in ignored:
            continue
        tensors[name] = ("F8_E4M3", [rows, columns])
        grid = [math.ceil(rows / block[0]), math.ceil(columns / block[1])]
        tensors[name + "_scale_inv"] = ("F32", grid)
    return tensors
