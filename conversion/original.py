"""
DeepSeek's own code for its models, reduced to what a dense model computes: what conversions from and to that layout
are checked against.

Written after the published `inference/model.py` of DeepSeek-V3, with its names, its complex rotary embedding and
without the library, so that a fault in the tables shows as a difference.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from .layouts import ORIGINAL_DEFAULTS


@torch.no_grad()
def original_logits(
    read: Callable[[str], torch.Tensor], settings: Mapping[str, Any], input_ids: torch.Tensor
) -> torch.Tensor:
    """
    Logits of a dense model in the original DeepSeek layout, in float32.

    Args:
        read: gives a tensor by its name in that layout; one layer is held at a time.
        settings: content of its config.json.
        input_ids: [B, S].

    Returns:
        [B, S, vocab_size].
    """
    settings = {**ORIGINAL_DEFAULTS, **settings}
    heads, rank = settings["n_heads"], settings["kv_lora_rank"]
    nope, rope, value = (settings[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    batch, length = input_ids.shape
    rotation = _rotation(settings, length)
    softmax_scale = (nope + rope) ** -0.5
    if settings["max_seq_len"] > settings["original_seq_len"]:
        softmax_scale *= (0.1 * settings["mscale"] * math.log(settings["rope_factor"]) + 1.0) ** 2
    mask = torch.full((length, length), float("-inf")).triu_(1)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, read(f"{name}.weight").float())

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], read(f"{name}.weight").float(), eps=1e-6)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * rotation[:, None]).flatten(-2)

    x = F.embedding(input_ids, read("embed.weight").float())
    for layer in range(settings["n_layers"]):
        attn, ffn = f"layers.{layer}.attn", f"layers.{layer}.ffn"
        h = norm(x, f"layers.{layer}.attn_norm")
        if settings["q_lora_rank"]:
            q = linear(norm(linear(h, f"{attn}.wq_a"), f"{attn}.q_norm"), f"{attn}.wq_b")
        else:
            q = linear(h, f"{attn}.wq")
        q_nope, q_pe = q.view(batch, length, heads, nope + rope).split([nope, rope], dim=-1)
        kv, k_pe = linear(h, f"{attn}.wkv_a").split([rank, rope], dim=-1)
        kv = linear(norm(kv, f"{attn}.kv_norm"), f"{attn}.wkv_b").view(batch, length, heads, nope + value)
        k_nope, v = kv.split([nope, value], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q_nope, k_nope)
        scores += torch.einsum("bshr,btr->bsht", rotate(q_pe), rotate(k_pe[:, :, None])[:, :, 0])
        weights = (scores * softmax_scale + mask[:, None]).softmax(dim=-1)
        x = x + linear(torch.einsum("bsht,bthd->bshd", weights, v).flatten(2), f"{attn}.wo")
        h = norm(x, f"layers.{layer}.ffn_norm")
        x = x + linear(F.silu(linear(h, f"{ffn}.w1")) * linear(h, f"{ffn}.w3"), f"{ffn}.w2")
    return linear(norm(x, "norm"), "head")


def _rotation(settings: Mapping[str, Any], length: int) -> torch.Tensor:
    """Rotation of every pair of rotary channels by position, complex, [S, qk_rope_head_dim / 2]."""
    width, base, original = settings["qk_rope_head_dim"], settings["rope_theta"], settings["original_seq_len"]
    frequencies = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    if settings["max_seq_len"] > original:

        def channel(turns: float) -> float:
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(channel(settings["beta_fast"])), 0)
        high = min(math.ceil(channel(settings["beta_slow"])), width - 1)
        ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low or 0.001)
        kept = 1 - ramp.clamp(0, 1)
        frequencies = frequencies / settings["rope_factor"] * (1 - kept) + frequencies * kept
    return torch.polar(torch.ones(()), torch.outer(torch.arange(length), frequencies))
