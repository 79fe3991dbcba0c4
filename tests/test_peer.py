"""Without a gate, EG-MLA is the library's own MLA: the same weights in DeepSeek-V3 with dense layers do the same."""

import copy

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "halves": {},
    "interleaved": {"rope_interleave": True},
    "low-rank-q": {"q_lora_rank": 14, "attention_bias": True},
    "low-rank-q-interleaved": {"q_lora_rank": 14, "rope_interleave": True, "rms_norm_eps": 1e-2},
    "yarn": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn-interleaved": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_interleave": True},
    "tied": {"tie_word_embeddings": True},
}
SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_parameters", "rope_interleave",
    "rms_norm_eps", "hidden_act", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def pair(request, make_model):
    """Our model and the library's, with the same weights."""
    changes = {"tie_word_embeddings": False, **request.param}
    ours = make_model(kv_gate="none", attn_implementation="eager", **changes)
    fields = {name: copy.deepcopy(getattr(ours.config, name)) for name in SHARED_FIELDS}
    config = DeepseekV3Config(
        **fields,
        num_key_value_heads=ours.config.num_attention_heads,
        first_k_dense_replace=ours.config.num_hidden_layers,
        num_mtp_layers=0,
        attn_implementation="eager",
    )
    theirs = DeepseekV3ForCausalLM(config).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(2))


def test_logits(pair, ids):
    """An MLA checkpoint gives the same logits here as in the library, with and without padding."""
    ours, theirs = pair
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        assert theirs(ids).logits.std() > 1
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)
        a, b = (m(ids, attention_mask=mask).logits[mask.bool()] for m in pair)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_cached_logits(pair, ids):
    """So do their caches, fed piece by piece, and they hold the same tensors in the same places."""
    ours, theirs = pair
    our_cache = their_cache = None
    with torch.no_grad():
        for piece in ids.split([7, 1, 3], dim=1):
            a = ours(piece, cache=our_cache, use_cache=True)
            b = theirs(piece, cache=their_cache, use_cache=True)
            our_cache, their_cache = a.cache, b.cache
            torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-5)
    assert isinstance(their_cache, DynamicCache)
    for mine, other in zip(our_cache.layers, their_cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(mine.values, other.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_generation(pair, ids, use_cache):
    """Greedy generation gives the same text."""
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "use_cache": use_cache}
    a, b = (model.generate(ids, **arguments) for model in pair)
    assert torch.equal(a, b)


def test_gradients(pair, ids):
    """Training starts in the same direction: loss and every gradient are equal."""
    losses, gradients = [], []
    for model in pair:
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*losses)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)
