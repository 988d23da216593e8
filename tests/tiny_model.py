"""A causal language model of a few kilobytes with random weights, for tests that run a real one.

torch and transformers are imported when a test asks for a model. Only tests marked slow do.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import kvcs

LAYERS = 4
KV_HEADS = 2
HEAD_DIM = 8
VOCABULARY = 97
WEIGHTS = "sha256:of-a-seed"


def require_live() -> None:
    """Skip the test without torch and transformers; in CI they must be there.

    Raises:
        pytest.skip.Exception, pytest.fail.Exception: they are not.
    """
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as exc:
        if os.environ.get("CI", "").lower() not in ("", "0", "false"):
            pytest.fail(f"{exc}: CI installs the extra `live` by scripts/setup --live")
        pytest.skip(f"{exc}: scripts/setup --live installs them")
    torch.set_num_threads(1)


def tiny_model(dtype: str = "float32", seed: int = 1, **settings: Any) -> Any:
    """A Llama with random weights; the same ones for the same seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 512,
            # Large enough that the model's choices depend on what it has read.
            "initializer_range": 0.3,
            "eos_token_id": None,
            "bos_token_id": None,
            **settings,
        }
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def prompt(tokens: int, seed: int = 5) -> list[int]:
    """Random token ids."""
    import random

    return random.Random(seed).choices(range(VOCABULARY), k=tokens)


def tiny_prefix(model: Any, token_ids: list[int], block_tokens: int = 8) -> kvcs.Prefix:
    """The prefix of a prompt for a model."""
    from kvcs.integrations import transformers as hf

    descriptor = hf.descriptor_for(
        model, weights=WEIGHTS, model_name="tiny", block_tokens=block_tokens
    )
    return kvcs.Prefix(kvcs.Scope(key=bytes(range(32))), descriptor, token_ids)


def computed(model: Any, prefix: kvcs.Prefix) -> tuple[Any, Any]:
    """Cache and last logits as both ends compute them: the whole blocks, then what is left over."""
    from transformers import DynamicCache

    from kvcs.integrations import transformers as hf

    token_ids = prefix.token_ids.tolist()
    cache = DynamicCache()
    hf.continue_from(model, cache, token_ids[: prefix.blocks * prefix.descriptor.block_tokens])
    return cache, hf.continue_from(model, cache, token_ids)


def greedy(model: Any, cache: Any, logits: Any, count: int = 12) -> list[int]:
    """Tokens that the model chooses behind its prompt."""
    import torch

    chosen: list[int] = []
    while len(chosen) < count:
        chosen.append(int(logits.argmax()))
        with torch.no_grad():
            logits = model(torch.tensor([chosen[-1:]]), cache=cache, use_cache=True).logits[0, -1]
    return chosen
