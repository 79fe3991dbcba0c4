"""What only a CUDA device can show; skipped where there is none."""

import copy

import pytest
import torch

from modeling_egmla import EGMLACache, EGMLAForCausalLM
from modeling_egmla.decoding_egmla import select_decoding


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=[1, 2], ids=["groups of 1", "groups of 2"])
def models(request, make_model):
    """One model on the CPU and its copy on the device."""
    model = make_model(layer_group_size=request.param, num_hidden_layers=4)
    return model, copy.deepcopy(model).to("cuda")


@pytest.mark.parametrize("cache_implementation", [None, "offloaded", "static", "offloaded_static"])
def test_generation_on_the_device_equals_that_on_the_cpu(models, cache_implementation):
    """Greedy text is the same on a CUDA device, with every cache that `generate` makes, offloaded ones included."""
    on_cpu, on_device = models
    ids = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = on_cpu.generate(ids, max_new_tokens=24, do_sample=False)
    actual = on_device.generate(
        ids.cuda(), max_new_tokens=24, do_sample=False, cache_implementation=cache_implementation
    )
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("decoding", ["expanded", "tiles", "grouped"])
def test_placed_gates_on_the_device(models, tmp_path, decoding, dtype, precomputes):
    """Tables on the host and in a file give the device's results bit for bit, with room for all rows and for few."""
    models[0].save_pretrained(tmp_path)
    models[0].save_kv_gates(tmp_path / "gates", dtype)
    ids = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(1)).cuda()

    def steps(placement, pool_rows=97):
        kv_gates = {"placement": placement, "pool_rows": pool_rows}
        if precomputes and placement == "mmap":
            kv_gates |= {"gates_file": tmp_path / "gates"}
        elif not precomputes:
            kv_gates |= {"dtype": dtype}
        model = EGMLAForCausalLM.from_pretrained(tmp_path, device_map="cuda", kv_gates=kv_gates)
        if precomputes and placement != "mmap":
            model.precompute_kv_gates(dtype)
        model.set_kv_decoding(decoding)
        cache = EGMLACache(model.config)
        with torch.no_grad():
            logits = [model(new, cache=cache).logits for new in (ids[:, :30], *ids[:, 30:].split(1, dim=1))]
        return torch.cat(logits, dim=1), model.kv_gate_statistics()

    expected, _ = steps("device")
    for placement in ("host", "mmap"):
        for pool_rows in (97, 9):
            actual, statistics = steps(placement, pool_rows)
            if precomputes and placement == "mmap":
                # The file's gates were computed on the CPU, which rounds otherwise.
                torch.testing.assert_close(actual, expected, atol=0.1 if dtype else 1e-4, rtol=1e-4)
            else:
                assert torch.equal(actual, expected)
            assert statistics.device == 0 < statistics.bytes_moved


@pytest.mark.parametrize("placement", ["device", "host"])
def test_placed_gates_move_to_the_device(models, placement):
    """A model that was placed on the CPU and then moved is one that was moved and then placed."""
    ids, results = torch.arange(2, 30)[None].cuda(), []
    for first in ("move", "place"):
        model = copy.deepcopy(models[0])
        model = model.to("cuda") if first == "move" else model
        model.place_kv_gates(placement, "int8")
        with torch.no_grad():
            results.append(model.to("cuda")(ids).logits)
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


def test_tables_that_were_moved_by_hand(models):
    """A table that somebody, or accelerate, left on the host gives the same logits on the device."""
    _, model = models
    ids = torch.arange(2, 30)[None].cuda()
    with torch.no_grad():
        expected = model(ids).logits
        model.model.layers[1].self_attn.kv_gate_embed.to("cpu")
        assert torch.equal(model(ids).logits, expected)


def test_placed_tables_are_never_on_the_device(make_model, tmp_path):
    """A model that is loaded to the device with its tables on the host never needs the device's memory for them."""
    make_model(vocab_size=50_000, kv_gate_dim=256).save_pretrained(tmp_path)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = EGMLAForCausalLM.from_pretrained(
        tmp_path, device_map="cuda", kv_gates={"placement": "host", "pool_rows": 64}
    )
    model.generate(torch.arange(2, 12)[None].cuda(), max_new_tokens=8)
    assert torch.cuda.max_memory_allocated() - before < 50_000 * 256 * 4
    assert model.model.layers[0].self_attn.kv_gate_embed.table.values.is_pinned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
@pytest.mark.parametrize("decoding", ["expanded", "tiles", "grouped", "fused"])
def test_decoding_on_the_device(models, decoding, precomputes, dtype, monkeypatch):
    """Every way to decode gives the logits of the whole text at once, with padding and without, and is what runs."""
    model = models[1].to(dtype)
    if precomputes:
        model.precompute_kv_gates()
    chosen = []
    monkeypatch.setattr(
        "modeling_egmla.modeling_egmla.select_decoding",
        lambda *args: chosen.append(select_decoding(*args)) or chosen[-1],
    )
    ids = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(1)).cuda()
    for mask in (None, torch.ones_like(ids)):
        if mask is not None:
            mask[0, :9] = 0
        positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
        cache, logits = EGMLACache(model.config), []
        model.set_kv_decoding("expanded")
        with torch.no_grad():
            expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 37:]
            for chunk in (slice(37), slice(37, 38), slice(38, 39), slice(39, 40)):
                part = (
                    {"attention_mask": mask[:, : chunk.stop], "position_ids": positions[:, chunk]}
                    if mask is not None
                    else {}
                )
                logits.append(model(ids[:, chunk], cache=cache, **part).logits[:, -1:])
                model.set_kv_decoding(decoding)
        actual = torch.cat(logits[1:], dim=1)
        assert set(chosen[-3 * len(model.model.layers) :]) == {decoding}
        assert (actual - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 2e-2)
