"""
MLA weights from a model of the Llama form: grouped (or multi-head) keys and values, rotary on all of their channels.

Of G heads of keys and values of d channels, MLA caches a shared rotary key of R channels and a latent of C. Three
things stand between, each done so that its error, weighted by how the model uses what is lost, is small:

1. *Rotary in few channels.* Rotation by one frequency acts on a pair of channels in every head and commutes with any
   mixing of heads at that frequency. So at frequency f, keys k_i become components w_m . (Q^1/2 k), w_m the
   eigenvectors of Q^1/2 K Q^1/2 (K second moments of keys across heads, Q those of the queries that meet them), and
   queries follow. The strongest components stay rotary, shared by all heads; the others lose their rotation and join
   the latent. The frequencies that stay are the same in all layers, since one config names them.
2. *Low rank.* What is left of the keys, and the values, are W x for the layer's normalised input x. The best rank-r
   factors of W under E |T (W - M A) x|^2 come from the singular vectors of T W S^1/2, S = E x x^T; T weighs keys by
   the queries that read them and values by the output projection, the total of each side being one.
3. *The latent's RMSNorm* divides by the length of A x, which differs from token to token. One channel of the latent
   holds a constant (the bias of `kv_a_proj_with_mqa`) that outweighs the others: the length is then constant, and the
   norm's weight undoes it. In the same way two key channels a head that no query reads make a gate's LayerNorm
   neutral: one outweighs all that is measured, the other makes the mean zero.

With R = G d and C above the rank of W, the MLA model computes what its source computes.

The idea of 1 is TransMLA's (arXiv:2502.07864, RoRoPE; there unweighted, all frequencies of the first component);
choosing frequencies by their part in scores, and joint factors of K and V, are MHA2MLA's (arXiv:2502.14837). Weights,
the cost of a lost rotation, and constant channels are ours.

Shapes: H heads of queries, G of keys and values, d channels each, F = d / 2 frequencies, E `hidden_size`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from ..configuration_egmla import SPECIAL_IDS, EGMLAConfig
from .calibration import observe
from .checkpoint import ConversionError
from .weights import Weights


ROPE_TYPES = ("default", "linear", "llama3")  # frequencies that are the same at every length
LATENT_CONSTANT = 1000.0  # the latent's constant channel, against the root mean square of the others together
# The constant channels of a gate's LayerNorm, likewise: their gates are trained, and any imbalance of them shifts all
# channels, so that a larger constant would be more exact and less stable.
NORM_CONSTANT = 100.0
RIDGE = 1e-6  # of second moments, against their mean, so that what calibration never saw is not amplified


@dataclass(frozen=True)
class GQALayer:
    """Projections of one layer: queries [H, d, E], keys and values [G, d, E], output [E, H, d], float64."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    output: torch.Tensor

    @classmethod
    def read(cls, weights: Callable[[str], torch.Tensor], layer: int, head_dim: int) -> "GQALayer":
        prefix = f"model.layers.{layer}.self_attn."
        q, k, v = (
            weights(f"{prefix}{name}_proj.weight").double().unflatten(0, (-1, head_dim)) for name in ("q", "k", "v")
        )
        return cls(q, k, v, weights(f"{prefix}o_proj.weight").double().unflatten(1, (-1, head_dim)))

    @property
    def groups(self) -> int:
        """Heads of queries that read one head of keys and values."""
        return self.queries.shape[0] // self.keys.shape[0]


@dataclass(frozen=True)
class Components:
    """
    A layer's keys as components at each frequency, the strongest first.

    Attributes:
        to_keys: key head from component, [F, G, G]: k_i = sum over m of to_keys[f, i, m] component m.
        from_keys: its inverse, [F, G, G].
        energies: mean square share of each in attention scores, [F, G]; all of a layer's sum to one.
    """

    to_keys: torch.Tensor
    from_keys: torch.Tensor
    energies: torch.Tensor


def components(layer: GQALayer, inputs: torch.Tensor, mix: bool = True) -> Components:
    """
    The components of a layer's keys at each frequency.

    Args:
        layer: its projections.
        inputs: second moments of its input, [E, E].
        mix: mix heads as step 1 says; otherwise a component is a head (as in MHA2MLA).
    """
    num_kv_heads, pairs = layer.keys.shape[0], layer.keys.shape[1] // 2

    def by_frequency(projections: torch.Tensor) -> torch.Tensor:
        """[heads, d, E] as [F, heads, 2, E]: a rotary pair is channels f and f + F."""
        return projections.unflatten(1, (2, pairs)).permute(2, 0, 1, 3)

    keys, queries = by_frequency(layer.keys), by_frequency(layer.queries)
    keys_with_inputs = keys @ inputs
    key_moments = keys_with_inputs.flatten(2) @ keys.flatten(2).mT  # [F, G, G]
    query_moments = ((queries @ inputs) * queries).sum((2, 3)).unflatten(1, (num_kv_heads, -1)).sum(2)  # [F, G]
    roots = query_moments.clamp_min(query_moments.mean() * RIDGE).sqrt()
    weighted = roots[:, :, None] * key_moments * roots[:, None, :]
    if mix:
        values, vectors = torch.linalg.eigh(weighted)
        values, vectors = values.flip(1), vectors.flip(2)
    else:
        values, order = weighted.diagonal(dim1=1, dim2=2).sort(descending=True)
        vectors = torch.eye(num_kv_heads, dtype=inputs.dtype)[order].mT
    values = values.clamp_min(0)
    return Components(vectors / roots[:, :, None], vectors.mT * roots[:, None, :], values / values.sum())


def choose_frequencies(
    energies: torch.Tensor, frequencies: torch.Tensor, rope_dim: int, length: int, by: str = "position"
) -> torch.Tensor:
    """
    How many components stay rotary at each frequency, [F].

    Args:
        energies: of components, mean over layers, [F, G], the strongest first.
        frequencies: radians a position, [F].
        rope_dim: channels that stay rotary, two a component.
        length: distances over which the loss of a rotation counts, the more the nearer (as 1 / (1 + distance), for
            attention is mostly near).
        by: `"energy"`: the strongest components; `"position"`: those whose part in scores would change most without
            rotation, energy x (1 - mean of cos(frequency x distance)).
    """
    worth = energies
    if by == "position":
        distances = torch.arange(length, dtype=torch.float64)
        nearness = 1 / (1 + distances)
        cosines = torch.outer(frequencies.double(), distances).cos()
        worth = energies * (1 - cosines @ (nearness / nearness.sum()))[:, None]
    kept = torch.zeros(worth.numel(), dtype=torch.bool)
    kept[worth.flatten().argsort(descending=True, stable=True)[: rope_dim // 2]] = True
    return kept.view_as(worth).sum(1)  # the strongest of each frequency, since they come first


@dataclass(frozen=True)
class Split:
    """
    A layer whose keys have a rotary part that all heads share and a rest without position.

    Attributes:
        rotary_keys: [R, E], halves.
        rotary_queries: [H, R, E], halves.
        rest_keys: [G, d, E]; nothing is left where all components of a frequency are rotary.
    """

    rotary_keys: torch.Tensor
    rotary_queries: torch.Tensor
    rest_keys: torch.Tensor


def split_rotary(layer: GQALayer, parts: Components, counts: torch.Tensor) -> Split:
    """Leaves `counts` [F] components of each frequency rotary; heads keep what is left of their own keys."""
    num_kv_heads, pairs = layer.keys.shape[0], layer.keys.shape[1] // 2
    keys, queries = (p.unflatten(1, (2, pairs)) for p in (layer.keys, layer.queries))  # [heads, 2, F, E]
    chosen = [(f, m) for f in range(pairs) for m in range(int(counts[f]))]
    f, m = (torch.tensor(index, dtype=torch.long) for index in zip(*chosen))
    rotary_keys = torch.einsum("rg,gtre->tre", parts.from_keys[f, m], keys[:, :, f])  # [2, R / 2, E]
    head_of = torch.arange(queries.shape[0]) // layer.groups
    rotary_queries = queries[:, :, f] * parts.to_keys[f, :, m].T[head_of][:, None, :, None]
    dropped = (torch.arange(num_kv_heads) >= counts[:, None]).double()  # [F, G]
    residue = (parts.to_keys * dropped[:, None, :]) @ parts.from_keys  # [F, G, G]
    rest = torch.einsum("fij,jtfe->itfe", residue, keys)
    return Split(
        rotary_keys.flatten(0, 1),
        rotary_queries.flatten(1, 2),
        rest.flatten(1, 2),
    )


@dataclass(frozen=True)
class LowRank:
    """
    Factors of keys and values: latent = down x, keys and values = up latent.

    Attributes:
        down: [r, E], orthogonal rows of one length; latents of calibration text have a mean square of one.
        keys: [G, d, r].
        values: [G, d, r].
        kept: share of the weighted energy that the factors keep.
    """

    down: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    kept: float


class JointFactors:
    """
    The weighted singular vectors of a layer's keys without position and of its values; factors of any rank are cut
    from them.

    Args:
        layer: its projections.
        rest_keys: its keys without position, [G, d, E].
        inputs: second moments of its input, [E, E].
    """

    def __init__(self, layer: GQALayer, rest_keys: torch.Tensor, inputs: torch.Tensor):
        num_kv_heads = len(rest_keys)
        self.sizes = (rest_keys.shape[:2], layer.values.shape[:2])
        self.inputs = inputs
        root, self.inverse_root = _roots(inputs)
        queries = layer.queries.unflatten(0, (num_kv_heads, -1))
        read_keys = torch.einsum("ghae,ghbe->gab", queries @ inputs, queries)
        outputs = layer.output.unflatten(1, (num_kv_heads, -1))
        read_values = torch.einsum("eghd,eghc->gdc", outputs, outputs)
        blocks, self.unweigh = [], []
        for moments, projections in ((read_keys, rest_keys), (read_values, layer.values)):
            weights, inverses = _roots(moments)
            weighted = weights @ projections @ root
            scale = weighted.norm().clamp_min(1e-300)
            blocks.append((weighted / scale).flatten(0, 1))
            self.unweigh.append(inverses * scale)
        u, s, vh = torch.linalg.svd(torch.cat(blocks), full_matrices=False)
        self.left, self.singular, self.right = u, s, vh

    def kept(self) -> torch.Tensor:
        """Share of the weighted energy that factors of rank 1, 2, ... keep."""
        energies = self.singular.square()
        return energies.cumsum(0) / energies.sum()

    def cut(self, rank: int) -> LowRank:
        """Factors of a rank; channels beyond what there is are zero."""
        used = min(rank, len(self.singular))
        # In an orthonormal basis of the latent no input makes it longer than the input is, also none that the
        # calibration text did not hold.
        basis, triangle = torch.linalg.qr((self.right[:used] @ self.inverse_root).T)
        scale = (used / ((basis.T @ self.inputs) * basis.T).sum()).sqrt()
        down = self.right.new_zeros(rank, self.right.shape[1])
        down[:used] = scale * basis.T
        up = self.left.new_zeros(self.left.shape[0], rank)
        up[:, :used] = (self.left[:, :used] * self.singular[:used]) @ triangle.T / scale
        rows = up.split([math.prod(size) for size in self.sizes])
        keys, values = (inv @ r.unflatten(0, size) for inv, r, size in zip(self.unweigh, rows, self.sizes))
        return LowRank(down, keys, values, self.kept()[used - 1].item())


def _roots(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Square roots of matrices of second moments [..., n, n], and their inverses."""
    values, vectors = torch.linalg.eigh(moments)
    values = values.clamp_min(0)
    roots = (values + RIDGE * values.mean(-1, keepdim=True) + 1e-300).sqrt()[..., None, :]
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT


def read_llama_config(raw_config: Mapping[str, Any]):
    """
    The library's config of a model of the Llama form.

    Raises:
        ConversionError: the library cannot read it, or it asks for what no MLA model does, named.
    """
    settings = dict(raw_config)
    try:
        theirs = AutoConfig.for_model(settings.pop("model_type", "llama"), **settings)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConversionError(f"The library cannot read the config.json of the source: {error}") from error
    heads = theirs.num_attention_heads
    theirs.num_key_value_heads = getattr(theirs, "num_key_value_heads", None) or heads
    theirs.head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
    window = getattr(theirs, "sliding_window", None)
    if window is not None and window < theirs.max_position_embeddings:
        raise ConversionError(f"`sliding_window` is {window}, but EG-MLA attends to all that came before.")
    return theirs


def llama_tensors(theirs) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model of the Llama form; a tied head is not among them."""
    hidden, width = theirs.hidden_size, theirs.intermediate_size
    queries, keys = (heads * theirs.head_dim for heads in (theirs.num_attention_heads, theirs.num_key_value_heads))
    shapes = {
        "model.embed_tokens.weight": (theirs.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (theirs.vocab_size, hidden),
    }
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    for n in range(theirs.num_hidden_layers):
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in layer.items()}
    if theirs.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def llama_frequencies(config) -> torch.Tensor:
    """
    Rotary frequencies of a library config, radians a position, [F].

    Raises:
        ConversionError: they depend on the length of the text, or scale attention.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ConversionError(
            f"`rope_parameters['rope_type']` is {rope_type!r}; of models of the Llama form, only those with "
            f"{', '.join(ROPE_TYPES)} can be converted."
        )
    return LlamaRotaryEmbedding(config).inv_freq.double()


@dataclass(frozen=True)
class GQAPlan:
    """
    Shape of the MLA model that a GQA model becomes.

    Attributes:
        latent: `kv_lora_rank`, with the constant channel.
        rope_dim: `qk_rope_head_dim`.
        rotary: how rotary components are chosen, as in [`choose_frequencies`].
        mix: mix heads at each frequency before.
        norm_channels: two more key channels a head, which make a gate's LayerNorm neutral.
        length: distances that a rotation is kept for.
    """

    latent: int
    rope_dim: int
    rotary: str = "position"
    mix: bool = True
    norm_channels: bool = False
    length: int = 1024

    def check(self, theirs) -> None:
        """Raises a `ConversionError` if a source with the library config `theirs` cannot become this."""
        all_rotary = theirs.num_key_value_heads * theirs.head_dim
        if self.rope_dim % 2 or not 2 <= self.rope_dim <= all_rotary:
            raise ConversionError(
                f"The rotary width must be even and from 2 to {all_rotary}, the source's, but is {self.rope_dim}."
            )
        full = full_latent(theirs)
        if not 2 <= self.latent <= full:
            raise ConversionError(
                f"The latent must be 2 or wider, a channel of it being constant, and no wider than {full}, which "
                f"keeps all of this source, but is {self.latent}: give --latent a width between."
            )


def full_latent(theirs) -> int:
    """The narrowest latent that loses nothing of a source with the library config `theirs`, constant channel too."""
    return 1 + min(2 * theirs.num_key_value_heads * theirs.head_dim, theirs.hidden_size)


def mla_config(theirs, plan: GQAPlan, counts: torch.Tensor) -> EGMLAConfig:
    """
    The config of the MLA model that a model with the library config `theirs` becomes.

    Args:
        theirs: of the Llama form.
        plan: its shape.
        counts: rotary components at each frequency, [F].
    """
    frequencies = llama_frequencies(theirs).repeat_interleave(counts)
    base = theirs.rope_parameters["rope_theta"]
    steps = base ** -(torch.arange(len(frequencies), dtype=torch.float64) * 2 / plan.rope_dim)
    factors = (steps / frequencies).tolist()  # long RoPE divides the frequencies of `rope_theta` by what it is given
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared += ("rms_norm_eps", "hidden_act", "max_position_embeddings", "initializer_range", "tie_word_embeddings")
    shared += ("attention_dropout", "use_cache", *SPECIAL_IDS)
    return EGMLAConfig(
        **{name: getattr(theirs, name) for name in shared},
        kv_lora_rank=plan.latent,
        qk_nope_head_dim=theirs.head_dim + 2 * plan.norm_channels,
        qk_rope_head_dim=plan.rope_dim,
        v_head_dim=theirs.head_dim,
        kv_gate="none",
        attention_bias=True,  # of which only that of the constant channel is not zero
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": base,
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": theirs.max_position_embeddings,
        },
    )


class GQAFactors:
    """
    Everything that the MLA weights are made of, layer by layer.

    Args:
        weights: reads a tensor of the source by its name.
        theirs: the source's library config.
        inputs: second moments of the input of attention in every layer, [E, E] each.
        plan: shape of the result.

    Raises:
        ConversionError: the plan does not fit the source.
    """

    def __init__(self, weights: Callable[[str], torch.Tensor], theirs, inputs: list[torch.Tensor], plan: GQAPlan):
        plan.check(theirs)
        self.weights, self.theirs, self.inputs, self.plan = weights, theirs, inputs, plan
        self.components = [components(self.layer(n), moments, plan.mix) for n, moments in enumerate(inputs)]
        energies = torch.stack([parts.energies for parts in self.components]).mean(0)
        self.counts = choose_frequencies(
            energies, llama_frequencies(theirs), plan.rope_dim, plan.length, by=plan.rotary
        )
        self.joint = lru_cache(maxsize=1)(self._joint)
        self.shares: dict[int, torch.Tensor] = {}

    def layer(self, layer: int) -> GQALayer:
        return GQALayer.read(self.weights, layer, self.theirs.head_dim)

    def split(self, layer: int) -> Split:
        return split_rotary(self.layer(layer), self.components[layer], self.counts)

    def kept(self) -> torch.Tensor:
        """Share of the weighted energy that factors of rank 1, 2, ... keep, mean over layers."""
        layers = range(len(self.inputs))
        for layer in layers:
            if layer not in self.shares:
                self.joint(layer)
        return torch.stack([self.shares[layer] for layer in layers]).mean(0)

    def _joint(self, layer: int) -> JointFactors:
        joint = JointFactors(self.layer(layer), self.split(layer).rest_keys, self.inputs[layer])
        self.shares[layer] = joint.kept()
        return joint


def mla_weights(factors: GQAFactors, dtype: Callable[[str], torch.dtype]) -> Weights:
    """
    The MLA model, read tensor by tensor.

    Args:
        factors: of the source.
        dtype: of the source's tensors; what is new has its output projection's.
    """
    plan, theirs = factors.plan, factors.theirs
    config = mla_config(theirs, plan, factors.counts)
    cached = lru_cache(maxsize=1)(lambda layer: _attention(factors, config, layer))

    def read(name: str) -> torch.Tensor:
        prefix, _, part = name.partition(".self_attn.")
        if not part or part == "o_proj.weight":
            return factors.weights(name).to(dtype_of(name))
        return cached(int(prefix.rpartition(".")[2]))[part].to(dtype_of(name))

    def dtype_of(name: str) -> torch.dtype:
        prefix, attention, part = name.partition(".self_attn.")
        return dtype(f"{prefix}{attention}o_proj.weight" if part else name)

    return Weights(config, read, dtype_of)


def _attention(factors: GQAFactors, config: EGMLAConfig, layer: int) -> dict[str, torch.Tensor]:
    """Tensors of one layer's attention, float64."""
    split, low = factors.split(layer), factors.joint(layer).cut(config.kv_lora_rank - 1)
    heads, groups = config.num_attention_heads, config.num_attention_heads // factors.theirs.num_key_value_heads
    rank = config.kv_lora_rank - 1

    # Attention divides scores by the root of its own width, the source by that of its heads'.
    scale = (config.qk_head_dim / factors.theirs.head_dim) ** 0.5
    queries = [factors.layer(layer).queries, split.rotary_queries]
    keys, values = (part.repeat_interleave(groups, 0) for part in (low.keys, low.values))
    constants = keys.new_zeros(*keys.shape[:2], 1)
    if factors.plan.norm_channels:
        # No query reads these two: one outweighs all that the LayerNorm measures, the other makes its mean zero.
        queries.insert(1, queries[0].new_zeros(heads, 2, queries[0].shape[2]))
        latents = low.down @ factors.inputs[layer] @ low.down.T
        features = torch.cat((keys, values), 1).flatten(0, 1)
        size = ((features @ latents) * features).sum().sqrt()
        extra = keys.new_zeros(heads, 2, rank)
        extra[0, 1] = -(keys.sum((0, 1)) + values.sum((0, 1)))
        keys = torch.cat((keys, extra), 1)
        constants = torch.cat((constants, keys.new_zeros(heads, 2, 1)), 1)
        signs = 1.0 - 2.0 * (torch.arange(heads) % 2)
        constants[:, -2, 0] = NORM_CONSTANT * size / heads**0.5 * signs
        constants[min(1, heads - 1), -1, 0] -= constants[:, -2, 0].sum()
    up = torch.cat(
        (torch.cat((keys, constants), 2), torch.cat((values, values.new_zeros(*values.shape[:2], 1)), 2)), 1
    )

    zeros = low.down.new_zeros(1, low.down.shape[1])
    constant = LATENT_CONSTANT * rank**0.5  # the other channels have a mean square of one
    bias = low.down.new_zeros(config.kv_lora_rank + config.qk_rope_head_dim)
    bias[rank] = constant
    norm = low.down.new_full((config.kv_lora_rank,), constant / config.kv_lora_rank**0.5)
    norm[-1] = config.kv_lora_rank**-0.5  # the constant comes out as one
    return {
        "q_proj.weight": (torch.cat(queries, 1) * scale).flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat((low.down, zeros, split.rotary_keys)),
        "kv_a_proj_with_mqa.bias": bias,
        "kv_a_layernorm.weight": norm,
        "kv_b_proj.weight": up.flatten(0, 1),
        "o_proj.bias": low.down.new_zeros(config.hidden_size),
    }


@torch.no_grad()
def input_moments(model, windows: torch.Tensor) -> list[torch.Tensor]:
    """
    Second moments of the input of attention in every layer of a library model, [E, E] each, float64.

    Args:
        model: of the Llama form, in evaluation mode.
        windows: ids of calibration text, [N, S].
    """
    size = model.config.hidden_size
    sums = [torch.zeros(size, size, dtype=torch.float64) for _ in model.model.layers]

    def collect(total: torch.Tensor, x: torch.Tensor) -> None:
        x = x.flatten(0, -2)
        total.add_((x.T @ x).double())

    observers = {
        layer.self_attn.q_proj: lambda x, _, total=total: collect(total, x)
        for layer, total in zip(model.model.layers, sums)
    }
    observe(model, windows, observers)
    return [total / windows.numel() for total in sums]
