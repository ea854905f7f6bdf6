"""Reads a Hugging Face folder: config.json, and safetensors files as views of the mapped files, under GGUF's names.

    8 bytes: header length | header: JSON {name: {dtype, shape, data_offsets}} | data

One file `model.safetensors`, or several with an index. Everything the headers say is checked against what the files can
hold; a broken file is one `ModelError` in one line.

Source: the safetensors format, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spolia.errors import ModelError
from spolia.kernels.program import Weight
from spolia.kernels.quants import bytes_per_row, dequantize, quantize
from spolia.models.architecture import Architecture

__all__ = ["MODULES", "HfFolder", "read_folder", "read_json", "rename", "spelt"]

_DTYPES = ("F32", "F16", "BF16")
_MAX_HEADER = 100 * 1024 * 1024  # the format's own limit

MODULES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's module names, less the path to them, and GGUF's for the same tensors."""

_NAME = re.compile(r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
# Not the language model's, or worked out from the config.
_IGNORED = re.compile(r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\.|.*\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True, eq=False)
class HfFolder:
    """What a folder in Hugging Face's layout holds.

    Attributes:
        paths: the weight files, in order.
        tensors: by the names in the files; their data is mapped read-only.
    """

    paths: tuple[Path, ...]
    tensors: dict[str, Weight]


def read_folder(folder: Path) -> HfFolder:
    """Read the headers of a folder's safetensors files.

    Raises:
        ModelError: a file is missing, truncated, corrupt, or holds a type that is not supported.
    """
    paths = _weight_files(folder)
    tensors: dict[str, Weight] = {}
    for path in paths:
        for name, weight in _read_file(path).items():
            if name in tensors:
                raise ModelError(f"{path}: tensor {name!r} is in an earlier file too")
            tensors[name] = weight
    return HfFolder(paths, tensors)


def rename(folder: HfFolder, architecture: Architecture, *, tied: bool) -> dict[str, Weight]:
    """The folder's tensors as a GGUF file of `architecture` would have them: names, and norms that are what multiplies.

    Args:
        tied: the head is the embedding table; a file may hold a copy of it under its own name.

    Raises:
        ModelError: no name is known for a tensor, or two have the same.
    """
    modules = {**MODULES, **architecture.hf_names}
    renamed: dict[str, Weight] = {}
    for name, weight in folder.tensors.items():
        if _IGNORED.match(name):
            continue
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in modules:
            raise ModelError(f"{folder.paths[0]}: tensor {name!r} is not known to architecture {architecture.name}")
        layer, module, kind = match.groups()
        new_name = f"{f'blk.{layer}.' if layer else ''}{modules[module]}.{kind}"
        if tied and new_name == "output.weight":
            continue
        if new_name in renamed:
            raise ModelError(f"{folder.paths[0]}: tensors {name!r} and {renamed[new_name].name!r} mean the same")
        if architecture.hf_norm_offset and new_name.endswith("norm.weight"):
            weight = quantize(dequantize(weight) + np.float32(architecture.hf_norm_offset), "F32", name)
        renamed[new_name] = weight
    return renamed


def spelt(name: str, architecture: Architecture) -> str:
    """The usual name in safetensors files of the tensor that GGUF calls `name`: `rename`, the other way."""
    module_of = {part: module for module, part in {**MODULES, **architecture.hf_names}.items()}
    *layer, part, kind = name.split(".")  # layer: "blk" and its number, or nothing
    module = module_of.get(part, part)
    path = f"model.layers.{layer[1]}." if layer else "" if module == "lm_head" else "model."
    return f"{path}{module}.{kind}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: there is no such file, or it is not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a model folder holds config.json and safetensors files") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index_path = folder / "model.safetensors.index.json"
    if not index_path.exists():
        return (folder / "model.safetensors",)
    names = read_json(index_path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{index_path}: has no weight_map of tensor names to file names")
    for name in names.values():
        if Path(name).name != name:
            raise ModelError(f"{index_path}: names {name!r}, which is outside the folder")
    return tuple(folder / name for name in sorted(set(names.values())))


def _read_file(path: Path) -> dict[str, Weight]:
    try:
        with path.open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; weights are read from safetensors files only") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError:
        raise ModelError(f"{path}: not a safetensors file: it is empty") from None
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or header_bytes > min(_MAX_HEADER, len(data) - 8):
        raise ModelError(
            f"{path}: truncated or not a safetensors file: a header of {header_bytes} bytes, {len(data)} in all"
        )
    try:
        header = json.loads(data[8 : 8 + header_bytes].tobytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: corrupt header: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: corrupt header: no JSON object")
    header.pop("__metadata__", None)
    payload = data[8 + header_bytes :]
    return {
        name: _read_tensor(path, name, entry, payload) for name, entry in header.items() if not _IGNORED.match(name)
    }


def _read_tensor(path: Path, name: str, entry: object, payload: np.ndarray[Any, np.dtype[np.uint8]]) -> Weight:
    match entry:
        case {"dtype": str(dtype), "shape": list(dims), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise ModelError(f"{path}: corrupt header: tensor {name!r} lacks dtype, shape or data_offsets")
    if dtype not in _DTYPES:
        raise ModelError(f"{path}: tensor {name!r} is of type {dtype}; supported are {', '.join(_DTYPES)}")
    if not dims or not all(isinstance(dim, int) and dim > 0 for dim in dims):
        raise ModelError(f"{path}: tensor {name!r} has shape {dims}, expected sizes above 0")
    row_bytes = bytes_per_row(dtype, dims[-1])
    expected = math.prod(dims[:-1]) * row_bytes
    if stop - start != expected:
        raise ModelError(f"{path}: tensor {name!r} ({dtype} {dims}) has {stop - start} bytes, expected {expected}")
    if start < 0 or stop > len(payload):
        raise ModelError(
            f"{path}: truncated in tensor {name!r} ({dtype} {dims}): the data has {len(payload)} bytes, it needs {stop}"
            "; fetch it again"
        )
    return Weight(name, dtype, tuple(dims), payload[start:stop].reshape(-1, row_bytes))
