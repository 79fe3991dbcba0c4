"""What a forward pass checks before it computes: ids, embeddings with the ids they stand for, and the cache."""

import torch
from transformers.cache_utils import Cache
from transformers.utils import logging

from .configuration_egmla import EGMLAConfig


logger = logging.get_logger(__name__)

NO_VIRTUAL_TOKENS = (
    "Adapters that insert virtual tokens (prompt tuning, P-tuning, prefix tuning) have no ids and cannot be used: use "
    "LoRA instead."
)


def has_packed_documents(position_ids: torch.Tensor | None) -> bool:
    """
    Whether rows hold several documents, told apart by positions that begin again. A compiled model cannot look, and
    takes it that they may: the library's mask then looks itself.
    """
    if position_ids is None or position_ids.shape[-1] < 2:
        return False
    return torch.compiler.is_compiling() or bool((position_ids.diff(dim=-1) < 1).any())


def starts_documents(
    cache: Cache | None, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> bool:
    """
    Whether rows hold several documents that must not see each other, which the library's mask overlooks with a cache.

    Raises:
        ValueError: they would be appended to a cache that holds tokens already, or that has a fixed room.
    """
    if attention_mask is not None or not has_packed_documents(position_ids):
        return False
    if cache is None or torch.compiler.is_compiling():
        return cache is None
    if cache.is_compileable or cache.get_seq_length():
        raise ValueError(
            "`position_ids` begin again within a row, so it holds several documents; these cannot go into a static "
            "cache, or behind what a cache holds. Give each document a row, or a prepared 4D `attention_mask`."
        )
    return True


def check_ids_in_vocabulary(token_ids: torch.Tensor, vocab_size: int) -> None:
    """Raises a `ValueError` that names the first id outside the vocabulary."""
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        raise ValueError(
            f"Token id {token_ids[outside][0].item()} lies outside the vocabulary: ids run from 0 to {vocab_size - 1} "
            "(`vocab_size`). The tokenizer may not belong to the model, or tokens were added to it without "
            "`model.resize_token_embeddings(len(tokenizer))`."
        )


def find_token_ids(
    config: EGMLAConfig,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    token_ids: torch.Tensor | None,
) -> torch.Tensor:
    """
    Returns the ids by which gates are looked up, [B, S]: `input_ids`, or `token_ids` beside embeddings.

    Raises:
        ValueError: embeddings come without ids, or with another number of them; ids are no whole numbers, or there
            are none; on a CPU, an id is outside the vocabulary.
    """
    if input_ids is not None:
        token_ids = input_ids
        if input_ids.numel() == 0:
            raise ValueError(f"`input_ids` has shape {tuple(input_ids.shape)}, which is no token at all: give one.")
    elif token_ids is None and config.kv_gate != "none":
        raise ValueError(
            "EG-MLA looks its gates up by token id, so `inputs_embeds` needs `token_ids` beside it: one id for an "
            f"embedding, shape [batch, sequence]. {NO_VIRTUAL_TOKENS}"
        )
    elif token_ids is None:
        # Without gates ids are not read: -1 says that they are not known.
        return torch.full(inputs_embeds.shape[:2], -1, dtype=torch.long, device=inputs_embeds.device)
    elif token_ids.shape != inputs_embeds.shape[:2]:
        raise ValueError(
            f"`token_ids` must have one id for each embedding, but has shape {tuple(token_ids.shape)} beside "
            f"`inputs_embeds` of shape {tuple(inputs_embeds.shape)}."
        )
    if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise ValueError(f"Token ids must be whole numbers, but are {token_ids.dtype}.")
    # On an accelerator this would wait for the device at every step; `generate` checks its prompt there.
    if token_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        check_ids_in_vocabulary(token_ids, config.vocab_size)
    # `generate` moves the prompt to the model, and not what comes beside it.
    return token_ids if inputs_embeds is None else token_ids.to(inputs_embeds.device)


def check_cache(config: EGMLAConfig, cache: Cache) -> None:
    """
    Says once that a cache of another class holds expanded keys and values; not looked at while compiling.

    Raises:
        ValueError: another model filled the cache.
    """
    if torch.compiler.is_compiling():
        return
    if getattr(cache, "holds_latents", False):
        cache.check(config)
        return
    logger.warning_once(
        f"A {type(cache).__name__} holds expanded keys and values: {config.num_attention_heads} heads of "
        f"{config.qk_head_dim} + {config.v_head_dim} elements a token and layer, where an EGMLACache holds "
        f"{config.kv_lora_rank} + {config.qk_rope_head_dim} in all. Results are the same."
    )
    layers = getattr(cache, "layers", [])
    keys = getattr(layers[0], "keys", None) if layers else None
    if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.shape[-2] > 0:
        expected = (config.num_attention_heads, config.qk_head_dim)
        if (keys.shape[1], keys.shape[3]) != expected:
            raise ValueError(
                f"The {type(cache).__name__} holds {keys.shape[1]} heads of {keys.shape[3]} key channels, which this "
                f"model did not write: it has {expected[0]} of {expected[1]}. {NO_VIRTUAL_TOKENS}"
            )
