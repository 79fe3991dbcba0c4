"""Decoding on the compressed cache (docs/decoding.md): tiles and grouped absorption give what expanding gives."""

import copy
import io
import os

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig

from modeling_egmla import EGMLACache, EGMLAStaticCache
from modeling_egmla.decoding_egmla import (
    TILE_TOKENS,
    History,
    TokenGroups,
    looped_attention,
    select_decoding,
    tiled_attention,
)


# Under triton's interpreter, which test_fused.py starts, all that holds for the others is asked of the kernel.
FAST = ["fused"] if os.environ.get("TRITON_INTERPRET") == "1" else ["tiles", "grouped"]
KEEPING = FAST[-1:]  # what keeps workspace with the cache
VARIANTS = [("multiply", "layer_norm"), ("multiply", "none"), ("add", "layer_norm"), ("add", "none"), ("none", "none")]
PADDING = (0, 5, 17)  # of the rows of `padded_batch`


def reference_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one sequence, [T, V], from the equations."""
    return reference.logits(model.config.to_dict(), model.state_dict(), ids[None])[0]


def padded_batch(length: int = 40, distinct: int = 20):
    """Ids [3, length] with repeats, and their mask with `PADDING` to the left."""
    ids, mask = torch.randint(1, distinct, (3, length)), torch.ones(3, length, dtype=torch.long)
    for row, padding in enumerate(PADDING):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return ids, mask


def make_cache(model, static: bool = False):
    return EGMLAStaticCache(model.config, 64) if static else EGMLACache(model.config)


@torch.no_grad()
def decode(model, way, cache, ids, mask, steps):
    """Logits of `ids` from the end of the cache on, `steps` tokens at a time, all of them decoded in this way."""
    model.set_kv_decoding(way)
    logits, start = [], int(cache.get_seq_length())
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for step in steps:
        chunk = slice(start, start + step)
        out = model(ids[:, chunk], attention_mask=mask[:, : chunk.stop], position_ids=positions[:, chunk], cache=cache)
        logits.append(out.logits)
        start += step
    model.set_kv_decoding("auto")
    return torch.cat(logits, dim=1)


@torch.no_grad()
def masked_logits(model, way, ids, mask, queries: int = 1, static: bool = False):
    """Logits of the last `queries` of 40 ids, decoded in this way under a prepared mask."""
    cache = make_cache(model, static)
    decode(model, "expanded", cache, ids, torch.ones_like(ids), (40 - queries,))
    model.set_kv_decoding(way)
    return model(ids[:, -queries:], attention_mask=mask, cache=cache).logits


def close(actual, expected):
    """Within 1e-5 of logits of order 1; these models' are larger, and so is their rounding."""
    scale = max(1.0, expected.abs().max().item() / 2)
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("layer_group_size", [1, 2])
@pytest.mark.parametrize(("kv_gate", "kv_gate_norm"), VARIANTS)
@pytest.mark.parametrize("way", FAST)
def test_decoding_follows_the_equations(make_model, way, kv_gate, kv_gate_norm, layer_group_size, static):
    """Every variant, with padded batches, single tokens and drafts of several, gives the paper's logits to 1e-5."""
    model = make_model(kv_gate=kv_gate, kv_gate_norm=kv_gate_norm, layer_group_size=layer_group_size)
    ids, mask = padded_batch()
    cache, steps = make_cache(model, static), (1, 1, 1, 3, 1, 2, 1)
    decode(model, "expanded", cache, ids, mask, (30,))
    logits = decode(model, way, cache, ids, mask, steps)
    for row, padding in enumerate(PADDING):
        close(logits[row], reference_logits(model, ids[row, padding:])[-10:])


@pytest.mark.parametrize("way", FAST)
def test_precomputed_gates(make_model, way):
    """Both ways look their gates up where `precompute_kv_gates` was called."""
    model = make_model()
    model.precompute_kv_gates()
    ids, mask = padded_batch()
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (35,))
    logits = decode(model, way, cache, ids, mask, (1,) * 5)
    close(logits[1], reference_logits(model, ids[1, 5:])[-5:])


@pytest.mark.parametrize("form", ["none", "boolean", "additive", "additive per head"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("way", FAST)
def test_mask_forms(make_model, way, queries, static, form):
    """Prepared masks of every form mean what they mean to `scaled_dot_product_attention`."""
    model, (ids, _) = make_model(), padded_batch()
    mask = None
    if form != "none":
        width = 64 if static else 40
        visible = torch.rand(3, 1, queries, width) > 0.3
        visible[..., 40:], visible[..., 40 - queries] = False, True
        shape = (3, 3, queries, width) if form == "additive per head" else visible.shape
        bias = torch.randn(shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        mask = visible if form == "boolean" else bias
    close(*(masked_logits(model, decoding, ids, mask, queries, static) for decoding in ("expanded", way)))


@pytest.mark.parametrize("smallest", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("way", FAST)
def test_rows_masked_by_the_smallest_number(make_model, way, smallest):
    """A row whose mask hides all by the smallest number, not minus infinity, is what expanding makes of it."""
    model, (ids, _) = make_model(), padded_batch()
    mask = torch.zeros(3, 1, 1, 40)
    mask[1] = smallest
    close(*(masked_logits(model, decoding, ids, mask) for decoding in ("expanded", way)))


@pytest.mark.parametrize("way", FAST)
def test_masks_of_another_length_are_refused(make_model, way):
    """A prepared mask that is shorter than the history is an error, in every way to decode."""
    model, (ids, _) = make_model(), padded_batch()
    with pytest.raises(RuntimeError, match="35"):
        masked_logits(model, way, ids, torch.ones(3, 1, 1, 35, dtype=torch.bool))


@pytest.mark.parametrize("way", FAST)
def test_another_default_dtype(make_model, way):
    """What a program sets with `torch.set_default_dtype` does not change the precision of a model that is there."""
    model, (ids, mask) = make_model(), padded_batch()
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (38,))
    torch.set_default_dtype(torch.float16)
    try:
        logits = decode(model, way, cache, ids, mask, (1, 1))
    finally:
        torch.set_default_dtype(torch.float32)
    close(logits[1], reference_logits(model, ids[1, 5:])[-2:])


@pytest.mark.parametrize("way", FAST)
def test_integer_masks_are_refused(make_model, way):
    """A prepared mask of ones and zeros would be added to the scores: no way to decode takes it."""
    model, (ids, _) = make_model(), padded_batch()
    with pytest.raises(ValueError, match=r"boolean or floating, but is torch\.int64"):
        masked_logits(model, way, ids, torch.ones(3, 1, 1, 40, dtype=torch.long))


@pytest.mark.parametrize("way", FAST)
def test_row_that_is_all_padding(make_model, way):
    """A row without a token gives finite numbers and disturbs no other row."""
    model, (ids, mask) = make_model(), padded_batch()
    mask[0] = 0
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (38,))
    logits = decode(model, way, cache, ids, mask, (1, 1))
    assert logits.isfinite().all()
    close(logits[1], reference_logits(model, ids[1, 5:])[-2:])


@pytest.mark.parametrize("way", FAST)
def test_tiles_and_groups_of_every_size(make_model, way, monkeypatch):
    """Histories of many tiles, and ids from one occurrence to hundreds, give the same logits."""
    monkeypatch.setattr("modeling_egmla.decoding_egmla.TILE_TOKENS", 64)
    model = make_model()
    ids = (torch.rand(2, 230).pow(4) * 97).long()
    mask = torch.ones_like(ids)
    logits = []
    for decoding in ("expanded", way):
        cache = make_cache(model)
        decode(model, "expanded", cache, ids, mask, (200,))
        logits.append(decode(model, decoding, cache, ids, mask, (1,) * 30))
    close(*logits)


@pytest.mark.parametrize("way", FAST)
@pytest.mark.parametrize("multiplies_bf16", [False, True])
@pytest.mark.parametrize("kv_gate", ["multiply", "add", "none"])
def test_bfloat16_is_as_exact_as_expanding(make_model, way, kv_gate, multiplies_bf16, monkeypatch):
    """In bfloat16 each way is about as near to float64 as the expanded computation, on CPUs with and without it."""
    monkeypatch.setattr("modeling_egmla.gate_egmla.CPU_MULTIPLIES_BF16", multiplies_bf16)
    model = make_model(kv_gate=kv_gate).to(torch.bfloat16)
    ids, mask = padded_batch()
    expected = reference_logits(model, ids[0])[-8:]
    errors = []
    for decoding in ("expanded", way):
        cache = make_cache(model)
        decode(model, "expanded", cache, ids, mask, (32,))
        logits = decode(model, decoding, cache, ids, mask, (1,) * 8)[0]
        errors.append(((logits - expected).norm() / expected.norm()).item())
    assert errors[1] < 1.5 * errors[0] + 1e-3
    assert errors[0] < 0.05


class BatchedProducts(TorchDispatchMode):
    """Types of the operands of all batched matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.bmm:
            self.dtypes.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("multiplies_bf16", [False, True])
def test_products_with_gates_are_fast_ones(make_model, dtype, multiplies_bf16, monkeypatch):
    """Grouped decoding multiplies gates in bfloat16 if the model and the CPU have it, and never in float16."""
    monkeypatch.setattr("modeling_egmla.gate_egmla.CPU_MULTIPLIES_BF16", multiplies_bf16)
    model, (ids, mask) = make_model().to(dtype), padded_batch()
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (39,))
    with BatchedProducts() as products:
        decode(model, "grouped", cache, ids, mask, (1,))
    is_native = dtype == torch.bfloat16 and multiplies_bf16
    assert products.dtypes == ({torch.float32, torch.bfloat16} if is_native else {torch.float32})


GENERATION = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 20},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "static": {"cache_implementation": "static"},
    "chunked prefill": {"prefill_chunk_size": 3},
}


@pytest.mark.parametrize("how", GENERATION)
@pytest.mark.parametrize("way", FAST)
def test_generation_gives_the_same_tokens(make_model, way, how):
    """`generate()` gives the tokens that expanding gives, whatever the strategy."""
    model, (ids, mask) = make_model(), padded_batch(12)
    ids, mask = ids[:2], mask[:2]
    if how == "prompt lookup":
        ids, mask = ids[:1], mask[:1]
    tokens = []
    for decoding in ("expanded", way):
        torch.manual_seed(1)
        model.set_kv_decoding(decoding)
        tokens.append(model.generate(ids, attention_mask=mask, max_new_tokens=24, **GENERATION[how]))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("way", FAST)
def test_assisted_generation(make_model, way):
    """Drafts of another model are verified on the compressed cache, and rejected ones leave no trace."""
    model, assistant = make_model(), make_model(seed=1)
    ids = torch.randint(1, 20, (1, 12))
    plain = model.generate(ids, max_new_tokens=32)
    for m in (model, assistant):
        m.set_kv_decoding(way)
    assert torch.equal(model.generate(ids, max_new_tokens=32, assistant_model=assistant), plain)


OPERATIONS = {
    "crop": lambda cache: cache.crop(-7),
    "crop one layer after the other": lambda cache: [layer.crop(-2) for layer in cache.layers],
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 1])),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("layer_group_size", [1, 2])
@pytest.mark.parametrize("way", KEEPING)
def test_workspace_follows_the_cache(make_model, way, operation, static, layer_group_size):
    """After any operation on a cache, what was derived for fast decoding fits its tokens, not those it once held."""
    model = make_model(layer_group_size=layer_group_size)
    ids, mask = torch.randint(1, 20, (3, 40)), torch.ones(3, 40, dtype=torch.long)
    cache = make_cache(model, static)
    decode(model, way, cache, ids, mask, (20, 1, 1, 1))
    assert cache.memory().workspace > 0
    OPERATIONS[operation](cache)
    length = int(cache.get_seq_length())
    fresh = make_cache(model, static)
    if length:
        streams = [[t[:, :, :length].clone() for t in part] for part in (cache.latents, cache.rotated_keys)]
        fresh.fill(*streams, cache.token_ids[:, :length].clone())
    batch_size = cache.token_ids.shape[0] if length else 3
    more, mask = torch.randint(20, 97, (batch_size, length + 6)), torch.ones(batch_size, length + 6, dtype=torch.long)
    steps = (1, 1, 1, 2, 1)
    close(decode(model, way, cache, more, mask, steps), decode(model, "expanded", fresh, more, mask, steps))


@pytest.mark.parametrize("way", KEEPING)
def test_workspace_is_not_copied(make_model, way):
    """Copies and pickles of a cache hold what it was filled with, and nothing derived."""
    model, (ids, mask) = make_model(), padded_batch()
    cache = make_cache(model)
    decode(model, way, cache, ids, mask, (30, 1))
    torch.save(cache, buffer := io.BytesIO())
    buffer.seek(0)
    copies = [copy.deepcopy(cache), torch.load(buffer, weights_only=False)]
    expected = decode(model, way, cache, ids, mask, (1, 1))
    for other in copies:
        assert other.memory().workspace == 0
        close(decode(model, way, other, ids, mask, (1, 1)), expected)


def test_kept_workspace_is_small(make_model):
    """What fast decoding keeps is two numbers a token and layer, and a few indices a token for all layers."""
    model = make_model(num_hidden_layers=6)
    ids = torch.randint(1, 97, (2, 200))
    cache = make_cache(model)
    decode(model, "grouped", cache, ids, torch.ones_like(ids), (199, 1))
    memory = cache.memory()
    assert memory.workspace <= ids.numel() * (6 * 2 * 4 + 60)
    assert memory.total == memory.latents + memory.token_ids + memory.slack + memory.workspace


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not function.is_view:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("way", FAST)
def test_transient_workspace_does_not_grow_with_the_batch(make_model, way):
    """A decode step needs memory for a tile, or for one sequence's distinct ids: not for batch x length features."""
    model, length = make_model(num_attention_heads=8), 2 * TILE_TOKENS
    largest = {}
    for batch_size in (1, 4):
        ids = torch.randint(1, 97, (batch_size, length + 2))
        cache = make_cache(model)
        cache.fill(
            [torch.randn(batch_size, 1, length, 16) for _ in cache.layers],
            [torch.randn(batch_size, 1, length, 6) for _ in cache.layers],
            ids[:, :length],
        )
        mask = torch.ones_like(ids)
        decode(model, way, cache, ids, mask, (1,))
        with LargestTensor() as mode:
            decode(model, way, cache, ids, mask, (1,))
        largest[batch_size] = mode.elements
    features = model.config.kv_width
    assert largest[1] <= (TILE_TOKENS if way == "tiles" else length // 4) * features
    assert largest[4] <= largest[1] + 4 * length


@torch.no_grad()
def select(model, cache, queries=1, mask=None, layer=0):
    attention = model.model.layers[layer].self_attn
    query = torch.zeros(1, attention.num_heads, queries, attention.qk_head_dim, dtype=model.dtype)
    return select_decoding(attention, query, mask, cache)


def test_auto_choice(make_model):
    """By default short histories and prefill are expanded, long ones decoded on the latents."""
    for kv_gate, few in (("multiply", 4), ("none", 16)):
        model = make_model(kv_gate=kv_gate)
        for length, expected in ((64, "expanded"), (6000, "grouped")):
            cache = make_cache(model)
            ids = torch.ones(1, length, dtype=torch.int)
            cache.fill([torch.randn(1, 1, length, 16)] * 2, [torch.randn(1, 1, length, 6)] * 2, ids)
            mask = torch.ones(1, 1, few, length, dtype=torch.bool)
            assert select(model, cache) == select(model, cache, few, mask) == expected
        if kv_gate == "multiply":
            assert select(model, cache, 5, torch.ones(1, 1, 5, 6000, dtype=torch.bool)) == "tiles"
        assert select(model, cache, 17, torch.ones(1, 1, 17, 6000, dtype=torch.bool)) == "expanded"


def test_accelerators_expand_by_default(make_model, monkeypatch):
    """What was measured on CPUs chooses there alone; elsewhere the fast ways are taken when they are named."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # does not know "meta"
    model = make_model().to("meta")
    cache = make_cache(model)
    states = [[torch.empty(1, 1, 6000, width, device="meta")] * 2 for width in (16, 6)]
    cache.fill(*states, torch.empty(1, 6000, dtype=torch.int, device="meta"))
    attention = model.model.layers[0].self_attn
    query = torch.empty(1, attention.num_heads, 1, attention.qk_head_dim, device="meta")
    with torch.no_grad():
        assert select_decoding(attention, query, None, cache) == "expanded"
        model.set_kv_decoding("tiles")
        assert select_decoding(attention, query, None, cache) == "tiles"


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
@pytest.mark.parametrize("way", ["auto", "expanded", "tiles"])
@pytest.mark.parametrize("layer_group_size", [1, 2])
def test_steps_do_not_wait_for_the_device(make_model, monkeypatch, layer_group_size, way, precomputes, static):
    """
    Nothing in a step looks at a number that an accelerator computes, which would wait for it and could not be captured
    in a graph: tensors of the "meta" device have none, and raise where one is asked for.
    """
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # does not know "meta"
    model = make_model(num_hidden_layers=4, layer_group_size=layer_group_size).to("meta")
    if precomputes:
        model.precompute_kv_gates()
    model.set_kv_decoding(way)
    cache, ids = make_cache(model, static), torch.empty(2, 20, dtype=torch.long, device="meta")
    with torch.no_grad():
        model(ids, cache=cache)
        for _ in range(3):
            logits = model(ids[:, :1], cache=cache).logits
    assert logits.shape == (2, 1, 97) and logits.is_meta


@pytest.mark.parametrize("rows", [1, 3])
def test_emptied_cache_takes_other_rows(make_model, rows):
    """Cropped to nothing, a cache on which two rows were decoded takes any number, with logits as of a new one."""
    model = make_model()
    ids, mask = torch.randint(1, 97, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    others, seen = torch.randint(1, 97, (rows, 12)), torch.ones(rows, 12, dtype=torch.long)
    cache = make_cache(model)
    decode(model, "grouped", cache, ids, mask, (17, 1, 1, 1))
    cache.crop(-20)
    logits = decode(model, "grouped", cache, others, seen, (10, 1, 1))
    assert torch.equal(logits, decode(model, "grouped", make_cache(model), others, seen, (10, 1, 1)))


def test_ways_of_a_prompt(make_model, monkeypatch):
    """
    A forced way is for a few tokens behind a history: a padded prompt is expanded, and many tokens behind one are not
    taken to the latents of each distinct id, whose memory is the product of both.
    """
    model, taken = make_model(), []

    def select(*args):
        taken.append(select_decoding(*args))
        return taken[-1]

    monkeypatch.setattr("modeling_egmla.modeling_egmla.select_decoding", select)
    ids, mask = torch.randint(1, 97, (2, 60)), torch.ones(2, 60, dtype=torch.long)
    mask[1, :5] = 0
    cache = make_cache(model)
    decode(model, "grouped", cache, ids, mask, (20, 20, 16, 1))
    decode(model, "tiles", make_cache(model), ids, mask, (20, 20))
    layers = model.config.num_hidden_layers
    assert taken[::layers] == ["expanded", "tiles", "grouped", "grouped", "expanded", "tiles"]


def test_unknown_decoding(make_model):
    """A name that means nothing raises and lists those that do."""
    with pytest.raises(ValueError, match="'expanded', 'tiles', 'grouped'"):
        make_model().set_kv_decoding("absorbed")


def test_triton_is_asked_for_by_name(make_model, monkeypatch):
    """Without triton, asking for the kernel says what to install."""
    monkeypatch.setattr("modeling_egmla.decoding_egmla.HAS_TRITON", False)
    with pytest.raises(ValueError, match="pip install triton"):
        make_model().set_kv_decoding("fused")


def lora(target):
    def wrap(model):
        peft = pytest.importorskip("peft")
        peft.get_peft_model(model, peft.LoraConfig(target_modules=[target], init_lora_weights=False)).eval()

    return wrap


def quantised(model):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), lambda module, name: name.endswith("kv_b_proj"))


def offloaded(model):
    pytest.importorskip("accelerate").cpu_offload(model)


def hooked(model):
    for layer in model.model.layers[:1]:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: 1.5 * out)


def parametrized(model):
    class Double(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    torch.nn.utils.parametrize.register_parametrization(model.model.layers[0].self_attn.kv_b_proj, "weight", Double())


CHANGES = {
    "LoRA on kv_b_proj": lora("kv_b_proj"),
    "LoRA on kv_gate_proj": lora("kv_gate_proj"),
    "quantised": quantised,
    "offloaded": offloaded,
    "hooked": hooked,
    "parametrized": parametrized,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layer_group_size", [1, 2])
@pytest.mark.parametrize("way", FAST)
def test_wrapped_modules(make_model, way, layer_group_size, change):
    """Adapters, quantised and offloaded weights and hooks count in every way of decoding."""
    model, (ids, mask) = make_model(layer_group_size=layer_group_size), padded_batch()
    plain = decode(model, "expanded", make_cache(model), ids, mask, (35,))
    CHANGES[change](model)
    logits = []
    for decoding in ("expanded", way):
        cache = make_cache(model)
        prefill = decode(model, "expanded", cache, ids, mask, (35,))
        logits.append(decode(model, decoding, cache, ids, mask, (1,) * 5))
    close(*logits)
    assert change == "offloaded" or not torch.allclose(prefill, plain, atol=1e-4), "the change has no effect"


@pytest.mark.parametrize("trained", ["kv_gate_norm", "kv_b_proj", "kv_gate_embed"])
@pytest.mark.parametrize("way", FAST)
def test_gradients_are_not_cut(make_model, way, trained):
    """Where a gradient is wanted, be it of a few weights only, forcing a fast way does not cut it."""
    model, (ids, mask) = make_model(), padded_batch()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (39,))
    model.set_kv_decoding(way)
    model(ids[:, 39:], attention_mask=mask, cache=cache).logits.sum().backward()
    assert getattr(model.model.layers[1].self_attn, trained).weight.grad.abs().sum() > 0


@pytest.mark.parametrize("way", FAST)
def test_autocast_expands(make_model, way):
    """Under autocast a forced way gives exactly what expanding gives."""
    model, (ids, mask) = make_model(), padded_batch()
    logits = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for decoding in ("expanded", way):
            cache = make_cache(model)
            decode(model, "expanded", cache, ids, mask, (39,))
            logits.append(decode(model, decoding, cache, ids, mask, (1,)))
    assert torch.equal(*logits)


def test_eager_attention_gives_weights(make_model):
    """`attn_implementation="eager"` always expands, and so gives attention weights while decoding."""
    model, (ids, mask) = make_model(), padded_batch()
    model.set_attn_implementation("eager")
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (39,))
    model.set_kv_decoding("grouped")
    with torch.no_grad():
        out = model(ids[:, 39:], attention_mask=mask, cache=cache, output_attentions=True)
    assert out.attentions[1].shape == (3, 3, 1, 40)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=80), st.lists(st.integers(0, 9), max_size=5))
def test_groups_hold_every_position_once(ids, appended):
    """Sorting by id loses no position, counts each once, and wastes less than four places a position."""
    groups = TokenGroups(torch.tensor(ids))
    for token in appended:
        groups.append(torch.tensor([token]))
    every = torch.tensor(ids + appended)
    assert groups.length == len(every)
    assert torch.equal(groups.position_P[groups.place_T], torch.arange(len(every)))
    assert groups.counts_P.sum() == len(every)
    assert groups.counts_P[groups.place_T].all()
    assert torch.equal(groups.ids_U[groups.group_T], every)
    assert sum(count * size for count, size in groups.blocks) == len(groups.position_P) < 4 * len(every)


@pytest.mark.slow  # compiles with inductor
@pytest.mark.timeout(1200)
def test_compiled_tiles(make_model):
    """A compiled static step attends by tiles in one graph, is not compiled again, and gives the same tokens."""
    model = make_model()
    model.precompute_kv_gates()
    ids, mask = padded_batch(12)
    compile_config = CompileConfig(fullgraph=True)
    compile_config._compile_all_devices = True
    settings = {"cache_implementation": "static", "max_cache_len": 600, "compile_config": compile_config}
    plain = model.generate(ids[:2], attention_mask=mask[:2], max_new_tokens=30)
    torch._dynamo.reset()
    model.set_kv_decoding("tiles")
    assert torch.equal(model.generate(ids[:2], attention_mask=mask[:2], max_new_tokens=30, **settings), plain)
    with torch._dynamo.config.patch(error_on_recompile=True):
        longer = model.generate(ids[1:], max_new_tokens=300, **settings)
    model.set_kv_decoding("expanded")
    assert torch.equal(longer, model.generate(ids[1:], max_new_tokens=300))


@pytest.mark.parametrize("kv_gate", ["multiply", "add"])
@pytest.mark.parametrize("changed", ["kv_gate_proj", "kv_gate_embed", "kv_b_proj"])
@pytest.mark.parametrize("way", KEEPING)
def test_statistics_follow_the_weights(make_model, way, kv_gate, changed):
    """Weights that change while a cache lives change every decoded step alike, whichever way it is decoded."""
    logits = {}
    for decoding in ("expanded", way):
        model = make_model(kv_gate=kv_gate)
        model.set_kv_decoding(decoding)
        ids, cache = torch.arange(2, 22)[None], EGMLACache(model.config)
        with torch.no_grad():
            model(ids[:, :18], cache=cache)
            model(ids[:, 18:19], cache=cache)
            for name, parameter in model.named_parameters():
                if changed in name:
                    parameter.mul_(torch.linspace(-1.3, 2, len(parameter))[:, None])
            logits[decoding] = model(ids[:, 19:], cache=cache).logits
    torch.testing.assert_close(logits[way], logits["expanded"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tile", [TILE_TOKENS, 40])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("way", FAST)
def test_one_mask_for_all_rows(make_model, way, queries, tile, monkeypatch):
    """A prepared mask [1, 1, S, T] counts for every row of the batch, however the batch is cut into tiles."""
    monkeypatch.setattr("modeling_egmla.decoding_egmla.TILE_TOKENS", tile)
    model, (ids, _) = make_model(), padded_batch()
    mask = torch.ones(1, 1, queries, 40, dtype=torch.bool)
    mask[..., 0, 39] = mask[..., 7] = False
    close(*(masked_logits(model, decoding, ids, mask, queries) for decoding in ("expanded", way)))


@pytest.mark.parametrize("way", FAST)
def test_dropout_is_not_skipped(make_model, way):
    """In training mode, with gradients off as well, attention drops what it should."""
    model, (ids, mask) = make_model(attention_dropout=0.9), padded_batch()
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (39,))
    model.set_kv_decoding(way)
    model.train()
    with torch.no_grad():
        first, second = (model(ids[:, 39:], attention_mask=mask, cache=copy.deepcopy(cache)).logits for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("way", FAST)
def test_ways_may_differ_by_layer(make_model, way):
    """A layer that expands behind one that did not takes the latents of its own layer group."""
    model, (ids, mask) = make_model(num_hidden_layers=4, layer_group_size=2), padded_batch()
    logits = []
    for third in ("expanded", way):
        cache = make_cache(model)
        decode(model, "expanded", cache, ids, mask, (39,))
        model.set_kv_decoding("expanded")
        model.model.layers[2].self_attn.kv_decoding = third
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1)[:, 39:]
            logits.append(model(ids[:, 39:], attention_mask=mask, position_ids=positions, cache=cache).logits)
    close(*logits)


def test_loop_over_a_full_cache(make_model):
    """The loop of compiled steps counts each slot once where the room is no multiple of its tile, and full."""
    model = make_model()
    cache = EGMLAStaticCache(model.config, 20)
    attention = model.model.layers[0].self_attn
    query, mask = torch.randn(2, 3, 1, attention.qk_head_dim), torch.ones(2, 1, 1, 20, dtype=torch.bool)
    with torch.no_grad():
        model(torch.randint(2, 97, (2, 20)), cache=cache)
        expected = tiled_attention(attention, query, mask, cache)
        actual = looped_attention(attention, query, mask, History.of(cache, 0), torch.tensor(20))
    close(actual, expected)
