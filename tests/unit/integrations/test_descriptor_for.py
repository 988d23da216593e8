"""Descriptors from configurations, which need no engine; and what real families make of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import kvcs
from kvcs.integrations.model_descriptors import check_model, descriptor_for
from tests.tiny_model import require_live

IMPORT_SECONDS = 300
"""Bound of a test that may be the first to read torch and transformers from the disk."""

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "_name_or_path": "tiny",
    "dtype": "torch.bfloat16",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


def config(**changes: Any) -> SimpleNamespace:
    members = {name: value for name, value in (CONFIG | changes).items() if value is not ...}
    return SimpleNamespace(**members)


def descriptor(**changes: Any) -> kvcs.Descriptor:
    return descriptor_for(config(**changes), weights="sha256:1")


def test_geometry_comes_from_the_configuration() -> None:
    assert descriptor() == kvcs.Descriptor(
        model="tiny",
        weights="sha256:1",
        layers=3,
        kv_heads=2,
        head_dim=8,
        dtype="bfloat16",
        block_tokens=16,
        extra={"rope_theta": 10000},
    )


@pytest.mark.parametrize(
    ("changes", "member", "value"),
    [
        ({"num_key_value_heads": ...}, "kv_heads", 8),
        ({"num_key_value_heads": None}, "kv_heads", 8),
        ({"num_key_value_heads": ..., "multi_query": True}, "kv_heads", 1),
        (
            {"num_key_value_heads": ..., "multi_query": True, "new_decoder_architecture": True},
            "kv_heads",
            8,
        ),
        ({"head_dim": 24}, "head_dim", 24),
        ({"dtype": "float16"}, "dtype", "float16"),
        ({"_name_or_path": ""}, "model", "llama"),
        ({"layer_types": ["full_attention"] * 3}, "layers", 3),
        ({"sliding_window": None}, "layers", 3),
        ({"num_kv_shared_layers": 0}, "layers", 3),
    ],
)
def test_what_is_left_out_has_its_usual_meaning(
    changes: dict[str, Any], member: str, value: object
) -> None:
    assert getattr(descriptor(**changes), member) == value


def test_the_caller_names_model_and_blocks() -> None:
    made = descriptor_for(
        config(), weights=kvcs.UNPINNED, model_name="SmolLM2-135M", block_tokens=32
    )
    assert (made.model, made.weights, made.block_tokens) == ("SmolLM2-135M", kvcs.UNPINNED, 32)


def test_a_models_dtype_goes_before_that_of_its_configuration() -> None:
    model = SimpleNamespace(config=config(), dtype="torch.float32")
    assert descriptor_for(model, weights="sha256:1").dtype == "float32"


def test_the_language_part_of_a_configuration_counts() -> None:
    outer = SimpleNamespace(get_text_config=lambda decoder: config(num_hidden_layers=7))
    assert descriptor_for(outer, weights="sha256:1").layers == 7


def test_rope_settings_go_to_extra_without_floats() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.5,
        "original_max_position_embeddings": 8192,
        "truncate": False,
        "attention_factor": None,
        "short_factor": [1.0, 2.5],
    }
    extra = descriptor(rope_parameters=rope).extra
    assert extra == {
        "rope_type": "llama3",
        "rope_theta": 500000,
        "rope_factor": 32,
        "rope_low_freq_factor": "1.5",
        "rope_original_max_position_embeddings": 8192,
        "rope_truncate": "False",
        "rope_short_factor": extra["rope_short_factor"],
    }
    other = descriptor(rope_parameters={**rope, "short_factor": [1.0, 2.6]}).extra
    assert other["rope_short_factor"] != extra["rope_short_factor"]


def test_rope_settings_of_the_one_kind_of_layer_mean_the_same() -> None:
    nested = {"full_attention": CONFIG["rope_parameters"]}
    assert descriptor(rope_parameters=nested) == descriptor()


@pytest.mark.parametrize("without", [None, ..., {}])
def test_a_model_without_rope_has_no_extra(without: object) -> None:
    assert descriptor(rope_parameters=without).extra == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_encoder_decoder": True}, "an encoder with a decoder"),
        ({"num_attention_heads": ...}, "no attention heads"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "linear_attention"]},
            "kinds linear_attention, sliding_attention besides",
        ),
        ({"sliding_window": 4096}, r"a sliding window \(sliding_window = 4096\)"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_kv_shared_layers": 15}, "share their keys and values"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, r"\(dynamic\) makes a token's keys"),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"\(longrope\) makes a token's keys"),
    ],
)
def test_other_caches_are_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(kvcs.UsageError, match=f"cannot be published: .*{reason}"):
        descriptor(**changes)


def test_a_dtype_is_needed() -> None:
    with pytest.raises(kvcs.UsageError, match="names a dtype"):
        descriptor(dtype=...)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"num_hidden_layers": 4}, "layers: ours 4, theirs 3"),
        ({"num_key_value_heads": 4}, "kv_heads: ours 4, theirs 2"),
        ({"head_dim": 16}, "head_dim: ours 16, theirs 8"),
        ({"dtype": "float16"}, "dtype: ours float16, theirs bfloat16"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "extra.rope_theta: ours 5, theirs 10000"),
        ({"rope_parameters": None}, "extra.rope_theta: ours absent, theirs 10000"),
    ],
)
def test_a_model_of_another_geometry_is_told_where(
    changes: dict[str, Any], difference: str
) -> None:
    with pytest.raises(kvcs.DescriptorMismatch, match=difference):
        check_model(config(**changes), descriptor())


def test_what_the_caller_added_to_extra_is_the_callers_word() -> None:
    made = descriptor()
    added = kvcs.Descriptor.from_json(
        {**made.to_json(), "extra": {**made.extra, "quantisation": "Q4_1"}}
    )
    check_model(config(), added)


SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.timeout(IMPORT_SECONDS)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"num_key_value_heads": 2, "head_dim": 16}),
        ("Qwen2", {"num_key_value_heads": 2}),
        ("Qwen3", {"num_key_value_heads": 1, "head_dim": 24}),
        ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
        ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 2}),
        ("Phi3", {"num_key_value_heads": 4}),
        ("Olmo", {}),
        ("GPT2", {}),
        ("GPTNeoX", {}),
        ("GPTBigCode", {"multi_query": True}),
        ("Falcon", {"multi_query": True}),
        ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("Bloom", {}),
    ],
)
def test_a_models_cache_has_the_geometry_of_its_descriptor(
    family: str, settings: dict[str, Any]
) -> None:
    require_live()
    import torch
    import transformers

    from kvcs.integrations.transformers import continue_from, from_dynamic_cache

    made = getattr(transformers, f"{family}Config")(**SMALL | settings)
    model = transformers.AutoModelForCausalLM.from_config(made).to(torch.bfloat16).eval()
    descriptor = descriptor_for(model, weights=kvcs.UNPINNED)
    cache = transformers.DynamicCache(config=made)
    continue_from(model, cache, [5, 6, 7])
    tensors = from_dynamic_cache(cache)
    assert len(tensors) == descriptor.layers == 2
    for tensor in (each for layer in tensors for each in layer):
        assert tuple(tensor.shape) == (3, descriptor.kv_heads, descriptor.head_dim)
        assert str(tensor.dtype) == f"torch.{descriptor.dtype}"


@pytest.mark.timeout(IMPORT_SECONDS)
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    (
        *("Mistral", "Gemma2", "Gemma3Text", "GptOss", "DeepseekV3", "Mamba"),
        *("T5", "Qwen3Next", "Llama4Text", "Jamba", "Zamba2", "Gemma3nText"),
    ),
)
def test_families_that_keep_something_else_are_refused(family: str) -> None:
    require_live()
    import transformers

    made = getattr(transformers, f"{family}Config")(dtype="bfloat16")
    with pytest.raises(kvcs.UsageError, match="cannot be published: it"):
        descriptor_for(made, weights=kvcs.UNPINNED)
