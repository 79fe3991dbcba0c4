"""
EG-MLA written from the paper's equations (arXiv:2509.16686, section 3 and Appendix E) in float64, with explicit loops
over layers, heads and positions. Slow, and shares no code with the library: what the tests hold the library against.

    c_t   = RMSNorm(W_DKV x_t)                        latent
    kv_t  = W_UKV c_t                                 up-projected keys and values of all heads
    g_t   = W_UE Emb[i_t]                             gate of the token's id
    kv~_t = LayerNorm(kv_t * g_t)                     over the whole width, before the split into keys and values
    k_t,h = [key part of head h ; RoPE(W_KR x_t)]     the rotary key is shared by all heads
    q_t,h = [q_C ; RoPE(q_R)]                         direct, or W_UQ RMSNorm(W_DQ x_t)
    u_t,h = sum_{j<=t} softmax_j(q_t,h . k_j,h / sqrt(d_nope + d_rope)) v_j,h
    o_t   = W_O [u_t,1 ; ... ; u_t,H]
"""

import math
from dataclasses import dataclass, field

import torch


LATENT_EPS = 1e-6  # of the latent's and the low-rank query's RMSNorm, whatever `rms_norm_eps` says


@dataclass
class Reference:
    """
    What a forward pass gives, float64.

    Attributes:
        logits: [B, S, V].
        hidden_states: embeddings and the output of every layer, the last after the final norm; [B, S, hidden] each.
        attentions: weights of every layer, [B, H, S, S]; rows of padding are zero.
        latents, rotated_keys: of every layer group, [B, S, C] and [B, S, R].
    """

    logits: torch.Tensor
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    attentions: list[torch.Tensor] = field(default_factory=list)
    latents: list[torch.Tensor] = field(default_factory=list)
    rotated_keys: list[torch.Tensor] = field(default_factory=list)


def rms_norm(x, weight, eps):
    return weight * x / math.sqrt(sum(float(a) ** 2 for a in x) / len(x) + eps)


def layer_norm(x, weight, bias, eps):
    mean = sum(float(a) for a in x) / len(x)
    variance = sum((float(a) - mean) ** 2 for a in x) / len(x)
    return weight * (x - mean) / math.sqrt(variance + eps) + bias


def silu(x):
    return x / (1 + torch.exp(-x))


def softmax(scores):
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return [w / sum(weights) for w in weights]


def yarn_scale(factor, mscale):
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_frequencies(config):
    """Angle a position for each pair of rotary channels, the factor on cosines and sines, and the one on scores."""
    rope = config.get("rope_parameters") or {}
    theta, width = rope.get("rope_theta", 10000.0), config["qk_rope_head_dim"]
    frequencies = [theta ** (-2 * i / width) for i in range(width // 2)]
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return frequencies, 1.0, 1.0
    if kind == "linear":
        return [f / rope["factor"] for f in frequencies], 1.0, 1.0
    assert kind == "yarn", kind

    factor = rope["factor"]
    trained = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]

    def channel(rotations):
        """The pair of channels that turns so often within the context that the model was trained on."""
        return width * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(rope.get("beta_fast", 32)), channel(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    for i in range(width // 2):
        ramp = min(max((i - low) / (high - low), 0), 1)  # 0: turns fast and is kept, 1: turns slowly and is stretched
        frequencies[i] = frequencies[i] / factor * ramp + frequencies[i] * (1 - ramp)

    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    attention_factor = rope.get("attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    elif attention_factor is None:
        attention_factor = yarn_scale(factor, 1)
    score_factor = yarn_scale(factor, mscale_all_dim) ** 2 if mscale_all_dim else 1.0
    return frequencies, attention_factor, score_factor


def rotate(x, position, frequencies, factor, interleave):
    """Turns each pair of channels by its angle. The result has the pairs' first channels first, in either layout."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for i, frequency in enumerate(frequencies):
        a, b = (x[2 * i], x[2 * i + 1]) if interleave else (x[i], x[i + half])
        cos, sin = factor * math.cos(position * frequency), factor * math.sin(position * frequency)
        out[i], out[i + half] = a * cos - b * sin, b * cos + a * sin
    return out


def forward(config: dict, state: dict, input_ids, attention_mask=None, position_ids=None) -> Reference:
    """
    Args:
        config: values by the names of the model's configuration, e.g. `config.to_dict()`.
        state: parameters by the names of the model's state dict.
        input_ids: [B, S].
        attention_mask: [B, S], 1 for tokens and 0 for padding.
        position_ids: [B, S]; 0, 1, 2, ... by default.
    """
    state = {name: tensor.detach().to("cpu", torch.float64) for name, tensor in state.items()}
    batch, length = input_ids.shape
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    rank, nope, rope = config["kv_lora_rank"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    wide = config["v_head_dim"]
    interleave = config.get("rope_interleave", False)
    frequencies, rope_factor, score_factor = rope_frequencies(config)
    scale = score_factor / math.sqrt(nope + rope)
    gate_kind = config.get("kv_gate", "multiply")

    def weight(name):
        return state[name + ".weight"]

    def linear(name, x):
        y = weight(name) @ x
        return y + state[name + ".bias"] if name + ".bias" in state else y

    rows = []
    for b in range(batch):
        ids = [int(i) for i in input_ids[b]]
        real = [attention_mask is None or bool(attention_mask[b, t]) for t in range(length)]
        positions = [t if position_ids is None else int(position_ids[b, t]) for t in range(length)]
        x = [weight("model.embed_tokens")[i].clone() for i in ids]
        row = Reference(None, hidden_states=[torch.stack(x)])
        up = rotary = None

        for n in range(layers):
            layer = f"model.layers.{n}."
            attention = layer + "self_attn."
            normed = [rms_norm(x[t], weight(layer + "input_layernorm"), config["rms_norm_eps"]) for t in range(length)]

            if n % config.get("layer_group_size", 1) == 0:  # the group's other layers reuse `up` and `rotary`
                latents, rotary = [], []
                for t in range(length):
                    down = linear(attention + "kv_a_proj_with_mqa", normed[t])
                    latents.append(rms_norm(down[:rank], weight(attention + "kv_a_layernorm"), LATENT_EPS))
                    rotary.append(rotate(down[rank:], positions[t], frequencies, rope_factor, interleave))
                up = [weight(attention + "kv_b_proj") @ c for c in latents]
                row.latents.append(torch.stack(latents))
                row.rotated_keys.append(torch.stack(rotary))

            gated = []
            for t in range(length):
                kv = up[t]
                if gate_kind != "none":
                    gate = weight(attention + "kv_gate_proj") @ weight(attention + "kv_gate_embed")[ids[t]]
                    kv = kv * gate if gate_kind == "multiply" else kv + gate
                    if config.get("kv_gate_norm", "layer_norm") == "layer_norm":
                        norm = attention + "kv_gate_norm"
                        kv = layer_norm(kv, weight(norm), state[norm + ".bias"], config["kv_gate_norm_eps"])
                gated.append(kv)

            queries = []
            for t in range(length):
                if config.get("q_lora_rank"):
                    q_latent = linear(attention + "q_a_proj", normed[t])
                    q_latent = rms_norm(q_latent, weight(attention + "q_a_layernorm"), LATENT_EPS)
                    queries.append(weight(attention + "q_b_proj") @ q_latent)
                else:
                    queries.append(weight(attention + "q_proj") @ normed[t])

            outputs = [[] for _ in range(length)]
            weights = torch.zeros(heads, length, length, dtype=torch.float64)
            for h in range(heads):
                keys, values = [], []
                for t in range(length):
                    part = gated[t][h * (nope + wide) : (h + 1) * (nope + wide)]
                    keys.append(torch.cat((part[:nope], rotary[t])))
                    values.append(part[nope:])
                for t in range(length):
                    query = queries[t][h * (nope + rope) : (h + 1) * (nope + rope)]
                    turned = rotate(query[nope:], positions[t], frequencies, rope_factor, interleave)
                    query = torch.cat((query[:nope], turned))
                    seen = [j for j in range(t + 1) if real[j] and real[t]]
                    out = torch.zeros(wide, dtype=torch.float64)
                    if seen:
                        scores = [float(query @ keys[j]) * scale for j in seen]
                        for j, probability in zip(seen, softmax(scores)):
                            weights[h, t, j] = probability
                            out += probability * values[j]
                    outputs[t].append(out)
            row.attentions.append(weights)

            for t in range(length):
                x[t] = x[t] + linear(attention + "o_proj", torch.cat(outputs[t]))
                y = rms_norm(x[t], weight(layer + "post_attention_layernorm"), config["rms_norm_eps"])
                inner = silu(weight(layer + "mlp.gate_proj") @ y) * (weight(layer + "mlp.up_proj") @ y)
                x[t] = x[t] + weight(layer + "mlp.down_proj") @ inner
            row.hidden_states.append(torch.stack(x))

        final = [rms_norm(x[t], weight("model.norm"), config["rms_norm_eps"]) for t in range(length)]
        row.hidden_states[-1] = torch.stack(final)
        tied = config.get("tie_word_embeddings", True)
        head = weight("model.embed_tokens") if tied else weight("lm_head")
        row.logits = torch.stack([head @ y for y in final])
        rows.append(row)

    def gather(name):
        return [torch.stack(parts) for parts in zip(*(getattr(row, name) for row in rows))]

    return Reference(
        torch.stack([row.logits for row in rows]),
        **{name: gather(name) for name in ("hidden_states", "attentions", "latents", "rotated_keys")},
    )


def logits(config: dict, state: dict, input_ids, attention_mask=None, position_ids=None) -> torch.Tensor:
    """Logits alone, [B, S, V]; arguments as in `forward`."""
    return forward(config, state, input_ids, attention_mask, position_ids).logits
