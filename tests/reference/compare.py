"""Compares what every rank of every model holds with what the reference says, byte for byte.

    compare.py REFERENCE_LOADER [--full] [--model NAME]
    compare.py REFERENCE_LOADER --gpus --bin_dir DIR

Without --full each model is compared at the sizes that differ most; with it, at all of them."""

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np

import fp8_blocks
from checkpoint import RAW_TYPES, Checkpoint
from models import MODELS, Config
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration", "cli"))
from service import Service  # noqa: E402
from walk import CheckpointWalk, Illegal, RankWalk, Tensor

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


# Compared only as they are published, FP8, without --full.
HEAVY = ("DeepSeek-V3",)
# Small models that nobody quantizes.
UNQUANTIZED = ("bert-base",)
# Served from GPUs, too: one with and one without experts.
GPU_MODELS = ("Qwen3-0.6B", "Qwen3-30B-A3B")


class Source:
    """A checkpoint as the reference sees it; what is worked out of a tensor is kept."""

    def __init__(self, checkpoint):
        self.tensors = checkpoint.tensors
        self.stored_shapes = checkpoint.stored_shapes
        self.quantizable = set()
        self._kept = {}

    def get(self, name):
        return self.tensors[name]

    def converted(self, name, dtype):
        key = (name, dtype)
        if key not in self._kept:
            self._kept[key] = fp8_blocks.convert(*self.tensors[name], dtype)
        return self._kept[key]

    def quantized(self, name):
        if name not in self._kept:
            self._kept[name] = fp8_blocks.quantize(fp8_blocks.to_float(*self.tensors[name]))
        return self._kept[name]


ARCHITECTURES = os.path.join(os.path.dirname(__file__), "..", "data", "architectures")


class Loader:
    """A running reference_loader."""

    def __init__(self, program, folder):
        self.process = subprocess.Popen(
            [program, folder, ARCHITECTURES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def map(self, rank):
        with open(f"/proc/{self.process.pid}/fd/{rank['fd']}", "rb") as file:
            return mmap.mmap(file.fileno(), rank["slab_bytes"], prot=mmap.PROT_READ)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Totals:
    tensors = bytes = cases = refused = 0


def fail(text):
    print("DIFFERS:", text)
    sys.exit(1)


def check_tensor(where, wanted, row, memory):
    name = row["name"]
    if (row["dtype"], tuple(row["shape"])) != (wanted.dtype, wanted.shape):
        fail(f"{where}: {name} is {row['dtype']} {row['shape']}, expected {wanted.dtype} {list(wanted.shape)}")
    count = int(np.prod(wanted.shape, dtype=np.int64))
    data = np.frombuffer(memory, RAW_TYPES[wanted.dtype], count, row["offset_bytes"]).reshape(wanted.shape)
    covered = 0
    for index, source, _, view in wanted.parts:
        if not np.array_equal(data[index], view):
            bad = np.argwhere(data[index] != view)[0]
            fail(f"{where}: {name}{list(index)} differs from {source}, first at {bad}")
        covered += view.size
    if covered != count:  # the rest is zero
        nonzero = np.count_nonzero(data) - sum(np.count_nonzero(view) for _, _, _, view in wanted.parts)
        if nonzero:
            fail(f"{where}: {name} has {nonzero} elements that are not zero where nothing belongs")
    Totals.tensors += 1
    Totals.bytes += row["size_bytes"]


def check_whole(where, source, walks):
    """All ranks together have each element of the checkpoint, in boxes that are the same or do not overlap."""
    boxes = {}
    for walk in walks:
        for tensor in walk.tensors.values():
            for _, name, index, view in tensor.parts:
                shape = source.get(name)[1].shape if name in source.tensors else None
                if shape is None:  # scales that were made on the fly
                    continue
                box = tuple(slice(*s.indices(n)).indices(n)[:2] for s, n in zip(index, shape))
                box += tuple((0, n) for n in shape[len(box):])
                boxes.setdefault(name, {})[box] = view.size
    for name, (_, data) in source.tensors.items():
        covered = sum(boxes.get(name, {}).values())
        if covered != data.size:
            fail(f"{where}: the ranks have {covered} elements of {name}, which has {data.size}")


def aliases_of(model, config):
    if config.get("tie_word_embeddings"):
        return {"lm_head.weight": "model.embed_tokens.weight"}
    return {}


def compare(loader, model, source, sizes, layout, quantize=False, dtype=None, unquantized=()):
    walk_model, config = MODELS[model]
    where = f"{model} {sizes} {layout}{' fp8_block' if quantize else ''}{' ' + dtype if dtype else ''}"
    world = sizes["tp"] * sizes["pp"] * sizes.get("dp", 1)
    is_as_it_is = world == 1 and layout == "hf" and not quantize
    try:
        walks = []
        for rank in range(world):
            walks.append(RankWalk(source, sizes, rank, layout, quantize, dtype, unquantized))
            walk_model(walks[-1], config)
    except Illegal as illegal:
        walks = None
    request = {"tensor_parallel_size": sizes["tp"], "pipeline_parallel_size": sizes["pp"],
               "expert_parallel_size": sizes["ep"], "data_parallel_size": sizes.get("dp", 1), "layout": layout,
               "unquantized_modules": list(unquantized)}
    if quantize:
        request["quantization"] = "fp8_block"
    if dtype:
        request["dtype"] = dtype
    if walks is None:
        answer = loader.ask(**request, only_plan=True)
        if answer.get("reason") != "SPLIT_IMPOSSIBLE":
            fail(f"{where}: {illegal_text(answer)} where the reference refuses")
        Totals.refused += 1
        return
    answer = loader.ask(**request)
    if "reason" in answer:
        fail(f"{where}: refused: {answer['message']}")
    for walk, rank in zip(walks, answer["ranks"]):
        memory = loader.map(rank)
        rows = {row["name"]: row for row in rank["tensors"]}
        aliases = {name: row for name, row in rows.items() if row["alias_of"]}
        for name, row in aliases.items():
            if aliases_of(model, config).get(name) != row["alias_of"]:
                fail(f"{where}: rank {rank['rank']} has {name} as {row['alias_of']}")
            if row["offset_bytes"] != rows[row["alias_of"]]["offset_bytes"]:
                fail(f"{where}: {name} does not lie where {row['alias_of']} does")
            del rows[name]
        tie_tail(walk, source, config, aliases, sizes)
        if set(rows) != set(walk.tensors):
            fail(f"{where}: rank {rank['rank']} has names that differ: {sorted(set(rows) ^ set(walk.tensors))[:8]}")
        for name, tensor in walk.tensors.items():
            row = rows[name]
            if is_as_it_is and row["shape"] == source.stored_shapes.get(name):
                row = dict(row, shape=list(tensor.shape))  # flat, as the file has it
            check_tensor(f"{where} rank {rank['rank']}", tensor, row, memory)
    check_whole(where, source, walks)
    if answer["read_bytes"] > answer["file_bytes"]:
        fail(f"{where}: {answer['read_bytes']} bytes are read of {answer['file_bytes']}")
    Totals.cases += 1


def tie_tail(walk, source, config, aliases, sizes):
    """A tied head is the embedding, on the last stage too."""
    if not config.get("tie_word_embeddings") or walk.stage != sizes["pp"] - 1:
        return
    if "lm_head.weight" not in aliases:
        fail("the last stage has no head")
    if walk.stage > 0:
        walk.active = True
        walk.vocab("model.embed_tokens.weight", config.hidden_size)


def illegal_text(answer):
    return f"{answer.get('reason', 'accepted')}: {answer.get('message', '')}"


def sizes(tp, pp=1, ep=1, dp=1):
    return {"tp": tp, "pp": pp, "ep": ep, "dp": dp}


def has_experts(config):
    return any("experts" in key for key in config)


def cases(model, full):
    """(sizes, layout) to compare a model at."""
    config = MODELS[model][1]
    layers = config.get("num_hidden_layers", config.get("depth", 1))
    if not full:
        yield sizes(8 if model not in ("falcon-7b", "bert-base") else 1), "hf"
        yield sizes(2, ep=2 if has_experts(config) else 1), "fused"
        if layers >= 2:
            yield sizes(1, pp=2), "fused"
        return
    for tp in (1, 2, 4, 8):
        for layout in ("hf", "fused"):
            yield sizes(tp), layout
            if has_experts(config):
                for ep in (2, 4, 8):
                    if ep <= tp:
                        yield sizes(tp, ep=ep), layout
    if has_experts(config):
        yield sizes(1, ep=2, dp=2), "fused"
        yield sizes(2, ep=1, dp=2), "hf"
    for pp in (2, 3):
        if layers >= pp:
            yield sizes(2, pp=pp), "hf"
            yield sizes(1, pp=pp), "fused"


def make(model, folder, quantized, dtype="BF16", store_flat=False):
    walk_model, config = MODELS[model]
    config = Config(config)
    if quantized:
        config["quantization_config"] = dict(FP8_CONFIG, modules_to_not_convert=[])
    checkpoint = Checkpoint(config)
    checkpoint.config_vocab = config.get("vocab_size", 300)
    walk_model(CheckpointWalk(checkpoint, quantized, dtype, store_flat), config)
    checkpoint.write(folder)
    return Source(checkpoint)


def run_model(program, model, full):
    start = time.monotonic()
    before = (Totals.tensors, Totals.bytes, Totals.cases, Totals.refused)
    is_quantizable = model not in UNQUANTIZED
    with tempfile.TemporaryDirectory() as folder:
        if model in HEAVY and not full:
            return run_quantized(program, model, full, before, start)
        source = make(model, folder, quantized=False)
        loader = Loader(program, folder)
        for size, layout in cases(model, full):
            compare(loader, model, source, size, layout)
            if is_quantizable and (full or layout == "fused"):
                compare(loader, model, source, size, layout, quantize=True)
        compare(loader, model, source, sizes(1), "fused", dtype="F16")
        if is_quantizable and model.startswith("Qwen"):
            for unquantized in (["qkv_proj"], ["q_proj", "k_proj", "v_proj"], ["layers.0.mlp"], ["q_proj"]):
                compare(loader, model, source, sizes(2), "hf", quantize=True, unquantized=unquantized)
                compare(loader, model, source, sizes(2), "fused", quantize=True, unquantized=unquantized)
        loader.close()
    run_quantized(program, model, full, before, start)


def run_quantized(program, model, full, before, start):
    """The checkpoint that is quantized already, and what has been compared of the model in all."""
    if model not in UNQUANTIZED:
        with tempfile.TemporaryDirectory() as folder:
            source = make(model, folder, quantized=True, store_flat=model == "Qwen3-0.6B")
            loader = Loader(program, folder)
            for size, layout in cases(model, full):
                compare(loader, model, source, size, layout)
            loader.close()
    counts = [now - then for now, then in
              zip((Totals.tensors, Totals.bytes, Totals.cases, Totals.refused), before)]
    print(f"{model:20} {counts[2]:4} cases  {counts[3]:3} refused  {counts[0]:7} tensors  {counts[1]:15,} bytes"
          f"  {time.monotonic() - start:6.1f} s", flush=True)


def quantizer_values(dtype):
    """float32 matrices, by name, that go through everything a quantizer could do differently."""
    random = np.random.default_rng(3)
    values = {
        "random": random.standard_normal((300, 517), np.float32),
        "zeros": np.zeros((128, 256), np.float32),
        "outlier": np.full((256, 256), 1e-3, np.float32),
        "ragged": random.standard_normal((129, 1), np.float32),
        "wide": (random.standard_normal((256, 384)) * np.exp2(random.integers(-40, 15, (256, 384)))).astype(np.float32),
        "subnormal": random.integers(0, 2**23, (128, 128), np.uint32).view(np.float32),
    }
    values["outlier"][77, 200] = -3e4
    patterns = np.arange(65536, dtype=np.uint16)
    if dtype == "F32":
        floats = random.integers(0, 2**32, 2**20, np.uint32).view(np.float32)
    else:
        floats = patterns.view(fp8_blocks.RAW[dtype]).astype(np.float32)
    with np.errstate(invalid="ignore"):
        floats = floats[np.isfinite(floats)]
    # Every value in blocks of each class of amax that can hold it, one exponent apart.
    blocks = []
    top = np.abs(floats).max()
    for exponent in range(-133, 128, 1 if dtype == "BF16" else 6):
        amax = np.float32(min(1.984375 * 2.0**exponent, top))
        if amax == 0:
            continue
        fit = floats[np.abs(floats) <= amax]
        count = -(-fit.size // (128 * 128 - 1))
        padded = np.zeros((count, 128 * 128), np.float32)
        padded[:, 0] = amax
        padded[:, 1:].flat[: fit.size] = fit
        blocks.append(padded.reshape(count, 128, 128))
    stacked = np.concatenate(blocks)
    values["classes"] = stacked.transpose(1, 0, 2).reshape(128, -1).copy()
    return values


def run_quantizer(program):
    start = time.monotonic()
    for dtype in ("BF16", "F16", "F32"):
        checkpoint = Checkpoint({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 100})
        with np.errstate(over="ignore"):
            matrices = quantizer_values(dtype)
        for i, values in enumerate(matrices.values()):
            clipped = np.clip(values, -6e4, 6e4) if dtype == "F16" else values
            raw = fp8_blocks.convert("F32", clipped.view(np.uint32), dtype)
            checkpoint.tensors[f"model.layers.{i}.mlp.up_proj.weight"] = (dtype, raw)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.write(folder)
            loader = Loader(program, folder)
            answer = loader.ask(quantization="fp8_block")
            if "reason" in answer:
                fail(f"quantizer {dtype}: {answer['message']}")
            memory = loader.map(answer["ranks"][0])
            rows = {row["name"]: row for row in answer["ranks"][0]["tensors"]}
            for name, (_, raw) in checkpoint.tensors.items():
                codes, scales = fp8_blocks.quantize(fp8_blocks.to_float(dtype, raw))
                for row_name, kind, data in ((name, "F8_E4M3", codes), (name + "_scale_inv", "F32", scales.view(np.uint32))):
                    wanted = Tensor(kind, data.shape)
                    wanted.put((), name, (), data)
                    check_tensor(f"quantizer {dtype}", wanted, rows[row_name], memory)
            loader.close()
        for bad in (np.nan, np.inf, -np.inf):
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = Checkpoint({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1})
                values = np.full((256, 384), 0.25, np.float32)
                values[200, 131] = bad
                name = "model.layers.0.mlp.up_proj.weight"
                checkpoint.tensors[name] = (dtype, fp8_blocks.convert("F32", values.view(np.uint32), dtype))
                checkpoint.write(folder)
                loader = Loader(program, folder)
                answer = loader.ask(quantization="fp8_block")
                if answer.get("metadata") != {"tensor": name, "row": "200", "column": "131"}:
                    fail(f"quantizer {dtype}: {bad} gives {answer}")
                loader.close()
    print(f"quantizer: every finite BF16 and F16 in blocks of each class of amax, and F32  {time.monotonic() - start:6.1f} s",
          flush=True)


def check_conversion_rule(program):
    """What DeepSeek's own conversion of V3 to 8 ranks gives each of them: dimension 0 or 1 by the module's name, whole
    for the rest, experts in contiguous ranges; scales as their weights."""
    dimension = {"embed_tokens": 0, "q_proj": 0, "q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1, "gate_proj": 0,
                 "up_proj": 0, "down_proj": 1, "lm_head": 0}
    model, ranks = "DeepSeek-V3", 8
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        source = make(model, folder, quantized=True)
        loader = Loader(program, folder)
        answer = loader.ask(tensor_parallel_size=ranks, expert_parallel_size=ranks)
        for rank in answer["ranks"]:
            memory = loader.map(rank)
            rows = {row["name"]: row for row in rank["tensors"]}
            for name, (dtype, data) in source.tensors.items():
                module = name.split(".")[-2]
                view = data
                if ".experts." in name:
                    each = MODELS[model][1].n_routed_experts // ranks
                    if int(name.split(".experts.")[1].split(".")[0]) // each != rank["rank"]:
                        if name in rows:
                            fail(f"conversion rule: rank {rank['rank']} has {name}")
                        continue
                elif module in dimension:
                    view = np.split(data, ranks, axis=dimension[module])[rank["rank"]]
                wanted = Tensor(dtype, view.shape)
                wanted.put((), name, (), view)
                check_tensor(f"conversion rule, rank {rank['rank']}", wanted, rows.pop(name), memory)
            if rows:
                fail(f"conversion rule: rank {rank['rank']} has more: {sorted(rows)[:4]}")
        loader.close()
    print(f"DeepSeek-V3's own conversion to 8 ranks gives the same  {time.monotonic() - start:6.1f} s", flush=True)


def check_service(bin_dir):
    """Whole models registered with a real service, as the client library gives them to an engine for each rank: one in
    FP8 at TP 4, and one of an architecture that the service was given a file for."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        with Service(bin_dir, {"models": root}, flags=["--devices", "host", "--architecture_dir", ARCHITECTURES]) as service:
            check_engines(service, root, "Qwen3-0.6B", sizes(4))
            check_engines(service, root, "Qwen3-0.6B", sizes(2), quantize=True)
            check_engines(service, root, "novel", sizes(2))
        bad = os.path.join(root, "bad")
        os.mkdir(bad)
        with open(os.path.join(bad, "bad.json"), "w") as file:
            file.write("{}")
        try:
            with Service(bin_dir, {"models": root}, flags=["--architecture_dir", bad]):
                fail("service: it starts with an architecture file that is wrong")
        except RuntimeError as error:
            if "bad.json: architectures: is missing" not in str(error):
                fail(f"service: {error}")
    print(f"a service and an engine for each rank, in FP8: the same  {time.monotonic() - start:6.1f} s", flush=True)


def check_gpus(bin_dir):
    """Whole models at TP 2 on two GPUs, quantized in the checkpoint and on the way, as each rank's engine finds them."""
    gpus = 0
    if shutil.which("nvidia-smi"):
        gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    if gpus < 2:
        print(f"the test needs 2 GPUs, and this machine has {gpus}")
        sys.exit(1 if int(os.environ.get("WEIGHTBROKER_REQUIRE_GPUS", "0")) >= 2 else 77)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    with tempfile.TemporaryDirectory() as root:
        with Service(bin_dir, {"models": root}) as service:
            for model in GPU_MODELS:
                for quantize in False, True:
                    check_engines(service, root, model, sizes(2), quantize=quantize, on_gpus=True)


def check_engines(service, root, model, size, quantize=False, on_gpus=False):
    walk_model, config = MODELS[model]
    where = f"service, {model}{' fp8_block' if quantize else ''}{' on GPUs' if on_gpus else ''}"
    folder = f"{model}{'-bf16' if quantize else ''}"
    source = make(model, os.path.join(root, folder), quantized=not quantize)
    split = ["--torch_version", "any", "--tp", str(size["tp"]), "--layout", "fused"]
    split += ["--quantization", "fp8_block"] if quantize else []
    registered = service.run("weightbroker", "register", f"models:{folder}", *split)
    if registered.returncode:
        fail(f"{where}: {registered.stderr}")
    for rank in range(size["tp"]):
        walk = RankWalk(source, size, rank, "fused", quantize)
        walk_model(walk, config)
        device = ["--cuda_device", str(rank)] if on_gpus else []
        with tempfile.TemporaryDirectory() as dump:
            engine = service.run("engine", "--model", f"models:{folder}", *split, *device, "--mode", "client", "--fallback",
                                 "fail", "--rank", str(rank), "--verify", "--dump_dir", dump)
            if engine.returncode:
                fail(f"{where}: {engine.stdout} {engine.stderr}")
            if set(os.listdir(dump)) != set(walk.tensors) | set(aliases_of(model, config)):
                fail(f"{where}: rank {rank} has other names")
            for name, tensor in walk.tensors.items():
                with open(os.path.join(dump, name), "rb") as file:
                    memory = file.read()
                row = {"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "offset_bytes": 0,
                       "size_bytes": len(memory)}
                check_tensor(f"{where}, rank {rank}", tensor, row, memory)
    Totals.cases += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--bin_dir", help="of the service's programs, to check one, too")
    parser.add_argument("--gpus", action="store_true", help="check whole models on two GPUs, and nothing else")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--model")
    arguments = parser.parse_args()
    if arguments.gpus:
        check_gpus(arguments.bin_dir)
    elif not arguments.model:
        run_quantizer(arguments.program)
        check_conversion_rule(arguments.program)
        if arguments.bin_dir:
            check_service(arguments.bin_dir)
    for model in [] if arguments.gpus else [arguments.model] if arguments.model else MODELS:
        run_model(arguments.program, model, arguments.full)
    print(f"the same as the reference: {Totals.tensors} tensors, {Totals.bytes:,} bytes, in {Totals.cases} cases; "
          f"{Totals.refused} refused by both")


if __name__ == "__main__":
    main()
