"""What the caches promise: three streams that move together, bytes as the formula says, nothing else kept."""

import copy
import importlib.resources
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from modeling_egmla import EGMLACache, EGMLAConfig, EGMLAStaticCache
from modeling_egmla.cache_egmla import BLOCK_SIZE


# Elements for one cached token in all layers, from the paper's accounting: (d_c + d_rope) a layer, a latent a group.
ELEMENTS_PER_TOKEN = {
    "mla-base-kv256": 3840,
    "egmla-base-kv256-emb256": 3840,
    "egmla-base-kv128-emb256": 2304,
    "egmla-base-kv64-emb256": 1536,
    "egmla-base-kv16-emb256": 960,
    "egmla-base-kv64-emb64": 1536,
    "egmla-base-kv64-emb128": 1536,
    "egmla-base-kv64-emb512": 1536,
    "egmla-base-kv64-emb1024": 1536,
    "egmla-base-kv64-emb2048": 1536,
    "mla-large-kv512": 6912,
    "egmla-large-kv128-emb512": 2304,
    "egmla-large-kv128-emb512-lgz2": 2304 // 2,
    "egmla-large-kv128-emb512-lgz4": 2304 // 4,
    "egmla-large-kv128-emb512-lgz6": 2304 // 6,
    "egmla-large-kv256-emb512": 3840,
    "egmla-large-kv256-emb512-lgz2": 3840 // 2,
    "egmla-large-kv256-emb512-lgz4": 3840 // 4,
    "egmla-large-kv256-emb512-lgz6": 3840 // 6,
    "mla-xlarge-kv512": 13824,
    "egmla-xlarge-kv128-emb512": 4608,
}

GROUPS = pytest.mark.parametrize("group_size", [1, 2])
BOTH_CACHES = pytest.mark.parametrize(
    "make_cache", [EGMLACache, lambda config: EGMLAStaticCache(config, 64)], ids=["dynamic", "static"]
)


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def alone(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


@torch.no_grad()
def step(model, ids: torch.Tensor, cache) -> torch.Tensor:
    return model(ids, cache=cache).logits


def streams(cache, length: int | None = None):
    """Copies of the filled part of the three streams."""
    length = int(cache.get_seq_length()) if length is None else length
    return (
        [latent[:, :, :length].clone() for latent in cache.latents],
        [key[:, :, :length].clone() for key in cache.rotated_keys],
        cache.token_ids[:, :length].clone(),
    )


def random_streams(config, batch: int, length: int, dtype=torch.float32):
    shapes = [(config.kv_lora_rank, torch.randn), (config.qk_rope_head_dim, torch.randn)]
    latents, keys = (
        [make(batch, 1, length, width, dtype=dtype) for _ in range(config.num_layer_groups)] for width, make in shapes
    )
    return latents, keys, torch.randint(config.vocab_size, (batch, length))


def tensors_of(thing, seen=None) -> list[torch.Tensor]:
    """Every tensor that hangs on an object of ours."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (str, int, float, type(None), torch.device, torch.dtype)):
        return []
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return [thing]
    parts = list(thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else [])
    parts += list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    return [tensor for part in parts for tensor in tensors_of(part, seen)]


def bytes_of_storage(cache) -> int:
    """What the cache really holds: whole storages, each once; the static layers' lengths (8 bytes each) apart."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(cache) if t.dim() > 0}
    return sum(storages.values())


def assert_together(cache, ids: torch.Tensor):
    """Latents, keys and ids cover the same tokens, which are `ids`."""
    batch, length = ids.shape
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {length}
    assert torch.equal(cache.token_ids[:, :length].long(), ids)
    assert {tensor.shape[0] for tensor in (*cache.latents, *cache.rotated_keys, cache.token_ids)} == {batch}


def test_every_preset_is_listed():
    """No preset escapes the count of bytes below."""
    folder = importlib.resources.files("modeling_egmla.configuration")
    names = {entry.name for entry in folder.iterdir() if entry.joinpath("config.json").is_file()}
    trained = {name for name in names if (folder / name / "model.safetensors").is_file()}
    assert set(ELEMENTS_PER_TOKEN) == names - trained
    for name, elements in ELEMENTS_PER_TOKEN.items():
        assert EGMLAConfig.from_preset(name).cache_elements_per_token == elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch, length", [(1, 1), (3, 257)])
@pytest.mark.parametrize("name", ELEMENTS_PER_TOKEN)
def test_bytes_equal_the_formula(name, batch, length, dtype):
    """Filled bytes are batch x tokens x elements x bytes an element, for every preset; slack is under one block."""
    config = EGMLAConfig.from_preset(name)
    cache = EGMLACache(config).fill(*random_streams(config, batch, length, dtype))
    memory = cache.memory()
    assert memory.latents == batch * length * ELEMENTS_PER_TOKEN[name] * dtype.itemsize
    assert memory.token_ids == batch * length * 4
    block = batch * BLOCK_SIZE * (ELEMENTS_PER_TOKEN[name] * dtype.itemsize + 4)
    assert 0 <= memory.slack < block
    assert memory.total == memory.latents + memory.token_ids + memory.slack == bytes_of_storage(cache)

    if length == 257:
        static = EGMLAStaticCache(config, 300).fill(*random_streams(config, batch, length, dtype)).memory()
        assert (static.latents, static.token_ids) == (memory.latents, memory.token_ids)
        assert static.slack == 43 * batch * (ELEMENTS_PER_TOKEN[name] * dtype.itemsize + 4)


@GROUPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_gate", ["multiply", "add", "none"])
def test_bytes_of_a_live_cache(make_model, kv_gate, dtype, group_size):
    """What `generate` leaves in the cache is what the formula says, and no tensor beside it."""
    model = make_model(kv_gate=kv_gate, layer_group_size=group_size).to(dtype)
    cache = EGMLACache(model.config)
    model.generate(random_ids(3, 10), max_new_tokens=6, do_sample=False, cache=cache)
    memory = cache.memory()
    assert memory.latents == 3 * 15 * (16 + 6) * (2 // group_size) * dtype.itemsize
    assert memory.token_ids == 3 * 15 * 4
    assert memory.total == bytes_of_storage(cache)
    assert {tensor.dtype for tensor in (*cache.latents, *cache.rotated_keys)} == {dtype}
    assert cache.token_ids.dtype == torch.int32


def test_growth_by_blocks(make_config):
    """Single tokens do not copy the history: buffers move once a block, and slack stays under a block throughout."""
    config = make_config()
    cache = EGMLACache(config)
    places = set()
    with torch.no_grad():
        for length in range(1, 2 * BLOCK_SIZE + 3):
            latents, keys, ids = random_streams(config, 1, 1)
            cache.fill(latents, keys, ids)
            memory = cache.memory()
            assert memory.latents == length * config.cache_elements_per_token * 4
            assert memory.slack < BLOCK_SIZE * (config.cache_elements_per_token * 4 + 4)
            pointers = [stream.data_ptr() for stream in (*cache.latents, *cache.rotated_keys, cache.token_ids)]
            places.add((*pointers, cache.layers[0].allocated_bytes))
    assert len(places) == 3


def test_an_empty_cache_holds_nothing(make_config):
    """Before the first token a dynamic cache has no bytes, no ids and no length."""
    for cache in (EGMLACache(make_config()), EGMLAStaticCache(make_config(), 8)):
        assert cache.memory().total == 0
        assert cache.get_seq_length() == 0
        assert cache.token_ids is None
        assert cache.latents == [None, None] == cache.rotated_keys


@GROUPS
@BOTH_CACHES
def test_a_cache_rebuilt_from_its_streams_continues_identically(make_model, make_cache, group_size, tmp_path):
    """The three documented streams are the whole state: written to a file and read back, they continue bit for bit."""
    model = make_model(layer_group_size=group_size)
    ids = random_ids(2, 14)
    cache = make_cache(model.config)
    step(model, ids[:, :9], cache)

    latents, keys, token_ids = streams(cache)
    assert [latent.shape for latent in latents] == [(2, 1, 9, 16)] * (2 // group_size)
    assert [key.shape for key in keys] == [(2, 1, 9, 6)] * (2 // group_size)
    assert torch.equal(token_ids.long(), ids[:, :9])
    tensors = {f"latent.{i}": latent for i, latent in enumerate(latents)}
    tensors |= {f"key.{i}": key for i, key in enumerate(keys)} | {"ids": token_ids}
    save_file(tensors, tmp_path / "cache.safetensors")
    tensors = load_file(tmp_path / "cache.safetensors")
    groups = range(model.config.num_layer_groups)
    rebuilt = make_cache(model.config).fill(
        [tensors[f"latent.{i}"] for i in groups], [tensors[f"key.{i}"] for i in groups], tensors["ids"]
    )
    for part in ids[:, 9:].split([1, 1, 3], dim=1):
        assert torch.equal(step(model, part, rebuilt), step(model, part, cache))
    for mine, other in zip(tensors_of(streams(rebuilt)), tensors_of(streams(cache))):
        assert torch.equal(mine, other)


def test_a_cache_is_rebuilt_in_parts_and_in_the_other_kind(make_model):
    """`fill` appends: two halves, from a dynamic cache into a static one, continue as the original."""
    model = make_model()
    ids = random_ids(2, 10)
    cache = EGMLACache(model.config)
    step(model, ids[:, :8], cache)
    latents, keys, token_ids = streams(cache)
    static = EGMLAStaticCache(model.config, 20)
    for part in (slice(0, 3), slice(3, 8)):
        static.fill([x[:, :, part] for x in latents], [x[:, :, part] for x in keys], token_ids[:, part])
    torch.testing.assert_close(step(model, ids[:, 8:], static), step(model, ids[:, 8:], cache), atol=1e-5, rtol=1e-5)


def test_streams_that_do_not_belong_together_are_refused(make_model):
    """`fill` checks that latents, keys and ids cover the same tokens, for as many layer groups as the cache has."""
    config = make_model().config
    latents, keys, ids = random_streams(config, 2, 5)
    cache = EGMLACache(config)
    with pytest.raises(ValueError, match="2 layer groups, but 1 latents"):
        cache.fill(latents[:1], keys, ids)
    for wrong in (
        (latents, keys, ids[:, :4]),
        (latents, [key[:, :, :4] for key in keys], ids),
        (latents, keys, ids[:1]),
    ):
        with pytest.raises(ValueError, match="same tokens"):
            cache.fill(*wrong)
    assert cache.get_seq_length() == 0


def apply(operation: tuple, cache, ids: torch.Tensor) -> torch.Tensor:
    """Does one operation to the cache, and to the ids that it should hold."""
    name, argument = operation
    getattr(cache, name)(argument)
    if name == "crop":
        return ids[:, : max(ids.shape[1] + argument, 0)]
    if name == "batch_repeat_interleave":
        return ids.repeat_interleave(argument, dim=0)
    return ids[argument]


OPERATIONS = {
    "reorder": ("reorder_cache", torch.tensor([2, 0, 0])),
    "repeat": ("batch_repeat_interleave", 2),
    "select": ("batch_select_indices", torch.tensor([2, 0])),
    "select by mask": ("batch_select_indices", torch.tensor([True, False, True])),
    "crop": ("crop", -3),
    "crop nothing": ("crop", 0),
    "crop all": ("crop", -9),
    "crop more than there is": ("crop", -20),
}


@GROUPS
@BOTH_CACHES
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_moves_all_streams(make_model, make_cache, name, group_size):
    """After any operation the cache continues as an uncached forward over the ids that should be left."""
    model = make_model(layer_group_size=group_size)
    cache = make_cache(model.config)
    ids = random_ids(3, 9)
    step(model, ids, cache)
    ids = apply(OPERATIONS[name], cache, ids)
    assert_together(cache, ids)
    for seed in (1, 2):
        new = random_ids(len(ids), 2, seed)
        ids = torch.cat([ids, new], dim=1)
        torch.testing.assert_close(step(model, new, cache), alone(model, ids)[:, -2:], atol=1e-5, rtol=1e-5)
        assert_together(cache, ids)


@BOTH_CACHES
def test_crop_takes_negative_numbers(make_model, make_cache):
    """As everywhere in the library: a positive number is an error that says so, and nothing is removed."""
    model = make_model()
    cache = make_cache(model.config)
    step(model, random_ids(1, 6), cache)
    with pytest.raises((ValueError, RuntimeError), match="negative"):
        cache.crop(2)
    assert cache.get_seq_length() == 6
    cache.crop(-2)
    assert cache.get_seq_length() == 4


@BOTH_CACHES
def test_reset(make_model, make_cache):
    """A reset cache is as good as new; a dynamic one lets its memory go."""
    model = make_model()
    cache = make_cache(model.config)
    step(model, random_ids(2, 6), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.memory().latents == cache.memory().token_ids == 0
    batch = 2
    if isinstance(cache, EGMLACache):
        assert cache.token_ids is None and cache.memory().total == 0
        batch = 3
    else:
        assert not any(tensor.any() for tensor in (*cache.latents, *cache.rotated_keys, cache.token_ids))
    ids = random_ids(batch, 4, seed=1)
    torch.testing.assert_close(step(model, ids, cache), alone(model, ids), atol=1e-5, rtol=1e-5)


@BOTH_CACHES
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_copies_are_independent(make_model, make_cache, how):
    """A deep copy and a pickled cache continue as the original would, and neither touches the other."""
    model = make_model()
    ids = random_ids(2, 8)
    cache = make_cache(model.config)
    step(model, ids[:, :6], cache)
    other = how(cache)
    assert type(other) is type(cache)
    assert other.memory() == cache.memory()
    assert not {t.data_ptr() for t in tensors_of(other)} & {t.data_ptr() for t in tensors_of(cache)}
    expected = alone(model, ids)[:, 6:]
    step(model, random_ids(2, 2, seed=5), other)
    torch.testing.assert_close(step(model, ids[:, 6:], cache), expected, atol=1e-5, rtol=1e-5)
    other.crop(-2)
    torch.testing.assert_close(step(model, ids[:, 6:], other), expected, atol=1e-5, rtol=1e-5)


def test_a_cache_from_training_mode_can_be_copied(make_model):
    """A prompt that was cached without no_grad gives a cache that can be copied like any other."""
    model = make_model()
    ids = random_ids(1, 8)
    cache = EGMLACache(model.config)
    model(ids[:, :6], cache=cache)
    with torch.no_grad():
        model(ids[:, 6:7], cache=cache)
    logits = step(model, ids[:, 7:], copy.deepcopy(cache))
    torch.testing.assert_close(logits, alone(model, ids)[:, 7:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("has_slack", [True, False])
@pytest.mark.parametrize("length", [5, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE])
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 3)])
def test_another_batch_size_is_refused(make_model, before, after, length, has_slack, grad):
    """Rows that do not belong to the cache are an error at any length, not a broadcast, and it stays as it was."""
    model = make_model()
    cache = EGMLACache(model.config)
    ids = random_ids(before, length)
    step(model, ids, cache)
    if not has_slack:
        cache.reorder_cache(torch.arange(before))
    held = tensors_of(streams(cache))
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="batch size"):
        model(random_ids(after, 1), cache=cache)
    assert_together(cache, ids)
    assert all(torch.equal(mine, other) for mine, other in zip(tensors_of(streams(cache)), held, strict=True))


@pytest.mark.parametrize("changes", [{"kv_lora_rank": 17}, {"qk_rope_head_dim": 4}], ids=str)
@BOTH_CACHES
def test_another_width_is_refused(make_config, make_cache, changes):
    """Streams of another model's widths are an error, and no stream is longer than the others afterwards."""
    config, other = make_config(), make_config(**changes)
    cache = make_cache(config).fill(*random_streams(config, 1, 4))
    with pytest.raises((ValueError, RuntimeError)):
        cache.fill(*random_streams(other, 1, 1))
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {4}
    if isinstance(cache, EGMLACache):
        assert cache.token_ids.shape[1] == 4


@BOTH_CACHES
@pytest.mark.parametrize("positional", [False, True])
def test_early_initialization(make_model, make_cache, positional):
    """`early_initialization`, called as the library calls it, gives the right widths whatever heads it names."""
    model = make_model()
    cache = make_cache(model.config)
    if positional:
        cache.early_initialization(2, 3, 8, torch.float32, torch.device("cpu"))
    else:
        cache.early_initialization(batch_size=2, num_heads=3, head_dim=8, dtype=torch.float32, device="cpu")
    assert cache.is_initialized
    assert [latent.shape[-1] for latent in cache.latents] == [16, 16]
    assert [key.shape[-1] for key in cache.rotated_keys] == [6, 6]
    ids = random_ids(2, 7)
    torch.testing.assert_close(step(model, ids, cache), alone(model, ids), atol=1e-5, rtol=1e-5)
    assert_together(cache, ids)


class RecordedMoves(TorchFunctionMode):
    """Notes what is moved to which device."""

    def __init__(self):
        super().__init__()
        self.moves = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            self.moves.append((tuple(args[0].shape), args[0].dtype, str(args[1])))
        return func(*args, **(kwargs or {}))


@BOTH_CACHES
def test_offload_and_prefetch_move_all_streams(make_model, make_cache):
    """Offloading a layer moves its latents, keys and ids to the host, prefetching brings all three back."""
    model = make_model()
    cache = make_cache(model.config)
    ids = random_ids(2, 7)
    step(model, ids[:, :5], cache)
    before = cache.memory()
    for layer, count in zip(cache.layers, (3, 2)):
        with RecordedMoves() as recorded:
            layer.offload()
        to_host = [move for move in recorded.moves if move[2] == "cpu"]
        assert len(to_host) == count
        assert {shape[-1] for shape, dtype, _ in to_host if dtype == torch.float32} == {16, 6}
        assert sum(dtype == torch.int32 for _, dtype, _ in to_host) == count - 2
        layer.prefetch()
    # No byte is lost from the books on the way, and the cache goes on.
    assert cache.memory().total == bytes_of_storage(cache)
    assert cache.memory().latents == before.latents
    torch.testing.assert_close(step(model, ids[:, 5:], cache), alone(model, ids)[:, 5:], atol=1e-5, rtol=1e-5)

    layer = cache.layers[0]
    layer.device = torch.device("meta")  # stands for an accelerator
    layer.prefetch()
    assert {tensor.device.type for tensor in (layer.keys, layer.values, layer.token_ids)} == {"meta"}


@pytest.mark.parametrize("trained", ["all", "kv_b_proj", "kv_gate", "q_proj"])
@GROUPS
def test_gradients_through_a_cache(make_model, trained, group_size):
    """
    Training over a text in parts with a cache gives the gradients of the whole text at once, whatever is frozen: what
    autograd saved of the cache is not written over, neither by the next part nor after a roll-back.
    """
    model = make_model(layer_group_size=group_size)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "all" or trained in name)
    ids = random_ids(2, 12)

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(model(ids, use_cache=False).logits.square().sum())
    cache, loss = EGMLACache(model.config), 0
    for part in ids.split([6, 1, 5], dim=1):
        loss = loss + model(part, cache=cache).logits.square().sum()
    # A step that is taken back, and then another text, must not write over what autograd saved.
    cache.crop(-2)
    step(model, random_ids(2, 2, seed=3), cache)
    actual = gradients(loss)
    assert actual.keys() == expected.keys() and actual
    for name in actual:
        assert (actual[name] - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


def test_a_prefix_without_gradients(make_model):
    """A prompt cached under no_grad serves several training steps, and is not changed by them."""
    model = make_model()
    prefix, text = random_ids(1, 6), random_ids(1, 4, seed=1)
    cache = EGMLACache(model.config)
    step(model, prefix, cache)
    before = streams(cache)
    losses = []
    for _ in range(2):
        losses.append(model(text, cache=cache).logits.square().sum())
        cache.crop(-4)
    sum(losses).backward()
    for mine, other in zip(tensors_of(streams(cache)), tensors_of(before)):
        assert torch.equal(mine, other)
    assert torch.equal(*losses)


@BOTH_CACHES
def test_the_cache_does_not_share_the_callers_ids(make_model, make_cache):
    """A caller who writes over its ids later does not change the history."""
    model = make_model()
    for grad in (False, True):
        cache = make_cache(model.config)
        ids = random_ids(1, 5).int()
        with torch.set_grad_enabled(grad and isinstance(cache, EGMLACache)):
            model(ids, cache=cache)
        expected = ids.clone()
        ids.fill_(3)
        assert torch.equal(cache.token_ids[:, :5], expected)


@pytest.mark.parametrize("parts", [[1030], [256, 256, 256, 262], [255, 1, 1, 256, 517], [1000] + 30 * [1]], ids=str)
def test_long_histories(make_model, parts):
    """Across block borders, however the text is split, logits are those of the whole text."""
    model = make_model(max_position_embeddings=2048)
    ids = random_ids(1, 1030)
    cache = EGMLACache(model.config)
    logits = torch.cat([step(model, part, cache) for part in ids.split(parts, dim=1)], dim=1)
    torch.testing.assert_close(logits, alone(model, ids), atol=1e-4, rtol=1e-4)
    assert_together(cache, ids)


@BOTH_CACHES
def test_autocast(make_model, make_cache):
    """Under autocast streams take the dtypes that the layers give, and the cache works as no cache does."""
    model = make_model()
    ids = random_ids(2, 9)
    cache = make_cache(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.cat([step(model, part, cache) for part in ids.split([6, 1, 2], dim=1)], dim=1).float()
        expected = alone(model, ids).float()
    assert (logits - expected).norm() / expected.norm() < 2e-2


def test_prefill_under_autocast_decodes_without(make_model):
    """A cache that was filled in one dtype continues in another, as concatenation would."""
    model = make_model()
    ids = random_ids(1, 8)
    cache = EGMLACache(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        step(model, ids[:, :6], cache)
    logits = step(model, ids[:, 6:], cache)
    expected = alone(model, ids)[:, 6:]
    assert (logits - expected).norm() / expected.norm() < 5e-2


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1},
        {"qk_rope_head_dim": 2},
        {"num_attention_heads": 1, "qk_nope_head_dim": 1, "v_head_dim": 1, "kv_lora_rank": 1, "kv_gate_dim": 1},
        {"v_head_dim": 40},
        {"vocab_size": 2, "bos_token_id": None, "pad_token_id": None},
        {"q_lora_rank": 1},
        {"num_hidden_layers": 6, "layer_group_size": 3},
        {"num_hidden_layers": 3, "layer_group_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch, length", [(1, 1), (2, 6)])
@BOTH_CACHES
def test_odd_shapes(make_model, make_cache, batch, length, changes):
    """The smallest and oddest models and inputs give the same with a cache as without."""
    model = make_model(**changes)
    ids = random_ids(batch, length + 2) % model.config.vocab_size
    cache = make_cache(model.config)
    logits = torch.cat([step(model, part, cache) for part in ids.split([length, 1, 1], dim=1)], dim=1)
    torch.testing.assert_close(logits, alone(model, ids), atol=1e-5, rtol=1e-5)
    assert_together(cache, ids)


def test_crop_gives_blocks_back(make_model):
    """What is allocated ahead stays below a block, after a long history was cropped as well."""
    model = make_model(max_position_embeddings=2048)
    cache = EGMLACache(model.config)
    with torch.no_grad():
        model(torch.randint(2, 97, (1, 700)), cache=cache)
    cache.crop(-650)
    assert 0 <= cache.memory().slack < BLOCK_SIZE * (model.config.cache_elements_per_token * 4 + 4)


def test_wider_states_are_not_rounded(make_config):
    """float32 states behind bfloat16 ones keep all their bits: the cache becomes float32, as by concatenation."""
    config = make_config()
    cache = EGMLACache(config)
    narrow = random_streams(config, 1, 3, torch.bfloat16)
    wide = random_streams(config, 1, 3)
    with torch.no_grad():
        cache.fill(*narrow).fill(*wide)
    assert torch.equal(cache.latents[0][:, :, :3], narrow[0][0].float())
    assert torch.equal(cache.latents[0][:, :, 3:], wide[0][0])


def test_static_cache_without_room(make_model):
    """A static cache of no size, or one that would overflow, is a ValueError with the numbers; it stays as it was."""
    model = make_model()
    for room in (0, -1):
        with pytest.raises(ValueError, match=f"`max_cache_len` must be at least 1, but is {room}"):
            EGMLAStaticCache(model.config, room)
    cache = EGMLAStaticCache(model.config, 4)
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long), cache=cache)
        with pytest.raises(ValueError, match="room for 4 tokens, but 5 are"):
            model(torch.ones(1, 2, dtype=torch.long), cache=cache)
    assert int(cache.get_seq_length()) == 3


@pytest.mark.parametrize("make_cache", [EGMLACache, lambda config, **kwargs: EGMLAStaticCache(config, 8, **kwargs)])
def test_one_layer_group_is_not_offloaded(make_model, make_cache):
    """It would be fetched while it is written to: there is no other layer to run meanwhile."""
    assert not make_cache(make_model(layer_group_size=2).config, offloading=True).offloading
