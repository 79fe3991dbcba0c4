"""
Starts that are near to their source and not equal to it: from MLA to EG-MLA, and from models of the Llama form to MLA
and on. Each is made in stages, and what a stage costs is measured on text that nothing was fitted on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..configuration_egmla import EGMLAConfig
from .calibration import split_windows
from .checking import TextScore, load_library_model, score_text
from .checkpoint import Checkpoint, ConversionError
from .gating import Bases, GateStart, fit_norms, with_gate
from .gqa import GQAFactors, GQAPlan, full_latent, input_moments, mla_config, mla_weights
from .weights import Weights, build_model


@dataclass(frozen=True)
class LatentStart:
    """
    The MLA model that a model of the Llama form becomes.

    Attributes:
        width: `kv_lora_rank`, one channel of which is constant.
        energy: in the place of a width, the share of the weighted energy of keys and values that is kept.
        rope_dim: `qk_rope_head_dim`; by default half of the source's heads.
        rotary: which components stay rotary, `"position"` or `"energy"` (see [`gqa.choose_frequencies`]); `"heads"`
            is by position, of heads as they are, not mixed.
    """

    width: int | None = None
    energy: float | None = None
    rope_dim: int | None = None
    rotary: str = "position"


def start_gate(
    weights: Weights, gate: GateStart, bases: Bases | None, windows: torch.Tensor | None, notes: list[str]
) -> tuple[Weights, dict[str, TextScore]]:
    """An EG-MLA model from an MLA model, and how it does at every stage on the last of `windows` [N, S]."""
    if weights.config.kv_gate != "none":
        raise ConversionError(f"The source has gates already (`kv_gate` is {weights.config.kv_gate!r}).")
    gated = with_gate(weights, gate, bases=bases)
    if windows is None:
        if gate.norm == "layer_norm":
            notes.append("the gate's LayerNorm was not fitted and no loss measured: give text with --calibration")
        return gated, {}

    fit_on, measure_on = split_windows(windows)
    model = build_model(weights)

    def score(stage: Weights) -> TextScore:
        return score_text(build_model(stage), model, measure_on)

    stages = {"source": score_text(model, model, measure_on)}
    if gate.norm == "none":
        return gated, {**stages, "neutral gate": score(gated)}
    naive = with_gate(weights, gate)
    fitted = with_gate(weights, gate, bases=bases, fitted=fit_norms(model, gated, fit_on))
    stages["neutral gate, LayerNorm as it is initialised"] = score(naive)
    stages["change of basis"] = before = score(gated)
    after = score(fitted)
    if after.divergence > before.divergence:
        notes.append(
            "the fitted LayerNorm was no better on held-out text and was not used: divergence "
            f"{after.divergence:.2g} nats a token, {before.divergence:.2g} without"
        )
        return gated, stages
    return fitted, {**stages, "LayerNorm fitted": after}


def planned_config(theirs, latent: LatentStart, gate: GateStart) -> EGMLAConfig:
    """
    The config of the MLA model that a model with the library config `theirs` becomes, but for which frequencies stay
    rotary.

    Raises:
        ConversionError: the shape does not fit the source.
    """
    plan = plan_latent(theirs, latent, gate, latent.width)
    plan.check(theirs)
    counts = torch.zeros(theirs.head_dim // 2, dtype=torch.long)
    counts += plan.rope_dim // 2 // len(counts)
    counts[: plan.rope_dim // 2 % len(counts)] += 1
    return mla_config(theirs, plan, counts)


def plan_latent(theirs, latent: LatentStart, gate: GateStart, width: int) -> GQAPlan:
    """The shape of the MLA model with this width."""
    rope_dim = theirs.head_dim // 2 if latent.rope_dim is None else latent.rope_dim
    norm_channels = gate.kind != "none" and gate.norm == "layer_norm"
    by, mix = ("position", False) if latent.rotary == "heads" else (latent.rotary, True)
    return GQAPlan(width, rope_dim, by, mix, norm_channels)


@dataclass(frozen=True)
class LlamaStart:
    """
    What [`start_from_llama`] made.

    Attributes:
        weights: of the result.
        stages: its scores, the source's first.
        exact: logits [B, S, V] of the MLA model that loses nothing, which must be the source's.
        reference: those of the source.
        kept: share of the weighted energy of keys and values that the latent keeps, mean over layers.
        counts: components that stay rotary at each frequency, the fastest first.
    """

    weights: Weights
    stages: dict[str, TextScore]
    exact: torch.Tensor
    reference: torch.Tensor
    kept: float
    counts: tuple[int, ...]


@torch.no_grad()
def start_from_llama(
    checkpoint: Checkpoint,
    theirs,
    latent: LatentStart,
    gate: GateStart,
    windows: torch.Tensor,
    check_ids: torch.Tensor,
    dtype: Callable[[str], torch.dtype],
    done: Callable[[str, TextScore], None],
) -> LlamaStart:
    """
    An MLA or EG-MLA model from a model of the Llama form, stage by stage.

    Args:
        checkpoint: of the source.
        theirs: its library config.
        latent, gate: what to make.
        windows: ids of calibration text, [N, S]; the last quarter measures and is not fitted on.
        check_ids: ids [B, S] that the conversion without loss is checked on.
        dtype: of the source's tensors, as they are to be written.
        done: called with every stage.

    Raises:
        ConversionError: the shape does not fit the source.
    """
    width = full_latent(theirs) if latent.width is None else latent.width
    plan_latent(theirs, latent, gate, width).check(theirs)  # before any work
    fit_on, measure_on = split_windows(windows)
    source = load_library_model(checkpoint.folder, checkpoint)
    inputs = input_moments(source, fit_on)
    stages: dict[str, TextScore] = {}

    def score(name: str, model: nn.Module) -> None:
        stages[name] = score_text(model, source, measure_on)
        done(name, stages[name])

    def factorise(plan: GQAPlan) -> GQAFactors:
        return GQAFactors(checkpoint.read, theirs, inputs, plan)

    def build(factors: GQAFactors) -> nn.Module:
        return build_model(mla_weights(factors, lambda name: torch.float32))

    whole, all_rotary = full_latent(theirs), theirs.num_key_value_heads * theirs.head_dim
    widest = plan_latent(theirs, latent, GateStart(), whole)
    lossless = build(factorise(replace(widest, rope_dim=all_rotary)))
    exact, reference = (model(check_ids, use_cache=False).logits for model in (lossless, source))
    del lossless

    score("source", source)
    few_rotary = factorise(widest)
    score(f"rotary in {widest.rope_dim} channels of {all_rotary}", build(few_rotary))
    kept, width = few_rotary.kept(), latent.width
    if width is None:
        width = min(2 + int((kept < latent.energy).sum()), whole)
    factors = factorise(plan_latent(theirs, latent, gate, width))
    width = factors.plan.latent
    model = build(factors)
    norms = [layer.self_attn.kv_a_layernorm for layer in model.model.layers]
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm = FixedNorm(layer.self_attn.kv_a_layernorm.weight)
    score(f"latent of {width}", model)
    for layer, norm in zip(model.model.layers, norms):
        layer.self_attn.kv_a_layernorm = norm
    score("RMSNorm of the latent", model)

    weights = mla_weights(factors, dtype)
    if gate.kind != "none":
        state = model.state_dict()  # the factors once more would give the same, and take their time
        wide = Weights(model.config, state.__getitem__, lambda name: torch.float32)
        neutral = with_gate(wide, gate)
        fitted = None
        if gate.norm == "layer_norm":
            score("gate of one, LayerNorm as it is initialised", build_model(neutral))
            fitted = fit_norms(model, neutral, fit_on)
        weights = with_gate(weights, gate, fitted=fitted)
        name = "gate of one" if fitted is None else "LayerNorm fitted"
        score(name, build_model(with_gate(wide, gate, fitted=fitted)))
    kept_here = kept[min(width - 1, len(kept)) - 1].item()
    return LlamaStart(weights, stages, exact, reference, kept_here, tuple(factors.counts.tolist()))


class FixedNorm(nn.Module):
    """The latent's RMSNorm with the length of the constant channel in the place of the measured one."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = weight

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return latent * (self.weight / self.weight[0])
