"""
Attention of one or a few new queries on the compressed cache, without keys and values of the whole history at once.

Exact ways, derived in docs/decoding.md. *Tiles* expand a piece of the history at a time, with the modules of the
attention, and add it to a running softmax. *Grouped* never expands: it takes the query to the latents, once for each
distinct token id (plain MLA and additive gates: once). *Fused* is a kernel for accelerators (fused_egmla.py). Where
none applies, attention expands the whole history.

Shapes: B batch, S query length, T cached length with the new tokens, H heads, N `qk_nope_head_dim`, V `v_head_dim`,
C `kv_lora_rank`, R `qk_rope_head_dim`, K = N + R, D = H * (N + V), U distinct ids of a sequence, P places for its
positions when sorted by id, A = H * S.
"""

from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .cache_egmla import GrowingTensor
from .fused_egmla import HAS_TRITON, can_fuse, fused_attention
from .gate_egmla import Sources, has_fast_matmul, is_plain, project


KV_DECODINGS = ("auto", "expanded", "tiles", "grouped", "fused")
TILE_TOKENS = 1024
COMPILED_TILE_TOKENS = 256
REGROUP_AFTER = 16  # appended tokens, each a group of its own, after which a sequence is sorted again

# Limits of "auto", measured in docs/decoding.md: history in features (T * D) and new tokens up to which each way pays.
MIN_FEATURES = 1 << 18
MAX_QUERIES_GROUPED = {"multiply": 4, "add": 16, "none": 16}
MAX_QUERIES_TILES = 16


class History(NamedTuple):
    """What the cache holds for a layer group."""

    latents_BTC: torch.Tensor
    k_rot_BTR: torch.Tensor
    token_ids_BT: torch.Tensor

    @classmethod
    def of(cls, cache, group_idx: int) -> "History":
        """What is filled; of a static cache being compiled, its whole room."""
        layer = cache.layers[group_idx]
        length = None if torch.compiler.is_compiling() else int(layer.get_seq_length())
        token_ids_BT = cache.token_ids[:, :length].to(layer.keys.device)
        return cls(layer.keys[:, 0, :length], layer.values[:, 0, :length], token_ids_BT)


def check_decoding(decoding: str) -> None:
    """Raises a `ValueError` if there is no such way to decode, or triton, which "fused" needs, is not installed."""
    if decoding not in KV_DECODINGS:
        raise ValueError(f"`decoding` must be one of {KV_DECODINGS}, but is {decoding!r}.")
    if decoding == "fused" and not HAS_TRITON:
        raise ValueError("`decoding='fused'` needs triton, which torch brings for CUDA: `pip install triton`.")


def select_decoding(attention: nn.Module, query_BHSK: torch.Tensor, mask: torch.Tensor | None, cache) -> str:
    """
    Returns the way to compute attention, "expanded", "tiles", "grouped" or "fused".

    `attention.kv_decoding` names it, or leaves it to measurements on CPUs ("auto", see docs/decoding.md); one that
    cannot be used gives way to one that can. "grouped" and "fused" read weights, which must be torch's own, and are
    not compiled; none knows gradients, autocast, masks other than those of `sdpa`, or a cache whose filled length is
    not on the host. A prompt of more than a few tokens is expanded, and grouping is for a few new tokens.
    """
    wanted, S = attention.kv_decoding, query_BHSK.shape[2]
    if (
        wanted == "expanded"
        or not getattr(cache, "holds_latents", False)
        or cache.offloading
        or attention.config._attn_implementation != "sdpa"
        or attention.training
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled(query_BHSK.device.type)
        or not ((mask is None and S == 1) or (torch.is_tensor(mask) and mask.dim() == 4))
    ):
        return "expanded"
    layer, is_compiling = cache.layers[attention.group_idx], torch.compiler.is_compiling()
    if layer.keys.device != query_BHSK.device or (layer.is_compileable and layer.keys.device.type != "cpu"):
        return "expanded"
    if is_compiling and (mask is None or not layer.is_compileable):
        return "expanded"
    length = layer.get_max_length() if is_compiling else int(layer.get_seq_length())
    if length == S > MAX_QUERIES_TILES:
        return "expanded"  # a prompt: all is new, so nothing is spared
    if wanted == "auto":
        if query_BHSK.device.type != "cpu":
            return "expanded"  # grouping and tiles are many small calls; nothing was measured elsewhere
        if length * attention.config.kv_width < MIN_FEATURES or S > MAX_QUERIES_TILES:
            return "expanded"
        wanted = "grouped" if MAX_QUERIES_GROUPED[attention.kv_gate] >= S else "tiles"
    if wanted == "tiles" or is_compiling or S > MAX_QUERIES_TILES or not reads_weights(attention):
        return "tiles"  # grouping takes the query to the latents of each distinct id: memory is their product
    return wanted if wanted == "grouped" or can_fuse(attention, query_BHSK, layer.keys) else "tiles"


def reads_weights(attention: nn.Module) -> bool:
    """Whether up-projection and norm, and the gate whose statistics are kept, are what their weights say."""
    modules = [attention.up_projection]
    if attention.kv_gate != "none":
        modules.append(attention.kv_gate_norm)
        if isinstance(attention.kv_gate_norm, nn.LayerNorm):
            modules += [attention.kv_gate_embed, attention.kv_gate_proj]
    return is_plain(*modules) and modules[0].bias is None


def is_normed(attention: nn.Module) -> bool:
    """Whether what was gated goes through a LayerNorm."""
    return attention.kv_gate != "none" and isinstance(attention.kv_gate_norm, nn.LayerNorm)


def decode(attention: nn.Module, decoding: str, query_BHSK: torch.Tensor, mask: torch.Tensor | None, cache):
    """
    Attention of `query_BHSK`, whose tokens the cache holds already, by "tiles", "grouped" or "fused".

    `mask` is None (one query that sees everything), boolean (True: attend) or additive, [B or 1, H or 1, S, T] or
    longer. Returns [B, S, H * V].
    """
    if decoding == "tiles":
        out_BSHV = tiled_attention(attention, query_BHSK, mask, cache)
    elif decoding == "grouped":
        out_BSHV = grouped_attention(attention, query_BHSK, mask, cache)
    else:
        history = History.of(cache, attention.group_idx)
        mask_BHT = None if mask is None else additive(mask)[:, :, 0, : history.latents_BTC.shape[1]]
        statistics_B2T = gated_statistics(attention, history, cache) if is_normed(attention) else None
        out_BSHV = fused_attention(attention, query_BHSK, mask_BHT, *history, statistics_B2T)
    return out_BSHV.flatten(2).to(query_BHSK.dtype)


def accumulator_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Precision of scores and of sums over positions."""
    return torch.promote_types(tensor.dtype, torch.float32)


def product_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Precision of products with gates: bfloat16 where it is fast (float16 has no range for them), else float32."""
    return tensor.dtype if tensor.dtype == torch.bfloat16 and has_fast_matmul(tensor) else accumulator_dtype(tensor)


def additive(mask: torch.Tensor) -> torch.Tensor:
    """
    A mask as something to add to scores.

    Raises:
        ValueError: it is neither boolean nor floating, so that ones and zeros would be added.
    """
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
    if not mask.is_floating_point():
        raise ValueError(f"A prepared attention mask must be boolean or floating, but is {mask.dtype}.")
    return mask.float()


def pieces(stop: int, size: int, start: int = 0) -> list[slice]:
    """Slices of at most `size` that cover `start` to `stop`."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def tiled_attention(attention: nn.Module, query_BHSK: torch.Tensor, mask: torch.Tensor | None, cache) -> torch.Tensor:
    """Attention by a running softmax over tiles of the history, [B, S, H, V] in float32."""
    history = History.of(cache, attention.group_idx)
    if torch.compiler.is_compiling():
        filled = cache.layers[attention.group_idx].cumulative_length
        return looped_attention(attention, query_BHSK, mask, history, filled)
    B, T = history.token_ids_BT.shape
    out = []
    for rows in pieces(B, max(1, TILE_TOKENS // T)):
        state = RunningSoftmax.start(query_BHSK[rows], attention.v_head_dim)
        for columns in pieces(T, TILE_TOKENS):
            tile = History(*(stream[rows, columns] for stream in history))
            part = None if mask is None else mask[rows if mask.shape[0] > 1 else slice(None), ..., columns]
            state = attend_to_tile(attention, query_BHSK[rows], part, tile, state)
        out.append(state.finish())
    return torch.cat(out)


def looped_attention(
    attention: nn.Module, query_BHSK: torch.Tensor, mask: torch.Tensor, history: History, filled: torch.Tensor
) -> torch.Tensor:
    """`tiled_attention` as one loop in a compiled graph, which ends where the static cache is `filled`."""
    T = history.token_ids_BT.shape[1]
    offsets = torch.arange(COMPILED_TILE_TOKENS, device=query_BHSK.device)

    def is_left(start, *state):
        return start < filled

    def attend(start, *state):
        index = start + offsets
        part = additive(mask.index_select(-1, index.clamp(max=T - 1))).masked_fill(index >= T, -torch.inf)
        tile = History(*(stream.index_select(1, index.clamp(max=T - 1)) for stream in history))
        state = attend_to_tile(attention, query_BHSK, part, tile, RunningSoftmax(*state))
        return start + COMPILED_TILE_TOKENS, *state

    start = torch.zeros((), dtype=torch.long, device=query_BHSK.device)
    state = RunningSoftmax.start(query_BHSK, attention.v_head_dim)
    _, *state = torch.while_loop(is_left, attend, (start, *state))
    return RunningSoftmax(*state).finish()


class RunningSoftmax(NamedTuple):
    """Weighted sum of values, sum of weights and largest score so far, of every query and head."""

    out_BHSV: torch.Tensor
    total_BHS1: torch.Tensor
    peak_BHS1: torch.Tensor

    @classmethod
    def start(cls, query_BHSK: torch.Tensor, v_head_dim: int) -> "RunningSoftmax":
        (B, H, S, _), dtype = query_BHSK.shape, accumulator_dtype(query_BHSK)
        total_BHS1 = query_BHSK.new_zeros((B, H, S, 1), dtype=dtype)
        peak_BHS1 = torch.full_like(total_BHS1, torch.finfo(dtype).min)
        return cls(query_BHSK.new_zeros((B, H, S, v_head_dim), dtype=dtype), total_BHS1, peak_BHS1)

    def add(self, scores_BHST: torch.Tensor, values_BHTV: torch.Tensor) -> "RunningSoftmax":
        peak_BHS1 = torch.maximum(self.peak_BHS1, scores_BHST.amax(-1, keepdim=True))
        rescale_BHS1 = torch.exp(self.peak_BHS1 - peak_BHS1)
        weights_BHST = torch.exp(scores_BHST - peak_BHS1)
        out_BHSV = torch.matmul(weights_BHST, values_BHTV) + self.out_BHSV * rescale_BHS1
        return RunningSoftmax(out_BHSV, weights_BHST.sum(-1, keepdim=True) + self.total_BHS1 * rescale_BHS1, peak_BHS1)

    def finish(self) -> torch.Tensor:
        """[B, S, H, V]. A query that sees nothing gets zeros, as from `scaled_dot_product_attention`."""
        smallest = torch.finfo(self.total_BHS1.dtype).tiny
        return (self.out_BHSV / self.total_BHS1.clamp(min=smallest)).transpose(1, 2)


def attend_to_tile(
    attention: nn.Module, query_BHSK: torch.Tensor, mask: torch.Tensor | None, tile: History, state: RunningSoftmax
) -> RunningSoftmax:
    """Expands a piece of the history with the modules of the attention, and adds it to the running softmax."""
    kv_features = project(attention.up_projection, tile.latents_BTC)
    keys, values = attention.expand_kv(kv_features, tile.k_rot_BTR.unsqueeze(1), tile.token_ids_BT)
    dtype = state.out_BHSV.dtype
    scores = torch.matmul(query_BHSK.to(dtype) * attention.scaling, keys.to(dtype).transpose(-1, -2))
    return state.add(scores if mask is None else scores + additive(mask), values.to(dtype))


class TokenGroups:
    """
    The positions of one sequence sorted by token id, for all layers.

    Ids with about equally many positions form a block of `count` groups with `size` places each; a group fills its
    first places, and repeats a position in the others, which do not count. Appended tokens become groups of one.

    Args:
        token_ids: [T].
    """

    def __init__(self, token_ids: torch.Tensor):
        distinct, inverse, counts = token_ids.unique(return_inverse=True, return_counts=True)
        order = inverse.argsort(stable=True)
        starts = counts.cumsum(0) - counts
        most = int(counts.max())
        powers = [4**k for k in range(((most - 1).bit_length() + 1) // 2 + 1)]

        self.blocks: list[tuple[int, int]] = []  # (count, size), largest size first, ones last
        ids, positions, counted, places = [], [], [], torch.empty_like(order)
        num_places = 0
        for power in reversed(powers):
            members = ((counts > power // 4) & (counts <= power)).nonzero().squeeze(1)
            size = min(power, most)
            slot_1P = torch.arange(size, device=order.device)[None]
            counts_U1 = counts[members][:, None]
            position_UP = order[starts[members][:, None] + torch.minimum(slot_1P, counts_U1 - 1)]
            is_first_UP = slot_1P < counts_U1
            place_UP = torch.arange(position_UP.numel(), device=order.device).view_as(position_UP) + num_places
            places[position_UP[is_first_UP]] = place_UP[is_first_UP]
            ids.append(distinct[members])
            positions.append(position_UP.flatten())
            counted.append(is_first_UP.flatten())
            self.blocks.append((len(members), size))
            num_places += position_UP.numel()

        self.ids_U = torch.cat(ids)
        self.position_P = torch.cat(positions)  # of a place
        self.counts_P = torch.cat(counted)  # whether a place is the only one of its position
        self.place_T = places  # of a position
        self.sorted_length = self.length = len(token_ids)

    def append(self, token_ids: torch.Tensor) -> None:
        first = torch.arange(len(token_ids), device=token_ids.device)
        self.ids_U = torch.cat((self.ids_U, token_ids))
        self.place_T = torch.cat((self.place_T, first + len(self.position_P)))
        self.position_P = torch.cat((self.position_P, first + self.length))
        self.counts_P = torch.cat((self.counts_P, torch.ones_like(first, dtype=torch.bool)))
        count, size = self.blocks[-1]
        self.blocks[-1] = (count + len(token_ids), size)
        self.length += len(token_ids)

    @property
    def group_T(self) -> torch.Tensor:
        """Index into `ids_U` of each position."""
        counts, sizes = torch.tensor(self.blocks, device=self.place_T.device).T
        groups_U = torch.arange(len(self.ids_U), device=self.place_T.device)
        return groups_U.repeat_interleave(sizes.repeat_interleave(counts))[self.place_T]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.ids_U, self.position_P, self.counts_P, self.place_T))


def token_groups(cache, token_ids: torch.Tensor) -> list[TokenGroups]:
    """Groups of every sequence, kept with the cache: brought up to `token_ids` [B, T], or made anew."""
    holder, T = cache.layers[0], token_ids.shape[1]
    if not holder.token_groups or T - holder.token_groups[0].sorted_length > REGROUP_AFTER:
        holder.token_groups = [TokenGroups(row) for row in token_ids]
    for groups, row in zip(holder.token_groups, token_ids):
        if groups.length < T:
            groups.append(row[groups.length :])
    return holder.token_groups


def gated_statistics(attention: nn.Module, history: History, cache) -> torch.Tensor:
    """
    Mean and inverse deviation over all D gated features of every token, [B, 2, T] in float32 or wider: what the
    LayerNorm makes of a token, kept with the cache.
    """
    kept = cache.layers[attention.group_idx].statistics
    stream = kept.get(attention.layer_idx)
    parameters = [m.weight for m in (attention.up_projection, attention.kv_gate_embed, attention.kv_gate_proj)]
    placement = attention.kv_gate_placement  # narrowed gates are other gates
    if stream is not None:
        sources, placed = stream.made_from
        if placed != placement or not sources.is_current(parameters):
            stream = None
    (B, T), start = history.token_ids_BT.shape, 0 if stream is None else stream.length
    if start < T:
        dtype = accumulator_dtype(history.latents_BTC)
        weight = attention.up_projection.weight.to(dtype)
        new = torch.empty((B, 2, T - start), dtype=dtype, device=weight.device)
        for rows, columns in product(pieces(B, max(1, TILE_TOKENS // (T - start))), pieces(T, TILE_TOKENS, start)):
            kv_features = F.linear(history.latents_BTC[rows, columns].to(dtype), weight)
            gates = attention.kv_gates(history.token_ids_BT[rows, columns])
            kv_features = kv_features.mul_(gates) if attention.kv_gate == "multiply" else kv_features.add_(gates)
            variance, mean = torch.var_mean(kv_features, -1, correction=0)
            tile = new[rows, :, columns.start - start : columns.stop - start]
            tile[:, 0], tile[:, 1] = mean, (variance + attention.kv_gate_norm.eps).rsqrt()
        if stream is None:
            stream = GrowingTensor(new, dim=-1, made_from=(Sources(parameters), placement))
            kept[attention.layer_idx] = stream
        else:
            stream.append(new)
    return stream.filled


def grouped_attention(
    attention: nn.Module, query_BHSK: torch.Tensor, mask: torch.Tensor | None, cache
) -> torch.Tensor:
    """Attention on the latents themselves, [B, S, H, V] in float32; docs/decoding.md has the formulas."""
    history = History.of(cache, attention.group_idx)
    (B, H, S, _), dtype = query_BHSK.shape, accumulator_dtype(query_BHSK)
    N, V, R = attention.qk_nope_head_dim, attention.v_head_dim, attention.qk_rope_head_dim
    weights = attention.up_projection.weight.to(dtype).view(H, N + V, -1).split([N, V], dim=1)
    q_nope_BHSN, q_rot_BHSR = (query_BHSK.to(dtype) * attention.scaling).split([N, R], dim=-1)

    is_gated, has_norm = attention.kv_gate != "none", is_normed(attention)
    if has_norm:
        norm = attention.kv_gate_norm
        gamma_H1NV, beta_H1NV = (p.to(dtype).view(H, 1, N + V) for p in (norm.weight, norm.bias))
        q_nope_BHSN = q_nope_BHSN * gamma_H1NV[..., :N]
        statistics_B2T = gated_statistics(attention, history, cache)
    groups = token_groups(cache, history.token_ids_BT) if is_gated else [None] * B
    maps_class = GroupedMaps if attention.kv_gate == "multiply" else SharedMaps

    out_BSHV = query_BHSK.new_empty((B, S, H, V), dtype=dtype)
    for b in range(B):
        maps = maps_class(attention, groups[b], history.latents_BTC[b], *weights, product_dtype(query_BHSK))

        # In place and flat: at this size a pass over memory costs as much as a product.
        scores_AT = maps.scores(q_nope_BHSN[b])
        if has_norm:
            mean_T, rstd_T = statistics_B2T[b]
            scores_AT.addr_(q_nope_BHSN[b].sum(-1).flatten(), mean_T, alpha=-1).mul_(rstd_T)
        scores_AT.addmm_(q_rot_BHSR[b].flatten(0, 1), history.k_rot_BTR[b].to(dtype).T)
        if mask is not None:
            scores_AT.view(H, S, -1).add_(additive(mask[b if mask.shape[0] > 1 else 0, ..., : scores_AT.shape[1]]))

        weights_AT = softmax(scores_AT)
        if has_norm:
            weights_AT.mul_(rstd_T)
        out_HSV = maps.values(weights_AT.view(H, S, -1))
        if has_norm:
            out_HSV = (out_HSV - (weights_AT @ mean_T).view(H, S, 1)) * gamma_H1NV[..., N:] + beta_H1NV[..., N:]
        out_BSHV[b] = out_HSV.transpose(0, 1)
    return out_BSHV


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax in place that gives zeros, as `scaled_dot_product_attention` does, to a query that sees nothing."""
    peak = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(peak).exp_()
    return weights.div_(weights.sum(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).tiny))


def gates_by_head(attention: nn.Module, groups: TokenGroups, dtype: torch.dtype, N: int):
    """Gates of a sequence's distinct ids, key and value part: [H, U, N] and [H, U, V]."""
    gates_UD = attention.kv_gates(groups.ids_U).to(dtype)
    gates_HUNV = gates_UD.view(len(groups.ids_U), attention.num_heads, -1).transpose(0, 1)
    return close_gaps(gates_HUNV[..., :N]), close_gaps(gates_HUNV[..., N:])


def close_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` made contiguous where a product gains more than that costs: in bfloat16."""
    return tensor.contiguous() if tensor.dtype == torch.bfloat16 else tensor


class GroupedMaps:
    """Multiplicative gates: key and value maps of each distinct id, applied to its latents without being formed."""

    def __init__(self, attention, groups, latents_TC, w_uk_HNC, w_uv_HVC, dtype):
        self.groups, self.w_uk_HNC, self.w_uv_HVC, self.dtype = groups, w_uk_HNC, w_uv_HVC, dtype
        self.gates_k_HUN, self.gates_v_HUV = gates_by_head(attention, groups, dtype, w_uk_HNC.shape[1])
        self.latents_PC = latents_TC.index_select(0, groups.position_P).to(w_uk_HNC.dtype)

    def blocks(self):
        """Yields slices of groups and of places, and the shape [count, size] that the places have."""
        group = place = 0
        for count, size in self.groups.blocks:
            if count:
                yield slice(group, group + count), slice(place, place + count * size), (count, size)
            group, place = group + count, place + count * size

    def scores(self, q_HSN):
        (H, S, N), C = q_HSN.shape, self.latents_PC.shape[1]
        maps_HNSC = q_HSN.transpose(1, 2)[..., None] * self.w_uk_HNC[:, :, None]
        absorbed_HUSC = torch.bmm(self.gates_k_HUN, maps_HNSC.to(self.dtype).reshape(H, N, S * C)).view(H, -1, S, C)
        absorbed_HUSC = absorbed_HUSC.to(q_HSN.dtype)
        scores_PA = q_HSN.new_empty((len(self.latents_PC), H * S))
        for groups, places, shape in self.blocks():
            absorbed_UCA = absorbed_HUSC[:, groups].permute(1, 3, 0, 2).flatten(2)
            latents = self.latents_PC[places].view(*shape, C)
            torch.bmm(latents, absorbed_UCA, out=scores_PA[places].view(*shape, H * S))
        return scores_PA.index_select(0, self.groups.place_T).T.contiguous()

    def values(self, weights_HST):
        (H, S, _), C = weights_HST.shape, self.latents_PC.shape[1]
        weights_AP = weights_HST.flatten(0, 1).index_select(1, self.groups.position_P).mul_(self.groups.counts_P)
        sums_UAC = weights_HST.new_empty((len(self.groups.ids_U), H * S, C))
        for groups, places, (count, size) in self.blocks():
            weights = weights_AP[:, places].view(-1, count, size).transpose(0, 1)
            latents = self.latents_PC[places].view(count, size, C)
            multiply = torch.mul if size == 1 else torch.bmm
            multiply(weights, latents, out=sums_UAC[groups])
        sums_HUSC = close_gaps(sums_UAC.to(self.dtype).view(-1, H, S * C).transpose(0, 1))
        mixed_HVSC = torch.bmm(self.gates_v_HUV.transpose(1, 2), sums_HUSC).view(H, -1, S, C)
        return (mixed_HVSC * self.w_uv_HVC[:, :, None]).sum(-1).transpose(1, 2)


class SharedMaps:
    """No gate, or an additive one: one key and one value map, and vectors to add for each distinct id."""

    def __init__(self, attention, groups, latents_TC, w_uk_HNC, w_uv_HVC, dtype):
        self.groups, self.w_uk_HNC, self.w_uv_HVC = groups, w_uk_HNC, w_uv_HVC
        self.latents_TC = latents_TC.to(w_uk_HNC.dtype)
        if groups is not None:
            self.gates_k_HUN, self.gates_v_HUV = gates_by_head(attention, groups, w_uk_HNC.dtype, w_uk_HNC.shape[1])
            self.group_T = groups.group_T

    def scores(self, q_HSN):
        scores_AT = torch.mm(torch.bmm(q_HSN, self.w_uk_HNC).flatten(0, 1), self.latents_TC.T)
        if self.groups is not None:
            scores_AU = torch.bmm(q_HSN, self.gates_k_HUN.transpose(1, 2)).flatten(0, 1)
            scores_AT += scores_AU.index_select(1, self.group_T)
        return scores_AT

    def values(self, weights_HST):
        out_HSV = torch.bmm(torch.matmul(weights_HST, self.latents_TC), self.w_uv_HVC.transpose(1, 2))
        if self.groups is not None:
            sums_HSU = weights_HST.new_zeros((*weights_HST.shape[:2], len(self.groups.ids_U)))
            sums_HSU.index_add_(-1, self.group_T, weights_HST)
            out_HSV += torch.bmm(sums_HSU, self.gates_v_HUV)
        return out_HSV
