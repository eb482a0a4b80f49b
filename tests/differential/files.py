"""Makes safetensors files, right ones and wrong ones, from a seed."""

import json
import os
import random
import struct

BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
        "C64": 64, "F64": 64, "I64": 64, "U64": 64}
NAMES = ["a", "b", "w", "model.layers.0.mlp.gate.weight", "", "é", "\U0001f600", "a\"b", "__metadata", "x" * 200, "\t", "/"]
NUMBERS = ["0", "-0", "1", "-1", "7", "00", "1.0", "1e0", "1E400", "255", "2147483648", "4294967296", "9007199254740993",
           "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616",
           "340282366920938463463374607431768211456", "1e-400", "null", "true", "\"1\"", "[]", "{}"]
FRAGMENTS = [b"{", b"}", b"[", b"]", b",", b":", b"\"", b"\\", b"\\u0000", b"\\ud800", b"\\ud83d\\ude00", b"\xff", b"\x00",
             b" ", b"\n", b"\t", b"\x1f", b"\xef\xbb\xbf", b"\"__metadata__\":{},", b"\"__metadata__\":null,", b"null", b"//",
             b"\"dtype\":\"U8\",", b"\"extra\":[[[]]],", b"\"extra\":{\"a\":1,\"a\":2},", b"\"extra\":\"\\ud800\",",
             b"\"extra\":1e999,", b"NaN", b"Infinity"]


def pack(header, data):
    return struct.pack("<Q", len(header)) + header + data


def split(raw):
    """Header and data, as far as the length says; of anything else all is header."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > len(raw) - 8:
        return raw[8:], b""
    return raw[8:8 + length], raw[8 + length:]


def generate(rng):
    """A file that every reader should accept."""
    entries, at = [], 0
    names = rng.sample(NAMES, rng.randint(0, 6))
    for name in names:
        dtype = rng.choice(list(BITS))
        shape = [rng.choice([0, 1, 2, 3, 4, 8]) for _ in range(rng.randint(0, 4))]
        bits = BITS[dtype]
        for dimension in shape:
            bits *= dimension
        if bits % 8:
            shape, bits = shape + [8], bits * 8
        entries.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [at, at + bits // 8]}))
        at += bits // 8
    rng.shuffle(entries)
    header = dict(entries)
    if rng.random() < 0.4:
        metadata = {rng.choice(NAMES): rng.choice(["pt", "", "é"]) for _ in range(rng.randint(0, 3))}
        items = list(header.items())
        items.insert(rng.randint(0, len(items)), ("__metadata__", metadata))
        header = dict(items)
    separators = rng.choice([(",", ":"), (", ", ": ")])
    text = json.dumps(header, separators=separators, ensure_ascii=rng.random() < 0.5).encode()
    text += b" " * rng.choice([0, 0, 1, -len(text) % 8])
    return pack(text, rng.randbytes(at))


def mutate_bytes(rng, raw):
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at:at] = rng.choice(FRAGMENTS)
        elif kind == 3:
            del data[at:at + rng.randint(1, 8)]
        elif kind == 4:
            del data[at:]
        else:
            end = min(len(data), at + rng.randint(1, 40))
            data[at:at] = data[at:end]
    return bytes(data)


def mutate_numbers(rng, raw):
    header, data = split(raw)
    spans, start = [], None
    for i, byte in enumerate(header + b" "):
        if 48 <= byte <= 57:
            start = i if start is None else start
        elif start is not None:
            spans.append((start, i))
            start = None
    if not spans:
        return mutate_bytes(rng, raw)
    begin, end = rng.choice(spans)
    return pack(header[:begin] + rng.choice(NUMBERS).encode() + header[end:], data)


def text_of(pairs):
    return b"{" + b",".join(json.dumps(key).encode() + b":" + value for key, value in pairs) + b"}"


def nested(rng):
    depth = rng.choice([1, 2, 60, 61, 62, 63, 64, 65, 100, 126, 127, 128, 200])
    opening, closing = rng.choice([(b"[", b"]"), (b"{\"a\":", b"}")])
    return opening * depth + (b"1" if opening != b"[" else b"") + closing * depth


def mutate_structure(rng, raw):
    """The header stays JSON; what it says changes."""
    header, data = split(raw)
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError):
        return mutate_bytes(rng, raw)
    if not isinstance(parsed, dict):
        return mutate_bytes(rng, raw)
    pairs = [(key, json.dumps(value).encode()) for key, value in parsed.items()]
    tensors = [i for i, (key, _) in enumerate(pairs) if key != "__metadata__" and isinstance(parsed[key], dict)]
    kind = rng.randrange(11)
    if kind == 0 and pairs:  # the same name again
        pairs.append(rng.choice(pairs))
    elif kind == 1:
        pairs.insert(rng.randint(0, len(pairs)), ("__metadata__", rng.choice([b"null", b"{}", b"[]", b"{\"a\":1}", b"{\"a\":null}", b"\"x\""])))
    elif kind == 2:
        pairs.insert(0, ("e", rng.choice([b"[\"U8\",[0],[0,0]]", b"null", b"{}", b"1", b"\"U8\""])))
    elif kind == 3:
        return pack(rng.choice([b" ", b"\n\t ", b"\xef\xbb\xbf", b"["]) + header, data)
    elif kind == 4:
        return pack(header + rng.choice([b" ", b"\n\r\t", b"\x00", b"{}", b","]), data)
    elif tensors:
        i = rng.choice(tensors)
        key = pairs[i][0]
        fields = [(field, json.dumps(value).encode()) for field, value in parsed[key].items()]
        if kind == 5:
            fields.append(("extra", nested(rng)))
        elif kind == 6:
            zero = [0] + [rng.choice([1, 3, 2**32, 2**61, 2**63 - 1]) for _ in range(rng.randint(1, 3))]
            rng.shuffle(zero)
            fields = [("dtype", b"\"F32\""), ("shape", json.dumps(zero).encode()), ("data_offsets", b"[0,0]")]
        elif kind == 7:
            shape = [1] * rng.choice([63, 64, 65, 66, 300])
            fields = [(f, json.dumps(shape + parsed[key].get("shape", [])).encode() if f == "shape" else v) for f, v in fields]
        elif kind == 8:
            fields = [(f, rng.choice([b"{\"U8\":null}", b"\"u8\"", b"\"F128\"", b"null", b"\"\\u0055\\u0038\"", b"[\"U8\"]"]) if f == "dtype" else v)
                      for f, v in fields]
        elif kind == 9 and fields:
            fields.append(rng.choice(fields)) if rng.random() < 0.5 else fields.pop(rng.randrange(len(fields)))
        else:
            pairs[i] = ("a\0b", pairs[i][1])
            return pack(text_of(pairs), data)
        pairs[i] = (key, text_of(fields))
    return pack(text_of(pairs), data)


def mutate_length(rng, raw):
    length = int.from_bytes(raw[:8].ljust(8, b"\0"), "little")
    new = rng.choice([0, 1, 2, length - 1, length + 1, len(raw) - 8, len(raw) - 7, 100_000_000, 100_000_001, 2**63, 2**64 - 1])
    return struct.pack("<Q", new % 2**64) + raw[8:]


def splice(rng, raw, other):
    header, data = split(raw)
    other_header, other_data = split(other)
    cut, other_cut = rng.randint(0, len(header)), rng.randint(0, len(other_header))
    return pack(header[:cut] + other_header[other_cut:], rng.choice([data, other_data, data + other_data]))


class Source:
    """Bases, one after another, and mutations of them, for ever; the same ones for the same seed."""

    def __init__(self, seed, cases):
        self.rng = random.Random(seed)
        self.cases = []
        for name in sorted(os.listdir(cases)):
            path = os.path.join(cases, name)
            if name.endswith(".safetensors") and os.path.getsize(path) < 1 << 20:
                with open(path, "rb") as file:
                    self.cases.append(file.read())

    def base(self):
        return self.rng.choice(self.cases) if self.rng.random() < 0.3 else generate(self.rng)

    def next(self):
        rng, raw = self.rng, self.base()
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 2, 3])):
            kind = rng.random()
            if kind < 0.3:
                header, data = split(raw)
                raw = pack(mutate_bytes(rng, header), data) if rng.random() < 0.6 else mutate_bytes(rng, raw)
            elif kind < 0.5:
                raw = mutate_numbers(rng, raw)
            elif kind < 0.85:
                raw = mutate_structure(rng, raw)
            elif kind < 0.93:
                raw = mutate_length(rng, raw)
            else:
                raw = splice(rng, raw, self.base())
        return raw
