"""The model against the float64 reference, its outputs on request, gradients, heads and loading."""

import copy
import math

import pytest
import reference
import torch
import torch.nn.functional as F
from transformers import DynamicCache, modeling_rope_utils
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import modeling_egmla.modeling_egmla as library
from modeling_egmla import (
    EGMLACache,
    EGMLAConfig,
    EGMLAForCausalLM,
    EGMLAForSequenceClassification,
    EGMLAForTokenClassification,
    EGMLAModel,
    inputs_egmla,
)


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_DEEPSEEK = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 4, "beta_slow": 0.5}
VARIANTS = {
    "multiply": {},
    "add": {"kv_gate": "add"},
    "none": {"kv_gate": "none"},
    "multiply-without-norm": {"kv_gate_norm": "none"},
    "add-without-norm": {"kv_gate": "add", "kv_gate_norm": "none"},
    "groups-of-2": {"num_hidden_layers": 4, "layer_group_size": 2},
    "groups-of-3-add": {"num_hidden_layers": 3, "layer_group_size": 3, "kv_gate": "add"},
    "groups-of-2-none": {"layer_group_size": 2, "kv_gate": "none"},
    "low-rank-q": {"q_lora_rank": 14},
    "low-rank-q-bias": {"q_lora_rank": 14, "attention_bias": True},
    "bias-groups": {"attention_bias": True, "layer_group_size": 2},
    "interleaved": {"rope_interleave": True},
    "interleaved-low-rank-q": {"rope_interleave": True, "q_lora_rank": 14},
    "yarn": {"rope_parameters": YARN},
    "yarn-deepseek": {"rope_parameters": YARN_DEEPSEEK},
    "yarn-deepseek-interleaved": {"rope_parameters": {**YARN_DEEPSEEK, "truncate": False}, "rope_interleave": True},
    "yarn-attention-factor": {"rope_parameters": {**YARN, "attention_factor": 1.7, "mscale_all_dim": 0.6}},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
    "untied": {"tie_word_embeddings": False},
    "wide-values": {"v_head_dim": 20},
    "values-as-wide-as-keys": {"v_head_dim": 14},
    "one-head": {"num_attention_heads": 1},
    # The latent's and the query's norm keep 1e-6; the layers' and the gate's take what the config says.
    "large-epsilons": {"rms_norm_eps": 0.3, "kv_gate_norm_eps": 0.2, "q_lora_rank": 14},
}
all_variants = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
gates = pytest.mark.parametrize("kv_gate", ["multiply", "add", "none"])


def batch(rows=3, length=9, vocab_size=97):
    return torch.randint(3, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def left_padded(rows=3, length=9, padding=(0, 2, 6)):
    """Ids and mask of rows that begin with so much padding."""
    ids, mask = batch(rows, length), torch.ones(rows, length, dtype=torch.long)
    for row, width in enumerate(padding):
        ids[row, :width], mask[row, :width] = 0, 0
    return ids, mask


class _Float64Torch:
    """`torch`, with float64 under the names of float32."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def exact(monkeypatch):
    """Norms, softmax and rotary angles in float64; the library computes them in float32 whatever the model's dtype."""
    for module in (modeling_deepseek_v3, modeling_rope_utils, library):
        monkeypatch.setattr(module, "torch", _Float64Torch())


class TestAgainstReference:
    @all_variants
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_float64(self, make_model, exact, changes, attention):
        """Every variant computes the paper's equations: only rounding differs from them, with and without padding."""
        model = make_model(attn_implementation=attention, **changes).double()
        config, state = model.config.to_dict(), model.state_dict()
        ids, mask = left_padded()
        with torch.no_grad():
            full, padded = model(ids).logits, model(ids, attention_mask=mask).logits
        torch.testing.assert_close(full[:2], reference.logits(config, state, ids[:2]), rtol=0, atol=1e-10)
        expected = reference.logits(config, state, ids, mask)
        torch.testing.assert_close(padded[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-10)

    @all_variants
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_float32(self, make_model, changes, attention):
        """In float32, logits of every variant are within 1e-5 of the equations, with left padding and positions."""
        model = make_model(attn_implementation=attention, **changes)
        ids, mask = left_padded()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = reference.logits(model.config.to_dict(), model.state_dict(), ids, mask, positions)
        with torch.no_grad():
            actual = model(ids, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(actual.double()[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)

    @pytest.mark.parametrize("name", ["multiply", "groups-of-2", "yarn-deepseek", "wide-values", "none"])
    def test_flex(self, make_model, name):
        """Flex attention gives the equations' logits; here its plain form, without the compiler."""
        model = make_model(attn_implementation="flex_attention", **VARIANTS[name])
        ids, mask = left_padded()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            actual = model(ids, attention_mask=mask).logits
        expected = reference.logits(model.config.to_dict(), model.state_dict(), ids, mask)
        torch.testing.assert_close(actual.double()[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)

    @pytest.mark.slow  # compiles
    def test_flex_compiled(self, make_model):
        """Flex attention as users get it, compiled, gives the equations' logits."""
        model = make_model(attn_implementation="flex_attention")
        ids, mask = left_padded()
        with torch.no_grad():
            actual = model(ids, attention_mask=mask).logits
        expected = reference.logits(model.config.to_dict(), model.state_dict(), ids, mask)
        torch.testing.assert_close(actual.double()[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)

    def test_far_positions(self, make_model, exact):
        """Angles are right far into the context, where float32 positions and yarn's stretched channels would show."""
        model = make_model(rope_parameters=YARN_DEEPSEEK, num_hidden_layers=1).double()
        ids = batch(1, 4)
        positions = torch.tensor([[0, 17, 200, 255]])
        with torch.no_grad():
            actual = model(ids, position_ids=positions).logits
        expected = reference.logits(model.config.to_dict(), model.state_dict(), ids, position_ids=positions)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("name", ["multiply", "groups-of-2", "none", "yarn-deepseek-interleaved"])
    def test_the_cache_holds_the_equations_latents_and_keys(self, make_model, exact, name):
        """Documented accessors give the latent after its norm and the rotated key, one of each a layer group."""
        model = make_model(**VARIANTS[name]).double()
        ids = batch(2)
        expected = reference.forward(model.config.to_dict(), model.state_dict(), ids)
        with torch.no_grad():
            cache = model(ids, use_cache=True).cache
        assert len(cache.layers) == model.config.num_layer_groups == len(expected.latents)
        assert torch.equal(cache.token_ids, ids.int())
        for group in range(model.config.num_layer_groups):
            torch.testing.assert_close(cache.latents[group][:, 0], expected.latents[group], rtol=0, atol=1e-11)
            torch.testing.assert_close(
                cache.rotated_keys[group][:, 0], expected.rotated_keys[group], rtol=0, atol=1e-11
            )


class TestOutputs:
    @pytest.mark.parametrize("name", ["multiply", "groups-of-2", "none", "yarn-deepseek"])
    def test_attentions_and_hidden_states(self, make_model, exact, name):
        """`output_attentions` and `output_hidden_states` give every layer's, in the shapes and values users know."""
        model = make_model(attn_implementation="eager", **VARIANTS[name]).double()
        ids, mask = left_padded()
        with torch.no_grad():
            outputs = model(ids, attention_mask=mask, output_attentions=True, output_hidden_states=True)
        expected = reference.forward(model.config.to_dict(), model.state_dict(), ids, mask)
        layers, heads, (rows, length) = model.config.num_hidden_layers, model.config.num_attention_heads, ids.shape
        assert [tuple(a.shape) for a in outputs.attentions] == [(rows, heads, length, length)] * layers
        assert [tuple(h.shape) for h in outputs.hidden_states] == [(rows, length, 32)] * (layers + 1)
        for actual, wanted in zip(outputs.hidden_states, expected.hidden_states):
            torch.testing.assert_close(actual[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-10)
        for actual, wanted in zip(outputs.attentions, expected.attentions):
            actual, wanted = actual.transpose(1, 2)[mask.bool()], wanted.transpose(1, 2)[mask.bool()]
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-10)

    def test_not_given_unless_asked(self, make_model):
        """By default a forward pass keeps no layer outputs alive, and returns a cache of latents as `.cache`."""
        outputs = make_model()(batch())
        assert outputs.attentions is None and outputs.hidden_states is None
        assert isinstance(outputs.cache, EGMLACache)
        assert make_model()(batch(), use_cache=False).cache is None

    def test_attentions_of_cached_steps(self, make_model):
        """Attention weights of a cached step are the last rows of those of the whole sequence."""
        model, ids = make_model(attn_implementation="eager"), batch()
        with torch.no_grad():
            whole = model(ids, output_attentions=True).attentions
            cache = model(ids[:, :6]).cache
            step = model(ids[:, 6:], cache=cache, output_attentions=True).attentions
        for a, b in zip(whole, step):
            assert b.shape == (3, 3, 3, 9)
            torch.testing.assert_close(a[:, :, 6:], b, rtol=0, atol=1e-5)

    def test_logits_to_keep(self, make_model):
        """`logits_to_keep` cuts the logits and changes none of them."""
        model, ids = make_model(), batch()
        with torch.no_grad():
            logits = model(ids).logits
            assert torch.equal(model(ids, logits_to_keep=2).logits, logits[:, -2:])
            assert torch.equal(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, logits[:, [1, 4]])

    def test_tuple_output(self, make_model):
        """`return_dict=False` gives the same values as a tuple."""
        model, ids = make_model(), batch()
        with torch.no_grad():
            outputs = model(ids, labels=ids)
            loss, logits, cache = model(ids, labels=ids, return_dict=False)
        assert torch.equal(loss, outputs.loss) and torch.equal(logits, outputs.logits) and len(cache) == 2

    def test_base_model(self, make_model):
        """`EGMLAModel` alone gives the states that the head reads."""
        model, ids = make_model(), batch()
        with torch.no_grad():
            states = model.model(ids).last_hidden_state
            torch.testing.assert_close(F.linear(states, model.lm_head.weight), model(ids).logits)


class TestAttentionOnCPU:
    @pytest.mark.parametrize("v_head_dim", [4, 10, 14, 20])
    @pytest.mark.parametrize("grad", [False, True])
    def test_padded_values_change_nothing(self, make_model, v_head_dim, grad):
        """Values narrower than keys are padded for the CPU's fast attention: logits and gradients are eager's."""
        ids, mask = left_padded()
        results = []
        for attention in ("eager", "sdpa"):
            model = make_model(attn_implementation=attention, v_head_dim=v_head_dim)
            with torch.set_grad_enabled(grad):
                logits = model(ids, attention_mask=mask).logits[mask.bool()]
            gradients = []
            if grad:
                logits.square().mean().backward()
                gradients = [p.grad for p in model.parameters()]
            results.append([logits.detach(), *gradients])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_sdpa_sees_values_as_wide_as_keys(self, make_model, monkeypatch):
        """The fast path is really taken: PyTorch's attention gets values as wide as keys, and one tensor of each."""
        shapes = []
        original = F.scaled_dot_product_attention

        def spy(query, key, value, **kwargs):
            shapes.append((query.shape[-1], key.shape[-1], value.shape[-1]))
            return original(query, key, value, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
        make_model(attn_implementation="sdpa")(batch())
        assert shapes == [(14, 14, 14)] * 2

    def test_attention_dropout_only_in_training(self, make_model):
        """Attention dropout acts in training and not in evaluation."""
        model, ids = make_model(attention_dropout=0.5, attn_implementation="eager"), batch()
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


class TestGate:
    @pytest.mark.parametrize("kv_gate", ["multiply", "add"])
    def test_depends_on_id_and_layer_only(self, make_model, kv_gate):
        """The same id has the same gate in any context, batch row and position; the context lives in the latent."""
        model = make_model(kv_gate=kv_gate)
        seen = [[], []]
        for n, layer in enumerate(model.model.layers):
            layer.self_attn.kv_gate_proj.register_forward_hook(lambda m, a, out, n=n: seen[n].append(out.detach()))
        first, second = batch(2, 6), batch(3, 9).flip(1)
        first[0, 1] = first[1, 4] = second[2, 7] = 42
        with torch.no_grad():
            model(first), model(second)
        for gates_of_layer in seen:
            gates = torch.stack((gates_of_layer[0][0, 1], gates_of_layer[0][1, 4], gates_of_layer[1][2, 7]))
            torch.testing.assert_close(gates, gates[:1].expand(3, -1), rtol=1e-6, atol=1e-6)
        assert not torch.allclose(seen[0][0][0, 1], seen[1][0][0, 1])

    @pytest.mark.parametrize("kv_gate_norm", ["layer_norm", "none"])
    @gates
    def test_expand_kv_gradcheck(self, make_model, kv_gate, kv_gate_norm):
        """Gradients of the gated expansion, for features, rotary keys and every parameter of the gate, are right."""
        model = make_model(
            kv_gate=kv_gate, kv_gate_norm=kv_gate_norm, num_attention_heads=2, qk_nope_head_dim=3, qk_rope_head_dim=2,
            v_head_dim=2, kv_gate_dim=3, vocab_size=5, num_hidden_layers=1,
        ).double()  # fmt: skip
        attention = model.model.layers[0].self_attn
        names = [name for name, _ in attention.named_parameters() if "kv_gate" in name]
        assert len(names) == (0 if kv_gate == "none" else 2 if kv_gate_norm == "none" else 4)
        ids = torch.tensor([[1, 3, 1], [0, 4, 2]])

        def expand(features, k_rot, *parameters):
            class Expand(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.attention = attention

                def forward(self, *args):
                    return self.attention.expand_kv(*args)

            changed = {f"attention.{name}": parameter for name, parameter in zip(names, parameters)}
            return torch.func.functional_call(Expand(), changed, (features, k_rot, ids))

        inputs = [torch.randn(2, 3, 10), torch.randn(2, 1, 3, 2)]
        inputs += [attention.get_parameter(name).detach() for name in names]
        assert torch.autograd.gradcheck(expand, [x.double().requires_grad_() for x in inputs])

    def test_key_half_of_the_norm_bias_is_dead(self, make_model, exact):
        """The gate norm's bias of the key part adds the same to every score of a query: its gradient is zero."""
        model = make_model(attn_implementation="eager").double()
        model(batch(), labels=batch()).loss.backward()
        for layer in model.model.layers:
            gradient = layer.self_attn.kv_gate_norm.bias.grad.view(3, 18)
            assert gradient[:, :8].abs().max() < 1e-12
            assert gradient[:, 8:].abs().min() > 1e-6

    @pytest.mark.parametrize("kv_gate", ["multiply", "add"])
    def test_pad_row_learns(self, make_model, kv_gate):
        """The padding id often is eos too, so its gate row learns; its token embedding does not, as in the library."""
        model = make_model(kv_gate=kv_gate, pad_token_id=5)
        ids = torch.tensor([[7, 5, 9, 5, 11]])
        model(ids, labels=ids).loss.backward()
        for layer in model.model.layers:
            gradient = layer.self_attn.kv_gate_embed.weight.grad
            assert gradient[5].abs().max() > 1e-6
            assert gradient.abs().amax(1).nonzero().flatten().tolist() == [5, 7, 9]  # the last token has no target

    def test_none_has_no_gate_parameters(self, make_model):
        """Plain MLA has no table, no gate projection and no gate norm."""
        assert not [name for name, _ in make_model(kv_gate="none").named_parameters() if "kv_gate" in name]

    def test_parameter_names(self, make_model):
        """State dicts have the names of the library's MLA models, so that checkpoints and LoRA targets carry over."""
        attention = "model.layers.{}.self_attn."
        model = make_model(layer_group_size=2, q_lora_rank=14, attention_bias=True, tie_word_embeddings=False)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        expected = {"model.embed_tokens.weight": (97, 32), "model.norm.weight": (32,), "lm_head.weight": (97, 32)}
        for n in range(2):
            layer = f"model.layers.{n}."
            expected |= {
                layer + "input_layernorm.weight": (32,),
                layer + "post_attention_layernorm.weight": (32,),
                layer + "mlp.gate_proj.weight": (40, 32),
                layer + "mlp.up_proj.weight": (40, 32),
                layer + "mlp.down_proj.weight": (32, 40),
                attention.format(n) + "q_a_proj.weight": (14, 32),
                attention.format(n) + "q_a_proj.bias": (14,),
                attention.format(n) + "q_a_layernorm.weight": (14,),
                attention.format(n) + "q_b_proj.weight": (42, 14),
                attention.format(n) + "kv_gate_embed.weight": (97, 12),
                attention.format(n) + "kv_gate_proj.weight": (54, 12),
                attention.format(n) + "kv_gate_norm.weight": (54,),
                attention.format(n) + "kv_gate_norm.bias": (54,),
                attention.format(n) + "o_proj.weight": (32, 30),
                attention.format(n) + "o_proj.bias": (32,),
            }
        expected |= {
            attention.format(0) + "kv_a_proj_with_mqa.weight": (22, 32),
            attention.format(0) + "kv_a_proj_with_mqa.bias": (22,),
            attention.format(0) + "kv_a_layernorm.weight": (16,),
            attention.format(0) + "kv_b_proj.weight": (54, 16),
        }
        assert shapes == expected


class TestGradients:
    @pytest.mark.timeout(120)  # a group's latent passed by keyword makes reentrant checkpoints replay each other
    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("name", ["multiply", "groups-of-2", "groups-of-3-add", "none", "low-rank-q-bias"])
    def test_checkpointing(self, make_model, name, reentrant):
        """Gradient checkpointing changes memory and not one gradient, also where layers share a latent."""
        ids, mask = left_padded()
        gradients = []
        for checkpoint in (False, True):
            model = make_model(**VARIANTS[name]).train()
            calls = []
            model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *a, calls=calls: calls.append(1))
            if checkpoint:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
                model.enable_input_require_grads()
            model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
            assert len(calls) == 1 + checkpoint, "a checkpointed layer runs twice"
            gradients.append({n: p.grad for n, p in model.named_parameters()})
        assert all(g is not None and g.abs().max() > 0 for n, g in gradients[0].items() if "norm.bias" not in n)
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: n + m)

    @pytest.mark.parametrize("layer_group_size", [1, 2])
    def test_checkpoints_keep_what_is_read(self, make_model, layer_group_size):
        """Checkpointing keeps a layer's hidden states, and what its group shares only where the group reads it."""
        model = make_model(num_hidden_layers=4, layer_group_size=layer_group_size).train()
        model.gradient_checkpointing_enable()
        kept = []

        def keep(function, *args):
            kept.append(sum(torch.is_tensor(argument) for argument in args))
            return function(*args)

        for layer in model.model.layers:
            layer._gradient_checkpointing_func = keep
        model(batch(), labels=batch(), use_cache=False)
        assert kept == ([1] * 4 if layer_group_size == 1 else [1, 3, 1, 3])

    def test_checkpointing_with_frozen_embeddings(self, make_model):
        """LoRA-like training (only some weights learn) under reentrant checkpointing still reaches a group's owner."""
        gradients = []
        for checkpoint in (False, True):
            model = make_model(**VARIANTS["groups-of-2"]).train().requires_grad_(False)
            for layer in model.model.layers:
                layer.self_attn.o_proj.requires_grad_(True)
                if layer.self_attn.owns_latent:
                    layer.self_attn.kv_b_proj.requires_grad_(True)
            if checkpoint:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
                model.enable_input_require_grads()
            model(batch(), labels=batch()).loss.backward()
            gradients.append([p.grad for p in model.parameters() if p.requires_grad])
        assert len(gradients[0]) == 6
        for a, b in zip(*gradients):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

    @all_variants
    def test_every_parameter_learns(self, make_model, changes):
        """No parameter of any variant is cut off from the loss."""
        model = make_model(**changes)
        model(batch(), labels=batch()).loss.backward()
        silent = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
        assert not silent

    def test_backward_through_the_cache(self, make_model):
        """A sequence fed in pieces with gradients, as in truncated training, has the gradients of one forward."""
        ids, gradients = batch(), []
        for split in ([9], [4, 1, 4]):
            model = make_model()
            cache, losses, start = EGMLACache(model.config), [], 0
            for size in split:
                outputs = model(ids[:, start : start + size], cache=cache)
                losses.append(outputs.logits.square().sum())
                start += size
            sum(losses).backward()
            gradients.append([p.grad for p in model.parameters()])
        for a, b in zip(*gradients):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)

    def test_backward_through_the_cache_of_frozen_latents(self, make_model):
        """The same where latents need no gradient: the cache must not overwrite what the backward pass reads."""
        ids, gradients = batch(1), []
        for split in ([9], [4, 1, 4]):
            model = make_model(num_hidden_layers=1).requires_grad_(False)
            model.model.layers[0].self_attn.kv_b_proj.requires_grad_(True)
            cache, losses, start = EGMLACache(model.config), [], 0
            for size in split:
                losses.append(model(ids[:, start : start + size], cache=cache).logits.square().sum())
                start += size
            sum(losses).backward()
            gradients.append(model.model.layers[0].self_attn.kv_b_proj.weight.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


class TestLoss:
    def test_labels_are_shifted_once(self, make_model):
        """`labels=input_ids` is next-token prediction: position t is scored on token t + 1; -100 does not count."""
        model, (ids, mask) = make_model(), left_padded()
        labels = ids.masked_fill(mask == 0, -100)
        with torch.no_grad():
            outputs = model(ids, attention_mask=mask, labels=labels)
        wanted, count = 0.0, 0
        for row in range(3):
            for t in range(8):
                if labels[row, t + 1] != -100:
                    wanted -= outputs.logits[row, t].log_softmax(-1)[labels[row, t + 1]].item()
                    count += 1
        assert outputs.loss.item() == pytest.approx(wanted / count, rel=1e-5)

    def test_num_items_in_batch(self, make_model):
        """With the item count of the whole batch, as the Trainer gives it, losses of its parts add up to its loss."""
        model, ids = make_model(), batch(4)
        with torch.no_grad():
            whole = model(ids, labels=ids).loss
            parts = [model(part, labels=part, num_items_in_batch=4 * 8).loss for part in ids.split(2)]
        torch.testing.assert_close(sum(parts), whole)


class TestHeads:
    def test_sequence_classification(self, make_model):
        """A score of the last token that is not padding, left or right padded, and its losses."""
        model = make_model(EGMLAForSequenceClassification, num_labels=4)
        ids, mask = left_padded()
        with torch.no_grad():
            outputs = model(ids, attention_mask=mask, labels=torch.tensor([0, 3, 1]))
            states = model.model(ids, attention_mask=mask).last_hidden_state[:, -1]
            right = F.pad(ids[:1], (0, 3))
            padded = model(right, attention_mask=(right != 0).long())
        expected = F.linear(states, model.score.weight)
        torch.testing.assert_close(outputs.logits, expected)
        torch.testing.assert_close(outputs.loss, F.cross_entropy(expected, torch.tensor([0, 3, 1])))
        torch.testing.assert_close(padded.logits, expected[:1], rtol=0, atol=1e-5)

    def test_token_classification(self, make_model):
        """Scores of every token, and a loss that is not shifted."""
        model = make_model(EGMLAForTokenClassification, num_labels=4)
        ids, labels = batch(), batch() % 4
        with torch.no_grad():
            outputs = model(ids, labels=labels)
            expected = model.score(model.model(ids).last_hidden_state)
        assert outputs.logits.shape == (3, 9, 4)
        torch.testing.assert_close(outputs.logits, expected)
        torch.testing.assert_close(outputs.loss, F.cross_entropy(expected.flatten(0, 1), labels.flatten()))

    @pytest.mark.parametrize(
        "model_class", [EGMLAModel, EGMLAForCausalLM, EGMLAForSequenceClassification, EGMLAForTokenClassification]
    )
    def test_embeddings_with_token_ids(self, make_model, model_class):
        """Embeddings with the ids they stand for give what the ids give; without them, an error says what to pass."""
        model, ids = make_model(model_class, num_labels=4), batch()
        with torch.no_grad():
            embeds = model.get_input_embeddings()(ids)
            expected, actual = model(ids)[0], model(inputs_embeds=embeds, token_ids=ids)[0]
            assert torch.equal(actual, expected)
            assert not torch.allclose(model(inputs_embeds=embeds, token_ids=ids.flip(0))[0], expected, atol=1e-2)
            with pytest.raises(ValueError, match="token_ids"):
                model(inputs_embeds=embeds)
            with pytest.raises(ValueError, match="token_ids"):
                model(inputs_embeds=embeds, token_ids=ids[:, :-1])

    def test_plain_mla_needs_no_token_ids(self, make_model):
        """Without a gate, embeddings alone are enough, as in any other model."""
        model, ids = make_model(kv_gate="none"), batch()
        with torch.no_grad():
            assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)

    def test_ids_win_over_token_ids(self, make_model):
        """`token_ids` is read only with embeddings."""
        model, ids = make_model(), batch()
        with torch.no_grad():
            assert torch.equal(model(ids, token_ids=ids.flip(0)).logits, model(ids).logits)

    def test_ids_or_embeddings(self, make_model):
        """Neither or both of ids and embeddings is an error."""
        model, ids = make_model(), batch()
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model()
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model(ids, inputs_embeds=model.get_input_embeddings()(ids))

    @pytest.mark.parametrize("bad", [-1, 97, 1000])
    @gates
    def test_ids_outside_the_vocabulary(self, make_model, bad, kv_gate):
        """An id outside the vocabulary is named, and so is the way out."""
        ids = batch()
        ids[1, 4] = bad
        model = make_model(kv_gate=kv_gate)
        with pytest.raises(ValueError, match=rf"{bad} .*vocab_size.*resize_token_embeddings"):
            model(ids)


class TestCacheArgument:
    @pytest.fixture(params=[EGMLAForCausalLM, EGMLAModel, EGMLAForSequenceClassification, EGMLAForTokenClassification])
    def model(self, request, make_model):
        return make_model(request.param)

    def test_past_key_values(self, model):
        """The cache's old name is accepted with a warning, and the cache is really used."""
        ids = batch()
        with torch.no_grad():
            expected = model(ids)[0]
            cache = EGMLACache(model.config)
            model(ids[:, :5], cache=cache)
            with pytest.warns(FutureWarning, match="past_key_values"):
                actual = model(ids[:, 5:], past_key_values=cache)[0]
        assert cache.get_seq_length() == 9
        expected = expected if expected.dim() == 2 else expected[:, 5:]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("name", ["multiply", "groups-of-2", "none", "yarn-deepseek"])
    def test_stock_cache(self, make_model, name, monkeypatch):
        """A stock cache gets expanded keys and values: right answers, and one line that says so."""
        model, ids, said = make_model(**VARIANTS[name]), batch(), []
        monkeypatch.setattr(inputs_egmla.logger, "warning_once", said.append)  # it says equal lines once
        with torch.no_grad():
            cache = DynamicCache()
            pieces = [model(ids[:, a:b], cache=cache).logits for a, b in ((0, 5), (5, 6), (6, 9))]
            torch.testing.assert_close(torch.cat(pieces, 1), model(ids).logits, rtol=0, atol=1e-5)
        layers = model.config.num_hidden_layers
        assert [tuple(layer.keys.shape) for layer in cache.layers] == [(3, 3, 9, 14)] * layers
        assert [tuple(layer.values.shape) for layer in cache.layers] == [(3, 3, 9, 10)] * layers
        assert len(set(said)) == 1 and "DynamicCache holds expanded keys and values" in said[0]

    def test_left_padding_with_cache(self, make_model):
        """Left-padded rows continue on the cache as they would alone."""
        model, (ids, mask) = make_model(), left_padded()
        with torch.no_grad():
            cache = model(ids[:, :7], attention_mask=mask[:, :7]).cache
            pieces = [model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache).logits for t in (7, 8)]
        for row, width in enumerate((0, 2, 6)):
            with torch.no_grad():
                alone = model(ids[row : row + 1, width:], use_cache=False).logits[0, -2:]
            torch.testing.assert_close(torch.cat(pieces, 1)[row], alone, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_all_padding_row(self, make_model, attention):
        """A row that is all padding gives finite numbers and disturbs no other row."""
        model, ids = make_model(attn_implementation=attention), batch()
        mask = torch.ones_like(ids)
        mask[1] = 0
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits
            assert logits.isfinite().all()
            torch.testing.assert_close(logits[[0, 2]], model(ids[[0, 2]]).logits, rtol=0, atol=1e-5)


class TestDtypeAndDevice:
    @gates
    def test_bfloat16(self, make_model, kv_gate):
        """bfloat16 logits are within a percent of float32's: no part of the gate loses precision."""
        model, ids = make_model(kv_gate=kv_gate), batch()
        with torch.no_grad():
            whole, half = model(ids).logits, copy.deepcopy(model).bfloat16()(ids).logits
        assert half.dtype == torch.bfloat16
        assert (half.float() - whole).norm() / whole.norm() < 1e-2

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_loading_in_a_dtype(self, make_model, tmp_path, dtype):
        """`from_pretrained(dtype=...)` gives the whole model in that dtype, and `dtype="auto"` the saved one."""
        model = make_model()
        model.save_pretrained(tmp_path)
        loaded = EGMLAForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert {p.dtype for p in loaded.parameters()} == {dtype}
        assert not loaded.training
        for (name, a), b in zip(loaded.named_parameters(), model.parameters()):
            assert torch.equal(a, b.to(dtype)), name
        loaded.save_pretrained(tmp_path)
        assert EGMLAForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == dtype

    @pytest.mark.parametrize("tie", [True, False])
    def test_save_and_load(self, make_model, tmp_path, tie):
        """A saved model loads to the same logits, tied if and only if it was, with no key lost or left over."""
        model, ids = make_model(tie_word_embeddings=tie), batch()
        model.save_pretrained(tmp_path)
        loaded, info = EGMLAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tie
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, model(ids).logits)

    @pytest.mark.parametrize("name", ["multiply", "groups-of-2"])
    def test_device_map(self, make_model, tmp_path, name):
        """`device_map` places the model, whole decoder layers at a time, and it computes the same."""
        model, ids = make_model(**VARIANTS[name]), batch()
        model.save_pretrained(tmp_path)
        assert EGMLAForCausalLM._no_split_modules == ["EGMLADecoderLayer"]
        loaded = EGMLAForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, model(ids).logits)

    @pytest.mark.parametrize("name", ["multiply", "groups-of-2"])
    def test_disk_offload(self, make_model, tmp_path, name):
        """Layers offloaded to disk, with hooks that move what passes between layers, compute the same, also cached."""
        model, ids = make_model(**VARIANTS[name]), batch()
        model.save_pretrained(tmp_path / "model")
        layers = model.config.num_hidden_layers
        device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        device_map |= {f"model.layers.{n}": "disk" if n % 2 else "cpu" for n in range(layers)}
        loaded = EGMLAForCausalLM.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
        )
        with torch.no_grad():
            cache = loaded(ids[:, :5]).cache
            torch.testing.assert_close(loaded(ids[:, 5:], cache=cache).logits, model(ids).logits[:, 5:])

    def test_rotary_buffers_after_loading(self, make_model, tmp_path):
        """Buffers that are not saved are those of a fresh model, also in another dtype."""
        model = make_model(rope_parameters=YARN_DEEPSEEK)
        model.save_pretrained(tmp_path)
        for kwargs in ({}, {"dtype": torch.bfloat16}, {"device_map": {"": "cpu"}}):
            trash = [torch.full((1000,), math.nan) for _ in range(50)]
            del trash
            loaded = EGMLAForCausalLM.from_pretrained(tmp_path, **kwargs)
            for (name, a), b in zip(loaded.named_buffers(), model.buffers()):
                assert torch.equal(a.float(), b), (name, kwargs)

    def test_autocast(self, make_model):
        """Under autocast the model runs and stays close to float32."""
        model, ids = make_model(), batch()
        with torch.no_grad():
            whole = model(ids).logits
            with torch.autocast("cpu", dtype=torch.bfloat16):
                half = model(ids).logits
        assert (half.float() - whole).norm() / whole.norm() < 2e-2

    def test_initialisation_is_seeded_and_complete(self, make_config):
        """A new model is the same for the same seed, and none of its parameters is left as memory was."""
        states = []
        for _ in range(2):
            torch.manual_seed(3)
            states.append(EGMLAForCausalLM(make_config(initializer_range=0.02)).state_dict())
        for name, tensor in states[0].items():
            assert torch.equal(tensor, states[1][name]) and tensor.isfinite().all(), name
            if "norm" in name:
                assert torch.equal(tensor, torch.ones_like(tensor) if "weight" in name else torch.zeros_like(tensor))


def test_initial_scales_of_the_gate():
    """A fresh model starts with gates of the documented scale, and a norm that passes: silence would not train."""
    config = EGMLAConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, kv_gate_dim=64)
    attention = EGMLAForCausalLM(config).model.layers[1].self_attn
    assert attention.kv_gate_proj.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert attention.kv_gate_embed.weight.std().item() == pytest.approx(config.initializer_range, rel=0.05)
    assert attention.kv_gate_norm.weight.eq(1).all() and attention.kv_gate_norm.bias.eq(0).all()
