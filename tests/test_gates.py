"""Gates: projected or precomputed for the whole vocabulary (`model.precompute_kv_gates()`)."""

import copy
import io

import pytest
import torch

from modeling_egmla import EGMLAForCausalLM


IDS = torch.tensor([[3, 5, 96, 5, 0, 41, 3, 88]])


@pytest.fixture(params=["multiply", "add"])
def model(make_model, request):
    return make_model(kv_gate=request.param)


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def tables(model):
    return [layer.self_attn._kv_gate_table for layer in model.model.layers]


def uses_tables(model) -> bool:
    """Whether logits change with the precomputed rows, that is, come from them."""
    before = logits(model)
    for table in tables(model):
        table.gates.mul_(2)
    changed = not torch.equal(before, logits(model))
    for table in tables(model):
        table.gates.div_(2)
    return changed


def test_precomputed_gates_give_the_same_logits(model):
    """EG-MLA-A is EG-MLA: looked-up gates agree with projected ones within 1e-5, and releasing them restores all."""
    projected = logits(model)
    model.precompute_kv_gates()
    assert uses_tables(model)
    torch.testing.assert_close(logits(model), projected, atol=1e-5, rtol=0)
    model.release_kv_gates()
    assert tables(model) == [None, None]
    assert torch.equal(logits(model), projected)


def test_precomputed_gates_are_not_saved(model, tmp_path):
    """They are derived state: neither the state dict nor a saved folder, copy or pickle contains them."""
    keys = set(model.state_dict())
    model.precompute_kv_gates()
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(EGMLAForCausalLM.from_pretrained(tmp_path)), logits(model), atol=1e-5, rtol=0)
    assert tables(copy.deepcopy(model)) == [None, None]
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert tables(loaded) == [None, None]
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)
    assert tables(loaded) != [None, None], "a copy computes its tables when it first needs them"


def optimizer_step(model):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.eval()


def optimizer_step_in_evaluation_mode(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


def load_state_dict(model):
    model.load_state_dict({name: 0.9 * tensor for name, tensor in model.state_dict().items()})


def assign_state_dict(model):
    model.load_state_dict({name: 0.9 * tensor for name, tensor in model.state_dict().items()}, assign=True)


def resize(model):
    model.resize_token_embeddings(105)


def replace_data_twice(model):
    for layer in model.model.layers:
        weight = layer.self_attn.kv_gate_proj.weight
        weight.data = weight.data * 3
        weight.data = weight.data * 2


def replace_module(model):
    for layer in model.model.layers:
        layer.self_attn.kv_gate_proj = type(layer.self_attn.kv_gate_proj)(12, 54, bias=False)


def write_through_data_in_training_mode(model):
    model.train()
    for layer in model.model.layers:
        layer.self_attn.kv_gate_proj.weight.data.mul_(2)
    model.eval()


@pytest.mark.parametrize(
    "change",
    [
        optimizer_step,
        optimizer_step_in_evaluation_mode,
        load_state_dict,
        assign_state_dict,
        resize,
        replace_data_twice,
        replace_module,
        write_through_data_in_training_mode,
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to(torch.bfloat16).to(torch.float32),
        lambda model: model.double(),
    ],
)
def test_precomputed_gates_are_never_stale(make_model, change):
    """Whatever changes the weights changes the looked-up gates with them, without being told."""
    model = make_model()
    model.precompute_kv_gates()
    logits(model)
    change(model)
    with_tables = logits(model)
    assert uses_tables(model)
    model.release_kv_gates()
    tolerance = 5e-2 if with_tables.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(with_tables, logits(model), atol=tolerance, rtol=tolerance)


def test_adapters_on_gates_win_over_precomputed_gates(make_model):
    """LoRA on the gate projection works after `precompute_kv_gates`, and merging it updates the tables."""
    peft = pytest.importorskip("peft")
    model = make_model()
    model.precompute_kv_gates()
    base = logits(model)
    config = peft.LoraConfig(target_modules=["kv_gate_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    with_adapter = logits(adapted)
    assert (with_adapter - base).abs().max() > 1e-2
    merged = adapted.merge_and_unload()
    assert merged is model
    torch.testing.assert_close(logits(merged), with_adapter, atol=1e-4, rtol=0)
    assert uses_tables(merged)


def test_adapter_merged_before_any_forward(make_model):
    """Merging writes through `weight.data`, which leaves no trace on the weight; the tables follow all the same."""
    peft = pytest.importorskip("peft")
    model = make_model()
    model.precompute_kv_gates()
    base = logits(model)
    config = peft.LoraConfig(target_modules=["kv_gate_proj"], init_lora_weights=False)
    merged = peft.get_peft_model(model, config).merge_and_unload()
    with_tables = logits(merged)
    assert (with_tables - base).abs().max() > 1e-2
    merged.release_kv_gates()
    torch.testing.assert_close(with_tables, logits(merged), atol=1e-5, rtol=0)


def test_gradients_reach_the_tables_of_the_model(make_model):
    """Precomputed gates never cut a gradient: where one is wanted, gates are projected, in evaluation mode too."""
    model = make_model()
    model.precompute_kv_gates()
    for mode in (True, False):
        model.train(mode)
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        attention = model.model.layers[0].self_attn
        assert attention.kv_gate_embed.weight.grad[3].abs().sum() > 0
        assert attention.kv_gate_proj.weight.grad.abs().sum() > 0


def test_precomputing_plain_mla_does_nothing(make_model):
    """A model without gates accepts both calls."""
    model = make_model(kv_gate="none")
    before = logits(model)
    model.precompute_kv_gates()
    assert torch.equal(logits(model), before)
    model.release_kv_gates()


def test_gates_computed_under_autocast_are_as_precise_as_the_weights(model):
    """Precomputing inside an autocast region leaves no rounded table behind."""
    expected = logits(model)
    with torch.autocast("cpu", torch.bfloat16):
        model.precompute_kv_gates()
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)


def test_fused_optimizers_leave_no_stale_gates(model):
    """Fine-tuning in evaluation mode with a fused optimizer, which leaves no trace on parameters, renews the gates."""
    model.precompute_kv_gates()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()
    actual = logits(model)
    model.release_kv_gates()
    torch.testing.assert_close(actual, logits(model), atol=1e-5, rtol=1e-5)


def test_a_compiled_model_sees_loaded_weights(model, make_model):
    """Weights loaded into a compiled model reach its precomputed gates."""
    model.precompute_kv_gates()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(IDS, use_cache=False)
        model.load_state_dict(make_model(seed=3, kv_gate=model.config.kv_gate).state_dict())
        actual = compiled(IDS, use_cache=False).logits
        model.release_kv_gates()
        torch.testing.assert_close(actual, model(IDS, use_cache=False).logits, atol=1e-5, rtol=1e-5)


def test_a_compiled_model_sees_a_resized_vocabulary(model):
    """New ids have gates in a compiled model too, whose precomputed ones were of fewer."""
    model.precompute_kv_gates()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(IDS, use_cache=False)
        model.resize_token_embeddings(120)
        ids = torch.arange(100, 120)[None]
        actual = compiled(ids, use_cache=False).logits
        model.release_kv_gates()
        torch.testing.assert_close(actual, model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-5)


def test_gates_in_many_pieces(make_model, monkeypatch, tmp_path):
    """A vocabulary that is projected, written and read in several pieces has every row in its place."""
    monkeypatch.setattr("modeling_egmla.gate_egmla.PRECOMPUTE_CHUNK", 10)
    model = make_model()
    model.save_pretrained(tmp_path)
    projected = logits(model)
    model.precompute_kv_gates()
    torch.testing.assert_close(logits(model), projected, atol=1e-5, rtol=0)
    model.release_kv_gates()
    for dtype, atol in (("float32", 1e-5), ("int8", 0.2)):
        model.save_kv_gates(tmp_path / dtype, dtype)
        model.place_kv_gates("mmap", checkpoint=tmp_path, gates_file=tmp_path / dtype)
        torch.testing.assert_close(logits(model), projected, atol=atol, rtol=0)


def test_tables_with_adapters_are_not_resized(make_model):
    """An adapter that stays as it was would fail at the next step: it is to be merged first."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["kv_gate_embed"]))
    with pytest.raises(ValueError, match="merge the adapters first"):
        model.resize_token_embeddings(110)
    assert model.get_base_model().config.vocab_size == 97
