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


@pytest.fixture
def launches(monkeypatch):
    """A list that has an element for each launch of the kernel."""
    found, launch = [], fused_egmla.fused_attention
    monkeypatch.setattr(
        "modeling_egmla.decoding_egmla.fused_attention", lambda *args: found.append(1) or launch(*args)
    )
    return found


@only_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("precomputes", [False, True], ids=["projected", "precomputed"])
@pytest.mark.parametrize("kv_gate", ["multiply", "add", "none"])
def test_kernel_is_what_decodes(make_model, kv_gate, precomputes, dtype, launches):
    """The kernel runs where it was asked for, once a layer and step, and is as near to float64 as expanding is."""
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
def test_masks_in_another_order(make_model, launches):
    """A prepared mask that is a view of something else is read as what it is."""
    model, (ids, mask) = make_model(), padded_batch()
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (39,))
    bias = torch.zeros(40, 1, 1, 3).masked_fill(mask.T[:, None, None] == 0, -torch.inf).permute(3, 1, 2, 0)
    model.set_kv_decoding("fused")
    positions = (mask.cumsum(-1) - 1)[:, 39:]
    with torch.no_grad():
        logits = model(ids[:, 39:], attention_mask=bias, position_ids=positions, cache=cache).logits
    assert bias.stride(-1) == 3 and len(launches) == 2
    torch.testing.assert_close(logits[1].double(), reference_logits(model, ids[1, 5:])[-1:], atol=1e-4, rtol=1e-5)


@pytest.fixture
def prefilled(make_model):
    """A model that is asked for the kernel, and a cache of 39 tokens."""
    model, (ids, mask) = make_model(), padded_batch()
    cache = make_cache(model)
    decode(model, "expanded", cache, ids, mask, (39,))
    model.set_kv_decoding("fused")
    return model, cache


@only_interpreted
def test_who_gives_way(make_model, prefilled):
    """Several queries, tables that are not plain tensors and precisions the kernel does not know go by tiles."""
    model, cache = prefilled
    assert select(model, cache) == "fused"
    assert select(model, cache, 2, torch.ones(1, 1, 2, 39, dtype=torch.bool)) == "tiles"
    model.place_kv_gates("host")
    assert select(model, cache) == "tiles"
    model.place_kv_gates("device")
    assert select(model, cache) == "fused"
    model.place_kv_gates("device", "int8")
    assert select(model, cache) == "tiles"

    model = make_model()
    model.set_kv_decoding("fused")
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    weight.data = weight.data.T.contiguous().T
    assert select(model, cache) == "tiles"
    assert select(model, cache, layer=1) == "fused"
    model.double()
    for cached in cache.layers:
        cached.keys = cached.keys.double()
    assert select(model, cache, layer=1) == "tiles"
    wide = make_model(v_head_dim=257)
    wide.set_kv_decoding("fused")
    assert select(wide, cache) == "tiles"


@only_compiled
def test_cpus_decode_by_tiles(prefilled):
    """On a CPU, for which triton does not compile, the same tokens come by tiles."""
    assert select(*prefilled) == "tiles"


@only_compiled
def test_package_loads_without_triton(tmp_path):
    """A triton that is not there, or cannot be imported on this machine, costs the kernel and nothing else."""
    (tmp_path / "triton.py").write_text("raise ImportError('not for this machine')")
    code = "from modeling_egmla import fused_egmla; print(fused_egmla.HAS_TRITON)"
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


BASE = {"N": 64, "V": 64, "C": 64, "R": 64}
LARGE = {"N": 128, "V": 128, "C": 512, "R": 64}  # DeepSeek-V3's
CONVERTED = {"N": 130, "V": 128, "C": 256, "R": 64}  # from heads of 128, with two channels for the norm


@only_compiled
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("gate", "gate_width", "normed"),
    [
        ("multiply", 256, True),
        ("multiply", None, True),
        ("multiply", None, False),
        ("add", 256, True),
        ("none", 0, False),
    ],
)
@pytest.mark.parametrize("widths", [BASE, LARGE, CONVERTED], ids=["Base", "DeepSeek-V3", "converted"])
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernel_compiles_for_devices(architecture, widths, gate, gate_width, normed, dtype):
    """Machine code comes out for A100 and H100, in every precision, and its shared memory fits smaller cards too."""
    kernel, heads = fused_egmla.attend_to_part, 12
    is_projected = gate != "none" and gate_width is not None
    constants = {
        **widths,
        "G": heads * (widths["N"] + widths["V"]) if gate_width is None else gate_width,
        "GATE": gate,
        "PROJECTED": is_projected,
        "NORMED": normed,
        "MASKED": normed,
        "BLOCK_T": fused_egmla.BLOCK_TOKENS,
        **{f"BLOCK_{name}": fused_egmla.block_size(widths[name]) for name in "NVR"},
        "BLOCK": fused_egmla.BLOCK_BYTES // (4 if dtype == "fp32" else 2),
    }
    absent = {"statistics": normed, "mask": normed, "gates": gate != "none", "gate_proj": is_projected}
    constants |= {name: None for name, is_there in absent.items() if not is_there}
    types = dict.fromkeys(("latents", "k_rot", "kv_b_proj", "gates", "gate_proj"), f"*{dtype}")
    types |= dict.fromkeys(("q_nope", "q_rot", "statistics", "mask", "out", "total", "peak"), "*fp32")
    types |= {"token_ids": "*i32"} | dict.fromkeys(constants, "constexpr")
    position = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    # What a launch finds aligned: all memory but the last two results, and the strides of whole rows.
    aligned = [name for name, type in types.items() if type.startswith("*") and name not in ("total", "peak")]
    aligned += ["latents_stride_b", "latents_stride_t", "k_rot_stride_b", "k_rot_stride_t"]
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in kernel.arg_names},
        {position[name]: value for name, value in constants.items()},
        {position[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": fused_egmla.NUM_WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared < 99 * 1024  # of a block on cards with the least
