"""What `generate()` promises: every way of decoding gives what a plain forward over the whole text gives."""

import copy
import gc
import random
import threading
import weakref

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StaticCache,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_egmla import EGMLACache, EGMLAForCausalLM, EGMLAModel, EGMLAStaticCache, generation_egmla, inputs_egmla


GROUPS = pytest.mark.parametrize("group_size", [1, 2])


@pytest.fixture(scope="module")
def make_model(make_model):
    """Models whose layers weigh more against the embedding: their greedy text does not repeat one token."""

    def make(*args, **changes):
        model = make_model(*args, **changes)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "proj" in name:
                parameter.data *= 2
        return model

    return make


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Ids [batch, length], none of them special."""
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def greedy(model, ids: torch.Tensor, new_tokens: int, **kwargs):
    return model.generate(ids, max_new_tokens=new_tokens, do_sample=False, **kwargs)


@torch.no_grad()
def alone(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the ids with nothing before and nothing cached: what all else is compared with."""
    return model(ids, use_cache=False).logits


def assert_streams_agree(cache, sequences: torch.Tensor):
    """Every latent, every rotated key and the ids cover the same tokens, and the ids are those that were generated."""
    length = int(cache.get_seq_length())
    assert length > 0
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {length}
    assert torch.equal(cache.token_ids[:, :length].long(), sequences[:, :length])
    if isinstance(cache, EGMLACache):
        assert {tensor.shape[-2] for tensor in (*cache.latents, *cache.rotated_keys)} == {length}
        assert cache.token_ids.shape[1] == length


class ThirdPartyCache(DynamicCache):
    """Stands for a cache of another library that changes how states are stored."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx)
        return keys.clone(), values.clone()


CACHES = {
    "default": lambda config: {},
    "static": lambda config: {"cache_implementation": "static"},
    "given": lambda config: {"cache": EGMLACache(config)},
    "given static": lambda config: {"cache": EGMLAStaticCache(config, max_cache_len=96)},
    "stock dynamic": lambda config: {"cache": DynamicCache(config=config)},
    "stock dynamic, no config": lambda config: {"cache": DynamicCache()},
    "stock static": lambda config: {"cache": StaticCache(config=config, max_cache_len=96)},
    "third party": lambda config: {"cache": ThirdPartyCache(config=config)},
}
ALL_CACHES = pytest.mark.parametrize("cache_kind", CACHES)
OWN_CACHES = pytest.mark.parametrize("cache_kind", ["default", "static", "given", "given static"])


@GROUPS
@ALL_CACHES
def test_greedy_logits_equal_an_uncached_forward_at_every_step(make_model, cache_kind, group_size):
    """Whatever cache holds the history, each of 32 steps has the logits of a forward over the whole text."""
    model = make_model(layer_group_size=group_size)
    outputs = greedy(
        model,
        random_ids(2, 9),
        32,
        return_dict_in_generate=True,
        output_logits=True,
        **CACHES[cache_kind](model.config),
    )
    expected = alone(model, outputs.sequences)[:, 8:-1]
    torch.testing.assert_close(torch.stack(outputs.logits, dim=1), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(outputs.sequences[:, 9:], expected.argmax(-1))
    assert len(outputs.sequences[:, 9:].unique()) > 10, "a model that repeats itself proves nothing"


@GROUPS
@pytest.mark.parametrize("make_cache", [EGMLACache, lambda config: EGMLAStaticCache(config, 11), lambda config: None])
def test_feeding_tokens_by_hand_continues_the_cache(make_model, make_cache, group_size):
    """7, then 1, then 3 tokens without position_ids give the logits of 11 at once."""
    model = make_model(layer_group_size=group_size)
    ids = random_ids(2, 11)
    cache, logits = make_cache(model.config), []
    with torch.no_grad():
        for part in ids.split([7, 1, 3], dim=1):
            outputs = model(part, cache=cache, use_cache=True)
            cache = outputs.cache
            logits.append(outputs.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), alone(model, ids), atol=1e-5, rtol=1e-5)
    assert_streams_agree(cache, ids)


@OWN_CACHES
def test_seeded_sampling_does_not_depend_on_the_cache(make_model, cache_kind):
    """With one seed, sampling draws the same tokens with any cache and without one, also several for each prompt."""
    model = make_model()
    ids = random_ids(2, 5)
    settings = {"do_sample": True, "top_k": 20, "temperature": 3.0, "max_new_tokens": 16, "num_return_sequences": 3}
    torch.manual_seed(1)
    expected = model.generate(ids, use_cache=False, **settings)
    torch.manual_seed(1)
    given = CACHES[cache_kind](model.config)
    assert torch.equal(model.generate(ids, **settings, **given), expected)
    assert len({tuple(row.tolist()) for row in expected}) == 6, "all rows alike would prove nothing"


@GROUPS
@pytest.mark.parametrize("eos_token_id", [None, 11])
@ALL_CACHES
def test_beams_equal_those_without_a_cache(make_model, cache_kind, eos_token_id, group_size):
    """Beam search reorders latents, keys and ids together: sequences and scores are those of an uncached search."""
    model = make_model(layer_group_size=group_size)
    ids = random_ids(2, 6, seed=3)
    settings = {
        "num_beams": 4,
        "num_return_sequences": 3,
        "max_new_tokens": 14,
        "do_sample": False,
        "eos_token_id": eos_token_id,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    expected = model.generate(ids, use_cache=False, **settings)
    outputs = model.generate(ids, **settings, **CACHES[cache_kind](model.config))
    assert torch.equal(outputs.sequences, expected.sequences)
    torch.testing.assert_close(outputs.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5)
    # Beams cross: some best sequence came from another row than its own at an earlier step.
    assert any(len(set(row.tolist()) - {-1}) > 1 for row in expected.beam_indices)


@GROUPS
def test_sampled_beams_equal_those_without_a_cache(make_model, group_size):
    """Beam sampling with one seed does not depend on the cache either."""
    model = make_model(layer_group_size=group_size)
    settings = {"num_beams": 3, "do_sample": True, "max_new_tokens": 10}
    torch.manual_seed(2)
    expected = model.generate(random_ids(2, 6), use_cache=False, **settings)
    torch.manual_seed(2)
    assert torch.equal(model.generate(random_ids(2, 6), **settings), expected)


def draft_settings(kind: str, model, make_model) -> dict:
    if kind == "prompt lookup":
        return {"prompt_lookup_num_tokens": 4}
    assistant = model if kind == "itself" else make_model(seed=7)
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": assistant}


@pytest.mark.parametrize(
    "group_size, cache_kind", [(1, "given"), (1, "given static"), (2, "given"), (2, "stock dynamic")]
)
@pytest.mark.parametrize("kind", ["random assistant", "itself", "prompt lookup"])
def test_drafts_that_are_rolled_back_leave_no_trace(make_model, monkeypatch, kind, cache_kind, group_size):
    """Assisted decoding and prompt lookup are plain greedy decoding, and the cache keeps only accepted tokens."""
    model = make_model(layer_group_size=group_size)
    ids = random_ids(1, 6, seed=1).repeat(1, 3)
    expected = greedy(model, ids, 64)
    drafts = draft_settings(kind, model, make_model)

    removed = []
    cache = CACHES[cache_kind](model.config)["cache"]
    crop = cache.crop
    monkeypatch.setattr(cache, "crop", lambda count: (removed.append(-count), crop(count)))
    outputs = greedy(model, ids, 64, cache=cache, return_dict_in_generate=True, **drafts)
    assert torch.equal(outputs.sequences, expected)
    if kind == "itself":
        assert len(removed) < 20 and sum(removed) == 0, "drafts by the model itself are all accepted"
    else:
        assert sum(removed) > 0, "no draft was rejected, so nothing was rolled back"
    if getattr(outputs.cache, "holds_latents", False):
        assert_streams_agree(outputs.cache, expected)
    assert int(cache.get_seq_length()) == expected.shape[1] - 1


@pytest.mark.parametrize("kind", ["random assistant", "itself", "prompt lookup"])
@pytest.mark.parametrize("only_new", [False, True])
def test_drafts_continue_a_filled_cache(make_model, kind, only_new):
    """With drafts as without, a prompt that continues a cache, whole or its new tokens only, gives the same text."""
    model = make_model()
    ids = random_ids(1, 12)
    expected = greedy(model, ids, 12)
    cache = EGMLACache(model.config)
    with torch.no_grad():
        model(ids[:, :8], cache=cache)
    outputs = greedy(
        model,
        ids[:, 8:] if only_new else ids,
        12,
        cache=cache,
        return_dict_in_generate=True,
        **({"attention_mask": torch.ones_like(ids)} if only_new else {}),
        **draft_settings(kind, model, make_model),
    )
    assert torch.equal(outputs.sequences[:, -12:], expected[:, -12:])
    assert int(outputs.cache.get_seq_length()) == 23


def test_drafts_of_padded_text_need_the_whole_of_it(make_model):
    """The library would cut the mask as if the new tokens were all of the text, and hide them behind the padding."""
    model = make_model()
    ids = torch.cat((torch.zeros(1, 3, dtype=torch.long), random_ids(1, 9)), 1)
    mask = (torch.arange(12) >= 3).long()[None]
    expected = greedy(model, ids, 8, attention_mask=mask)
    for prompt in (ids, ids[:, 8:]):
        cache = EGMLACache(model.config)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            model(ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8], cache=cache)
        drafted = {"attention_mask": mask, "cache": cache, "prompt_lookup_num_tokens": 3}
        if prompt is ids:
            assert torch.equal(greedy(model, prompt, 8, **drafted), expected)
        else:
            with pytest.raises(ValueError, match="covers 12 tokens, but `input_ids` has only the last 4"):
                greedy(model, prompt, 8, **drafted)


class Words:
    """A tokenizer of letters and, greedily, of the given words of ten letters."""

    def __init__(self, words: list[str]):
        self.pieces = [*"abcdefghijklmnopqrstuvwxyz", *words]
        self.ids = {piece: index for index, piece in enumerate(self.pieces)}

    def get_vocab(self) -> dict[str, int]:
        return self.ids

    def decode(self, ids: torch.Tensor, **kwargs) -> str:
        return "".join(self.pieces[index] for index in ids.flatten().tolist())

    def __call__(self, text: str, **kwargs) -> dict[str, torch.Tensor]:
        ids = []
        while text:
            piece = text[:10] if text[:10] in self.ids else text[0]
            ids.append(self.ids[piece])
            text = text[len(piece) :]
        return {"input_ids": torch.tensor([ids])}


@pytest.mark.parametrize("seed", range(3))
def test_assistant_of_another_vocabulary(make_model, seed):
    """Drafts that come back in other tokens than the assistant wrote cost it a part of its cache, and no text."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=10)) for _ in range(71)]
    model, assistant = make_model(seed=seed), make_model(seed=seed + 9, vocab_size=26, pad_token_id=None)
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    ids = random_ids(1, 9)
    both = {"tokenizer": Words(words), "assistant_tokenizer": Words([])}
    assert torch.equal(greedy(model, ids, 20, assistant_model=assistant, **both), greedy(model, ids, 20))


def test_flash_attention_knows_the_empty_slots_of_a_given_cache(make_model, monkeypatch):
    """Its mask says how much of a static cache is filled, whether `generate` made the cache or was given it."""

    def flash(module, query, key, value, mask, scaling, **kwargs):
        filled = key.shape[2] if mask is None else mask.shape[1]
        after = torch.arange(filled) > torch.arange(filled - query.shape[2], filled)[:, None]
        scores = (query @ key[:, :, :filled].mT * scaling).masked_fill(after, float("-inf"))
        return (scores.softmax(-1) @ value[:, :, :filled]).transpose(1, 2), None

    model, ids = make_model(), random_ids(2, 9)
    expected = greedy(model, ids, 6)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert torch.equal(greedy(model, ids, 6), expected)
    assert torch.equal(greedy(model, ids, 6, cache=EGMLAStaticCache(model.config, 20)), expected)


def test_chunks_of_embeddings_are_refused(make_model):
    """The library would cut ids, of which there are none."""
    model, ids = make_model(), random_ids(1, 9)
    embeddings = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "token_ids": ids}
    with pytest.raises(ValueError, match="`prefill_chunk_size` cuts `input_ids`"):
        model.generate(**embeddings, max_new_tokens=4, prefill_chunk_size=4)


def left_padded(lengths: list[int], pad_id: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    rows = [random_ids(1, length, seed=length)[0] for length in lengths]
    width = max(max(lengths), 1)
    ids, mask = torch.full((len(rows), width), pad_id), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = 1
    return ids, mask, rows


@GROUPS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [[3, 7, 12], [3, 0, 12]])
@ALL_CACHES
def test_left_padding_changes_nothing(make_model, cache_kind, lengths, attention, group_size):
    """
    Each row of a padded batch decodes as it would alone, whatever the padding id's gate is; a row that is nothing but
    padding gives finite numbers and disturbs no other row.
    """
    model = make_model(layer_group_size=group_size)
    model.set_attn_implementation(attention)
    for layer in model.model.layers:
        layer.self_attn.kv_gate_embed.weight.data[0] = 1e3
    ids, mask, rows = left_padded(lengths)
    outputs = greedy(
        model,
        ids,
        17,  # the prompt and 16 decode steps
        attention_mask=mask,
        return_dict_in_generate=True,
        output_logits=True,
        **CACHES[cache_kind](model.config),
    )
    logits = torch.stack(outputs.logits, dim=1)
    assert logits.isfinite().all()
    for index, row in enumerate(rows):
        if not len(row):
            continue
        text = torch.cat([row, outputs.sequences[index, ids.shape[1] :]])[None]
        expected = alone(model, text)[0, len(row) - 1 : -1]
        torch.testing.assert_close(logits[index], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padding_in_a_forward_by_hand(make_model, attention):
    """A padded prefill and single steps without position_ids of the caller's give each row's own logits."""
    model = make_model()
    model.set_attn_implementation(attention)
    ids, mask, rows = left_padded([3, 7, 12])
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        outputs = model(ids, attention_mask=mask, position_ids=position_ids)
        new = random_ids(3, 1, seed=9)
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
        step = model(new, attention_mask=mask, position_ids=position_ids[:, -1:] + 1, cache=outputs.cache)
    for index, row in enumerate(rows):
        expected = alone(model, torch.cat([row, new[index]])[None])[0]
        torch.testing.assert_close(outputs.logits[index, -len(row) :], expected[:-1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(step.logits[index, -1], expected[-1], atol=1e-5, rtol=1e-5)


def test_beams_with_left_padding(make_model):
    """Padding and beams together: each row's beams are those it has alone."""
    model = make_model()
    ids, mask, rows = left_padded([4, 9])
    settings = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    outputs = model.generate(ids, attention_mask=mask, **settings)
    for index, row in enumerate(rows):
        assert torch.equal(outputs[index, ids.shape[1] :], model.generate(row[None], **settings)[0, len(row) :])


@pytest.mark.parametrize("chunk", [1, 3, 50])
@OWN_CACHES
def test_chunked_prefill(make_model, cache_kind, chunk):
    """A prompt that is read in chunks gives the text of one read at once, with padding too."""
    model = make_model()
    ids, mask, _ = left_padded([4, 10])
    expected = greedy(model, ids, 12, attention_mask=mask)
    given = CACHES[cache_kind](model.config)
    assert torch.equal(greedy(model, ids, 12, attention_mask=mask, prefill_chunk_size=chunk, **given), expected)


def test_chunked_prefill_continues_a_cache(make_model):
    """Chunks begin where a given cache ends."""
    model = make_model()
    ids = random_ids(2, 13)
    cache = EGMLACache(model.config)
    with torch.no_grad():
        model(ids[:, :5], cache=cache)
    assert torch.equal(greedy(model, ids, 6, cache=cache, prefill_chunk_size=3), greedy(model, ids, 6))


def compiled(**settings) -> CompileConfig:
    config = CompileConfig(**{"fullgraph": True, "mode": None, **settings})
    config._compile_all_devices = True  # as on an accelerator: on a CPU the library does not compile by itself
    return config


@pytest.mark.slow  # compiles with inductor
@pytest.mark.parametrize("group_size, backend", [(1, "inductor"), (2, "aot_eager")])
def test_compiled_generation_does_not_recompile(make_model, monkeypatch, tmp_path, group_size, backend):
    """
    A compiled static cache gives the text of a plain one, and once warm nothing is compiled again: not as the text
    grows, not for other prompts, lengths and paddings, not for a new cache.
    """
    model = make_model(layer_group_size=group_size)
    torch._dynamo.reset()
    # Processes that compile at once must not read each other's half-written files.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # As for every model of the library: the cache is made for the longest call, so that its size stays.
    settings = {"cache_implementation": "static", "max_cache_len": 64, "compile_config": compiled(backend=backend)}
    ids, mask, _ = left_padded([3, 8])

    torch._dynamo.utils.counters.clear()
    expected = greedy(model, ids, 12, attention_mask=mask)
    assert torch.equal(greedy(model, ids, 12, attention_mask=mask, **settings), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"

    calls = [left_padded(lengths)[:2] for lengths in ([3, 8], [15, 2], [9, 9], [1, 20])]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids, mask in calls:
            expected = greedy(model, ids, 30, attention_mask=mask)
            assert torch.equal(greedy(model, ids, 30, attention_mask=mask, **settings), expected)


@pytest.mark.slow  # compiles
def test_compiled_generation_with_a_given_cache_that_is_reset(make_model):
    """One static cache serves several texts: `reset()` between them, no new compilation."""
    model = make_model()
    torch._dynamo.reset()
    cache = EGMLAStaticCache(model.config, max_cache_len=48)
    settings = {"cache": cache, "compile_config": compiled(backend="aot_eager")}
    assert torch.equal(greedy(model, random_ids(2, 5), 10, **settings), greedy(model, random_ids(2, 5), 10))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (5, 9, 2):
            cache.reset()
            ids = random_ids(2, length, seed=length)
            assert torch.equal(greedy(model, ids, 20, **settings), greedy(model, ids, 20))
            assert_streams_agree(cache, greedy(model, ids, 20))


@pytest.mark.slow  # compiles
def test_compiled_generation_with_a_stock_static_cache(make_model):
    """A stock static cache, with expanded keys and values, compiles in one graph too."""
    model = make_model()
    torch._dynamo.reset()
    ids = random_ids(2, 5)
    cache = StaticCache(config=model.config, max_cache_len=32)
    settings = {"cache": cache, "compile_config": compiled(backend="aot_eager")}
    assert torch.equal(greedy(model, ids, 10, **settings), greedy(model, ids, 10))


@pytest.mark.slow  # compiles
def test_compiled_chunked_prefill(make_model):
    """With chunked prefill the prompt runs through the compiled graph too; the text stays the same."""
    model = make_model()
    torch._dynamo.reset()
    settings = {
        "cache_implementation": "static",
        "max_cache_len": 48,
        "prefill_chunk_size": 4,
        "compile_config": compiled(backend="aot_eager"),
    }
    for ids in (random_ids(2, 10), random_ids(2, 12, seed=4)):
        assert torch.equal(greedy(model, ids, 10, **settings), greedy(model, ids, 10))
    with torch._dynamo.config.patch(error_on_recompile=True):
        ids = random_ids(2, 12, seed=5)
        assert torch.equal(greedy(model, ids, 20, **settings), greedy(model, ids, 20))


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("use_cache", [False, True])
def test_compiled_forward(make_model, use_cache):
    """`torch.compile(model)` gives the logits of the model, without a graph break, also for other lengths."""
    model = make_model()
    torch._dynamo.reset()
    forward = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for length in (8, 12, 17):
            ids = random_ids(2, length)
            logits = forward(ids, use_cache=use_cache).logits
            torch.testing.assert_close(logits, alone(model, ids), atol=1e-5, rtol=1e-5)


def test_a_static_cache_that_is_too_small_is_refused(make_model):
    """A cache without room for prompt and new tokens is an error that says how many it needs, before any work."""
    model = make_model()
    cache = EGMLAStaticCache(model.config, max_cache_len=10)
    with pytest.raises(ValueError, match=r"room for 10 tokens.*need 15"):
        greedy(model, random_ids(1, 8), 8, cache=cache)
    assert not cache.is_initialized
    greedy(model, random_ids(1, 8), 3, cache=cache)  # fits exactly: the last token is not cached
    assert int(cache.get_seq_length()) == 10


def test_a_static_cache_that_overflows_in_a_forward_stays_consistent(make_model):
    """Past its room a static cache raises, and still holds what it held."""
    model = make_model()
    cache = EGMLAStaticCache(model.config, max_cache_len=6)
    ids = random_ids(1, 7)
    with torch.no_grad():
        model(ids[:, :5], cache=cache)
        with pytest.raises((IndexError, ValueError)):
            model(ids[:, 5:], cache=cache)
        assert {int(layer.get_seq_length()) for layer in cache.layers} == {5}
        logits = model(ids[:, 5:6], cache=cache).logits
    torch.testing.assert_close(logits, alone(model, ids[:, :6])[:, -1:], atol=1e-5, rtol=1e-5)


@GROUPS
@pytest.mark.parametrize("make_cache", [EGMLACache, lambda config: EGMLAStaticCache(config, 40)])
def test_deep_copies_of_a_prompt_cache(make_model, make_cache, group_size):
    """One prefilled prompt serves many questions: each deep copy continues alone, and the original stays as it was."""
    model = make_model(layer_group_size=group_size)
    prefix = random_ids(1, 10)
    cache = make_cache(model.config)
    with torch.no_grad():
        model(prefix, cache=cache)
    for seed in range(3):
        ids = torch.cat([prefix, random_ids(1, 4, seed=seed + 20)], dim=1)
        assert torch.equal(greedy(model, ids, 10, cache=copy.deepcopy(cache)), greedy(model, ids, 10))
        assert_streams_agree(cache, prefix)
        assert int(cache.get_seq_length()) == 10


@pytest.mark.parametrize("cache_kind", ["given", "given static", "stock dynamic", "stock static"])
@pytest.mark.parametrize("only_new", [False, True])
def test_several_turns_on_one_cache(make_model, cache_kind, only_new):
    """A conversation goes on: the whole text, or only what is new with a mask over all, gives the uncached text."""
    model = make_model()
    cache = CACHES[cache_kind](model.config)["cache"]
    text = random_ids(2, 5)
    for turn in range(4):
        expected = greedy(model, text, 6, use_cache=False)
        past = int(cache.get_seq_length())
        if only_new:
            output = greedy(model, text[:, past:], 6, cache=cache, attention_mask=torch.ones_like(text))
            output = torch.cat([text[:, :past], output], dim=1)
        else:
            output = greedy(model, text, 6, cache=cache)
        assert torch.equal(output, expected)
        text = torch.cat([output, random_ids(2, 3, seed=turn + 30)], dim=1)


def test_turns_with_left_padding(make_model):
    """The second turn of a padded batch continues each row as it would alone."""
    model = make_model()
    ids, mask, rows = left_padded([3, 9])
    cache = EGMLACache(model.config)
    first = greedy(model, ids, 5, attention_mask=mask, cache=cache)
    text = torch.cat([first, random_ids(2, 4, seed=50)], dim=1)
    mask = torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], dim=1)
    second = greedy(model, text, 6, attention_mask=mask, cache=cache)
    for index, row in enumerate(rows):
        own = text[index : index + 1, ids.shape[1] - len(row) :]
        assert torch.equal(second[index, text.shape[1] :], greedy(model, own, 6)[0, own.shape[1] :])


def test_a_returned_cache_continues_after_beams(make_model):
    """The cache that beam search returns holds the running beams, one row each, ids included."""
    model = make_model()
    outputs = model.generate(
        random_ids(1, 5), num_beams=3, max_new_tokens=6, do_sample=False, return_dict_in_generate=True
    )
    ids = outputs.cache.token_ids.long()
    new = random_ids(3, 1, seed=8)
    with torch.no_grad():
        logits = model(new, cache=outputs.cache).logits
    torch.testing.assert_close(logits, alone(model, torch.cat([ids, new], dim=1))[:, -1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [4, 8])
@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"prefill_chunk_size": 2}], ids=str
)
@pytest.mark.parametrize("cache_kind", ["given", "given static", "stock dynamic"])
def test_a_prompt_not_longer_than_its_cache_is_refused(make_model, cache_kind, settings, length):
    """A prompt that adds nothing to the given cache is an error that says so; the cache never doubles."""
    model = make_model()
    cache = CACHES[cache_kind](model.config)["cache"]
    ids = random_ids(1, 8)
    with torch.no_grad():
        model(ids, cache=cache)
    if "num_beams" in settings:
        cache.reorder_cache(torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="cache already holds"):
        greedy(model, ids[:, :length], 4, cache=cache, **settings)
    assert int(cache.get_seq_length()) == 8


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_a_prompt_that_does_not_match_its_cache_is_refused(make_model, settings):
    """A prompt whose beginning is not what the cache holds would get an answer to another text: an error."""
    model = make_model()
    cache = EGMLACache(model.config)
    with torch.no_grad():
        model(random_ids(1, 8), cache=cache)
    if "num_beams" in settings:
        cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="does not begin with the tokens"):
        greedy(model, random_ids(1, 12, seed=1), 4, cache=cache, **settings)
    assert cache.get_seq_length() == 8


def test_new_embeddings_alone_do_not_continue_a_cache(make_model):
    """The library would take the first of them for cached ones: they must stand for the whole text."""
    model, ids = make_model(), random_ids(1, 9)
    expected = greedy(model, ids, 6)[:, 9:]
    embeds = model.get_input_embeddings()(ids)
    for first, refused in ((0, False), (5, True)):
        cache = EGMLACache(model.config)
        with torch.no_grad():
            model(ids[:, :5], cache=cache)
        given = {"inputs_embeds": embeds[:, first:], "token_ids": ids[:, first:], "attention_mask": torch.ones(1, 9)}
        if refused:
            with pytest.raises(ValueError, match="must begin with these"):
                model.generate(**given, cache=cache, max_new_tokens=6, do_sample=False)
        else:
            assert torch.equal(model.generate(**given, cache=cache, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_drafts_of_the_first_layers(make_model, layers):
    """The first layers draft for the whole model, also where that cuts a layer group."""
    model = make_model(num_hidden_layers=4, layer_group_size=2)
    ids = random_ids(1, 8)
    assert torch.equal(greedy(model, ids, 24, assistant_early_exit=layers), greedy(model, ids, 24))
    assert model.config.num_hidden_layers == 4


def test_beams_on_a_prompt_cache_of_one_row(make_model):
    """A prompt cache that was not repeated for the beams is an error that speaks of the batch."""
    model = make_model()
    ids = random_ids(1, 9)
    cache = EGMLACache(model.config)
    with torch.no_grad():
        model(ids[:, :6], cache=cache)
    with pytest.raises(ValueError, match="batch"):
        greedy(model, ids, 5, cache=cache, num_beams=3)
    cache.batch_repeat_interleave(3)
    assert torch.equal(greedy(model, ids, 5, cache=cache, num_beams=3), greedy(model, ids, 5, num_beams=3))


@pytest.mark.parametrize("make_cache", [EGMLACache, lambda config: EGMLAStaticCache(config, 20)])
def test_generation_after_an_interrupted_forward(make_model, make_cache):
    """
    A forward that fails half-way leaves layers of unequal length: going on with that cache is an error, never a text
    from a history with holes; after `reset` it serves again.
    """
    model = make_model()
    ids = random_ids(1, 8)
    cache = make_cache(model.config)

    def fail(*args):
        raise KeyboardInterrupt

    with torch.no_grad():
        model(ids[:, :6], cache=cache)
        handle = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 6:7], cache=cache)
        handle.remove()
        with pytest.raises(ValueError, match="interrupted"):
            model(ids[:, 7:], cache=cache)
        with pytest.raises(ValueError, match="interrupted"):
            greedy(model, ids, 2, cache=cache)
    cache.reset()
    assert torch.equal(greedy(model, ids, 2, cache=cache), greedy(model, ids, 2))


@pytest.fixture(scope="module")
def tokenizer():
    words = {f"w{index}": index for index in range(97)}
    words = {{"w0": "<pad>", "w1": "<bos>"}.get(word, word): index for word, index in words.items()}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", padding_side="left")


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("settings", [{}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 2}], ids=str)
def test_streamers_get_every_token_once(make_model, settings):
    """A streamer sees the prompt and every new token once and in order."""
    model = make_model()
    streamer = Collector()
    output = greedy(model, random_ids(1, 5), 12, streamer=streamer, **settings)
    assert streamer.tokens == output[0].tolist()
    assert streamer.ended == 1


def test_text_streamers(make_model, tokenizer, capsys):
    """The library's text streamers print, and hand out from another thread, the generated text."""
    model = make_model()
    ids = random_ids(1, 5)
    text = tokenizer.decode(greedy(model, ids, 8)[0, 5:])
    greedy(model, ids, 8, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.split() == text.split()

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=greedy, args=(model, ids, 8), kwargs={"streamer": streamer})
    thread.start()
    assert "".join(streamer).split() == text.split()
    thread.join()


def test_text_generation_pipeline(make_model, tokenizer):
    """`pipeline("text-generation")` gives each prompt of a padded batch the text that it gets alone."""
    model = make_model()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    prompts = ["w5 w6 w7", "w9 w10 w11 w12 w13 w14", "w20"]
    settings = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    texts = [result[0]["generated_text"] for result in generator(prompts, batch_size=3, **settings)]
    for prompt, text in zip(prompts, texts):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        assert (
            text.split()
            == tokenizer.decode(greedy(model, ids, 8)[0, ids.shape[1] :], skip_special_tokens=True).split()
        )
        assert generator(prompt, **settings)[0]["generated_text"] == text


@pytest.mark.parametrize("way", ["generate_batch", "paged", "init"])
def test_continuous_batching_is_refused(make_model, way):
    """Continuous batching is refused with a sentence that says what to use instead, at once."""
    model = make_model()
    calls = {
        "generate_batch": lambda: model.generate_batch([[5, 6, 7]], max_new_tokens=2),
        "paged": lambda: model.generate(random_ids(1, 3), cache_implementation="paged", max_new_tokens=2),
        "init": lambda: model.init_continuous_batching(),
    }
    with pytest.raises(NotImplementedError, match=r"Continuous batching.*Use `generate\(\)`"):
        calls[way]()


@pytest.mark.parametrize("threads", [3])
def test_threads_share_one_model(make_model, threads):
    """Texts that are generated at once on one model do not mix."""
    model = make_model()
    prompts = [random_ids(1, 4 + index, seed=60 + index) for index in range(threads)]
    expected = [greedy(model, ids, 20) for ids in prompts]
    outputs = [None] * threads

    def work(index):
        outputs[index] = greedy(model, prompts[index], 20)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for output, text in zip(outputs, expected):
        assert output is not None and torch.equal(output, text)


@GROUPS
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
def test_embeddings_with_token_ids_generate_the_same_text(make_model, settings, group_size):
    """`inputs_embeds` with `token_ids` is `input_ids` by another name, in `generate` too, padded or not."""
    model = make_model(layer_group_size=group_size)
    ids, mask, _ = left_padded([4, 8])
    embeds = model.get_input_embeddings()(ids).detach()
    settings = {"max_new_tokens": 10, "do_sample": False, "attention_mask": mask, **settings}
    torch.manual_seed(4)
    expected = model.generate(ids, **settings)[:, ids.shape[1] :]
    torch.manual_seed(4)
    assert torch.equal(model.generate(inputs_embeds=embeds, token_ids=ids, **settings), expected)


def test_embeddings_with_token_ids_in_a_forward(make_model):
    """`inputs_embeds` with `token_ids` gives the logits of `input_ids`; other ids give others, so they are read."""
    model = make_model()
    ids = random_ids(2, 7)
    embeds = model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs_embeds=embeds, token_ids=ids).logits, alone(model, ids))
        other = model(inputs_embeds=embeds, token_ids=ids.flip(1)).logits
    assert (other - alone(model, ids)).abs().max() > 1e-2


def test_embeddings_continue_a_cache(make_model):
    """Embeddings of a whole text continue a given cache from where it ends."""
    model = make_model()
    ids = random_ids(2, 9)
    embeds = model.get_input_embeddings()(ids).detach()
    cache = EGMLACache(model.config)
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
    output = greedy(model, None, 6, inputs_embeds=embeds, token_ids=ids, cache=cache)
    assert torch.equal(output, greedy(model, ids, 6)[:, 9:])


@pytest.mark.parametrize("call", ["forward", "generate", "decoder"])
def test_embeddings_alone_are_refused(make_model, call):
    """Gates are looked up by id: embeddings alone are an error that says what to pass."""
    model = make_model()
    embeds = torch.randn(1, 4, model.config.hidden_size)
    calls = {
        "forward": lambda: model(inputs_embeds=embeds),
        "generate": lambda: model.generate(inputs_embeds=embeds, max_new_tokens=2),
        "decoder": lambda: model.model(inputs_embeds=embeds),
    }
    with pytest.raises(ValueError, match=r"`inputs_embeds` needs `token_ids`"):
        calls[call]()
    with pytest.raises(ValueError, match=r"one id for each embedding.*\(1, 3\)"):
        model(inputs_embeds=embeds, token_ids=torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="exactly one"):
        model(torch.ones(1, 4, dtype=torch.long), inputs_embeds=embeds)
    with pytest.raises(ValueError, match="exactly one"):
        model()


def test_plain_mla_takes_embeddings_alone(make_model):
    """Without gates there is nothing to look up: embeddings alone work, and the cache continues with ids."""
    model = make_model(kv_gate="none")
    ids = random_ids(1, 6)
    embeds = model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        outputs = model(inputs_embeds=embeds)
    torch.testing.assert_close(outputs.logits, alone(model, ids))
    text = torch.cat([ids, random_ids(1, 3, seed=1)], dim=1)
    assert torch.equal(greedy(model, text, 5, cache=outputs.cache), greedy(model, text, 5))


@pytest.mark.parametrize("bad", [-1, -100, 97, 50000])
@pytest.mark.parametrize(
    "call", ["forward", "decoder", "generate", "beams", "lookup", "embeddings", "generate embeddings", "decode step"]
)
def test_ids_outside_the_vocabulary_are_named(make_model, call, bad):
    """An id below 0 or not below vocab_size is a ValueError that names it, not an index error or a wrong gate."""
    model = make_model()
    ids = random_ids(1, 5)
    embeds = model.get_input_embeddings()(ids).detach()
    ids[0, 2] = bad
    cache = EGMLACache(model.config)
    calls = {
        "forward": lambda: model(ids),
        "decoder": lambda: model.model(ids),
        "generate": lambda: greedy(model, ids, 2),
        "beams": lambda: greedy(model, ids, 2, num_beams=2),
        "lookup": lambda: greedy(model, ids, 2, prompt_lookup_num_tokens=2),
        "embeddings": lambda: model(inputs_embeds=embeds, token_ids=ids),
        "generate embeddings": lambda: greedy(model, None, 2, inputs_embeds=embeds, token_ids=ids),
        "decode step": lambda: model(ids[:, 2:3], cache=cache),
    }
    with pytest.raises(ValueError, match=rf"Token id {bad} lies outside the vocabulary.*0 to 96"):
        calls[call]()
    assert cache.get_seq_length() == 0, "a refused id is not cached"


@pytest.mark.parametrize("cache_kind", ["stock dynamic", "stock static", "third party"])
def test_caches_of_other_classes_warn_once(make_model, cache_kind, monkeypatch):
    """A cache that holds expanded keys and values works, and says what it costs, once."""
    messages = []
    warn = inputs_egmla.logger.warning_once
    getattr(warn, "cache_clear", lambda: None)()
    monkeypatch.setattr(inputs_egmla.logger, "_log", lambda level, msg, *args, **kwargs: messages.append(msg))
    model = make_model()
    for seed in range(2):
        cache = CACHES[cache_kind](model.config)["cache"]
        greedy(model, random_ids(1, 5, seed=seed), 4, cache=cache)
    assert len([message for message in messages if "expanded keys and values" in message]) == 1
    messages.clear()
    greedy(model, random_ids(1, 5), 4)
    assert not messages, "the default cache does not warn"


@GROUPS
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "backend",
    [pytest.param("quanto", marks=pytest.mark.slow), "hqq", "fp8"],  # quanto compiles its kernels on the first use
)
def test_quantized_caches(make_model, backend, beams, group_size):
    """`cache_implementation="quantized"` keeps the library's behaviour: near-equal logits from quantized K and V."""
    cache_config = {"backend": backend}
    if backend != "fp8":
        pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend])
        cache_config |= {"nbits": 8 if backend == "hqq" else 4, "q_group_size": 16, "residual_length": 8}
        cache_config |= {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}
    # Widths of whole quantization groups.
    model = make_model(layer_group_size=group_size, qk_nope_head_dim=10, v_head_dim=16, num_attention_heads=4)
    ids = random_ids(2, 16)
    outputs = model.generate(
        ids,
        max_new_tokens=12,
        do_sample=False,
        num_beams=beams,
        cache_implementation="quantized",
        cache_config=cache_config,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert isinstance(outputs.cache, QuantizedCache)
    assert len(outputs.cache.layers) == model.config.num_hidden_layers
    if beams > 1:
        return
    expected = alone(model, outputs.sequences)[:, 15:-1]
    logits = torch.stack(outputs.logits, dim=1)
    torch.testing.assert_close(logits[:, 0], expected[:, 0], atol=1e-5, rtol=1e-5)
    # An unrelated text would be off by more than 1; four bits on so few channels are coarse.
    assert (logits - expected).norm() / expected.norm() < (0.25 if backend == "quanto" else 0.1)


def test_a_cache_of_another_model_is_refused(make_model):
    """A cache with other widths, other heads or another number of layers is a ValueError, and stays as it was."""
    model = make_model()
    ids = random_ids(1, 6)
    for changes in ({"kv_lora_rank": 20}, {"qk_rope_head_dim": 8}, {"num_hidden_layers": 4}, {"num_hidden_layers": 1}):
        other = make_model(**changes)
        for make_cache in (EGMLACache, lambda config: EGMLAStaticCache(config, 20)):
            cache = make_cache(other.config)
            with torch.no_grad():
                other(ids, cache=cache)
                with pytest.raises(ValueError, match="model"):
                    model(ids[:, :1], cache=cache)
            assert {int(layer.get_seq_length()) for layer in cache.layers} == {6}, changes
            if isinstance(cache, EGMLACache):
                assert cache.token_ids.shape == (1, 6)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"cache_implementation": "static"}, {"use_cache": False}],
    ids=str,
)
def test_no_module_keeps_a_cache_or_ids(make_model, monkeypatch, settings):
    """After generate nothing of it lives on in the model: no cache, no tensor of the prompt's size."""
    model = make_model()
    caches = []
    for name in ("EGMLACache", "EGMLAStaticCache"):
        original = getattr(generation_egmla, name)

        def make(*args, original=original, **kwargs):
            cache = original(*args, **kwargs)
            caches.append(weakref.ref(cache))
            return cache

        monkeypatch.setattr(generation_egmla, name, make)
    known = {name for module in model.modules() for name in vars(module)}
    gc.collect()
    before = {id(thing) for thing in gc.get_objects() if type(thing) is torch.Tensor}
    output = greedy(model, random_ids(1, 31), 6, **settings)
    assert caches or settings == {"use_cache": False}
    output = output.tolist()
    gc.collect()
    assert all(cache() is None for cache in caches)
    left = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and id(thing) not in before]
    assert not [thing.shape for thing in left if {31, 36, 37} & set(thing.shape)]
    new = {name for module in model.modules() for name in vars(module)} - known
    assert new <= {"_previous_max_cache_length"}, "the library keeps the length of static caches, nothing else"


@pytest.mark.parametrize("make_cache", [EGMLACache, lambda config: EGMLAStaticCache(config, 20)])
@pytest.mark.parametrize("first, then", [("inference_mode", "no_grad"), ("no_grad", "inference_mode")])
def test_prefill_and_decode_under_different_modes(make_model, make_cache, first, then):
    """A cache that was filled under inference_mode decodes under no_grad, and the other way round."""
    model = make_model()
    ids = random_ids(2, 8)
    with getattr(torch, first)():
        cache = make_cache(model.config)
        model(ids[:, :3], cache=cache)
    if first == "inference_mode":
        cache.crop(-1)
        kept = copy.deepcopy(cache)
        kept.reset()
        assert int(kept.get_seq_length()) == 0 and int(cache.get_seq_length()) == 2
    with getattr(torch, first)():
        model(ids[:, int(cache.get_seq_length()) : 5], cache=cache)
    with getattr(torch, then)():
        logits = torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(5, 8)], dim=1)
    torch.testing.assert_close(logits.clone(), alone(model, ids)[:, 5:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{"do_sample": True, "temperature": 5.0}, {"num_beams": 3}, {}], ids=str)
def test_padded_vocabulary_is_never_sampled(make_model, tmp_path, settings):
    """Ids past the tokenizer's are rows that training never touched: a saved generation_config keeps them out."""
    model = make_model(tie_word_embeddings=False)
    model.lm_head.weight.data[90:] = 0
    model.lm_head.weight.data[90:, :] += 3 * torch.randn(7, model.config.hidden_size)
    ids = random_ids(4, 5)
    assert (model.generate(ids, max_new_tokens=30, **settings)[:, 5:] >= 90).any(), "they would be sampled otherwise"
    model.generation_config = GenerationConfig(suppress_tokens=list(range(90, 97)), pad_token_id=0, bos_token_id=1)
    model.save_pretrained(tmp_path)
    model = EGMLAForCausalLM.from_pretrained(tmp_path)
    assert (model.generate(ids, max_new_tokens=30, **settings)[:, 5:] < 90).all()


def test_two_caches_are_refused(make_model):
    """A cache under each of the argument's names is an error: neither is dropped silently."""
    model = make_model()
    with pytest.raises(ValueError, match="past_key_values"):
        model(random_ids(1, 5), cache=EGMLACache(model.config), past_key_values=DynamicCache(config=model.config))


@pytest.mark.parametrize("value", ["cache", "past_key_values"])
def test_both_names_of_the_cache_argument_work(make_model, value):
    """`past_key_values`, the argument's name for years, is not dropped silently, in any of the classes."""
    for model in (make_model(), make_model(EGMLAModel)):
        cache = EGMLACache(model.config)
        with torch.no_grad():
            outputs = model(random_ids(1, 5), **{value: cache})
        assert outputs.cache is cache
        assert cache.get_seq_length() == 5


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_chunked_static_prefill_of_several_sequences(make_model, settings):
    """A static cache has rows for all beams, or all sequences of a prompt, when the prompt comes in pieces too."""
    model = make_model()
    ids, mask, _ = left_padded([4, 10])
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, **settings}
    sequences = []
    for cache in ({}, {"cache_implementation": "static", "prefill_chunk_size": 3}):
        torch.manual_seed(1)
        sequences.append(model.generate(ids, **settings, **cache))
    assert torch.equal(*sequences)


def test_ids_that_are_none(make_model):
    """Fractions and empty prompts are errors; nothing is rounded."""
    model = make_model()
    embeddings = model.get_input_embeddings()(random_ids(1, 4))
    for use_cache in (False, True):
        with pytest.raises(ValueError, match="whole numbers, but are"):
            model(inputs_embeds=embeddings, token_ids=random_ids(1, 4) + 0.9, use_cache=use_cache)
        with pytest.raises(ValueError, match="no token at all"):
            model(torch.empty(1, 0, dtype=torch.long), use_cache=use_cache)
