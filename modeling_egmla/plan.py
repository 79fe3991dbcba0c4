"""
Memory of a model by arithmetic: parameters, gate tables, cache and workspace, beside other attention at its shape.
Nothing is built or loaded.

    cache elements a token = (d_c + d_rope) * layer groups        EG-MLA and MLA
                             n * (d_nope + d_v) * layers          n KV heads: H in MHA, 4 in GQA, 1 in MQA
    cache bytes            = batch * context * elements * bytes an element, and 4 bytes a token for ids (EG-MLA only)

Source: arXiv:2509.16686, appendix on cache sizes. Cached tokens are batch * context everywhere.
"""

import copy
import math
from dataclasses import asdict, dataclass, replace

from .configuration.presets import PRESETS
from .configuration_egmla import EGMLAConfig
from .placement_egmla import PLACEMENTS
from .table_egmla import POOL_ROWS


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = 4  # an int8 row of a gate table comes with one float32 scale
TOKEN_ID_BYTES = 4
GATES = ("projected", "precomputed")

# What grouped decoding keeps for a token (docs/decoding.md): two float32 numbers a layer, and its place among the
# groups of equal ids, which is an index of 8 bytes, 1.6 places of 9 on text, and 4 for each distinct id.
STATISTICS_BYTES = 8
PLACES_PER_TOKEN = 1.6
GROUP_BYTES = 24

# Distinct ids in so many tokens of presidential messages, GPT-2's tokenizer (docs/decoding.md).
DISTINCT_IDS = {1: 1, 256: 148, 1024: 442, 4096: 1246, 16384: 3105, 65536: 6489, 131072: 8846, 2_388_908: 26907}


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
    """
    The MLA that the paper sets beside models of this shape, with a latent of its own and `config`'s head, biases and
    query rank; None for other shapes.
    """
    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    shape += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for preset in PRESETS.values():
        if preset["kv_gate"] == "none" and all(preset[field] == getattr(config, field) for field in shape):
            baseline = copy.copy(config)
            baseline.kv_gate, baseline.layer_group_size = "none", 1
            baseline.kv_lora_rank = preset["kv_lora_rank"]
            return baseline
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


def distinct_ids(tokens: int, vocab_size: int) -> int:
    """Distinct ids to expect in so many tokens of text: measured, with straight lines between in logarithms."""
    known = list(DISTINCT_IDS.items())
    after = next((n for n in range(1, len(known)) if known[n][0] >= tokens), len(known) - 1)
    (t0, u0), (t1, u1) = known[after - 1 : after + 1]
    slope = math.log(u1 / u0) / math.log(t1 / t0)
    return min(round(u0 * (tokens / t0) ** slope), tokens, vocab_size)


def step_workspace_elements(config: EGMLAConfig, context: int, distinct: int) -> int:
    """
    Elements of float32 that grouped decoding holds for a moment in a layer: of one sequence, whatever the batch.

    Of the distinct ids: gates and absorbed queries. Of tokens and of places: latents, and scores and weights of all
    heads. With additive gates queries and places are not by id.
    """
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    elements = context * rank + 3 * heads * context
    if config.kv_gate != "none":
        elements += distinct * config.kv_width
    if config.kv_gate == "multiply":
        elements += distinct * heads * rank + round(PLACES_PER_TOKEN * context) * (rank + heads)
    return elements


def break_even_tokens(extra: int, saved: int) -> int | None:
    """
    Cached tokens from which `saved` a token has paid for `extra`; any unit, bytes or elements.

    Args:
        extra: what the model needs more, once; may be negative.
        saved: what it needs less for each cached token; may be negative.

    Returns:
        0 if the model never needs more, None if it does however many tokens are cached.
    """
    if saved < 0 or (saved == 0 and extra > 0):
        return None
    return -(-extra // saved) if extra > 0 else 0


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
        source_tables: tables that precomputed gates are computed from, which the library keeps beside them.
        gate_rows: pool of rows on the device, when the tables are elsewhere.
        workspace: kept with the cache between steps by grouped decoding, on text.
        transient: for a moment in a decoding step ([`step_workspace_elements`]), on text.
        prefill: for a moment while a prompt of the whole context is read, whose keys and values are expanded
            ([`expanded_workspace_elements`]); not counted in `device`, since shorter prompts need less.
        device, host, disk: all of it, by place. Memory-mapped tables count as disk: the system may drop their pages.
        traffic_per_token: gate rows that a new token brings to the device in all layers, if its id is new.
        expected_rows: distinct ids to expect in the cached tokens, on text.
        reread_per_step: rows that find no room in the pool, and are brought over at each step, on text.
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
    source_tables: int = 0
    token_ids: int = 0
    gate_rows: int = 0
    workspace: int = 0
    transient: int = 0
    prefill: int = 0
    host: int = 0
    disk: int = 0
    traffic_per_token: int = 0
    expected_rows: int = 0
    reread_per_step: int = 0
    break_even_tokens: int | None = None

    @property
    def compared(self) -> int:
        """Bytes on the device without ids and workspace: what break-even is about."""
        return self.device - self.token_ids - self.workspace - self.transient


@dataclass(frozen=True)
class Plan:
    """
    Memory of a model and of its alternatives.

    Attributes:
        batch, context: sequences, and cached tokens of each.
        dtypes: of `weights`, `tables` and `cache`.
        gates: `"projected"` or `"precomputed"`.
        placement: of the tables, `"device"`, `"host"` or `"mmap"`.
        pool_rows: rows that the pool on the device has room for; 0 without one.
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
    pool_rows: int
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
    pool_rows: int = POOL_ROWS,
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
            EG-MLA-A) looks up rows of the projected width D, and keeps what they were made from.
        placement: where the tables are: `"device"`, `"host"` or `"mmap"` (read from the file as needed), as
            `model.place_kv_gates()` has it.
        pool_rows: rows that stay on the device when the tables are elsewhere.

    Raises:
        ValueError: an argument that cannot be, or gates and placement of a model without gate tables.
    """
    context = config.max_position_embeddings if context is None else context
    dtypes = {"weights": weights, "tables": tables or weights, "cache": cache or weights}
    for name, value in (("batch", batch), ("context", context), ("pool_rows", pool_rows)):
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

    pool_rows = 0 if placement == "device" else min(pool_rows, config.vocab_size)
    model = _planned_footprint(config, batch, context, dtypes, gates, placement, pool_rows)
    others = _alternative_footprints(config, batch, context, dtypes)
    others = [other for other in others if other.name != model.name]

    def saved(other: Footprint) -> int:
        return (other.cache_elements_per_token - model.cache_elements_per_token) * BYTES[dtypes["cache"]]

    fixed = model.compared - model.cache
    others = [
        replace(other, break_even_tokens=break_even_tokens(fixed - other.weights, saved(other))) for other in others
    ]
    baseline = paper_baseline(config)
    name = f"MLA-{baseline.kv_lora_rank}" if baseline is not None else "MHA"
    against = next((other for other in others if other.name == name), others[-1])
    tables_break_even = break_even_tokens(model.tables, saved(against))
    return Plan(batch, context, dtypes, gates, placement, pool_rows, model, others, against.name, tables_break_even)


def _mla_footprint(config: EGMLAConfig, batch: int, context: int, dtypes: dict[str, str]) -> Footprint:
    """Footprint of a model without its gate tables and ids."""
    parameters, tokens = count_parameters(config), batch * context
    weights = parameters.activated * BYTES[dtypes["weights"]]
    cache = tokens * config.cache_elements_per_token * BYTES[dtypes["cache"]]
    distinct = distinct_ids(context, config.vocab_size)
    transient = step_workspace_elements(config, context, distinct) * BYTES["float32"]
    return Footprint(
        name=f"MLA-{config.kv_lora_rank}",
        parameters=parameters,
        cache_elements_per_token=config.cache_elements_per_token,
        weights=weights,
        cache=cache,
        transient=transient,
        prefill=tokens * expanded_workspace_elements(config) * BYTES[dtypes["weights"]],
        device=weights + cache + transient,
    )


def _planned_footprint(
    config: EGMLAConfig,
    batch: int,
    context: int,
    dtypes: dict[str, str],
    gates: str,
    placement: str,
    pool_rows: int,
) -> Footprint:
    model, tokens = _mla_footprint(config, batch, context, dtypes), batch * context
    token_ids = tokens * TOKEN_ID_BYTES  # without gates as well: our cache keeps them
    model = replace(model, token_ids=token_ids, device=model.device + token_ids)
    if config.kv_gate == "none":
        return model

    def table_bytes(width: int, dtype: str, rows: int = config.vocab_size) -> int:
        scale = SCALE_BYTES if dtype == "int8" else 0
        return rows * config.num_hidden_layers * (width * BYTES[dtype] + scale)

    width = config.kv_gate_dim if gates == "projected" else config.kv_width
    # Rows that are mapped from a checkpoint are narrowed when they are read.
    is_stored = placement == "mmap" and gates == "projected"
    tables = table_bytes(width, dtypes["weights" if is_stored else "tables"])
    source_tables = 0 if gates == "projected" else table_bytes(config.kv_gate_dim, dtypes["weights"])
    fetched = 0 if placement == "device" else table_bytes(width, dtypes["tables"], rows=1)
    expected_rows = distinct_ids(tokens, config.vocab_size)
    statistics = STATISTICS_BYTES * config.num_hidden_layers if config.kv_gate_norm == "layer_norm" else 0
    workspace = tokens * (statistics + GROUP_BYTES)
    place = {"device": "device", "host": "host", "mmap": "disk"}[placement]
    sizes = {"device": model.device + workspace + fetched * pool_rows, "host": 0, "disk": 0}
    sizes[place] += tables + source_tables
    return replace(
        model,
        name="EG-MLA" if gates == "projected" else "EG-MLA-A",
        parameters=replace(model.parameters, tables=config.num_hidden_layers * config.vocab_size * width),
        tables=tables,
        source_tables=source_tables,
        gate_rows=fetched * pool_rows,
        workspace=workspace,
        traffic_per_token=fetched,
        expected_rows=expected_rows,
        reread_per_step=fetched * max(0, expected_rows - pool_rows),
        **sizes,
    )


def _alternative_footprints(config: EGMLAConfig, batch: int, context: int, dtypes: dict[str, str]) -> list[Footprint]:
    tokens = batch * context
    mla = copy.copy(config)
    mla.kv_gate = "none"
    mlas = [config for config in (mla, paper_baseline(config)) if config is not None]
    by_name = {footprint.name: footprint for footprint in (_mla_footprint(c, batch, context, dtypes) for c in mlas)}
    for name, kv_heads in multi_head_kinds(config).items():
        parameters = Parameters(multi_head_parameters(config, kv_heads), tables=0)
        elements = multi_head_cache_elements(config, kv_heads)
        weights = parameters.activated * BYTES[dtypes["weights"]]
        cache = tokens * elements * BYTES[dtypes["cache"]]
        by_name[name] = Footprint(name, parameters, elements, weights, cache, device=weights + cache)
    return list(by_name.values())
