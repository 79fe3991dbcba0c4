"""
Memory of a model by arithmetic: parameters, gate tables, cache and workspace, beside other attention at its shape.
Nothing is built or loaded.

    cache elements a token = (d_c + d_rope) * layer groups        EG-MLA and MLA
                             n * (d_nope + d_v) * layers          n KV heads: H in MHA, 4 in GQA, 1 in MQA
    cache bytes            = batch * context * elements * bytes an element, and 4 bytes a token for ids (EG-MLA only)

Source: arXiv:2509.16686, appendix on cache sizes. Cached tokens are batch * context everywhere.
"""

import copy
from dataclasses import asdict, dataclass, replace

from .configuration.presets import PRESETS
from .configuration_egmla import EGMLAConfig


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = 4  # an int8 row of a gate table comes with one float32 scale
TOKEN_ID_BYTES = 4
GATES = ("projected", "precomputed")
PLACEMENTS = ("device", "host", "mmap")


@dataclass(frozen=True)
class Parameters:
    """
    Number of parameters, each tensor once.

    Attributes:
        activated: all but the gate tables, as the paper counts them.
        tables: rows of all gate tables.
    """

    activated: int
    tables: int

    @property
    def total(self) -> int:
        return self.activated + self.tables


def count_parameters(config: EGMLAConfig) -> Parameters:
    """Counts the parameters of an [`EGMLAForCausalLM`]; `kv_gate="none"` makes it plain MLA."""
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.kv_width
    compressed = config.kv_lora_rank + config.qk_rope_head_dim
    bias = int(config.attention_bias)

    queries = heads * config.qk_head_dim
    rank = config.q_lora_rank
    if rank is None:
        query = hidden * queries
    else:
        query = hidden * rank + bias * rank + rank + rank * queries  # q_a_proj, q_a_layernorm, q_b_proj
    output = heads * config.v_head_dim * hidden + bias * hidden
    latent = hidden * compressed + bias * compressed + config.kv_lora_rank + config.kv_lora_rank * width
    gate = tables = 0
    if config.kv_gate != "none":
        gate = config.kv_gate_dim * width + (2 * width if config.kv_gate_norm == "layer_norm" else 0)
        tables = config.vocab_size * config.kv_gate_dim

    layers = config.num_hidden_layers
    attention = layers * (query + output + gate) + config.num_layer_groups * latent
    return Parameters(attention + _other_parameters(config), layers * tables)


def _other_parameters(config: EGMLAConfig) -> int:
    """Parameters outside attention: embeddings, MLPs and RMSNorms."""
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    layer = 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    return embeddings + config.num_hidden_layers * layer + config.hidden_size


def multi_head_parameters(config: EGMLAConfig, kv_heads: int) -> int:
    """Parameters of a model of this shape whose attention has keys and values of `kv_heads` heads, and no biases."""
    key_value = config.hidden_size * kv_heads * (config.qk_nope_head_dim + config.v_head_dim)
    query = config.hidden_size * config.num_attention_heads * config.qk_nope_head_dim
    output = config.num_attention_heads * config.v_head_dim * config.hidden_size
    return config.num_hidden_layers * (query + key_value + output) + _other_parameters(config)


def multi_head_kinds(config: EGMLAConfig) -> dict[str, int]:
    """
    Number of KV heads of GQA, MQA and MHA at this shape, by name. GQA has 4, or the largest number below that divides
    the heads; where only 1 does, it is MQA.
    """
    heads = config.num_attention_heads
    grouped = next(({f"GQA-{n}": n} for n in (4, 3, 2) if n < heads and heads % n == 0), {})
    return grouped | {"MQA": 1, "MHA": heads}


def multi_head_cache_elements(config: EGMLAConfig, kv_heads: int) -> int:
    """Elements that attention with `kv_heads` KV heads of this shape caches for one token in all layers."""
    return kv_heads * (config.qk_nope_head_dim + config.v_head_dim) * config.num_hidden_layers


def paper_baseline(config: EGMLAConfig) -> EGMLAConfig | None:
    """The MLA that the paper sets beside models of this shape, with a latent of its own; None for other shapes."""
    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    shape += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for preset in PRESETS.values():
        if preset["kv_gate"] == "none" and all(preset[field] == getattr(config, field) for field in shape):
            return EGMLAConfig.from_dict(preset)
    return None


def expanded_workspace_elements(config: EGMLAConfig) -> int:
    """
    Elements a cached token that a decoding step holds for a moment when it expands the whole history, in one layer.

    With D = `config.kv_width` and K = H * (d_nope + d_rope): up-projected features (D) and, gated, the gate, the
    product and its norm (3 D); then features, the gated K/V (D), keys (K) and values padded to the keys' width (K, on
    a CPU). So 2 D + 2 max(D, K) with a gate and D + 2 K without.
    """
    width, keys = config.kv_width, config.num_attention_heads * config.qk_head_dim
    return width + 2 * keys if config.kv_gate == "none" else 2 * width + 2 * max(width, keys)


def break_even_tokens(extra: int, saved: int, row: int = 0, rows: int = 0) -> int | None:
    """
    Cached tokens from which `saved` a token has paid for `extra`; any unit, bytes or elements.

    Args:
        extra: what the model needs more, once; may be negative.
        saved: what it needs less for each cached token; may be negative.
        row: what each of the first `rows` tokens brings with it (a gate row fetched from a table that is elsewhere).
        rows: rows of that table.

    Returns:
        0 if the model never needs more, None if it does however many tokens are cached.
    """
    with_all_rows = extra + row * rows
    if saved < 0 or (saved == 0 and with_all_rows > 0):
        return None
    if with_all_rows > saved * rows:
        return -(-with_all_rows // saved)
    return -(-extra // (saved - row)) if extra > 0 else 0


@dataclass(frozen=True)
class Footprint:
    """
    What a model with one kind of attention needs; sizes in bytes.

    Attributes:
        name: `EG-MLA`, `EG-MLA-A` (precomputed gates), `MLA-<latent>`, `GQA-<KV heads>`, `MQA` or `MHA`.
        parameters: with precomputed gates, their rows count as the tables.
        cache_elements_per_token: elements cached for one token in all layers.
        weights: all parameters but the tables.
        tables: gate tables, wherever they are.
        cache: latents and rotated keys, or keys and values.
        token_ids: ids of the cached tokens.
        gate_rows: rows of the cached tokens that must be on the device when the tables are not, each distinct id once;
            at most this much, since texts repeat ids.
        workspace: passing, in a step that expands the whole history ([`expanded_workspace_elements`]): an upper bound,
            since tiles and groups need less; attention that reads its cache as it is needs none.
        device, host, disk: all of it, by place. Memory-mapped tables count as disk: the system may drop their pages.
        traffic_per_token: gate rows that a new token brings to the device in all layers, at most.
        reread_per_step: the same for a decoder that keeps no rows and reads the whole history's at each step.
        break_even_tokens: of an alternative: cached tokens from which the planned model needs no more device memory
            than it, ids and workspace apart; 0 if it never needs more, None if it always does.
    """

    name: str
    parameters: Parameters
    cache_elements_per_token: int
    weights: int
    cache: int
    device: int
    tables: int = 0
    token_ids: int = 0
    gate_rows: int = 0
    workspace: int = 0
    host: int = 0
    disk: int = 0
    traffic_per_token: int = 0
    reread_per_step: int = 0
    break_even_tokens: int | None = None


@dataclass(frozen=True)
class Plan:
    """
    Memory of a model and of its alternatives.

    Attributes:
        batch, context: sequences, and cached tokens of each.
        dtypes: of `weights`, `tables` and `cache`.
        gates: `"projected"` or `"precomputed"`.
        placement: of the tables, `"device"`, `"host"` or `"mmap"`.
        model: the planned model.
        alternatives: MLA of the same latent, the paper's MLA where it has one of this shape, GQA, MQA and MHA.
        tables_against: the alternative that `tables_break_even_tokens` is about: the paper's MLA, else MHA.
        tables_break_even_tokens: cached tokens at which the cache saved against it equals the gate tables alone; None
            if nothing is saved.
    """

    batch: int
    context: int
    dtypes: dict[str, str]
    gates: str
    placement: str
    model: Footprint
    alternatives: list[Footprint]
    tables_against: str
    tables_break_even_tokens: int | None

    def to_dict(self) -> dict:
        return asdict(self)


def plan(
    config: EGMLAConfig,
    batch: int = 1,
    context: int | None = None,
    weights: str = "bfloat16",
    tables: str | None = None,
    cache: str | None = None,
    gates: str = "projected",
    placement: str = "device",
) -> Plan:
    """
    Plans the memory that decoding with a model needs, and what other attention at its shape would need.

    Args:
        config: configuration of the model, EG-MLA or (`kv_gate="none"`) MLA.
        batch: sequences.
        context: cached tokens of each; by default `config.max_position_embeddings`.
        weights: dtype of all parameters but the gate tables: `"float32"`, `"bfloat16"` or `"float16"`.
        tables: dtype of the gate tables, by default that of the weights; also `"int8"` (a float32 scale a row).
        cache: dtype of the cache, by default that of the weights.
        gates: `"projected"` looks up tables of width `kv_gate_dim` and projects; `"precomputed"` (the paper's
            EG-MLA-A) looks up rows of the projected width D, counted in place of the tables they were made from;
            the library keeps those as well, which is not counted.
        placement: where the tables are: `"device"`, `"host"` or `"mmap"` (read from the file as needed).

    Raises:
        ValueError: an argument that cannot be, or gates and placement of a model without gate tables.
    """
    context = config.max_position_embeddings if context is None else context
    dtypes = {"weights": weights, "tables": tables or weights, "cache": cache or weights}
    for name, value in (("batch", batch), ("context", context)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value}.")
    for part, dtype in dtypes.items():
        known = [name for name in BYTES if part == "tables" or name != "int8"]
        if dtype not in known:
            raise ValueError(f"The dtype of {part} must be one of {', '.join(known)}, but is {dtype!r}.")
    for name, value, known in (("gates", gates, GATES), ("placement", placement, PLACEMENTS)):
        if value not in known:
            raise ValueError(f"`{name}` must be one of {', '.join(known)}, but is {value!r}.")
    if config.kv_gate == "none" and (gates, placement, tables) != ("projected", "device", None):
        raise ValueError("This model is plain MLA, without gate tables: leave `gates`, `placement` and `tables` out.")

    tokens = batch * context
    model = _planned_footprint(config, tokens, dtypes, gates, placement)
    others = _alternative_footprints(config, tokens, dtypes)
    others = [other for other in others if other.name != model.name]

    def saved(other: Footprint) -> int:
        return (other.cache_elements_per_token - model.cache_elements_per_token) * BYTES[dtypes["cache"]]

    fixed = model.weights + model.tables - model.host - model.disk
    others = [
        replace(
            other,
            break_even_tokens=break_even_tokens(
                fixed - other.weights, saved(other), row=model.traffic_per_token, rows=config.vocab_size
            ),
        )
        for other in others
    ]
    baseline = paper_baseline(config)
    name = f"MLA-{baseline.kv_lora_rank}" if baseline is not None else "MHA"
    against = next((other for other in others if other.name == name), others[-1])
    tables_break_even = break_even_tokens(model.tables, saved(against))
    return Plan(batch, context, dtypes, gates, placement, model, others, against.name, tables_break_even)


def _mla_footprint(config: EGMLAConfig, tokens: int, dtypes: dict[str, str]) -> Footprint:
    """Footprint of a model without its gate tables and ids."""
    parameters = count_parameters(config)
    weights = parameters.activated * BYTES[dtypes["weights"]]
    cache = tokens * config.cache_elements_per_token * BYTES[dtypes["cache"]]
    workspace = tokens * expanded_workspace_elements(config) * BYTES[dtypes["weights"]]
    return Footprint(
        name=f"MLA-{config.kv_lora_rank}",
        parameters=parameters,
        cache_elements_per_token=config.cache_elements_per_token,
        weights=weights,
        cache=cache,
        workspace=workspace,
        device=weights + cache + workspace,
    )


def _planned_footprint(
    config: EGMLAConfig, tokens: int, dtypes: dict[str, str], gates: str, placement: str
) -> Footprint:
    model = _mla_footprint(config, tokens, dtypes)
    token_ids = tokens * TOKEN_ID_BYTES  # without gates as well: our cache keeps them
    model = replace(model, token_ids=token_ids, device=model.device + token_ids)
    if config.kv_gate == "none":
        return model

    width = config.kv_gate_dim if gates == "projected" else config.kv_width
    scale = SCALE_BYTES if dtypes["tables"] == "int8" else 0
    row = config.num_hidden_layers * (width * BYTES[dtypes["tables"]] + scale)
    tables = config.vocab_size * row
    if placement == "device":
        fetched = gate_rows = 0
    else:
        fetched = row
        gate_rows = min(tokens, config.vocab_size) * row
    return replace(
        model,
        name="EG-MLA" if gates == "projected" else "EG-MLA-A",
        parameters=replace(model.parameters, tables=config.num_hidden_layers * config.vocab_size * width),
        tables=tables,
        gate_rows=gate_rows,
        device=model.device + (tables if placement == "device" else gate_rows),
        host=tables if placement == "host" else 0,
        disk=tables if placement == "mmap" else 0,
        traffic_per_token=fetched,
        reread_per_step=fetched * tokens,
    )


def _alternative_footprints(config: EGMLAConfig, tokens: int, dtypes: dict[str, str]) -> list[Footprint]:
    mla = copy.copy(config)
    mla.kv_gate = "none"
    mlas = [config for config in (mla, paper_baseline(config)) if config is not None]
    by_name = {footprint.name: footprint for footprint in (_mla_footprint(c, tokens, dtypes) for c in mlas)}
    for name, kv_heads in multi_head_kinds(config).items():
        parameters = Parameters(multi_head_parameters(config, kv_heads), tables=0)
        elements = multi_head_cache_elements(config, kv_heads)
        weights = parameters.activated * BYTES[dtypes["weights"]]
        cache = tokens * elements * BYTES[dtypes["cache"]]
        by_name[name] = Footprint(name, parameters, elements, weights, cache, device=weights + cache)
    return list(by_name.values())
