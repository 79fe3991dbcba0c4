"""Gate tables in other places and precisions than the model (`model.place_kv_gates()`)."""

import copy
import io
import logging
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import minihub
import pytest
import torch
from minihub import MiniHub
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, CompileConfig

from modeling_egmla import EGMLACache, EGMLAForCausalLM, EGMLAModel
from modeling_egmla.gate_egmla import token_gates
from modeling_egmla.mapped_egmla import MappedTensor, write_tensors
from modeling_egmla.table_egmla import GateRowPool, PlacedTable, narrow, widen


IDS = torch.randint(2, 97, (2, 24), generator=torch.Generator().manual_seed(1))
PLACEMENTS = ["device", "host", "mmap"]


@pytest.fixture(scope="module", params=["multiply", "add"])
def saved(make_model, tmp_path_factory, request):
    """A model of two layer groups and its folder, which also has files of its precomputed gates in every precision."""
    folder = tmp_path_factory.mktemp("model")
    make_model(kv_gate=request.param, num_hidden_layers=4, layer_group_size=2).save_pretrained(folder)
    model = EGMLAForCausalLM.from_pretrained(folder)
    for dtype in ("float32", "bfloat16", "int8"):
        model.save_kv_gates(folder / dtype, dtype)
    return model, folder


@pytest.fixture
def folder(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    return tmp_path


def placed(saved, placement="device", dtype=None, precomputes=False, **kwargs):
    model, folder = saved if isinstance(saved, tuple) else (EGMLAForCausalLM.from_pretrained(saved), saved)
    model = copy.deepcopy(model)
    if precomputes and placement == "mmap":
        kwargs["gates_file"] = folder / (dtype or "float32")
    elif precomputes:
        model.precompute_kv_gates()
    model.place_kv_gates(placement, dtype, **kwargs)
    return model


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits


def is_mapped(model) -> bool:
    tables = [layer.self_attn.kv_gate_embed.table for layer in model.model.layers]
    return all(table.values.data_ptr() == table.mapped.tensor.data_ptr() for table in tables)


def decode(model, decoding, ids=IDS):
    """Logits of the last four tokens, one at a time."""
    model.set_kv_decoding(decoding)
    cache = EGMLACache(model.config)
    with torch.no_grad():
        model(ids[:, :-4], cache=cache)
        return torch.cat([model(new, cache=cache).logits for new in ids[:, -4:].split(1, dim=1)], dim=1)


@pytest.mark.parametrize("decoding", ["expanded", "tiles", "grouped"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
def test_placements_agree_bit_for_bit(saved, precomputes, dtype, decoding):
    """Whatever the precision and way to decode, results do not depend on where tables are, nor on the pool's size."""
    expected = decode(placed(saved, "device", dtype, precomputes), decoding)
    for placement in ("host", "mmap"):
        for pool_rows in (97, 9):  # more than distinct ids, and fewer
            model = placed(saved, placement, dtype, precomputes, pool_rows=pool_rows)
            assert torch.equal(decode(model, decoding), expected), (placement, pool_rows)
            assert model.kv_gate_statistics().bytes_moved > 0


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_precomputed_and_projected_agree(saved, placement):
    """Precomputed gates are the projected ones within 1e-5 and, wherever they are, the same."""
    model = copy.deepcopy(saved[0])
    projected = logits(model)
    model.precompute_kv_gates()
    precomputed = logits(model)
    model = placed(saved, placement, precomputes=True)
    assert torch.equal(logits(model), precomputed)
    torch.testing.assert_close(precomputed, projected, atol=1e-5, rtol=0)
    model.release_kv_gates()
    assert torch.equal(logits(model), projected)


@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
@pytest.mark.parametrize("placement", ["host", "mmap"])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generation(saved, placement, precomputes, settings):
    """Padded batches, beams and static caches give the same tokens from placed tables, with room for few rows."""
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, **settings}
    expected = placed(saved, "device", precomputes=precomputes).generate(IDS, **settings)
    actual = placed(saved, placement, precomputes=precomputes, pool_rows=20).generate(IDS, **settings)
    assert torch.equal(actual, expected)


@pytest.mark.slow  # compiles with inductor
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "placement, dtype, precomputes", [("host", "int8", False), ("mmap", None, False), ("host", "int8", True)]
)
def test_compiled_generation(folder, placement, dtype, precomputes):
    """A static cache compiles to one graph with placed tables, which it reads without the pool: the same tokens."""
    model = placed(folder, placement, dtype, precomputes)
    model.set_kv_decoding("tiles")
    expected = model.generate(IDS, max_new_tokens=12, do_sample=False)
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager")
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    settings = {"cache_implementation": "static", "compile_config": compile_config}
    assert torch.equal(model.generate(IDS, max_new_tokens=12, do_sample=False, **settings), expected)


@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
def test_bytes_are_counted(saved, precomputes):
    """Hits, misses and bytes are those of the distinct ids that each forward pass looked up for the first time."""
    model = placed(saved, "host", "int8", precomputes)
    row = 4 * ((54 if precomputes else 12) + 4)  # four layers, one byte an element and a scale
    cache, first, second = EGMLACache(model.config), IDS[:, :10], torch.tensor([[90], [int(IDS[0, 0])]])
    with torch.no_grad():
        model(first, cache=cache)
    new = len(first.unique())
    statistics = model.kv_gate_statistics()
    assert (statistics.hits, statistics.misses, statistics.bytes_moved) == (0, new, new * row)
    with torch.no_grad():
        model(second, cache=cache)
    more = int(90 not in first)
    statistics = model.kv_gate_statistics()
    assert (statistics.hits, statistics.misses) == (new + 1 - more, new + more)
    assert statistics.bytes_moved == (new + more) * row
    assert (statistics.rows, statistics.pool_rows, statistics.pool) == (new + more, 97, 97 * row)
    assert (statistics.device, statistics.file) == (0, 0)
    assert statistics.host == 97 * row + (97 * 4 * 12 * 4 if precomputes else 0)


def test_rows_used_longest_ago_make_room():
    """The pool gives the room of rows that have waited longest, and never that of rows which a step looks up."""
    table = PlacedTable(torch.arange(20.0)[:, None], torch.float32)
    pool = GateRowPool(4)
    table.pool, device = pool, torch.device("cpu")

    def step(*token_ids):
        ids = torch.tensor(token_ids)
        before = pool.statistics()["misses"] if pool.pools else 0
        pool.admit(ids, [(table, device)])
        assert torch.equal(table.look_up(ids, torch.float32)[:, 0], ids.float())
        kept = {n for n in range(20) if pool.pools[device].slot_of_id[n] >= 0}
        return kept, pool.statistics()["misses"] - before

    assert step(1, 2, 3) == ({1, 2, 3}, 3)
    assert step(4, 1) == ({1, 2, 3, 4}, 1)
    assert step(2) == ({1, 2, 3, 4}, 0)
    assert step(5) == ({1, 2, 4, 5}, 1)  # 3 has waited longest
    kept, misses = step(1, 2, 6, 7, 8, 9, 1)  # more than there is room for
    assert {1, 2} < kept and len(kept) == 4 and misses == 4
    assert step(*kept)[1] == 0


def test_a_small_pool_is_said_once(folder, caplog, monkeypatch):
    """A pool that is too small for the text is named once, with the remedy; one that is large enough is not."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for pool_rows, times in ((97, 0), (11, 1)):
        caplog.clear()
        placed(folder, "host", pool_rows=pool_rows).generate(IDS, max_new_tokens=8, do_sample=False)
        assert sum("11 gate rows" in message and "pool_rows" in message for message in caplog.messages) == times


def test_narrowed_rows_are_as_close_as_their_precision():
    """An int8 row is off by half a step of its own scale; a row of zeros stays zeros."""
    rows = torch.randn(50, 16) * torch.logspace(-6, 3, 50)[:, None]
    rows[7] = 0
    values, scales = narrow(rows, torch.int8)
    assert values.dtype == torch.int8 and scales.shape == (50, 1)
    error = (widen(values, scales, torch.float32) - rows).abs()
    assert (error <= 0.5001 * scales).all() and error.max() > 0
    assert torch.equal(values.abs().amax(-1), torch.where(rows.abs().amax(-1) > 0, 127, 0).to(torch.int8))


@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
def test_narrowed_tables_change_logits_little(saved, precomputes):
    """Logits of narrowed tables are near the model's, nearer in bfloat16 than in int8, and are not its own."""
    expected = logits(saved[0])
    errors = [
        (logits(placed(saved, "device", dtype, precomputes)) - expected).norm() / expected.norm()
        for dtype in ("bfloat16", "int8")
    ]
    assert 1e-5 < errors[0] < errors[1] < 3e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("placement", ["host", "mmap"])
@pytest.mark.parametrize("shards", [False, True])
def test_loading_without_building_the_tables(make_model, tmp_path, placement, dtype, shards):
    """`from_pretrained(kv_gates=...)` gives the model of an ordinary load, whatever class, shards and precision."""
    make_model(tie_word_embeddings=False).save_pretrained(tmp_path, **({"max_shard_size": "10KB"} if shards else {}))
    for device_map in (None, "cpu", "auto"):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=dtype, device_map=device_map, kv_gates={"placement": placement}
        )
        assert not any("kv_gate_embed" in name for name, _ in model.named_parameters())
        assert torch.equal(logits(model), logits(EGMLAForCausalLM.from_pretrained(tmp_path, dtype=dtype)))
    statistics = model.kv_gate_statistics()
    assert (statistics.device, statistics.host > 0, statistics.file > 0) == (
        0,
        placement == "host",
        placement == "mmap",
    )
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, kv_gates={"placement": placement})
    logits(classifier)
    EGMLAModel.from_pretrained(tmp_path).save_pretrained(tmp_path / "decoder")
    decoder = EGMLAModel.from_pretrained(tmp_path / "decoder", kv_gates={"placement": placement, "dtype": "int8"})
    with torch.no_grad():
        decoder(IDS)


@pytest.mark.parametrize("placement", ["host", "mmap"])
def test_tables_are_those_of_the_variant(make_model, tmp_path, placement):
    """Of two models in one folder, the variant that is loaded brings its own tables, in one file or in shards."""
    make_model().save_pretrained(tmp_path)
    other = make_model()
    for gate in other.modules():
        if hasattr(gate, "kv_gate_embed"):
            gate.kv_gate_embed.weight.data.mul_(-2)
    for settings in ({}, {"max_shard_size": "10KB"}):
        other.save_pretrained(tmp_path, variant="other", **settings)
        model = EGMLAForCausalLM.from_pretrained(tmp_path, variant="other", kv_gates={"placement": placement})
        assert torch.equal(logits(model), logits(other))
        for path in tmp_path.glob("*.other*"):
            path.unlink()


def test_placed_later_from_where_the_model_is_from(make_model, tmp_path):
    """Tables that are mapped after loading come from the variant and the subfolder that were loaded."""
    make_model().save_pretrained(tmp_path)
    other = make_model()
    for gate in token_gates(other):
        gate.kv_gate_embed.weight.data.mul_(-2)
    other.save_pretrained(tmp_path, variant="other")
    other.save_pretrained(tmp_path / "below" / "sub")
    for folder, settings in ((tmp_path, {"variant": "other"}), (tmp_path / "below", {"subfolder": "sub"})):
        model = EGMLAForCausalLM.from_pretrained(folder, **settings)
        model.place_kv_gates("mmap")
        assert is_mapped(model) and torch.equal(logits(model), logits(other))


def test_gates_of_a_quantised_projection_are_not_written(make_model, tmp_path):
    """Four-bit weights, packed into bytes, are refused in a sentence before a file is begun."""
    model = make_model()

    class Linear4bit(torch.nn.Linear):
        pass

    gate = token_gates(model)[1]
    gate.kv_gate_proj = Linear4bit(12, 54, bias=False)
    gate.kv_gate_proj.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="projection of layer 1 is wrapped by an adapter, quantised"):
        model.save_kv_gates(tmp_path / "gates")
    assert not list(tmp_path.iterdir())


def test_tables_come_back_as_they_were(make_model):
    """Placed and put back, tables of a frozen model are frozen; and a size that they have already changes nothing."""
    model = make_model().requires_grad_(False)
    model.place_kv_gates("host")
    values = token_gates(model)[0].kv_gate_embed.weight
    model.resize_token_embeddings(97)
    assert token_gates(model)[0].kv_gate_embed.weight.data_ptr() == values.data_ptr()
    model.place_kv_gates()
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placing_while_a_cache_lives(saved, placement, precomputes):
    """Gates that are narrowed between two steps change the next one alike, whichever way it is decoded."""
    steps = {}
    for decoding in ("expanded", "grouped"):
        model = copy.deepcopy(saved[0])
        model.set_kv_decoding(decoding)
        if precomputes:
            model.precompute_kv_gates()
        cache, gates_file = (
            EGMLACache(model.config),
            saved[1] / "int8" if precomputes and placement == "mmap" else None,
        )
        with torch.no_grad():
            for new in IDS[:, :22], IDS[:, 22:23]:
                model(new, cache=cache)
            model.place_kv_gates(placement, "int8", gates_file=gates_file)
            steps[decoding] = model(IDS[:, 23:], cache=cache).logits
    torch.testing.assert_close(steps["grouped"], steps["expanded"], atol=1e-5, rtol=1e-5)


def test_narrow_rows_of_another_precision(folder):
    """A float32 file gives a bfloat16 model the same int8 rows from the host as mapped, and as narrowed later."""
    results = []
    for placement in ("host", "mmap"):
        kv_gates = {"placement": placement, "dtype": "int8"}
        results.append(logits(EGMLAForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, kv_gates=kv_gates)))
    model = EGMLAForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.place_kv_gates("device", "int8")
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], logits(model))


def test_tables_of_a_model_on_the_hub(make_model, tmp_path, monkeypatch):
    """Tables are mapped from the Hub's cache, at the revision that is asked for, and without network afterwards."""
    make_model().save_pretrained(tmp_path / "model", max_shard_size="10KB")
    make_model(seed=1).save_pretrained(tmp_path / "other")
    with MiniHub(tmp_path / "server") as server:
        minihub.use_hub(monkeypatch, server, tmp_path / "cache")
        first = server.publish("tester/tiny", tmp_path / "model").refs["refs/heads/main"]
        for settings in ({}, {"revision": first}, {"revision": first, "local_files_only": True}):
            model = EGMLAForCausalLM.from_pretrained("tester/tiny", kv_gates={"placement": "mmap"}, **settings)
            assert torch.equal(logits(model), logits(EGMLAForCausalLM.from_pretrained(tmp_path / "model")))
        ordinary = EGMLAForCausalLM.from_pretrained("tester/tiny")
        ordinary.place_kv_gates("mmap")
        assert torch.equal(logits(ordinary), logits(model))
        with pytest.raises(ValueError, match="changed since"):
            ordinary.place_kv_gates("mmap", checkpoint=tmp_path / "other")
    assert "cache" in str(model.model.layers[0].self_attn.kv_gate_embed.table.mapped.path)


@pytest.mark.parametrize("placement", ["host", "mmap"])
def test_offloaded_layers(folder, tmp_path, placement):
    """Layers that accelerate keeps on the host or the disk, buffers included, work beside placed tables."""
    accelerate = pytest.importorskip("accelerate")
    expected = logits(EGMLAForCausalLM.from_pretrained(folder))
    for offload_buffers in (False, True):
        model = placed(folder, placement, pool_rows=9)
        accelerate.cpu_offload(model, offload_buffers=offload_buffers)
        assert torch.equal(logits(model), expected)
    parts = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    device_map = {**parts, "model.layers.0": "cpu", "model.layers.1": "disk"}
    model = EGMLAForCausalLM.from_pretrained(
        folder, device_map=device_map, offload_folder=tmp_path / "offload", kv_gates={"placement": placement}
    )
    assert torch.equal(logits(model), expected)


def test_device_map_does_not_see_placed_tables(make_model, tmp_path):
    """`device_map="auto"` makes no room for placed tables, since no device holds them even while loading."""
    make_model(vocab_size=1000, kv_gate_dim=300).save_pretrained(tmp_path)
    settings = {"device_map": "auto", "max_memory": {"cpu": 600_000}, "offload_folder": tmp_path / "offload"}
    ordinary = EGMLAForCausalLM.from_pretrained(tmp_path, **settings)
    assert "disk" in ordinary.hf_device_map.values()
    model, info = EGMLAForCausalLM.from_pretrained(
        tmp_path, **settings, kv_gates={"placement": "mmap"}, output_loading_info=True
    )
    assert "disk" not in getattr(model, "hf_device_map", {}).values()
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(model), logits(ordinary))


@pytest.mark.parametrize("placement", ["host", "mmap"])
def test_saving_gives_the_original_values(folder, tmp_path, placement):
    """A model with placed tables is saved as it was loaded, and tables that come back train."""
    model = placed(folder, placement)
    expected = EGMLAForCausalLM.from_pretrained(folder).state_dict()
    model.save_pretrained(tmp_path / "again")
    model.place_kv_gates()
    for state in (EGMLAForCausalLM.from_pretrained(tmp_path / "again").state_dict(), model.state_dict()):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    model.train()(IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].self_attn.kv_gate_embed.weight.grad.abs().sum() > 0


def test_given_up_values_are_never_saved(folder, tmp_path):
    """Saving, placing again and precomputing from narrowed tables are refused; a mapped file still has the values."""
    for placement in ("device", "host"):
        model = placed(folder, placement, "int8")
        for refused, *arguments in (
            (model.save_pretrained, tmp_path / "again"),
            (model.place_kv_gates,),
            (model.precompute_kv_gates,),
            (model.save_kv_gates, tmp_path / "gates"),
        ):
            with pytest.raises(ValueError, match="narrowed to int8 and their original"):
                refused(*arguments)
    model = placed(folder, "mmap", "int8")
    model.save_pretrained(tmp_path / "again")
    expected = logits(EGMLAForCausalLM.from_pretrained(folder))
    assert torch.equal(logits(EGMLAForCausalLM.from_pretrained(tmp_path / "again")), expected)
    model = EGMLAForCausalLM.from_pretrained(folder)
    model.precompute_kv_gates()
    model.place_kv_gates("device", "int8")
    model.save_pretrained(tmp_path / "thrice")
    assert torch.equal(logits(EGMLAForCausalLM.from_pretrained(tmp_path / "thrice")), expected)


@pytest.mark.parametrize("own, rows", [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_halves_of_the_other_kind_are_narrower(folder, tmp_path, own, rows):
    """Rows as wide as the table's that cannot hold its values count as narrowed: they are not saved for them."""
    model = EGMLAForCausalLM.from_pretrained(folder, dtype=own)
    model.place_kv_gates("host", rows)
    with pytest.raises(ValueError, match=f"narrowed to {rows} and their original"):
        model.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("precomputes", [False, True])
def test_relative_paths_are_read_again_from_elsewhere(folder, tmp_path_factory, monkeypatch, precomputes):
    """Where the process moves to another folder, mapped tables are still found when they are opened again."""
    model = EGMLAForCausalLM.from_pretrained(folder)
    model.save_kv_gates(folder / "gates")
    monkeypatch.chdir(folder)
    model.place_kv_gates("mmap", checkpoint=".", gates_file="gates" if precomputes else None)
    before = logits(model)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert torch.equal(logits(model.train().eval()), before)
    torch.save(model, buffer := io.BytesIO())
    assert torch.equal(logits(torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)), before)


@pytest.mark.parametrize("content", [b"", b"garbage, long enough to be a header", (1 << 40).to_bytes(8, "little")])
def test_broken_files_are_named(folder, content):
    """A file of gates that was cut off, or is something else, is an error that says which."""
    (folder / "gates").write_bytes(content)
    with pytest.raises(ValueError, match=r"gates is no safetensors file .* again"):
        EGMLAForCausalLM.from_pretrained(folder).place_kv_gates("mmap", gates_file=folder / "gates")


@pytest.mark.parametrize("pool_rows", [8, 4096])
@pytest.mark.parametrize("placement, precomputes", [("host", False), ("host", True), ("mmap", False)])
def test_threads_share_a_pool(folder, placement, precomputes, pool_rows):
    """Threads that read other texts take rows from each other, and never another id's row."""
    texts = [torch.randint(2, 97, (1, 12), generator=torch.Generator().manual_seed(n)) for n in range(60)]
    whole = EGMLAForCausalLM.from_pretrained(folder)
    expected = [logits(whole, ids) for ids in texts]
    model = placed(folder, placement, precomputes=precomputes, pool_rows=pool_rows)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            outputs = list(pool.map(lambda ids: logits(model, ids), texts))
    finally:
        sys.setswitchinterval(interval)
    for output, wanted in zip(outputs, expected):
        torch.testing.assert_close(output, wanted, atol=1e-5, rtol=0)


def test_saving_over_mapped_files(folder):
    """A mapped file is not written over: the process would read rubbish from it, or end."""
    model = placed(folder, "mmap")
    before = logits(model)
    with pytest.raises(ValueError, match="mapped from"):
        model.save_pretrained(folder)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("placement, dtype", [("device", "bfloat16"), ("host", None), ("mmap", None)])
def test_training_is_refused(folder, placement, dtype):
    """Placed and narrowed tables do not train in silence: the first step says what to do; evaluation works again."""
    model = placed(folder, placement, dtype)
    before = logits(model)
    with pytest.raises(ValueError, match="cannot be trained"):
        model.train()(IDS, labels=IDS)
    assert torch.equal(logits(model.eval()), before)


def test_narrowed_precomputed_gates_follow_training(folder):
    """Precomputed gates are derived state in any precision: training goes on with the tables they come from."""
    model = EGMLAForCausalLM.from_pretrained(folder)
    model.precompute_kv_gates()
    model.place_kv_gates("device", "int8")
    before = logits(model)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=0.05)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    actual = logits(model.eval())
    assert (actual - before).norm() > 0.1 * before.norm()
    model.release_kv_gates()
    expected = logits(model)
    assert 0 < (actual - expected).norm() < 3e-2 * actual.norm()
    model.precompute_kv_gates()
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("placement, dtype", [("device", "int8"), ("host", None), ("mmap", None)])
def test_placed_tables_move_and_cast_with_the_model(folder, placement, dtype):
    """`model.to()` gives what placing after it gives; copies and pickles work by themselves."""
    expected = EGMLAForCausalLM.from_pretrained(folder).to(torch.bfloat16)
    if placement != "mmap":
        expected.place_kv_gates(placement, dtype)
    model = placed(folder, placement, dtype).to(torch.bfloat16)
    tolerance = {"atol": 0, "rtol": 0} if dtype is None else {"atol": 0.1, "rtol": 0.1}
    torch.testing.assert_close(logits(model), logits(expected), **tolerance)
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert placement != "mmap" or is_mapped(other)
        other.model.embed_tokens.weight.data.zero_()
        assert not torch.equal(logits(other), logits(model))
        other.model.embed_tokens.weight.data.copy_(model.model.embed_tokens.weight)
        assert torch.equal(logits(other), logits(model))


def test_adapters(folder):
    """LoRA on the gate projection works on placed tables, precomputed ones included, which then give way."""
    peft = pytest.importorskip("peft")
    results = []
    for placement in PLACEMENTS:
        torch.manual_seed(0)
        model = placed(folder, placement)
        config = peft.LoraConfig(target_modules=["kv_gate_proj", "q_proj"], init_lora_weights=False)
        results.append(logits(peft.get_peft_model(model, config).eval()))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    with pytest.raises(ValueError, match="wrapped by an adapter"):
        model.save_kv_gates(folder / "gates")
    assert not (folder / "gates").exists()

    for settings in ({"target_modules": ["kv_gate_embed"]}, {"modules_to_save": ["kv_gate_embed"]}):
        config = peft.LoraConfig(**{"target_modules": ["q_proj"], **settings})
        adapted = peft.get_peft_model(EGMLAForCausalLM.from_pretrained(folder), config)
        with pytest.raises(ValueError, match="layer 0 is wrapped by an adapter"):
            adapted.get_base_model().place_kv_gates("host")


def test_precomputed_gates_on_the_host_are_never_stale(folder):
    """Weights that change reach placed precomputed gates and the rows that were lent of them."""
    model = EGMLAForCausalLM.from_pretrained(folder)
    model.place_kv_gates("host")
    model.precompute_kv_gates()
    before = logits(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_gate_proj.weight.mul_(-1.5)
    after = logits(model)
    assert not torch.allclose(after, before)
    assert model.kv_gate_statistics().pool == 97 * 2 * 54 * 4
    model.release_kv_gates()
    torch.testing.assert_close(logits(model), after, atol=1e-5, rtol=0)
    assert model.kv_gate_statistics().pool == 97 * 2 * 12 * 4, "rows that are looked up no more are let go"


def test_gates_of_another_model_are_refused(folder, tmp_path):
    """Gates that the model would not compute are an error, when the file is opened and when weights change."""
    model = EGMLAForCausalLM.from_pretrained(folder)
    for dtype in (None, "bfloat16", "int8"):
        model.save_kv_gates(tmp_path / f"gates-{dtype}", dtype)
        model.place_kv_gates("mmap", gates_file=tmp_path / f"gates-{dtype}")
        logits(model)
        with torch.no_grad():
            model.model.layers[1].self_attn.kv_gate_proj.weight.mul_(1.05)
        with pytest.raises(ValueError, match=r"layer 1 .* not those of this model"):
            logits(model)
        with pytest.raises(ValueError, match=r"layer 1 .* not those of this model"):
            model.place_kv_gates("mmap", gates_file=tmp_path / f"gates-{dtype}")
        model = EGMLAForCausalLM.from_pretrained(folder)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is counted by Linux")
@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
def test_mapped_tables_stay_out_of_memory(make_model, tmp_path, precomputes):
    """Of a mapped table only the rows that a text needs are in memory, also after it was checked and precomputed."""

    def resident() -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(status[kind].split()[0]) for kind in ("RssAnon", "RssFile")) * 1024

    model = make_model(vocab_size=40_000, kv_gate_dim=400, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    table = 40_000 * 400 * 4
    del model
    kv_gates = {"placement": "mmap", "pool_rows": 100}
    before = resident()
    model = EGMLAForCausalLM.from_pretrained(tmp_path, kv_gates=kv_gates)
    if precomputes:
        model.save_kv_gates(tmp_path / "gates")
        model.place_kv_gates(**kv_gates, gates_file=tmp_path / "gates")
    logits(model, IDS * 400)
    assert model.kv_gate_statistics().file >= table
    assert resident() - before < table / 2


def test_tables_of_another_model_are_refused(folder, make_model, tmp_path):
    """Mapping would give a model that was trained on its old tables back: it must be saved first."""
    model = EGMLAForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_gate_embed.weight[3, 3] += 0.1
    changed = logits(model)
    with pytest.raises(ValueError, match="changed since"):
        model.place_kv_gates("mmap")
    assert torch.equal(logits(model), changed), "nothing is placed where something cannot be"
    model.save_pretrained(tmp_path / "changed")
    model.place_kv_gates("mmap", checkpoint=tmp_path / "changed")
    assert torch.equal(logits(model), changed)
    make_model(num_hidden_layers=1).save_pretrained(tmp_path / "shallow")
    with pytest.raises(ValueError, match=r"has no tensor layers\.1"):
        EGMLAForCausalLM.from_pretrained(folder).place_kv_gates("mmap", checkpoint=tmp_path / "shallow")
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        make_model().place_kv_gates("mmap")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"placement": "gpu"}, "placement.*device, host, mmap.*gpu"),
        ({"placement": "host", "dtype": "int4"}, "dtype.*int8.*int4"),
        ({"placement": "host", "pool_rows": 0}, "pool_rows"),
        ({"placement": "host", "gates_file": "gates"}, "gates_file.*mmap"),
    ],
    ids=str,
)
def test_options_that_match_nothing(folder, arguments, named):
    """A wrong option is named, before and while loading."""
    with pytest.raises(ValueError, match=named):
        EGMLAForCausalLM.from_pretrained(folder).place_kv_gates(**arguments)
    with pytest.raises(ValueError, match=named):
        EGMLAForCausalLM.from_pretrained(folder, kv_gates=arguments)
    with pytest.raises(TypeError, match="place"):
        EGMLAForCausalLM.from_pretrained(folder, kv_gates={"place": "host"})


def test_what_placed_tables_cannot_do(folder, make_model, tmp_path):
    """A model without gates, precomputing without a file, resizing and loading weights are errors that say so."""
    make_model(kv_gate="none").save_pretrained(tmp_path / "mla")
    with pytest.raises(ValueError, match="no gates"):
        EGMLAForCausalLM.from_pretrained(tmp_path / "mla", kv_gates={"placement": "host"})
    model = placed(folder, "mmap")
    with pytest.raises(ValueError, match="save_kv_gates"):
        model.precompute_kv_gates()
    with pytest.raises(ValueError, match="put them back"):
        model.resize_token_embeddings(105)
    with pytest.raises(RuntimeError, match="put tables back"):
        model.load_state_dict(model.state_dict())
    model.place_kv_gates()
    model.resize_token_embeddings(105)
    model.precompute_kv_gates()
    with pytest.raises(ValueError, match="save_kv_gates"):
        model.place_kv_gates("mmap")


@pytest.mark.parametrize("failing", range(4))
def test_an_interrupted_read_is_made_up_for(folder, monkeypatch, failing):
    """After a forward pass that ended while rows were read, the next one has the right rows."""
    model, rows, reads = placed(folder, "mmap", pool_rows=20), PlacedTable.rows, []
    logits(model, IDS[:1, :6])

    def interrupted(*args):
        reads.append(args)
        if len(reads) == failing + 1:
            raise KeyboardInterrupt
        return rows(*args)

    monkeypatch.setattr(PlacedTable, "rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        logits(model, IDS[:, 6:14])
    monkeypatch.undo()
    expected = EGMLAForCausalLM.from_pretrained(folder)
    for ids in (IDS[:, 6:14], IDS[:1, :6], IDS):
        assert torch.equal(logits(model, ids), logits(expected, ids))


def test_a_layer_by_itself(folder):
    """A layer whose rows no forward pass of the model brought over reads them all the same."""
    gates = [placed(folder, place).model.layers[1].self_attn.kv_gates(IDS) for place in PLACEMENTS]
    assert torch.equal(gates[0], gates[1]) and torch.equal(gates[0], gates[2])


def test_files_appear_whole_or_not_at_all(tmp_path):
    """A process that ends while it writes leaves the old file."""
    path = tmp_path / "table.safetensors"
    rows = torch.randn(5, 3)
    write_tensors(path, {"rows": (torch.float32, (5, 3))}, [rows[:2], rows[2:]])

    def broken():
        yield rows[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(path, {"rows": (torch.float32, (5, 3))}, broken())
    assert torch.equal(MappedTensor(path, "rows").tensor, rows)
    assert [file.name for file in tmp_path.iterdir()] == ["table.safetensors"]


def test_mapped_files_may_be_replaced(folder, tmp_path):
    """A process that has a file mapped goes on with it when its name is given to another."""
    model = placed(folder, "mmap", pool_rows=3)
    before = logits(model)
    other = tmp_path / "other"
    shutil.copytree(folder, other, ignore=lambda *_: ["other"])
    (other / "model.safetensors").rename(folder / "model.safetensors")
    assert torch.equal(logits(model), before)


def test_refused_saving_writes_nothing(make_model, tmp_path):
    """Tables whose values were given up cannot be saved: no folder is made, and none gets another model's config."""
    make_model().save_pretrained(tmp_path / "model")
    make_model(num_hidden_layers=4).save_pretrained(tmp_path / "other")
    before = (tmp_path / "other" / "config.json").read_bytes()
    kv_gates = {"placement": "host", "dtype": "int8"}
    narrowed = EGMLAForCausalLM.from_pretrained(tmp_path / "model", kv_gates=kv_gates)
    for name in ("new", "other"):
        with pytest.raises(ValueError, match="original values"):
            narrowed.save_pretrained(tmp_path / name)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "other" / "config.json").read_bytes() == before


def test_arguments_of_placement_are_checked_first(make_model, tmp_path):
    """What is no dict, and a pool of half a row, are named before weights are read, or forward passes fail."""
    with pytest.raises(ValueError, match="`kv_gates` must be a dict"):
        EGMLAForCausalLM.from_pretrained(tmp_path, kv_gates="host")
    with pytest.raises(ValueError, match=r"`pool_rows` must be a whole number of at least 1, but is 2.5"):
        make_model().place_kv_gates("host", pool_rows=2.5)


@pytest.mark.parametrize(("dtype", "message"), [("float8_e4m3fn", "stored as F8_E4M3"), ("int8", "no scales")])
def test_tables_that_cannot_be_mapped_are_refused(make_model, tmp_path, dtype, message):
    """Numbers of another kind in the place of a gate table are named, and not read as gates."""
    model = make_model()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if "kv_gate_embed" in name)
    save_file({**tensors, name: tensors[name].to(getattr(torch, dtype))}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        model.place_kv_gates("mmap", checkpoint=tmp_path)


def test_a_gates_file_that_was_cut_short(make_model, tmp_path):
    """Named with what to do; and so is a folder that is not there."""
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    model.save_kv_gates(tmp_path / "gates")
    data = (tmp_path / "gates").read_bytes()
    (tmp_path / "gates").write_bytes(data[:-100])
    with pytest.raises(ValueError, match="gates was cut short"):
        model.place_kv_gates("mmap", checkpoint=tmp_path / "model", gates_file=tmp_path / "gates")
    with pytest.raises(FileNotFoundError, match="no folder to write"):
        model.save_kv_gates(tmp_path / "nowhere" / "gates")
