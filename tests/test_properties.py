"""What holds for every input: the gate is bilinear, and a cache is nothing but the ids it was fed."""

import copy
import pickle

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

from modeling_egmla import EGMLACache, EGMLAStaticCache
from modeling_egmla.cache_egmla import BLOCK_SIZE, EGMLALayer


VARIANTS = {
    "multiply": {},
    "add": {"kv_gate": "add"},
    "none": {"kv_gate": "none"},
    "groups": {"num_hidden_layers": 4, "layer_group_size": 2},
    "no-norm": {"kv_gate_norm": "none", "q_lora_rank": 14, "rope_interleave": True},
}
ROOM = 20  # tokens, of static caches


@pytest.fixture(scope="session")
def models(make_model):
    return {name: make_model(**changes) for name, changes in VARIANTS.items()}


def new_cache(kind, config):
    return {
        "dynamic": lambda: EGMLACache(config),
        "static": lambda: EGMLAStaticCache(config, max_cache_len=ROOM),
        "stock dynamic": lambda: DynamicCache(),
        "stock static": lambda: StaticCache(config, max_cache_len=ROOM),
    }[kind]()


def random_ids(rows, length, seed):
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


class TestBilinearGate:
    """The paper's claim on expressiveness: one output channel is (w1.x1)(w2.x2) = x1^T (w1 w2^T) x2."""

    @staticmethod
    def channels(make_model, **changes):
        """Of every output channel the matrix of its values for all pairs of unit latents and unit table rows."""
        rank, width = 16, 12
        model = make_model(kv_gate_norm="none", vocab_size=width, num_hidden_layers=1, **changes).double()
        attention = model.model.layers[0].self_attn
        attention.kv_gate_embed.weight.data = torch.eye(width).double()
        pairs = torch.arange(width).repeat(rank)[None]  # ids: 0, 1, ..., 0, 1, ...
        latents = torch.eye(rank).double().repeat_interleave(width, dim=0)[None]
        with torch.no_grad():
            keys, values = attention.expand_kv(
                attention.kv_b_proj(latents), torch.zeros(1, 1, rank * width, 6).double(), pairs
            )
        outputs = torch.cat((keys[0, ..., :8], values[0]), dim=-1)  # [heads, pairs, channels of a head]
        matrices = outputs.transpose(1, 2).reshape(3 * 18, rank, width)
        return attention, matrices

    def test_a_channel_is_an_outer_product(self, make_model):
        """Every channel of the product gate is w1 w2^T, of rank one, with the same row of both projections."""
        attention, matrices = self.channels(make_model)
        w1, w2 = attention.kv_b_proj.weight, attention.kv_gate_proj.weight
        torch.testing.assert_close(matrices, w1[:, :, None] * w2[:, None, :], rtol=0, atol=1e-15)
        singular = torch.linalg.svdvals(matrices)
        assert (singular[:, 1:] < 1e-14).all() and (singular[:, 0] > 1e-3).all()
        _, added = self.channels(make_model, kv_gate="add")
        assert (torch.linalg.svdvals(added)[:, 1] > 1e-3).all(), "a sum is not bilinear: the property can fail"

    @given(seed=st.integers(0, 1000), a=st.floats(-3, 3), b=st.floats(-3, 3))
    @settings(max_examples=20)
    def test_linear_in_each_argument(self, models, seed, a, b):
        """Scaling the latent or the table row scales K and V: no sigmoid and no bias hides in the gate."""
        attention = copy.deepcopy(models["no-norm"].model.layers[0].self_attn).double()
        generator = torch.Generator().manual_seed(seed)
        latent = torch.randn(1, 3, 16, generator=generator).double()
        ids, k_rot = torch.tensor([[5, 7, 5]]), torch.zeros(1, 1, 3, 6).double()
        with torch.no_grad():
            before = attention.expand_kv(attention.kv_b_proj(latent), k_rot, ids)
            attention.kv_gate_embed.weight.mul_(b)
            after = attention.expand_kv(attention.kv_b_proj(a * latent), k_rot, ids)
        for x, y in zip(before, after):
            torch.testing.assert_close(y, a * b * x, rtol=1e-12, atol=1e-12)

    @given(seed=st.integers(0, 1000), scale=st.floats(1.0, 1e3))
    @settings(max_examples=20)
    def test_the_norm_takes_the_scale_away(self, models, seed, scale):
        """Behind the LayerNorm only the direction of latent and table row counts (up to epsilon)."""
        attention = copy.deepcopy(models["multiply"].model.layers[0].self_attn).double()
        attention.kv_gate_norm.eps = 0.0
        latent = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(seed)).double()
        ids, k_rot = torch.tensor([[5, 7, 5]]), torch.zeros(1, 1, 3, 6).double()
        with torch.no_grad():
            before = attention.expand_kv(attention.kv_b_proj(latent), k_rot, ids)
            after = attention.expand_kv(attention.kv_b_proj(scale * latent), k_rot, ids)
        for x, y in zip(before, after):
            torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-9)


class TestShapes:
    @given(data=st.data())
    @settings(max_examples=25)
    def test_any_shape_computes_the_equations(self, make_model, data):
        """Any widths, head counts, groups and variants fit together, and give the equations' logits, cached or not."""
        draw = data.draw
        group = draw(st.integers(1, 3), label="layer_group_size")
        widths = {
            name: draw(st.integers(1, 9), label=name)
            for name in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "kv_gate_dim")
        }
        model = make_model(
            **widths,
            hidden_size=draw(st.integers(2, 24), label="hidden_size"),
            intermediate_size=draw(st.integers(1, 24), label="intermediate_size"),
            qk_rope_head_dim=2 * draw(st.integers(1, 5), label="rotary pairs"),
            q_lora_rank=draw(st.one_of(st.none(), st.integers(1, 9)), label="q_lora_rank"),
            layer_group_size=group,
            num_hidden_layers=group * draw(st.integers(1, 2), label="groups"),
            kv_gate=draw(st.sampled_from(["multiply", "add", "none"]), label="kv_gate"),
            kv_gate_norm=draw(st.sampled_from(["layer_norm", "none"]), label="kv_gate_norm"),
            kv_gate_norm_eps=0.1,  # widths of 2 or 3 can have a variance near zero
            rms_norm_eps=0.1,
            rope_interleave=draw(st.booleans(), label="rope_interleave"),
            tie_word_embeddings=draw(st.booleans(), label="tie_word_embeddings"),
            attention_bias=draw(st.booleans(), label="attention_bias"),
        )
        rows, length = draw(st.integers(1, 2), label="rows"), draw(st.integers(1, 5), label="length")
        ids = random_ids(rows, length, draw(st.integers(0, 99), label="seed"))
        expected = reference.logits(model.config.to_dict(), model.state_dict(), ids).float()
        with torch.no_grad():
            assert_close(model(ids, use_cache=False).logits, expected)
            cache = model(ids[:, : length - 1]).cache if length > 1 else None
            assert_close(model(ids[:, length - 1 :], cache=cache).logits, expected[:, length - 1 :])


class TestSplits:
    @given(data=st.data())
    @settings(max_examples=30)
    @pytest.mark.parametrize("kind", ["dynamic", "static", "stock dynamic", "stock static"])
    def test_any_split_is_one_forward(self, models, kind, data):
        """A sequence fed in any pieces, left-padded or not, gives the logits of one forward pass over all of it."""
        model = models[data.draw(st.sampled_from(sorted(VARIANTS)), label="variant")]
        rows = data.draw(st.integers(1, 3), label="rows")
        pieces = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5).filter(lambda p: sum(p) <= ROOM))
        length = sum(pieces)
        padding = data.draw(st.lists(st.integers(0, length - 1), min_size=rows, max_size=rows), label="padding")
        ids = random_ids(rows, length, data.draw(st.integers(0, 99), label="seed"))
        mask = torch.ones_like(ids)
        for row, width in enumerate(padding):
            ids[row, :width], mask[row, :width] = 0, 0
        with_mask = data.draw(st.booleans(), label="pass mask") or max(padding) > 0

        cache, logits, start = new_cache(kind, model.config), [], 0
        with torch.no_grad():
            for piece in pieces:
                end = start + piece
                arguments = {"attention_mask": mask[:, :end]} if with_mask else {}
                logits.append(model(ids[:, start:end], cache=cache, **arguments).logits)
                start = end
        logits = torch.cat(logits, dim=1)
        assert logits.isfinite().all()
        for row, width in enumerate(padding):
            with torch.no_grad():
                alone = model(ids[row : row + 1, width:], use_cache=False).logits
            assert_close(logits[row : row + 1, width:], alone)
        if "stock" not in kind:
            assert torch.equal(cache.token_ids[:, :length], ids.int())
            assert cache.memory().latents == rows * length * model.config.cache_elements_per_token * 4
            assert cache.memory().token_ids == rows * length * 4


class Rows:
    """The naive model of a cache: the ids of every row, as lists of equal length."""

    def __init__(self):
        self.rows = None  # None: nothing was ever fed, so the number of rows is free

    @property
    def length(self):
        return len(self.rows[0]) if self.rows else 0


def check(model, cache, rows):
    """Ids, lengths, bytes, latents and keys of `cache` are those of a cache that is fed `rows` at once."""
    length, batch = rows.length, len(rows.rows or [])
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [length] * len(cache.layers)
    if not length:
        return
    ids = torch.tensor(rows.rows)
    assert torch.equal(cache.token_ids[:, :length].long(), ids)
    memory = cache.memory()
    assert memory.latents == batch * length * model.config.cache_elements_per_token * 4
    assert memory.token_ids == batch * length * 4
    assert memory.slack >= 0
    with torch.no_grad():
        fresh = model(ids, use_cache=True).cache
    for stream in ("latents", "rotated_keys"):
        for actual, expected in zip(getattr(cache, stream), getattr(fresh, stream), strict=True):
            assert_close(actual[:, :, :length], expected)


class TestOperations:
    @given(data=st.data())
    @settings(max_examples=25)
    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_any_operations_leave_what_the_ids_say(self, models, kind, data):
        """After any updates, crops, reorderings, selections, copies, resets and moves, only the ids left count."""
        model = models[data.draw(st.sampled_from(["multiply", "groups"]), label="variant")]
        cache, rows = new_cache(kind, model.config), Rows()
        left_behind = []  # copies' originals, which must not change any more
        names = ["feed", "feed", "crop", "reorder", "repeat", "select", "reset", "copy", "pickle", "rebuild", "move"]
        more = data.draw(st.lists(st.sampled_from(names), max_size=4), label="more operations")
        for name in ["feed", *data.draw(st.permutations(names + more), label="operations"), "feed"]:
            batch = len(rows.rows) if rows.rows is not None else 0
            if name == "feed":
                size = min(data.draw(st.integers(1, 5), label="tokens"), ROOM - rows.length)
                if size == 0:
                    continue
                batch = batch or data.draw(st.integers(1, 3), label="rows")
                new = random_ids(batch, size, data.draw(st.integers(0, 99), label="seed"))
                rows.rows = [a + b for a, b in zip(rows.rows or [[]] * batch, new.tolist())]
                with torch.no_grad():
                    logits = model(new, cache=cache).logits
                    assert_close(logits, model(torch.tensor(rows.rows), use_cache=False).logits[:, -size:])
            elif name == "crop" and rows.length:
                size = data.draw(st.integers(0, rows.length - 1), label="tokens")
                cache.crop(-size)
                rows.rows = [row[: len(row) - size] for row in rows.rows]
            elif name == "reorder" and rows.length:
                order = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch), label="beams")
                cache.reorder_cache(torch.tensor(order))
                rows.rows = [rows.rows[i] for i in order]
            elif name == "repeat" and rows.length:
                repeats = data.draw(st.integers(2, 3), label="repeats")
                cache.batch_repeat_interleave(repeats)
                rows.rows = [row for row in rows.rows for _ in range(repeats)]
            elif name == "select" and rows.length:
                kept = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch), label="kept")
                cache.batch_select_indices(torch.tensor(kept))
                rows.rows = [rows.rows[i] for i in kept]
            elif name == "reset":
                cache.reset()
                # A static cache keeps its buffers, and so its number of rows.
                rows.rows = [[] for _ in rows.rows] if kind == "static" and rows.rows is not None else None
            elif name == "copy":
                left_behind.append((cache, copy.deepcopy(rows)))
                cache = copy.deepcopy(cache)
            elif name == "pickle":
                cache = pickle.loads(pickle.dumps(cache))
            elif name == "rebuild" and rows.length:
                left_behind.append((cache, copy.deepcopy(rows)))
                streams = [[t[:, :, : rows.length] for t in s] for s in (cache.latents, cache.rotated_keys)]
                cache = new_cache(kind, model.config).fill(*streams, cache.token_ids[:, : rows.length])
            elif name == "move":
                for layer in cache.layers:
                    layer.offload()
                    layer.prefetch()
            check(model, cache, rows)
        for original, its_rows in left_behind:
            check(model, original, its_rows)

    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    @pytest.mark.parametrize("operation", ["repeat", "select", "reorder", "crop"])
    def test_operations_on_an_emptied_cache(self, models, kind, operation):
        """Rows without tokens are repeated, selected and reordered; a dynamic cache then takes any number of rows."""
        model, cache = models["multiply"], new_cache(kind, models["multiply"].config)
        with torch.no_grad():
            model(random_ids(2, 6, 0), cache=cache)
            cache.crop(-6)
            if operation == "repeat":
                cache.batch_repeat_interleave(2)
            elif operation == "select":
                cache.batch_select_indices(torch.tensor([1]))
            elif operation == "reorder":
                cache.reorder_cache(torch.tensor([1, 0]))
            else:
                cache.crop(-100)
            rows = 3 if kind == "dynamic" else {"repeat": 4, "select": 1}.get(operation, 2)
            ids = Rows()
            ids.rows = random_ids(rows, 5, 1).tolist()
            new = torch.tensor(ids.rows)
            assert_close(model(new, cache=cache).logits, model(new).logits)
        check(model, cache, ids)

    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    @pytest.mark.parametrize("operation", ["crop", "reorder", "repeat", "select", "reset", "copy", "move"])
    def test_operations_on_an_unused_cache(self, models, kind, operation):
        """Every operation on a cache that was never filled does nothing, and it can be filled afterwards."""
        model, cache = models["multiply"], new_cache(kind, models["multiply"].config)
        {
            "crop": lambda: cache.crop(-1),
            "reorder": lambda: cache.reorder_cache(torch.tensor([1, 0])),
            "repeat": lambda: cache.batch_repeat_interleave(2),
            "select": lambda: cache.batch_select_indices(torch.tensor([0])),
            "reset": lambda: cache.reset(),
            "copy": lambda: copy.deepcopy(cache),
            "move": lambda: [(layer.offload(), layer.prefetch()) for layer in cache.layers],
        }[operation]()
        assert cache.memory().total == 0
        ids = random_ids(2, 5, 1)
        with torch.no_grad():
            assert_close(model(ids, cache=cache).logits, model(ids).logits)

    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_accessors_are_views_and_fill_copies(self, models, kind):
        """What the accessors gave changes with the cache; what `fill` took from them does not."""
        model, cache = models["multiply"], new_cache(kind, models["multiply"].config)
        ids, other = random_ids(2, 8, 0), random_ids(2, 3, 5)
        with torch.no_grad():
            model(ids[:, :4], cache=cache)
            model(ids[:, 4:], cache=cache)
            latents, keys = ([t[:, :, :8] for t in s] for s in (cache.latents, cache.rotated_keys))
            token_ids = cache.token_ids[:, :8]
            taken = new_cache(kind, model.config).fill(latents, keys, token_ids)
            cache.crop(-3)
            model(other, cache=cache)
        before, after = Rows(), Rows()
        before.rows = ids.tolist()
        after.rows = torch.cat([ids[:, :5], other], dim=1).tolist()
        check(model, taken, before)
        check(model, cache, after)
        assert torch.equal(token_ids, cache.token_ids[:, :8])
        for views, stream in ((latents, cache.latents), (keys, cache.rotated_keys)):
            assert all(torch.equal(view, now[:, :, :8]) for view, now in zip(views, stream, strict=True))


class TestGrowth:
    @given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8))
    @settings(max_examples=40)
    def test_blocks(self, sizes):
        """A dynamic cache holds what was appended, allocates less than a block ahead, and reports it."""
        layer = EGMLALayer(holds_token_ids=True)
        streams = [torch.empty(2, 1, 0, 3), torch.empty(2, 1, 0, 2), torch.empty(2, 0, dtype=torch.int32)]
        with torch.no_grad():
            for size in sizes:
                new = [torch.randn(2, 1, size, 3), torch.randn(2, 1, size, 2), torch.randint(0, 9, (2, size))]
                returned = layer.update(*new)
                streams = [torch.cat((a, b.to(a.dtype)), dim=d) for a, b, d in zip(streams, new, (-2, -2, -1))]
                assert torch.equal(returned[0], streams[0]) and torch.equal(returned[1], streams[1])
        for actual, expected in zip((layer.keys, layer.values, layer.token_ids), streams):
            assert torch.equal(actual, expected)
        filled = sum(stream.nbytes for stream in streams)
        assert 0 <= layer.allocated_bytes - filled < 2 * BLOCK_SIZE * (3 + 2 + 1) * 4

    def test_a_cache_of_inference_mode_continues_outside(self, models):
        """A prompt cached under `inference_mode` continues under `no_grad` and with gradients."""
        model, cache = models["multiply"], new_cache("dynamic", models["multiply"].config)
        ids = random_ids(2, 9, 0)
        with torch.inference_mode():
            model(ids[:, :4], cache=cache)
        with torch.no_grad():
            model(ids[:, 4:6], cache=cache)
        with torch.inference_mode():
            model(ids[:, 6:8], cache=cache)
        assert_close(model(ids[:, 8:], cache=cache).logits, model(ids).logits[:, 8:])
