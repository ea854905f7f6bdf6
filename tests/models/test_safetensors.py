"""Hugging Face folders: what config.json may say, and files that are not right."""

from __future__ import annotations

import json
import re
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from spolia.errors import ModelError
from spolia.models import load
from spolia.models.arch import BY_MODEL_TYPE
from spolia.models.config import config_from_json
from spolia.models.safetensors import read_folder

from .test_arch import CASES, save_random

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


def config(tmp_path, model_type, **settings):
    return config_from_json(tmp_path / "config.json", {**SIZES, **settings}, BY_MODEL_TYPE[model_type])


@pytest.mark.parametrize(
    ("model_type", "old", "new"),
    [
        ("llama", {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            "qwen2",
            {
                "rope_theta": 1e6,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        (
            "gemma3_text",
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 2e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window": 32,
                "sliding_window_pattern": 3,
            },
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                },
                "sliding_window": 32,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            },
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4},
            {
                "use_sliding_window": True,
                "sliding_window": 32,
                "layer_types": ["full_attention"] * 4 + ["sliding_attention"] * 2,
            },
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 32}, {"sliding_window": None}),
    ],
)
def test_transformers_4_and_5_spell_the_same_config(tmp_path, model_type, old, new):
    assert config(tmp_path, model_type, **old) == config(tmp_path, model_type, **new)


def test_yarn_makes_the_context_longer(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert config(tmp_path, "qwen2", rope_scaling=scaling).context_length == 1024


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing: expected an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: expected an integer from 1 to 1024"),
        ({"num_key_value_heads": 3}, "layer 0 has 4 heads on 3 KV heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"head_dim": 15}, "turns 15 dimensions of heads of 15"),
        ({"hidden_act": "relu"}, "supported are silu"),
        ({"num_local_experts": 8}, "mixtures of experts are not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "supported are none, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": [4]}, "rope_scaling is [4]: expected an object"),
        ({"sliding_window": 8, "layer_types": ["chunked_attention"] * 6}, "expected 6 of sliding_attention"),
        ({"use_bidirectional_attention": True}, "only causal attention"),
    ],
)
def test_a_config_that_is_not_supported_is_told_by_field_and_value(tmp_path, settings, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        config(tmp_path, "llama", **settings)


def header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return header({"w": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}, bytes(24))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"1234", "truncated or not a safetensors file"),
        (struct.pack("<Q", 2**60) + b"{}", "truncated or not a safetensors file"),
        (struct.pack("<Q", 2) + b"{]", "corrupt header"),
        (struct.pack("<Q", 2) + b"[]", "corrupt header: no JSON object"),
        (struct.pack("<Q", 40_000) + b"[" * 40_000, "corrupt header"),
        (header({"w": {"dtype": "F32"}}), "tensor 'w' lacks dtype, shape or data_offsets"),
        (entry(dtype="F8_E4M3"), "tensor 'w' is of type F8_E4M3; supported are F32, F16, BF16"),
        (entry(shape=(2, -3)), "has shape [2, -3]"),
        (entry(shape=()), "has shape []"),
        (entry(offsets=(0, 20)), "(F32 [2, 3]) has 20 bytes, expected 24"),
        (entry(offsets=(8, 32)), "truncated in tensor 'w' (F32 [2, 3]): the data has 24 bytes, it needs 32"),
        (entry(offsets=(-24, 0)), "truncated in tensor 'w'"),
        (entry(shape=(2**40, 2**40)), "has 24 bytes, expected"),
    ],
)
def test_a_broken_file_is_told_in_one_line(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_folder(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_are_views_of_the_mapped_file(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file({"w": values}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weight = read_folder(tmp_path).tensors["w"]
    assert not weight.data.flags.owndata
    np.testing.assert_array_equal(weight.data.view("<f4"), values)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"w": "../model.safetensors"}}', "outside the folder"),
        ('{"weight_map": {"w": "absent.safetensors"}}', "absent.safetensors: no such file"),
    ],
)
def test_a_broken_index_is_told(tmp_path, index, message):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=re.escape(message)):
        read_folder(tmp_path)


def rewrite(folder, change):
    """Save the folder's tensors again after `change` of the dictionary."""
    from safetensors.numpy import load_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "tensor 'model.layers.1.mlp.up_proj.weight' of shape [64, 48] is missing",
        ),
        (lambda t: t.pop("model.embed_tokens.weight"), "'model.embed_tokens.weight' of shape [257, 48] is missing"),
        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing, and tie_word_embeddings is false"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(47, np.float32)}),
            "tensor 'model.norm.weight' has shape [47], expected [48]",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.router.weight": np.ones((2, 2), np.float32)}),
            "tensor 'model.layers.0.mlp.router.weight' is not known to architecture llama",
        ),
        (
            lambda t: t.update({"model.layers.3.input_layernorm.weight": np.ones(48, np.float32)}),
            "tensor 'model.layers.3.input_layernorm.weight' is not used by architecture llama",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_architecture_are_named(tmp_path, change, message):
    save_random(tmp_path, *CASES["llama"])
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=re.escape(message)):
        load(tmp_path)


def test_a_folder_without_a_model_is_told(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match="model_type 'mamba' is not supported; supported are llama, mistral, qwen2"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {}}')
    with pytest.raises(ModelError, match="quantised safetensors are not supported; take the GGUF"):
        load(tmp_path)
