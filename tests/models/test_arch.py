"""Every architecture against transformers: tiny random models that it saved, loaded by us, run by `reference`."""

from __future__ import annotations

import dataclasses
import json
import warnings

import numpy as np
import pytest
import torch
import transformers

from spolia.models import load

from .tiny import VOCAB, VOCABULARY, logits_of, write_gguf, write_tokenizer

PROMPT = [int(i) for i in np.random.default_rng(0).integers(0, 257, 60)]  # longer than any window here
SIZES = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CASES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, as many KV heads": ("Llama", {"num_key_value_heads": 6}),
    "llama, llama3 scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, linear scaling": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, window": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows, yarn": (
        "Qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16, "rope_parameters": YARN},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "num_hidden_layers": 8, "sliding_window": 16}),
    "gemma3, scales and caps": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "num_hidden_layers": 8,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
            "rope_parameters": GEMMA3_ROPES,
        },
    ),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2, window, untied, no biases": (
        "Starcoder2",
        {"sliding_window": 16, "tie_word_embeddings": False, "use_bias": False},
    ),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3, window, part of a head turns": (
        "Phi3",
        {
            "pad_token_id": 0,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
}


def save_random(folder, name, settings, dtype=torch.float32, **save_options):
    """A model of transformers in float32 with random weights that `dtype` can hold, saved in that dtype.

    Biases and norms are random too, which its own initialisation leaves at 0 or 1.
    """
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.normal_(0.0, 0.3).to(dtype))
        transformers.utils.logging.disable_progress_bar()
        tensors = {name: value.to(dtype) for name, value in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=tensors, **save_options)
    write_tokenizer(folder)
    return model


def theirs(model, ids=PROMPT):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path, case):
    reference = theirs(save_random(tmp_path, *CASES[case]))
    ours = logits_of(load(tmp_path).program, PROMPT)
    assert np.abs(reference).max() > 0.5  # logits of nothing would agree too
    assert np.abs(ours - reference).max() < 1e-3


@pytest.mark.parametrize(
    "case",
    [
        "mistral, window",
        "qwen2, windows, yarn",
        "gemma3",
        "starcoder2, window, untied, no biases",
        "phi3, window, part of a head turns",
    ],
)
def test_the_window_decides_over_more_than_rounding(tmp_path, case):
    """Or the agreement of windowed models would show nothing about windows."""
    save_random(tmp_path, *CASES[case])
    program = load(tmp_path).program
    everywhere = dataclasses.replace(
        program, cache_layers=tuple(dataclasses.replace(layer, window=None) for layer in program.cache_layers)
    )
    difference = np.abs(logits_of(program, PROMPT) - logits_of(everywhere, PROMPT)).max(axis=1)
    assert difference[:16].max() == 0
    assert difference[16:].max() > 0.05


@pytest.mark.parametrize("case", ["starcoder2", "phi3"])
def test_a_gguf_file_of_the_same_tensors_is_the_same_model(tmp_path, case):
    name, settings = CASES[case]
    reference = theirs(save_random(tmp_path, name, {**settings, "vocab_size": VOCAB}))
    keys = {
        "block_count": SIZES["num_hidden_layers"],
        "context_length": SIZES["max_position_embeddings"],
        "embedding_length": SIZES["hidden_size"],
        "feed_forward_length": SIZES["intermediate_size"],
        "attention.head_count": SIZES["num_attention_heads"],
        "attention.head_count_kv": SIZES["num_key_value_heads"],
        "attention.layer_norm_epsilon" if case == "starcoder2" else "attention.layer_norm_rms_epsilon": 1e-5,
    }
    metadata = {"general.architecture": case, **{f"{case}.{key}": value for key, value in keys.items()}, **VOCABULARY}
    path = write_gguf(tmp_path / "model.gguf", metadata, load(tmp_path).tensors)
    assert np.abs(logits_of(load(path).program, PROMPT) - reference).max() < 1e-3


@pytest.mark.parametrize("case", ["llama", "gemma3", "starcoder2"])
def test_an_activation_that_config_json_leaves_out_is_the_architectures(tmp_path, case):
    reference = theirs(save_random(tmp_path, *CASES[case]))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert {"hidden_act", "hidden_activation"} & config.keys()
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in ("hidden_act", "hidden_activation")}))
    assert np.abs(logits_of(load(tmp_path).program, PROMPT) - reference).max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_read_exactly(tmp_path, dtype):
    reference = theirs(save_random(tmp_path, *CASES["gemma3"], dtype=dtype))
    program = load(tmp_path).program
    assert program.ops[0].table.type == ("BF16" if dtype == torch.bfloat16 else "F16")
    assert np.abs(logits_of(program, PROMPT) - reference).max() < 1e-3


def test_a_sharded_folder_is_the_same_model(tmp_path):
    reference = theirs(save_random(tmp_path, *CASES["qwen3"], max_shard_size="40KB"))
    model = load(tmp_path)
    assert len(model.paths) > 3
    assert np.abs(logits_of(model.program, PROMPT) - reference).max() < 1e-3
