"""Block-wise FP8 by its definition, in numpy: blocks of 128x128, amax clamped at 1e-4, scale = amax / 448,
q = E4M3(x * (1 / scale))."""

import ml_dtypes
import numpy as np

BLOCK = 128
RAW = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def to_float(dtype, raw):
    """Raw integers of a floating-point type as float32."""
    return raw.view(RAW[dtype]).astype(np.float32)


def convert(dtype, raw, wanted):
    """Raw integers of one floating-point type as raw integers of another."""
    with np.errstate(over="ignore"):
        converted = to_float(dtype, raw).astype(RAW[wanted])
    return converted.view({2: np.uint16, 4: np.uint32}[converted.itemsize])


def grid(shape):
    return tuple(-(-n // BLOCK) for n in shape)


def quantize(values):
    """float32 [rows, columns] -> (E4M3 codes as uint8 [rows, columns], scales as float32 [grid])."""
    rows, columns = values.shape
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty(grid(values.shape), np.float32)
    for i in range(scales.shape[0]):
        band = values[i * BLOCK : (i + 1) * BLOCK]
        width = scales.shape[1] * BLOCK
        if width != columns:
            band = np.pad(band, ((0, 0), (0, width - columns)))
        blocks = band.reshape(band.shape[0], scales.shape[1], BLOCK)
        amax = np.maximum(np.abs(blocks).max(axis=(0, 2)), np.float32(1e-4))
        scales[i] = amax / np.float32(448)
        scaled = blocks * (np.float32(1) / scales[i])[None, :, None]
        quantized = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        codes[i * BLOCK : (i + 1) * BLOCK] = quantized.reshape(band.shape[0], width)[:, :columns]
    return codes, scales
