"""
Attention of one new query on the compressed cache as one Triton kernel, for each head and part of the history.

The kernel reads latents, rotated keys, ids and the statistics of the LayerNorm, and expands a block of tokens for its
head alone, in registers: keys and values of the history are never in memory. It is derived in docs/decoding.md, and is
used where `set_kv_decoding("fused")` asks for it.

Shapes: B batch, T cached length with the new token, H heads, N `qk_nope_head_dim`, V `v_head_dim`, C `kv_lora_rank`,
R `qk_rope_head_dim`, G width of a gate table's rows, P parts of the history.
"""

import torch


# Models must load, exported ones too, where triton is missing or broken.
try:
    import triton
    import triton.language as tl
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

BLOCK_TOKENS, NUM_WARPS = 32, 8  # compiled for sm_80 and sm_90, the least registers spilled; not measured
BLOCK_BYTES = 128  # of a row that is multiplied, at a time: what is loaded fits the memory of old devices too
PROGRAMS = 512  # at least as many, if the history is long enough, so that every unit of a device has some
MAX_HEAD_WIDTH = 256  # of keys and values; wider blocks do not fit into shared memory

# Arguments that differ with the history's length, for which nothing is to be compiled again.
CHANGING = ["T", "part_tokens", "mask_stride_b", "mask_stride_h", "statistics_stride_b", "statistics_stride_s"]
CHANGING += ["token_ids_stride_b"]
KERNEL_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IS_INTERPRETED = False

if HAS_TRITON:

    @triton.jit
    def products(rows_T1, is_token_T1, weights_1I, is_row_1I, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        """Products of the rows and the weights at these addresses, each `WIDTH` wide: [T, I] in float32."""
        out_TI = tl.zeros((rows_T1.shape[0], weights_1I.shape[1]), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            i = start + tl.arange(0, BLOCK)
            rows_TB = tl.load(rows_T1 + i[None, :], mask=is_token_T1 & (i < WIDTH)[None, :], other=0.0)
            weights_BI = tl.load(weights_1I + i[:, None], mask=is_row_1I & (i < WIDTH)[:, None], other=0.0)
            out_TI = tl.dot(rows_TB, weights_BI, out_TI, input_precision="ieee")
        return out_TI

    @triton.jit
    def gated_features(
        latents_T1, gates_T1, is_token_T1, kv_b_proj, gate_proj, row_1I, is_row_1I,
        C: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, PROJECTED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Rows `row_1I` of the up-projected latents, gated, before the norm: [T, I] in float32."""
        features_TI = products(latents_T1, is_token_T1, kv_b_proj + row_1I * C, is_row_1I, C, BLOCK)
        if GATE != "none":
            if PROJECTED:
                gates_TI = products(gates_T1, is_token_T1, gate_proj + row_1I * G, is_row_1I, G, BLOCK)
            else:
                gates_TI = tl.load(gates_T1 + row_1I, mask=is_token_T1 & is_row_1I, other=0.0).to(tl.float32)
            if GATE == "multiply":
                features_TI *= gates_TI
            else:
                features_TI += gates_TI
        return features_TI

    @triton.jit(do_not_specialize=CHANGING)
    def attend_to_part(
        q_nope, q_rot, latents, k_rot, token_ids, statistics, kv_b_proj, gates, gate_proj, mask,
        out, total, peak,
        T, part_tokens, H,
        latents_stride_b, latents_stride_t, k_rot_stride_b, k_rot_stride_t, token_ids_stride_b,
        statistics_stride_b, statistics_stride_s, mask_stride_b, mask_stride_h,
        N: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
        GATE: tl.constexpr, PROJECTED: tl.constexpr, NORMED: tl.constexpr, MASKED: tl.constexpr,
        BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """
        Running softmax of one sequence and head over one part of its history: the sum of values before the norm's
        weight and bias, the sum of weights and the largest score.
        """
        bh, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        b, h = bh // H, bh % H
        n, v, r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
        row_1N, row_1V = h * (N + V) + n[None, :], h * (N + V) + N + v[None, :]
        q_N = tl.load(q_nope + bh * N + n, mask=n < N, other=0.0)
        q_R = tl.load(q_rot + bh * R + r, mask=r < R, other=0.0)

        out_V = tl.zeros((BLOCK_V,), tl.float32)
        total_1 = tl.zeros((1,), tl.float32)
        peak_1 = tl.full((1,), -3.4028234663852886e38, tl.float32)  # the smallest, as masks may hold it
        first = part * part_tokens
        for start in range(first, tl.minimum(first + part_tokens, T), BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            is_token = t < T
            is_token_T1 = is_token[:, None]
            latents_T1 = latents + b * latents_stride_b + t[:, None].to(tl.int64) * latents_stride_t
            gates_T1 = gates
            if GATE != "none":
                ids_T = tl.load(token_ids + b * token_ids_stride_b + t, mask=is_token, other=0)
                gates_T1 = gates + ids_T[:, None].to(tl.int64) * G

            keys_TN = gated_features(
                latents_T1, gates_T1, is_token_T1, kv_b_proj, gate_proj, row_1N, (n < N)[None, :],
                C, G, GATE, PROJECTED, BLOCK,
            )  # fmt: skip
            scores_T = tl.sum(keys_TN * q_N[None, :], axis=1)
            if NORMED:
                statistics_T = statistics + b * statistics_stride_b + t
                mean_T = tl.load(statistics_T, mask=is_token, other=0.0)
                rstd_T = tl.load(statistics_T + statistics_stride_s, mask=is_token, other=0.0)
                scores_T = (scores_T - mean_T * tl.sum(q_N, axis=0)) * rstd_T
            k_rot_TR = k_rot + b * k_rot_stride_b + t[:, None].to(tl.int64) * k_rot_stride_t + r[None, :]
            k_rot_TR = tl.load(k_rot_TR, mask=is_token_T1 & (r < R)[None, :], other=0.0)
            scores_T += tl.sum(k_rot_TR.to(tl.float32) * q_R[None, :], axis=1)
            if MASKED:
                scores_T += tl.load(mask + b * mask_stride_b + h * mask_stride_h + t, mask=is_token, other=0.0)
            scores_T = tl.where(is_token, scores_T, -float("inf"))

            higher_1 = tl.maximum(peak_1, tl.max(scores_T, axis=0))
            weights_T = tl.exp(scores_T - higher_1)
            rescale_1 = tl.exp(peak_1 - higher_1)
            total_1 = total_1 * rescale_1 + tl.sum(weights_T, axis=0)
            peak_1 = higher_1

            values_TV = gated_features(
                latents_T1, gates_T1, is_token_T1, kv_b_proj, gate_proj, row_1V, (v < V)[None, :],
                C, G, GATE, PROJECTED, BLOCK,
            )  # fmt: skip
            if NORMED:
                values_TV = (values_TV - mean_T[:, None]) * rstd_T[:, None]
            out_V = out_V * rescale_1 + tl.sum(weights_T[:, None] * values_TV, axis=0)

        place = bh * tl.num_programs(1) + part
        tl.store(out + place * V + v, out_V, mask=v < V)
        tl.store(total + place + tl.arange(0, 1), total_1)
        tl.store(peak + place + tl.arange(0, 1), peak_1)

    IS_INTERPRETED = not isinstance(attend_to_part, triton.JITFunction)
    if IS_INTERPRETED:
        KERNEL_DTYPES.remove(torch.bfloat16)  # triton's interpreter multiplies its bits as whole numbers


def can_fuse(attention, query_BHSK: torch.Tensor, latents_BTC: torch.Tensor) -> bool:
    """
    Whether the kernel can compute this: one query, in a precision that it knows, heads that are not too wide, on CUDA
    from compute capability 8.0 on (or anywhere, with TRITON_INTERPRET=1), with gates from tensors on that device.
    """
    if (
        not HAS_TRITON
        or query_BHSK.shape[2] > 1
        or query_BHSK.dtype not in KERNEL_DTYPES
        or max(attention.qk_nope_head_dim, attention.v_head_dim) > MAX_HEAD_WIDTH
        or not (
            IS_INTERPRETED or (query_BHSK.is_cuda and torch.cuda.get_device_capability(query_BHSK.device) >= (8, 0))
        )
    ):
        return False
    gates = attention.gate_tensors()
    if gates is None:
        return False
    weights = [weight for weight in (attention.up_projection.weight, *gates) if weight is not None]
    return all(weight.is_contiguous() for weight in weights) and all(
        (tensor.dtype, tensor.device) == (query_BHSK.dtype, query_BHSK.device) for tensor in (*weights, latents_BTC)
    )


def fused_attention(
    attention,
    query_BH1K: torch.Tensor,
    mask_BHT: torch.Tensor | None,
    latents_BTC: torch.Tensor,
    k_rot_BTR: torch.Tensor,
    token_ids_BT: torch.Tensor,
    statistics_B2T: torch.Tensor | None,
) -> torch.Tensor:
    """
    Attention of one query on the whole history, [B, 1, H, V] in float32. The streams' last axes must be contiguous, as
    those of a cache are.

    Args:
        mask_BHT: what is added to scores, in float32, broadcast over B and H.
        statistics_B2T: means and inverse deviations for the LayerNorm, if there is one.
    """
    (B, H, _, _), T, C = query_BH1K.shape, latents_BTC.shape[1], latents_BTC.shape[2]
    N, V, R = attention.qk_nope_head_dim, attention.v_head_dim, attention.qk_rope_head_dim
    q_nope_BHN, q_rot_BHR = (query_BH1K[:, :, 0].float() * attention.scaling).split([N, R], dim=-1)
    if statistics_B2T is not None:
        norm = attention.kv_gate_norm
        gamma_HNV, beta_HNV = norm.weight.float().view(H, N + V), norm.bias.float().view(H, N + V)
        q_nope_BHN = q_nope_BHN * gamma_HNV[:, :N]
    gates, gate_proj = attention.gate_tensors()
    if mask_BHT is not None:
        mask_BHT = mask_BHT.expand(B, H, T)
        if mask_BHT.stride(-1) != 1:
            mask_BHT = mask_BHT.contiguous()

    num_blocks = triton.cdiv(T, BLOCK_TOKENS)
    part_blocks = max(1, num_blocks // triton.cdiv(PROGRAMS, B * H))
    P = triton.cdiv(num_blocks, part_blocks)
    out_BHPV = torch.empty((B, H, P, V), dtype=torch.float32, device=query_BH1K.device)
    total_BHP1, peak_BHP1 = (torch.empty_like(out_BHPV[..., :1]) for _ in range(2))
    with torch.cuda.device_of(query_BH1K):
        attend_to_part[(B * H, P)](
            q_nope_BHN.contiguous(), q_rot_BHR.contiguous(), latents_BTC, k_rot_BTR, token_ids_BT, statistics_B2T,
            attention.up_projection.weight, gates, gate_proj, mask_BHT,
            out_BHPV, total_BHP1, peak_BHP1,
            T, part_blocks * BLOCK_TOKENS, H,
            *latents_BTC.stride()[:2], *k_rot_BTR.stride()[:2], token_ids_BT.stride(0),
            *((0, 0) if statistics_B2T is None else statistics_B2T.stride()[:2]),
            *((0, 0) if mask_BHT is None else mask_BHT.stride()[:2]),
            N=N, V=V, C=C, R=R, G=0 if gates is None else gates.shape[1],
            GATE=attention.kv_gate, PROJECTED=gate_proj is not None,
            NORMED=statistics_B2T is not None, MASKED=mask_BHT is not None,
            BLOCK_T=BLOCK_TOKENS, BLOCK_N=block_size(N), BLOCK_V=block_size(V), BLOCK_R=block_size(R),
            BLOCK=BLOCK_BYTES // latents_BTC.itemsize, num_warps=NUM_WARPS,
        )  # fmt: skip

    rescale_BHP1 = (peak_BHP1 - peak_BHP1.amax(2, keepdim=True)).exp()
    total_BH1 = (total_BHP1 * rescale_BHP1).sum(2).clamp(min=torch.finfo(torch.float32).tiny)
    out_BHV = (out_BHPV * rescale_BHP1).sum(2) / total_BH1
    if statistics_B2T is not None:
        out_BHV = out_BHV * gamma_HNV[:, N:] + beta_HNV[:, N:]
    return out_BHV.unsqueeze(1)


def block_size(width: int) -> int:
    """Channels of a block: a power of two, and at least the 16 that products of matrices take."""
    return max(16, triton.next_power_of_2(width))
