"""The Triton kernel (fused_egmla.py): exact under triton's interpreter, and compiled for devices that are not here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_decoding import decode, make_cache, padded_batch, reference_logits, select

from modeling_egmla import fused_egmla


triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402


only_interpreted = pytest.mark.skipif(not fused_egmla.IS_INTERPRETED, reason="run by the test that interprets")
only_compiled = pytest.mark.skipif(fused_egmla.IS_INTERPRETED, reason="is about compiled kernels")


@only_compiled
@pytest.mark.timeout(900)
def test_everything_under_the_interpreter():
    """What tests of decoding ask of the other ways, the kernel does as well: each variant, mask and wrapped module."""
    tests = Path(__file__).parent
    chosen = "fused and not generation and not transient and not every_size"  # long ones, which ask nothing more
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            chosen,
            __file__,
            tests / "test_decoding.py",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=tests.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 70


@only_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
@pytest.mark.parametrize("kv_gate", ["multiply", "add", "none"])
def test_kernel_is_what_decodes(make_model, kv_gate, precomputes, dtype, monkeypatch):
    """The kernel runs where it was asked for, once a layer and step, and is as near to float64 as expanding is."""
    launches = []
    launch = fused_egmla.fused_attention
    monkeypatch.setattr(
        "modeling_egmla.decoding_egmla.fused_attention", lambda *args: launches.append(1) or launch(*args)
    )
    model, (ids, mask) = make_model(kv_gate=kv_gate).to(dtype), padded_batch()
    if precomputes:
        model.precompute_kv_gates()
    expected = reference_logits(model, ids[1, 5:])[-4:]
    errors = []
    for way in ("expanded", "fused"):
        cache = make_cache(model)
        decode(model, "expanded", cache, ids, mask, (36,))
        errors.append((decode(model, way, cache, ids, mask, (1,) * 4)[1] - expected).norm() / expected.norm())
    assert len(launches) == 4 * 2
    assert errors[1] < 1.5 * errors[0] + (1e-6 if dtype == torch.float32 else 1e-3)


@only_interpreted
def test_parts_of_a_history(make_model, monkeypatch):
    """However a history is cut into parts and blocks, its end in the middle of one, logits are the same."""
    model = make_model()
    ids = torch.randint(1, 97, (2, 151))
    mask = torch.ones_like(ids)
    mask[0, :70] = 0
    logits = []
    for programs, block in ((1, 32), (18, 32), (1000, 16), (1000, 256)):
        monkeypatch.setattr(fused_egmla, "PROGRAMS", programs)
        monkeypatch.setattr(fused_egmla, "BLOCK_TOKENS", block)
        cache = make_cache(model)
        decode(model, "expanded", cache, ids, mask, (150,))
        logits.append(decode(model, "fused", cache, ids, mask, (1,)))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=1e-5, rtol=1e-5)


@only_interpreted
def test_wide_rows(make_model):
    """Latents and gates wider than a block of channels, and heads wider than it, are summed in pieces."""
    widths = {"kv_lora_rank": 72, "kv_gate_dim": 40, "qk_nope_head_dim": 20, "v_head_dim": 36, "qk_rope_head_dim": 18}
    model, (ids, mask) = make_model(**widths), padded_batch()
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (38,))
    logits = decode(model, "fused", cache, ids, mask, (1, 1))
    torch.testing.assert_close(logits[2].double(), reference_logits(model, ids[2, 17:])[-2:], atol=1e-4, rtol=1e-5)


@only_interpreted
def test_memory_in_another_order(make_model):
    """Ids and masks that are views of something else, and weights that are transposed, are read as what they are."""
    model, (ids, mask) = make_model(), padded_batch()
    expected = reference_logits(model, ids[1, 5:])[-1:]
    model.model.layers[0].self_attn.kv_b_proj.weight.data = (
        model.model.layers[0].self_attn.kv_b_proj.weight.data.T.contiguous().T
    )
    ids = ids.T.contiguous().T
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (39,))
    prepared = mask[:, None, None].bool().transpose(0, 3).contiguous().transpose(0, 3)
    model.set_kv_decoding("fused")
    positions = (mask.cumsum(-1) - 1)[:, 39:]
    with torch.no_grad():
        logits = model(ids[:, 39:], attention_mask=prepared, position_ids=positions, cache=cache).logits
    torch.testing.assert_close(logits[1].double(), expected, atol=1e-4, rtol=1e-5)


@only_interpreted
def test_who_gives_way(make_model):
    """Several queries, tables that are not plain tensors and precisions the kernel does not know go by tiles."""
    model, (ids, mask) = make_model(), padded_batch()
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (39,))
    model.set_kv_decoding("fused")
    assert select(model, cache) == "fused"
    assert select(model, cache, 2, torch.ones(1, 1, 2, 39, dtype=torch.bool)) == "tiles"
    model.place_kv_gates("host")
    assert select(model, cache) == "tiles"
    model.place_kv_gates("device")
    assert select(model, cache) == "fused"
    model.place_kv_gates("device", "int8")
    assert select(model, cache) == "tiles"
    other = make_model().double()
    other.set_kv_decoding("fused")
    assert select(other, cache) == "tiles"


@only_compiled
def test_cpus_decode_by_tiles(make_model):
    """On a CPU, for which triton does not compile, the same tokens come by tiles."""
    model, (ids, mask) = make_model(), padded_batch()
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (39,))
    model.set_kv_decoding("fused")
    assert select(model, cache) == "tiles"


def test_triton_is_asked_for_by_name(make_model, monkeypatch):
    """Without triton, the error says what to install."""
    monkeypatch.setattr("modeling_egmla.modeling_egmla.is_triton_available", lambda: False)
    with pytest.raises(ValueError, match="pip install triton"):
        make_model().set_kv_decoding("fused")


BASE = {"N": 64, "V": 64, "C": 64, "R": 64}
LARGE = {"N": 128, "V": 128, "C": 512, "R": 64}  # DeepSeek-V3's


@only_compiled
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("gate", "gate_width"), [("multiply", 256), ("multiply", None), ("add", 256), ("none", 0)])
@pytest.mark.parametrize("widths", [BASE, LARGE], ids=["Base", "DeepSeek-V3"])
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernel_compiles_for_devices(architecture, widths, gate, gate_width, dtype):
    """Machine code comes out for A100 and H100, in every precision, and its shared memory fits smaller cards too."""
    kernel, heads = fused_egmla.attend_to_part, 12
    projected = gate_width is not None and gate != "none"
    constants = {
        **widths,
        "G": heads * (widths["N"] + widths["V"]) if gate_width is None else gate_width,
        "GATE": gate,
        "PROJECTED": projected,
        "NORMED": gate != "none",
        "MASKED": True,
        "BLOCK_T": fused_egmla.BLOCK_TOKENS,
        **{f"BLOCK_{name}": fused_egmla.block_size(widths[name]) for name in "NVR"},
        "BLOCK": fused_egmla.BLOCK_BYTES // (4 if dtype == "fp32" else 2),
    }
    if gate == "none":
        constants |= dict.fromkeys(("gates", "gate_proj", "statistics"))
    elif not projected:
        constants["gate_proj"] = None
    in_model_dtype = ("latents", "k_rot", "kv_b_proj", "gates", "gate_proj")
    in_float32 = ("q_nope", "q_rot", "statistics", "mask", "out", "total", "peak")
    types = dict.fromkeys(in_model_dtype, f"*{dtype}") | dict.fromkeys(in_float32, "*fp32") | {"token_ids": "*i32"}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": fused_egmla.NUM_WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared < 99 * 1024  # of a block on cards with the least
