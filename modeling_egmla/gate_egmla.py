"""
The gate of EG-MLA: a vector over all heads' keys and values that is looked up by token id, one table a layer.

A gate is projected from a narrow row (the paper's EG-MLA) or read from a table of all ids' gates (its EG-MLA-A).

Shapes: D = heads * (`qk_nope_head_dim` + `v_head_dim`), the gate's width.
"""

import weakref
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_egmla import EGMLAConfig


PRECOMPUTE_CHUNK = 8192  # ids projected at a time

CPU_MULTIPLIES_BF16 = torch.cpu._is_avx512_bf16_supported()


class EGMLAGateProjection(nn.Linear):
    """Projects rows of a gate table to the width of K/V; a class of its own for its initial scale."""


PLAIN_MODULES = (nn.Linear, EGMLAGateProjection, nn.Embedding, nn.LayerNorm, nn.Identity)


def is_plain(*modules: nn.Module) -> bool:
    """
    Whether reading the weights of these modules means the same as calling them: false for one that is wrapped by an
    adapter, parametrized, quantised, sharded, offloaded or hooked.
    """
    return all(
        type(module) in PLAIN_MODULES
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and all(type(p.data) is torch.Tensor and p.device.type != "meta" for p in module.parameters(recurse=False))
        for module in modules
    )


def has_fast_matmul(tensor: torch.Tensor) -> bool:
    """Whether matrix products in this precision are fast: on CPUs without instructions for it, bfloat16 is not."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.bfloat16, torch.float16):
        return True
    return tensor.dtype == torch.bfloat16 and CPU_MULTIPLIES_BF16


def project(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Calls `linear`, which may be a wrapped one or on another device, through float32 where that is faster."""
    if has_fast_matmul(x) or not is_plain(linear):
        return linear(x)
    bias = None if linear.bias is None else linear.bias.float()
    return F.linear(x.float(), linear.weight.float(), bias).to(x.dtype)


class Sources:
    """What something was computed from: `parameters`, as they were then."""

    def __init__(self, parameters: list[nn.Parameter]):
        # The alias keeps the storage alive, so that another one cannot appear at its address, and shares the version.
        self.states = [(weakref.ref(p), p.detach(), self._version(p)) for p in parameters]

    @staticmethod
    def _version(tensor: torch.Tensor) -> int | None:
        return None if tensor.is_inference() else tensor._version

    def is_current(self, parameters: list[nn.Parameter]) -> bool:
        """Whether `parameters` are the same ones with the same memory, not written to since."""
        return all(
            reference() is p
            and (alias.data_ptr(), alias.dtype, alias.shape) == (p.data_ptr(), p.dtype, p.shape)
            and version == self._version(p)
            for p, (reference, alias, version) in zip(parameters, self.states)
        )


class GateTable(NamedTuple):
    """Gates of all ids, [vocab_size, D], with what they were computed from."""

    gates: torch.Tensor
    sources: Sources


class TokenGate(nn.Module):
    """
    What attention knows about gates. The table `kv_gate_embed`, its projection `kv_gate_proj` and the norm of what was
    gated, `kv_gate_norm`, are modules of the attention itself.

    After [`~TokenGate.precompute_kv_gates`] gates come from a [`GateTable`]. That is derived state: neither saved nor
    copied, read only in evaluation mode where no gradient is wanted, and computed again when next used after its
    parameters were replaced, moved or written to. What writes through `parameter.data`, as merging an adapter, and
    fused optimizers leave no trace on the parameter; so `train()`, a forward pass with gradients and loading weights
    drop the table too, and so does replacing one of its modules, as putting an adapter on or taking it off does.
    """

    def init_kv_gate(self, config: EGMLAConfig) -> None:
        self.kv_gate = config.kv_gate
        self.precomputes_kv_gates = False
        self._kv_gate_table: GateTable | None = None
        if self.kv_gate != "none":
            # No padding_idx: it would freeze the gate of the padding id at zero, and that id often is eos as well.
            self.kv_gate_embed = nn.Embedding(config.vocab_size, config.kv_gate_dim)
            self.kv_gate_proj = EGMLAGateProjection(config.kv_gate_dim, config.kv_width, bias=False)
            self.kv_gate_norm = (
                nn.LayerNorm(config.kv_width, eps=config.kv_gate_norm_eps)
                if config.kv_gate_norm == "layer_norm"
                else nn.Identity()
            )

    def precompute_kv_gates(self) -> None:
        """Computes the gates of all ids now; see [`EGMLAPreTrainedModel.precompute_kv_gates`]."""
        self.precomputes_kv_gates = self.kv_gate != "none"
        self._current_gate_table()

    def release_kv_gates(self) -> None:
        """Frees the table; gates are projected again."""
        self.precomputes_kv_gates = False
        self._kv_gate_table = None

    def kv_gates(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the gates of `token_ids`, [..., D]."""
        modules = (self.kv_gate_embed, self.kv_gate_proj)
        wants_gradient = torch.is_grad_enabled() and any(p.requires_grad for m in modules for p in m.parameters())
        if wants_gradient:
            self._kv_gate_table = None  # an optimizer may step next
        table = None if wants_gradient else self._current_gate_table()
        if table is None:
            return project(self.kv_gate_proj, self.kv_gate_embed(token_ids))
        return F.embedding(token_ids, table)

    def gate_kv(self, kv_features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Gates up-projected latents [..., D] by their tokens' ids and normalises the result over all heads."""
        if self.kv_gate == "none":
            return kv_features
        gates = self.kv_gates(token_ids)
        return self.kv_gate_norm(kv_features * gates if self.kv_gate == "multiply" else kv_features + gates)

    def _current_gate_table(self) -> torch.Tensor | None:
        """Returns the table of all gates where it may be used, computing it if it is not there or no longer right."""
        if not self.precomputes_kv_gates or self.training or not is_plain(self.kv_gate_embed, self.kv_gate_proj):
            return None
        parameters = [self.kv_gate_embed.weight, self.kv_gate_proj.weight]
        table = self._kv_gate_table
        if torch.compiler.is_compiling():  # what was computed from is checked by the calls that are not compiled
            return table.gates if table is not None else None
        if table is None or not table.sources.is_current(parameters):
            self._kv_gate_table = table = None  # before the new one is allocated
            self._kv_gate_table = table = GateTable(self._compute_gates(), Sources(parameters))
        return table.gates

    @torch.no_grad()
    def _compute_gates(self) -> torch.Tensor:
        embed = self.kv_gate_embed.weight
        gates = embed.new_empty((embed.shape[0], self.kv_gate_proj.out_features))
        with torch.autocast(embed.device.type, enabled=False):
            for rows, chunk in zip(embed.split(PRECOMPUTE_CHUNK), gates.split(PRECOMPUTE_CHUNK)):
                chunk.copy_(project(self.kv_gate_proj, rows))
        return gates

    def _load_from_state_dict(self, *args, **kwargs):
        self._kv_gate_table = None
        super()._load_from_state_dict(*args, **kwargs)

    def train(self, mode: bool = True):
        if mode:
            self._kv_gate_table = None
        return super().train(mode)

    def __setattr__(self, name, value):
        if name in ("kv_gate_embed", "kv_gate_proj"):
            self.__dict__["_kv_gate_table"] = None
        super().__setattr__(name, value)

    def __getstate__(self):
        return {**self.__dict__, "_kv_gate_table": None}
