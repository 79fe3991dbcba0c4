"""`modeling_egmla.plan` counts what models really have and caches really hold, and gives the paper's break-even."""

import copy
import itertools

import pytest
import torch

from modeling_egmla import EGMLACache, EGMLAConfig, EGMLAForCausalLM
from modeling_egmla.configuration.presets import PRESETS
from modeling_egmla.plan import (
    break_even_tokens,
    count_parameters,
    distinct_ids,
    expanded_workspace_elements,
    multi_head_cache_elements,
    plan,
    step_workspace_elements,
)


BASE = EGMLAConfig.from_preset("egmla-base-kv64-emb256")


def alternatives(*args, **kwargs):
    return {footprint.name: footprint for footprint in plan(*args, **kwargs).alternatives}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_gate": "add"},
        {"kv_gate": "none"},
        {"kv_gate_norm": "none"},
        {"q_lora_rank": 7},
        {"q_lora_rank": 7, "attention_bias": True, "layer_group_size": 2},
        {"attention_bias": True, "tie_word_embeddings": False},
        {"num_hidden_layers": 4, "layer_group_size": 2, "kv_gate": "none"},
    ],
    ids=str,
)
def test_parameters_equal_the_models(make_config, changes):
    """Counts by formula equal those of a model that is built, for every variant of the architecture."""
    config = make_config(**changes)
    with torch.device("meta"):
        model = EGMLAForCausalLM(config)
    tables = sum(p.numel() for name, p in model.named_parameters() if name.endswith("kv_gate_embed.weight"))
    counted = count_parameters(config)
    assert (counted.tables, counted.total) == (tables, sum(p.numel() for p in model.parameters()))


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_presets(name):
    """Counts by formula equal those of the presets' models."""
    config = EGMLAConfig.from_preset(name)
    with torch.device("meta"):
        model = EGMLAForCausalLM(config)
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_equals_a_live_cache(make_model, dtype):
    """The planned bytes of cache and ids are those that a cache reports after a forward pass."""
    model = make_model(num_hidden_layers=4, layer_group_size=2).to(getattr(torch, dtype))
    cache = EGMLACache(model.config)
    model(torch.randint(97, (3, 11)), cache=cache)
    planned = plan(model.config, batch=3, context=11, weights=dtype).model
    assert (planned.cache, planned.token_ids) == (cache.memory().latents, cache.memory().token_ids)


@pytest.mark.parametrize("kv_gate", ["multiply", "none"])
def test_workspace_is_measured(make_model, kv_gate):
    """What a step allocates at its peak when it expands the history is the workspace planned for prefill."""
    shape = {"num_attention_heads": 12, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    model = make_model(num_hidden_layers=1, kv_gate=kv_gate, max_position_embeddings=4096, **shape)
    tokens, new = 4096, 32  # several new tokens at once are always computed by expansion
    streams = [torch.randn(1, 1, tokens - new, width) for width in (16, 64)]
    cache = EGMLACache(model.config)
    cache.fill([streams[0]], [streams[1]], torch.randint(97, (1, tokens - new)))
    peak = peak_bytes(lambda: model(torch.randint(97, (1, new)), cache=cache))
    planned = tokens * expanded_workspace_elements(model.config) * 4
    assert peak - cache.memory().total == pytest.approx(planned, rel=0.06)


def peak_bytes(function) -> int:
    """The most that was allocated at once while `function` ran, above what was before."""
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    allocations = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    ordered = sorted(allocations, key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in ordered))


@pytest.mark.parametrize("kv_gate", ["multiply", "add"])
def test_workspace_of_decoding_is_measured(make_model, kv_gate):
    """What a grouped step allocates at its peak, and what it keeps with the cache, are what is planned for text."""
    shape = {"num_attention_heads": 12, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    sizes = {"num_hidden_layers": 2, "vocab_size": 20_000, "kv_lora_rank": 64, "max_position_embeddings": 4096}
    model = make_model(kv_gate=kv_gate, **sizes, **shape)
    model.set_kv_decoding("grouped")
    ranks = torch.arange(1, 20_001).double()
    ids = torch.multinomial((ranks + 10) ** -1.3, 2048, replacement=True)[None]  # as in text, a few are common
    cache = EGMLACache(model.config)
    latents, keys = ([torch.randn(1, 1, 2046, 64) for _ in range(2)] for _ in range(2))
    cache.fill(latents, keys, ids[:, :2046])
    with torch.no_grad():
        model(ids[:, 2046:2047], cache=cache)
    peak = peak_bytes(lambda: model(ids[:, 2047:], cache=cache))
    planned = plan(model.config, context=2048, weights="float32").model
    distinct = len(ids.unique())
    assert peak == pytest.approx(4 * step_workspace_elements(model.config, 2048, distinct), rel=0.12)
    assert distinct_ids(2048, 20_000) == pytest.approx(distinct, rel=0.2)
    assert cache.memory().workspace == pytest.approx(planned.workspace, rel=0.08)


def test_cache_elements_of_the_paper():
    """Elements a token at the Base shape: 18,432 for MHA, twelve times EG-MLA's."""
    others = alternatives(BASE)
    assert {name: footprint.cache_elements_per_token for name, footprint in others.items()} == {
        "MLA-64": 1_536,
        "MLA-256": 3_840,
        "GQA-4": 6_144,
        "MQA": 1_536,
        "MHA": 18_432,
    }
    assert multi_head_cache_elements(EGMLAConfig.from_preset("egmla-large-kv128-emb512"), kv_heads=16) == 49_152


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_break_even_of_the_paper(dtype):
    """Tables against cache, total parameters, and precomputed tables: 67,072, 66,831 and 402,432 cached tokens."""
    projected = plan(BASE, weights=dtype)
    assert (projected.tables_against, projected.tables_break_even_tokens) == ("MLA-256", 67_072)
    assert alternatives(BASE, weights=dtype)["MLA-256"].break_even_tokens == 66_831
    precomputed = plan(BASE, weights=dtype, gates="precomputed")
    assert precomputed.tables_break_even_tokens == 402_432
    assert precomputed.model.parameters.tables == 927_203_328


@pytest.mark.parametrize(
    ("gates", "placement", "tables"),
    itertools.product(["projected", "precomputed"], ["device", "host", "mmap"], ["bfloat16", "int8"]),
)
def test_break_even_is_where_totals_cross(gates, placement, tables):
    """One token before its break-even the model needs more device memory than the alternative, from there on not."""

    def difference(name, context):
        planned = plan(BASE, context=context, gates=gates, placement=placement, tables=tables)
        other = next(footprint for footprint in planned.alternatives if footprint.name == name)
        return planned.model.compared - other.compared

    for name, footprint in alternatives(BASE, gates=gates, placement=placement, tables=tables).items():
        tokens = footprint.break_even_tokens
        if tokens is None:
            assert difference(name, 10**9) > 0
        else:
            assert all(difference(name, tokens + more) <= 0 for more in (1, 10**3, 10**6, 10**9))
            assert tokens == 0 or difference(name, max(tokens, 1)) <= 0
            assert tokens <= 1 or difference(name, tokens - 1) > 0


def test_break_even_of_nothing():
    """A model that never needs more breaks even at once; one that saves nothing, never."""
    assert break_even_tokens(-5, 0) == 0
    assert break_even_tokens(5, 0) is None
    assert break_even_tokens(5, -1) is None
    assert break_even_tokens(5, 2) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("gates", ["projected", "precomputed"])
@pytest.mark.parametrize("placement", ["device", "host", "mmap"])
def test_placements_equal_a_live_model(make_model, tmp_path, placement, gates, dtype):
    """Planned bytes of tables, pool and traffic are those that a model with placed tables reports."""
    model, arguments = make_model(), {}
    model.save_pretrained(tmp_path)
    if gates == "precomputed" and placement == "mmap":
        arguments = {"gates_file": tmp_path / "gates"}
        model.save_kv_gates(tmp_path / "gates", dtype)
    elif gates == "precomputed":
        model.precompute_kv_gates()
    model.place_kv_gates(placement, dtype, pool_rows=40, checkpoint=tmp_path, **arguments)
    with torch.no_grad():
        model(torch.arange(2, 25)[None])
    live = model.kv_gate_statistics()
    options = {"gates": gates, "placement": placement, "tables": dtype, "pool_rows": 40}
    planned = plan(model.config, weights="float32", **options).model
    on_device = planned.tables + planned.source_tables if placement == "device" else 0
    assert (live.device, live.host, live.file) == (on_device, planned.host, planned.disk)
    assert (live.pool, live.bytes_moved) == (planned.gate_rows, 23 * planned.traffic_per_token)


def test_placement_moves_the_tables():
    """Tables on the host or in a file leave the device, and a pool of rows takes their place."""
    on_device, on_host, in_file = (plan(BASE, batch=2, placement=place).model for place in ("device", "host", "mmap"))
    row = 12 * 256 * 2  # bytes of one id in all layers
    assert on_device.host == on_device.disk == on_device.traffic_per_token == on_device.gate_rows == 0
    assert (on_host.host, on_host.disk) == (50_304 * row, 0)
    assert (in_file.host, in_file.disk) == (0, 50_304 * row)
    assert (on_host.traffic_per_token, on_host.gate_rows, on_host.reread_per_step) == (row, 4096 * row, 0)
    assert on_host.device == in_file.device == on_device.device - 50_304 * row + 4096 * row
    assert plan(BASE, placement="host", pool_rows=10**6).model.gate_rows == 50_304 * row  # no more rows than ids
    small = plan(BASE, batch=2, placement="host", pool_rows=1000).model
    assert small.reread_per_step == (small.expected_rows - 1000) * row > 0


def test_law_of_distinct_ids():
    """Distinct ids are those that were measured, grow with the text, and are no more than tokens or ids."""
    assert [distinct_ids(tokens, 50_304) for tokens in (1, 256, 4096, 65_536)] == [1, 148, 1246, 6489]
    grown = [distinct_ids(2**n, 50_304) for n in range(40)]
    assert grown == sorted(grown) and grown[-1] == 50_304
    assert all(rows <= 2**n for n, rows in enumerate(grown))
    assert distinct_ids(4096, 97) == 97


def test_totals_are_sums():
    """What a footprint holds on the device is the sum of its parts, and dtypes count by part."""
    planned = plan(BASE, batch=2, context=100, weights="float32", tables="int8", cache="bfloat16")
    model = planned.model
    assert model.weights == 120_086_016 * 4
    assert model.tables == 12 * 50_304 * (256 + 4)
    assert model.cache == 2 * 100 * 1_536 * 2
    assert model.token_ids == 2 * 100 * 4
    assert model.prefill == 2 * 100 * expanded_workspace_elements(BASE) * 4 == 2 * 100 * 4 * 1_536 * 4
    for footprint in (model, *planned.alternatives):
        parts = footprint.weights + footprint.tables + footprint.cache + footprint.token_ids
        assert footprint.device == parts + footprint.workspace + footprint.transient
    precomputed = plan(BASE, gates="precomputed", tables="int8").model
    assert precomputed.tables == 12 * 50_304 * (1_536 + 4)
    assert precomputed.source_tables == 12 * 50_304 * 256 * 2
    assert precomputed.compared == precomputed.weights + precomputed.cache + precomputed.tables + 309_067_776
    assert planned.to_dict()["model"]["device"] == model.device


def test_the_papers_model_has_the_head_and_biases_of_ours():
    """An untied head, biases and a query rank count for both sides of a comparison, or for neither."""
    config = copy.copy(BASE)
    config.tie_word_embeddings = False
    tied, untied = alternatives(BASE)["MLA-256"], alternatives(config)["MLA-256"]
    assert untied.parameters.activated - tied.parameters.activated == config.vocab_size * config.hidden_size
    assert untied.break_even_tokens == tied.break_even_tokens == 66_831


def test_shapes_outside_the_paper(make_config):
    """Any configuration has a plan; without a baseline in the paper, tables are set against MHA."""
    planned = plan(make_config())
    assert planned.tables_against == "MHA"
    assert [footprint.name for footprint in planned.alternatives] == ["MLA-16", "MQA", "MHA"]
    assert [footprint.name for footprint in plan(make_config(num_attention_heads=8)).alternatives][1] == "GQA-4"


def test_plain_mla():
    """MLA is planned as a model as well, and compared with the others."""
    planned = plan(EGMLAConfig.from_preset("mla-base-kv256"))
    assert planned.model.name == "MLA-256"
    assert [footprint.name for footprint in planned.alternatives] == ["GQA-4", "MQA", "MHA"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"batch": 0}, "batch"),
        ({"context": -1}, "context"),
        ({"weights": "int8"}, "weights"),
        ({"cache": "float8"}, "float8"),
        ({"gates": "cached"}, "gates"),
        ({"placement": "gpu"}, "placement"),
        ({"placement": "host", "pool_rows": 0}, "pool_rows"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be(arguments, named):
    """A wrong argument is named."""
    with pytest.raises(ValueError, match=named):
        plan(BASE, **arguments)


@pytest.mark.parametrize("arguments", [{"gates": "precomputed"}, {"placement": "host"}, {"tables": "int8"}], ids=str)
def test_options_without_tables(arguments):
    """Options that concern gate tables are refused for a model without any."""
    with pytest.raises(ValueError, match="without gate tables"):
        plan(EGMLAConfig.from_preset("mla-base-kv256"), **arguments)
