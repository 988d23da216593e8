"""What a transformers model's configuration says of its caches, and whether they can be published.

Nothing of torch or transformers is imported: a configuration is enough.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvcs.errors import DescriptorMismatch, UsageError
from kvcs.kv import Descriptor, Unpinned

BLOCK_TOKENS = 16
"""Tokens per block, unless the caller says otherwise."""

CHANGING_ROPE = ("dynamic", "longrope")
"""Kinds of rotary embedding whose keys depend on how long the whole context is."""

SHARED_EXTRA = "rope_"
"""How the members of ``extra`` begin that a model's configuration decides."""


def descriptor_for(
    model: Any,
    *,
    weights: str | Unpinned,
    model_name: str | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> Descriptor:
    """Compatibility Descriptor of the caches that a model makes, from its configuration.

    Rotary embedding settings go to ``extra``: numbers that are integers as such, others as text.

    Args:
        model: the model, or its configuration.
        weights: fingerprint of the weights, such as ``sha256:...`` of their file, or
            `kvcs.UNPINNED`. Names and configurations are equal for weights that differ.
        model_name: name for people; by default the one that the configuration has.
        block_tokens: tokens per block.

    Raises:
        UsageError: the model is not one of full attention in every layer; the message says why.
    """
    config = decoder_config(getattr(model, "config", model))
    reason = _unsupported(config)
    if reason is not None:
        raise UsageError(f"the cache of this model cannot be published: {reason}")
    heads = config.num_attention_heads
    dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None)
    if dtype is None:
        raise UsageError("neither the model nor its configuration names a dtype")
    name = model_name or getattr(config, "_name_or_path", "") or config.model_type
    return Descriptor(
        model=name,
        weights=weights,
        layers=config.num_hidden_layers,
        kv_heads=_kv_heads(config),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        extra=_rope(config),
    )


def check_model(model: Any, descriptor: Descriptor) -> None:
    """Check that a model's caches are what a descriptor says.

    Name and weights are the caller's word and are not compared.

    Raises:
        DescriptorMismatch: geometry, dtype or rotary embedding differ; the message says in what.
        UsageError: as `descriptor_for`.
    """
    own = descriptor_for(
        model,
        weights=descriptor.weights,
        model_name=descriptor.model,
        block_tokens=descriptor.block_tokens,
    )
    # What the caller has added to `extra`, quantisation for example, no configuration tells.
    said = {n: v for n, v in descriptor.extra.items() if not n.startswith(SHARED_EXTRA)}
    own = Descriptor.from_json({**own.to_json(), "extra": {**said, **own.extra}})
    differences = own.differences(descriptor)
    if differences:
        raise DescriptorMismatch(
            "the model does not make the caches of this descriptor: " + "; ".join(differences)
        )


def decoder_config(config: Any) -> Any:
    """The part of a configuration that describes the language model."""
    inner = getattr(config, "get_text_config", None)
    return config if inner is None else inner(decoder=True)


def _unsupported(config: Any) -> str | None:
    """Why the caches of a model have another form than keys and values of every token."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder with a decoder, which keep two caches"
    if getattr(config, "num_attention_heads", None) is None:
        return "its configuration names no attention heads"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"it has layers of the kinds {', '.join(sorted(kinds))} besides full attention"
    for name, what in (
        ("sliding_window", "a sliding window"),
        ("attention_chunk_size", "chunked attention"),
        ("kv_lora_rank", "latent attention, whose cache here is not the latent tensor"),
        ("num_kv_shared_layers", "layers that share their keys and values"),
    ):
        if getattr(config, name, None):
            return f"it has {what} ({name} = {getattr(config, name)})"
    kind = _rope_parameters(config).get("rope_type")
    if kind in CHANGING_ROPE:
        return f"its rotary embedding ({kind}) makes a token's keys depend on what follows it"
    return None


def _kv_heads(config: Any) -> int:
    # Two older families have one head for all, or repeat their few to as many as queries have.
    if getattr(config, "multi_query", False):
        repeated = getattr(config, "new_decoder_architecture", False)
        heads: int = config.num_attention_heads if repeated else 1
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads


def _rope_parameters(config: Any) -> Mapping[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or {}
    # Nested by kind of layer where there are several; with one kind it means the same.
    if set(parameters) == {"full_attention"}:
        parameters = parameters["full_attention"]
    return parameters if isinstance(parameters, Mapping) else {}


def _rope(config: Any) -> dict[str, str | int]:
    """Rotary embedding settings as members of ``extra``; what is left at its default is not named.

    A descriptor has no floats: their shortest exact text stands for them.
    """
    settings: dict[str, str | int] = {}
    for name, value in _rope_parameters(config).items():
        if value is None or (name == "rope_type" and value == "default"):
            continue
        member = name if name.startswith(SHARED_EXTRA) else SHARED_EXTRA + name
        if isinstance(value, bool | str):
            settings[member] = str(value)
        elif isinstance(value, int | float):
            settings[member] = int(value) if value == int(value) else repr(float(value))
        else:
            text = json.dumps(value, sort_keys=True)
            settings[member] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return settings
