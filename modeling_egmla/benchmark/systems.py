"""What is measured: EG-MLA in its variants, and the library's own models at the same shape, unmodified."""

import copy
from dataclasses import dataclass

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache

from .. import plan
from ..cache_egmla import EGMLACache
from ..configuration_egmla import EGMLAConfig
from ..modeling_egmla import EGMLAForCausalLM


LABELS = {
    "mha": "MHA",
    "gqa": "GQA",
    "mla": "MLA",
    "our-mla": "our MLA",
    "egmla": "EG-MLA",
    "egmla-a": "EG-MLA-A",
    "egmla-a-fused": "EG-MLA-A, fused",
    "egmla-stock": "EG-MLA, K/V",
}
FUSED = "egmla-a-fused"  # `egmla-a` decoded by the kernel, which is measured where it is named
ALL_SYSTEMS = tuple(name for name in LABELS if name != FUSED)
SAME_WEIGHTS = {"egmla", "egmla-a", FUSED, "egmla-stock"}
LAYER_GROUPS = (1, 2, 4, 6)
GROUPED = "egmla-a-lgz"  # and the layer group size: `egmla-a` with it


def label(name: str) -> str:
    """Name of a system in tables."""
    return f"groups of {name.removeprefix(GROUPED)}" if name.startswith(GROUPED) else LABELS[name]


@dataclass(frozen=True)
class Shape:
    """
    Shape of all systems.

    Attributes:
        config: of EG-MLA.
        mla_rank: width of the latent of plain MLA, as the paper's MLA of this shape has it; else as EG-MLA's.
        gqa_heads: KV heads of GQA.
    """

    config: EGMLAConfig
    mla_rank: int
    gqa_heads: int

    @classmethod
    def of(cls, config: EGMLAConfig, layers: int | None = None) -> "Shape":
        """
        Args:
            config: a model's configuration.
            layers: measure so many layers in place of all.

        Raises:
            ValueError: Llama has no such shape, or the model no gates.
        """
        if config.kv_gate != "multiply":
            raise ValueError(
                f"The benchmark sets multiplicative gates beside other attention, but `kv_gate` is {config.kv_gate!r}."
            )
        if config.qk_nope_head_dim != config.v_head_dim:
            raise ValueError(
                f"Llama's keys and values are of one width, but `qk_nope_head_dim` is {config.qk_nope_head_dim} and "
                f"`v_head_dim` is {config.v_head_dim}: no peer of this shape can be made."
            )
        baseline = plan.paper_baseline(config) or config
        grouped = next((n for name, n in plan.multi_head_kinds(config).items() if name.startswith("GQA")), 1)
        config = copy.copy(config)
        config.num_hidden_layers = layers or config.num_hidden_layers
        config.max_position_embeddings = max(config.max_position_embeddings, 1 << 17)
        return cls(config, baseline.kv_lora_rank, grouped)

    def egmla_config(self, name: str) -> EGMLAConfig:
        """Configuration of one of our systems, and what the shape of the library's MLA is read from."""
        config = copy.copy(self.config)
        if name in ("our-mla", "mla"):
            config.kv_gate, config.kv_lora_rank = "none", self.mla_rank
        if name.startswith(GROUPED):
            config.layer_group_size = int(name.removeprefix(GROUPED))
        return config


def library_config(shape: Shape, name: str) -> LlamaConfig | DeepseekV3Config:
    """Configuration of one of the library's models."""
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields += ("max_position_embeddings", "tie_word_embeddings")
    config = shape.egmla_config(name)
    common = {field: getattr(config, field) for field in fields}
    if name == "mla":
        return DeepseekV3Config(
            **common,
            num_key_value_heads=config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            first_k_dense_replace=config.num_hidden_layers,
        )
    kv_heads = shape.gqa_heads if name == "gqa" else config.num_attention_heads
    return LlamaConfig(**common, num_key_value_heads=kv_heads, head_dim=config.qk_nope_head_dim)


@torch.no_grad()
def build_model(
    shape: Shape, name: str, dtype: torch.dtype, device: str, others: dict[str, PreTrainedModel] | None = None
) -> PreTrainedModel:
    """
    Builds the model of a system with random weights, gates precomputed where the system has them so. It shares the
    weights of one among the `others` that is the same but for that.
    """
    with init.no_init_weights(), torch.device(device):
        if name in ("mha", "gqa", "mla"):
            model_class = DeepseekV3ForCausalLM if name == "mla" else LlamaForCausalLM
            model = model_class._from_config(library_config(shape, name), dtype=dtype)
        else:
            model = EGMLAForCausalLM._from_config(shape.egmla_config(name), dtype=dtype)
    twin = next((model for other, model in (others or {}).items() if {name, other} <= SAME_WEIGHTS), None)
    if twin is not None:
        model.load_state_dict(twin.state_dict(), assign=True)
    model.tie_weights()
    for parameter in model.parameters() if twin is None else ():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            bound = parameter.shape[1] ** -0.5
            parameter.uniform_(-bound, bound)
    model.eval()
    if name.startswith("egmla-a"):
        model.precompute_kv_gates()
    if name == FUSED:
        model.set_kv_decoding("fused")
    return model


def new_cache(model: PreTrainedModel, name: str) -> Cache:
    """An empty cache of the kind that the system decodes on."""
    is_stock = name in ("mha", "gqa", "mla", "egmla-stock")
    return DynamicCache(config=model.config) if is_stock else EGMLACache(model.config)


@torch.no_grad()
def filled_cache(model: PreTrainedModel, name: str, token_ids: torch.Tensor) -> Cache:
    """A cache as after a prompt of `token_ids` [B, T], filled with random states directly."""
    (B, T), config, cache = token_ids.shape, model.config, new_cache(model, name)
    if name in ("mha", "gqa"):
        heads, widths = config.num_key_value_heads, (config.head_dim, config.head_dim)
    elif name == "egmla-stock":
        heads, widths = config.num_attention_heads, (config.qk_head_dim, config.v_head_dim)
    else:
        heads, widths = 1, (config.kv_lora_rank, config.qk_rope_head_dim)
    # One random row for all layers and sequences: values do not change the speed, and drawing them all takes long.
    row = [torch.randn(1, heads, T, width, dtype=model.dtype, device=model.device) for width in widths]
    keys, values = (states.expand(B, -1, -1, -1) for states in row)
    if isinstance(cache, EGMLACache):
        groups = len(cache.layers)
        return cache.fill([keys] * groups, [values] * groups, token_ids)
    for layer in range(config.num_hidden_layers):
        cache.update(keys, values, layer)
    return cache


def cache_bytes(cache: Cache) -> dict[str, int]:
    """Bytes that a cache holds: `filled` with states, `token_ids`, `slack` allocated ahead, and `workspace` kept."""
    if isinstance(cache, EGMLACache):
        memory = cache.memory()
        return {
            "filled": memory.latents,
            "token_ids": memory.token_ids,
            "slack": memory.slack,
            "workspace": memory.workspace,
        }
    filled = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"filled": filled, "token_ids": 0, "slack": 0, "workspace": 0}


def weight_bytes(model: PreTrainedModel) -> dict[str, int]:
    """Bytes of the `weights`, of the gate `tables`, and of what was `precomputed` from them."""
    tables = precomputed = 0
    for name, module in model.named_modules():
        if name.endswith("kv_gate_embed"):
            tables += module.weight.nbytes
        table = getattr(module, "_kv_gate_table", None)
        precomputed += 0 if table is None else table.gates.nbytes
    weights = sum(parameter.nbytes for parameter in model.parameters()) - tables
    return {"weights": weights, "tables": tables, "precomputed": precomputed}


def estimated_bytes(shape: Shape, name: str, cell) -> int:
    """About how much memory a system needs in a cell, at its highest."""
    config, size = shape.egmla_config(name), plan.BYTES[cell.dtype]
    tokens, layers = cell.batch * cell.prompt, config.num_hidden_layers
    parameters = plan.count_parameters(config)
    weights, expanded = parameters.total, plan.expanded_workspace_elements(config)
    if name in ("mha", "gqa"):
        heads = shape.gqa_heads if name == "gqa" else config.num_attention_heads
        elements = plan.multi_head_cache_elements(config, heads)
        expanded = 2 * elements // layers  # the cache of a layer is copied as it grows
    elif name == "egmla-stock":
        elements = layers * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
        expanded += elements // layers
    else:
        elements = config.cache_elements_per_token
        if name.startswith("egmla-a"):
            weights += layers * config.vocab_size * config.kv_width
        if cell.phase != "prefill" and name != "mla":
            expanded //= 8  # tiles and groups
    if cell.phase == "prefill":
        expanded += 4 * (config.hidden_size + config.intermediate_size) + 3 * config.num_attention_heads * (
            config.qk_head_dim
        )
    return size * (weights + tokens * (elements + expanded)) + (1 << 28)
