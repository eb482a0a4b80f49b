"""Two ways to walk over a model: one makes its checkpoint, one works out what a rank of an engine holds of it.

A model is a function that calls the methods of a walk, one for each module. The ranges that it passes are those of the
rank that is asked about; making a checkpoint, they are all of it."""

from collections import namedtuple

import numpy as np

import fp8_blocks

BLOCK = 128


class Illegal(Exception):
    """What is asked for does not divide."""


# A linear layer's weight [outputs, inputs], and the outputs or inputs that the rank has of it.
Linear = namedtuple("Linear", "name outputs inputs rows columns bias")


def linear(name, outputs, inputs, rows=None, columns=None, bias=False):
    return Linear(name, outputs, inputs, rows, columns, bias)


class CheckpointWalk:
    """Adds every tensor of a model to a checkpoint."""

    layout = "hf"

    def __init__(self, checkpoint, quantized, dtype="BF16", store_flat=False):
        self.checkpoint, self.quantized, self.dtype, self.store_flat = checkpoint, quantized, dtype, store_flat

    def at(self, layer=None, stage=None):
        pass

    def even(self, count, size=1):
        return None

    heads = expert_even = even

    def kv_heads(self, count, size, may_replicate=True):
        return None

    def vocab(self, name, columns, stage=None):
        self.checkpoint.add(name, self.dtype, (self.checkpoint.config_vocab, columns))

    def whole(self, name, shape, dtype=None):
        self.checkpoint.add(name, dtype or self.dtype, shape)

    def sliced(self, name, shape, rows):
        self.checkpoint.add(name, self.dtype, shape)

    def linear(self, l, quantizable=True):
        shape = (l.outputs, l.inputs)
        if self.quantized and quantizable:
            self.checkpoint.add_block_fp8(l.name + ".weight", shape, self.store_flat)
        else:
            self.checkpoint.add(l.name + ".weight", self.dtype, shape)
        if l.bias:
            self.checkpoint.add(l.name + ".bias", self.dtype, (l.outputs,))

    def fused(self, name, parts, quantizable=True):
        for part in parts:
            self.linear(part, quantizable)

    def experts(self, prefix, count, of_expert, names):
        for expert in range(count):
            gate, up, down = of_expert(f"{prefix}{expert}.")
            for part in (gate, up, down):
                self.linear(part)

    def stacked(self, name, shape, axis, size, fused_name, transposed=False, first_rank_only=False):
        self.checkpoint.add(name, self.dtype, shape)


class Tensor:
    """What a rank holds: parts (index into it, source's name, index into the source, view of its data); the rest is
    zero."""

    def __init__(self, dtype, shape):
        self.dtype, self.shape, self.parts = dtype, tuple(shape), []

    def put(self, index, source, source_index, view):
        self.parts.append((index, source, source_index, view))


class RankWalk:
    """Collects what one rank holds, by name."""

    def __init__(self, source, sizes, rank, layout, quantize=False, dtype=None, unquantized=(), keep_mtp=True):
        self.source, self.layout, self.quantize, self.unquantized = source, layout, quantize, unquantized
        self.dtype, self.keep_mtp = dtype, keep_mtp
        tp, pp, ep = sizes["tp"], sizes["pp"], sizes["ep"]
        dp = sizes.get("dp", 1)
        self.tp, self.rank = tp, rank % tp
        self.pp, self.stage = pp, rank // (tp * dp)
        in_stage = rank % (tp * dp)
        if tp * dp % ep:
            raise Illegal("expert groups")
        self.ep = ep
        self.moe_tp = tp * dp // ep
        self.ep_rank, self.moe_rank = divmod(in_stage, self.moe_tp)
        self.tensors = {}
        self.active = True

    # Where something is.

    def set_layers(self, count, mtp=0):
        base, more = divmod(count, self.pp)
        sizes = [base] * self.pp
        for i in range(more):
            sizes[-2 - i] += 1
        if min(sizes) < 1:
            raise Illegal("too few layers")
        begin = sum(sizes[: self.stage])
        self.held_layers = range(begin, begin + sizes[self.stage])
        self.layer_count = count

    def at(self, layer=None, stage=None):
        if layer is not None:
            is_mtp = layer >= self.layer_count
            self.active = (self.keep_mtp and self.stage == self.pp - 1) if is_mtp else layer in self.held_layers
        else:
            self.active = {None: True, "first": self.stage == 0, "last": self.stage == self.pp - 1}[stage]

    # Which rows or columns.

    def _even(self, count, size, ranks, rank):
        if count % ranks:
            raise Illegal(f"{count} among {ranks}")
        each = count // ranks * size
        return [(rank * each, (rank + 1) * each)]

    def even(self, count, size=1):
        return self._even(count, size, self.tp, self.rank)

    heads = even

    def expert_even(self, count, size=1):
        return self._even(count, size, self.moe_tp, self.moe_rank)

    def kv_heads(self, count, size, may_replicate=True):
        if self.tp <= count or not may_replicate:
            return self.even(count, size)
        if self.tp % count:
            raise Illegal(f"{count} KV heads among {self.tp}")
        head = self.rank // (self.tp // count)
        return [(head * size, (head + 1) * size)]

    # What is there.

    def _out(self, name, dtype, shape):
        assert name not in self.tensors, name
        self.tensors[name] = Tensor(dtype, shape)
        return self.tensors[name]

    def _data(self, name, keep_dtype=False):
        dtype, data = self.source.get(name)
        if self.dtype and not keep_dtype and dtype in ("BF16", "F16", "F32") and dtype != self.dtype:
            return self.dtype, self.source.converted(name, self.dtype)
        return dtype, data

    def _put(self, name, source, index, keep_dtype=False):
        dtype, data = self._data(source, keep_dtype)
        view = data[index]
        self._out(name, dtype, view.shape).put((), source, index, view)

    def whole(self, name, shape, dtype=None):
        if self.active:
            self._put(name, name, (slice(None),) * len(shape), keep_dtype=dtype is not None)

    def sliced(self, name, shape, rows):
        if self.active:
            (begin, end), = rows
            self._put(name, name, (slice(begin, end),) + (slice(None),) * (len(shape) - 1))

    def vocab(self, name, columns, stage=None):
        if not self.active:
            return
        dtype, data = self._data(name)
        rows = -(-data.shape[0] // 64) * 64
        if self.layout == "hf" and self.tp == 1:
            rows = data.shape[0]
        if rows % self.tp:
            raise Illegal("vocabulary")
        each = rows // self.tp
        begin, end = (min(data.shape[0], r * each) for r in (self.rank, self.rank + 1))
        out = self._out(name, dtype, (each, columns))
        out.put((slice(0, end - begin),), name, (slice(begin, end),), data[begin:end])

    # Linear layers: alone, fused, or stacked.

    def _is_fp8(self, l, quantizable):
        name = l.name + ".weight"
        if self.source.get(name)[0] == "F8_E4M3":
            return True
        return self.quantize and quantizable and not self._is_ignored(l.name)

    def _is_ignored(self, module):
        spellings = {module}
        for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            head, _, last = module.rpartition(".")
            if last in parts:
                spellings.add(f"{head}.{fused}")
        segments = [s.split(".") for s in spellings]
        for entry in self.unquantized:
            wanted = entry.split(".")
            for have in segments:
                if any(have[i : i + len(wanted)] == wanted for i in range(len(have))):
                    return True
        return False

    def _ranges(self, l):
        rows = []
        for begin, end in l.rows or [(0, l.outputs)]:  # what is not apart in the checkpoint is one
            if rows and rows[-1][1] == begin:
                rows[-1] = (rows[-1][0], end)
            else:
                rows.append((begin, end))
        return rows, (l.columns or [(0, l.inputs)])[0]

    def _check_blocks(self, l, is_part):
        rows, (left, right) = l.rows, self._ranges(l)[1]
        cut = self.moe_tp if ".experts." in l.name else self.tp
        if l.rows and (cut > 1 or is_part):
            if any(a % BLOCK or (b - a) % BLOCK for a, b in rows):
                raise Illegal(f"{l.name}: {rows}")
        if l.columns and cut > 1 and (left % BLOCK or (right - left) % BLOCK):
            raise Illegal(f"{l.name}: {left}-{right}")

    def _assemble(self, name, parts, lead, out_index, quantizable, names):
        """Puts `parts` behind each other, at `out_index` of tensors with leading dimensions `lead`."""
        fp8 = {self._is_fp8(part, quantizable) for part in parts}
        if len(fp8) > 1:
            raise Illegal("some parts are quantized and some are not")
        for suffix in ["weight"] + ["bias"] * parts[0].bias + ["weight_scale_inv"] * fp8.pop():
            pieces = [piece for part in parts for piece in self._cut(part, suffix)]
            height = sum(piece[-1].shape[0] for piece in pieces)
            target = names.format(suffix)
            if target not in self.tensors:
                self._out(target, pieces[0][0], tuple(lead) + (height,) + pieces[0][-1].shape[1:])
            at = 0
            for _, source, index, view in pieces:
                place = tuple(out_index) + (slice(at, at + view.shape[0]),)
                self.tensors[target].put(place, source, index, view)
                at += view.shape[0]

    def _cut(self, l, suffix):
        """(dtype, source, index, view) for each range of rows."""
        rows, (left, right) = self._ranges(l)
        source = f"{l.name}.{suffix}"
        if suffix == "bias":
            dtype, data = self._data(source)
            return [(dtype, source, (slice(a, b),), data[a:b]) for a, b in rows]
        quantized = self.quantize and suffix != "bias" and not self._is_ignored(l.name) and (l.name + ".weight") in self.source.quantizable
        if quantized:
            codes, scales = self.source.quantized(l.name + ".weight")
            dtype, data = ("F8_E4M3", codes) if suffix == "weight" else ("F32", scales.view(np.uint32))
        elif suffix == "weight_scale_inv":
            dtype, data = self.source.get(source)
        else:
            dtype, data = self._data(source)
        if suffix == "weight_scale_inv":
            up = lambda n: -(-n // BLOCK)
            rows = [(a // BLOCK, up(b)) for a, b in rows]
            left, right = left // BLOCK, up(right)
        return [(dtype, source, (slice(a, b), slice(left, right)), data[a:b, left:right]) for a, b in rows]

    def linear(self, l, quantizable=True):
        if not self.active:
            return
        if quantizable:
            self.source.quantizable.add(l.name + ".weight")
        if self._is_fp8(l, quantizable):
            self._check_blocks(l, is_part=self.layout == "fused" and l.rows is not None and len(l.rows) > 1)
        self._assemble(l.name, [l], (), (), quantizable, l.name + ".{}")

    def fused(self, name, parts, quantizable=True):
        if not self.active:
            return
        if self.layout == "hf":
            for part in parts:
                self.linear(part, quantizable)
            return
        for part in parts:
            if quantizable:
                self.source.quantizable.add(part.name + ".weight")
            if self._is_fp8(part, quantizable):
                self._check_blocks(part, is_part=len(parts) > 1)
        self._assemble(name, parts, (), (), quantizable, name + ".{}")

    def experts(self, prefix, count, of_expert, names):
        if not self.active:
            return
        if count % self.ep:
            raise Illegal(f"{count} experts among {self.ep}")
        each = count // self.ep
        for local in range(each):
            parts = of_expert(f"{prefix}{self.ep_rank * each + local}.")
            for part in parts:
                self.source.quantizable.add(part.name + ".weight")
            if self.layout == "hf":
                for part in parts:
                    self.linear(part)
                continue
            gate, up, down = parts
            for group, stem in (([gate, up], "w13"), ([down], "w2")):
                for part in group:
                    if self._is_fp8(part, True):
                        self._check_blocks(part, is_part=len(group) > 1)
                self._assemble(stem, group, (each,), (local,), True, f"{prefix}{stem}_{{}}")

    def stacked(self, name, shape, axis, size, fused_name, transposed=False, first_rank_only=False):
        """Experts that the checkpoint has in one tensor; `axis` is split in units of `size`, None is whole."""
        if not self.active:
            return
        if shape[0] % self.ep:
            raise Illegal("experts")
        each = shape[0] // self.ep
        index = [slice(self.ep_rank * each, (self.ep_rank + 1) * each)] + [slice(None)] * (len(shape) - 1)
        if axis is not None:
            (begin, end), = self.expert_even(shape[axis] // size, size)
            index[axis] = slice(begin, end)
        index = tuple(index)
        if self.layout == "hf":
            self._put(name, name, index)
            return
        dtype, data = self._data(name)
        view = data[index]
        shown = view.transpose(0, 2, 1) if transposed else view
        out = self._out(fused_name, dtype, shown.shape)
        if not first_rank_only or self.moe_rank == 0:
            out.put((), name, index, shown)
