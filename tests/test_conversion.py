"""Checkpoints in and out: same logits, round trips to the bit, and no fault that passes in silence."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import typer
from conftest import TINY, scramble, tiny_model
from safetensors.torch import load_file, save_file
from tiny_export import TOKENS, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV2Config,
    DeepseekV3Config,
    GenerationConfig,
    MiniCPM3Config,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from modeling_egmla import EGMLAConfig, EGMLAForCausalLM
from modeling_egmla.commands.common import Commands
from modeling_egmla.commands.convert import convert as convert_command
from modeling_egmla.conversion.calibration import read_windows, split_windows
from modeling_egmla.conversion.checkpoint import Checkpoint, ConversionError, Fp8Blocks
from modeling_egmla.conversion.converter import CheckFailed, convert, plan_conversion
from modeling_egmla.conversion.gating import near_isometry
from modeling_egmla.conversion.layouts import LAYOUTS, get_layout
from modeling_egmla.plan import count_parameters


SHAPE = {
    **{key: value for key, value in TINY.items() if not key.startswith("kv_gate")},
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "eos_token_id": 2,
}
DENSE = {"first_k_dense_replace": SHAPE["num_hidden_layers"]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}
LIBRARY_CONFIGS = {
    "deepseek_v3": DeepseekV3Config(**SHAPE, **DENSE, rope_parameters=YARN, attention_bias=True),
    "deepseek_v3-halves-tied": DeepseekV3Config(
        **{**SHAPE, "q_lora_rank": None}, **DENSE, rope_interleave=False, tie_word_embeddings=True
    ),
    "deepseek_v2": DeepseekV2Config(**SHAPE, **DENSE),
    "minicpm3": MiniCPM3Config(**SHAPE, dim_model_base=16, scale_emb=12, scale_depth=1.4, rope_parameters=LONGROPE),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Folders of the library's own models, by name."""
    folders = {}
    for name, config in LIBRARY_CONFIGS.items():
        folders[name] = tmp_path_factory.mktemp("sources") / name
        scramble(AutoModelForCausalLM.from_config(config)).save_pretrained(folders[name], max_shard_size="20KB")
    return folders


@torch.no_grad()
def logits(folder: Path, length: int = 48) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(length)[None] * 7 % model.config.vocab_size
    return model(ids, use_cache=False).logits


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]), name


def single_file(folder: Path, change) -> Path:
    """The folder's weights in one file, after `change` did something to them."""
    content = tensors(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    change(content)
    save_file(content, folder / "model.safetensors")
    return folder


@pytest.fixture
def copied(sources, tmp_path):
    """A copy of a source that a test may spoil."""
    return lambda name: Path(shutil.copytree(sources[name], tmp_path / f"copy of {name}"))


# What comes out computes the same.


@pytest.mark.parametrize("name", LIBRARY_CONFIGS)
def test_library_models_keep_their_logits(sources, tmp_path, name):
    """Logits equal the library's model, also beyond the length at which long RoPE changes its factors."""
    report = convert(sources[name], tmp_path / "out", max_shard_size="20KB")
    torch.testing.assert_close(logits(tmp_path / "out"), logits(sources[name]), atol=2e-5, rtol=0)
    assert report.comparison.passed and report.comparison.relative < 1e-5
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "egmla"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_minicpm3_scales_go_into_tensors(sources, tmp_path):
    """Embedding, residual and head scales are folded, so that the embedding is no longer tied, and are reported."""
    report = convert(sources["minicpm3"], tmp_path / "out")
    before, after = tensors(sources["minicpm3"]), tensors(tmp_path / "out")
    assert "lm_head.weight" not in before
    torch.testing.assert_close(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"] * 12)
    torch.testing.assert_close(after["lm_head.weight"], before["model.embed_tokens.weight"] / 2)
    assert not EGMLAConfig.from_pretrained(tmp_path / "out").tie_word_embeddings
    assert len(report.inventory.scaled) == 4
    planned = plan_conversion(sources["minicpm3"]).config
    assert count_parameters(planned) == count_parameters(EGMLAConfig.from_pretrained(tmp_path / "out"))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3-halves-tied"])
def test_deepseek_v3_round_trip_is_exact(sources, tmp_path, name):
    """DeepSeek-V3 to EG-MLA and back gives the same tensors bit for bit, and the same settings."""
    convert(sources[name], tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "back", to="deepseek_v3")
    assert_same_bits(tensors(sources[name]), tensors(tmp_path / "back"))
    before, after = (DeepseekV3Config.from_pretrained(folder) for folder in (sources[name], tmp_path / "back"))
    for key in LAYOUTS["deepseek_v3"].config.values():
        assert getattr(before, key) == getattr(after, key), key
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "back")).__name__ == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3-halves-tied"])
def test_original_layout_round_trip(sources, tmp_path, name):
    """
    DeepSeek's own layout and back: the same tensors bit for bit where rotary channels and head need no change; the
    check runs an independent implementation of that layout.
    """
    convert(sources[name], tmp_path / "in")
    report = convert(tmp_path / "in", tmp_path / "original", to="deepseek")
    assert report.comparison.relative < 1e-5
    names = set(tensors(tmp_path / "original"))
    assert {"embed.weight", "layers.1.attn.wkv_a.weight", "layers.0.ffn.w3.weight", "head.weight"} <= names
    assert convert(tmp_path / "original", tmp_path / "back").comparison.relative < 1e-5
    torch.testing.assert_close(logits(tmp_path / "back"), logits(sources[name]), atol=2e-5, rtol=0)
    if name == "deepseek_v2":
        assert_same_bits(tensors(tmp_path / "in"), tensors(tmp_path / "back"))


def test_original_layout_with_yarn(tmp_path):
    """Positions stretched beyond `original_seq_len`, with DeepSeek's defaults for what its config does not say."""
    config = EGMLAConfig(**{**TINY, "rope_parameters": YARN, "rope_interleave": True, "kv_gate": "none"})
    scramble(EGMLAForCausalLM(config)).save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "original", to="deepseek")
    written = json.loads((tmp_path / "original/config.json").read_text())
    assert (written["dim"], written["rope_factor"], written["q_lora_rank"]) == (32, 4.0, 0)
    assert convert(tmp_path / "original", tmp_path / "back").comparison.relative < 1e-5


def test_rotary_layouts_are_equal(sources, tmp_path):
    """Pairs to halves changes no logit at all, and back no bit of a tensor."""
    convert(sources["deepseek_v3"], tmp_path / "pairs")
    report = convert(tmp_path / "pairs", tmp_path / "halves", rope_layout="halves")
    assert report.comparison.largest == 0
    assert not EGMLAConfig.from_pretrained(tmp_path / "halves").rope_interleave
    convert(tmp_path / "halves", tmp_path / "again", rope_layout="pairs")
    assert_same_bits(tensors(tmp_path / "pairs"), tensors(tmp_path / "again"))


def test_yaml_layout_round_trip(tmp_path):
    """A gated model goes to a user's own names and back, bit for bit, by one table."""
    model = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model.save_pretrained(tmp_path / "model")
    example = Path(sys.modules["modeling_egmla.conversion"].__file__).parent / "paper_listing.yaml"
    text = example.read_text().replace("checkpoint_key: model\n", "")
    (tmp_path / "mine.yaml").write_text(text)
    convert(tmp_path / "model", tmp_path / "theirs", to=str(tmp_path / "mine.yaml"))
    assert "transformer.h.1.attn.gate_ln.bias" in tensors(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs/config.json").read_text())["emb_dim"] == TINY["kv_gate_dim"]

    with pytest.raises(ConversionError, match="--reference-logits"):
        convert(tmp_path / "theirs", tmp_path / "back", layout=str(tmp_path / "mine.yaml"))
    ids = torch.arange(20)[None]
    save_file({"input_ids": ids, "logits": model(ids).logits.detach()}, tmp_path / "reference.safetensors")
    report = convert(
        tmp_path / "theirs",
        tmp_path / "back",
        layout=str(tmp_path / "mine.yaml"),
        reference_logits=tmp_path / "reference.safetensors",
    )
    assert report.comparison.largest == 0
    assert_same_bits(tensors(tmp_path / "model"), tensors(tmp_path / "back"))


def test_yaml_layout_named_as_a_built_in_one(tmp_path):
    """A file is called by its whole name: deepseek_v3.yaml is not checked with the library's DeepSeek-V3."""
    example = Path(sys.modules["modeling_egmla.conversion"].__file__).parent / "paper_listing.yaml"
    path = Path(shutil.copyfile(example, tmp_path / "deepseek_v3.yaml"))
    assert get_layout(str(path)).name == "deepseek_v3.yaml"
    tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}).save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "theirs", to=str(path))
    assert json.loads((tmp_path / "theirs/config.json").read_text())["emb_dim"] == TINY["kv_gate_dim"]


def test_layouts_are_one_to_one():
    """No two of our tensors have one place in a layout."""
    for layout in LAYOUTS.values():
        theirs = {layout.theirs(ours.replace("{n}", "11")) for ours in layout.tensors}
        assert len(theirs) == len(layout.tensors)


def test_bin_shards(sources, copied, tmp_path):
    """PyTorch files, in shards and with the nested entry that training code writes, are read as safetensors are."""
    folder = copied("deepseek_v2")
    index = (folder / "model.safetensors.index.json").read_text()
    index = index.replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
    for path in folder.glob("*.safetensors"):
        torch.save(load_file(path), folder / path.name.replace("model", "pytorch_model").replace("safetensors", "bin"))
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(index)
    assert convert(folder, tmp_path / "out").comparison.passed
    assert_same_bits(tensors(sources["deepseek_v2"]), tensors(tmp_path / "out"))

    nested = tmp_path / "nested"
    nested.mkdir()
    torch.save({"model": tensors(tmp_path / "out"), "step": 5}, nested / "last.pt")
    assert Checkpoint(nested, key="model").tensors.keys() == tensors(tmp_path / "out").keys()
    with pytest.raises(ConversionError, match="checkpoint_key"):
        Checkpoint(nested)
    torch.save(tensors(tmp_path / "out"), nested / "last.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(Checkpoint(nested).read("model.norm.weight"), tensors(tmp_path / "out")["model.norm.weight"])
    (nested / "last.pt").write_bytes((nested / "last.pt").read_bytes()[:-5000])
    with pytest.raises(ConversionError, match="cut short or damaged"):
        Checkpoint(nested)


def test_dtype(sources, tmp_path):
    """Tensors are written in the dtype that was asked for; by default in the source's, so that nothing is rounded."""
    convert(sources["deepseek_v2"], tmp_path / "narrow", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in tensors(tmp_path / "narrow").values()} == {torch.bfloat16}
    assert EGMLAForCausalLM.from_pretrained(tmp_path / "narrow", dtype="auto").dtype == torch.bfloat16
    assert convert(tmp_path / "narrow", tmp_path / "same", to="deepseek_v2").comparison.relative < 1e-5
    convert(sources["deepseek_v2"], tmp_path / "half", dtype=torch.float16)
    assert convert(tmp_path / "half", tmp_path / "other half", dtype=torch.bfloat16).comparison.relative > 1e-4
    assert_same_bits(tensors(tmp_path / "narrow"), tensors(tmp_path / "same"))


@pytest.mark.parametrize("block", [2, 16])
def test_fp8_blocks_are_dequantised(copied, tmp_path, block):
    """
    DeepSeek's 8-bit weights with block scales become what the library makes of them where its blocks divide a weight
    (2), and what they stand for where they do not (16).
    """
    folder, stored = copied("deepseek_v2"), {}
    blocks = Fp8Blocks(block, block, "weight_scale_inv", torch.float32)

    def quantise(content):
        for name in [name for name in content if "_proj" in name]:
            weight = content[name]
            scale = 0.01 + torch.rand(*(-(-size // block) for size in weight.shape))
            wide = torch.stack([scale[r // block, torch.arange(weight.shape[1]) // block] for r in range(len(weight))])
            content[name] = (weight / wide).to(torch.float8_e4m3fn)
            content[blocks.scale_name(name)] = scale
            stored[name] = content[name].float() * wide

    single_file(folder, quantise)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    report = convert(folder, tmp_path / "out", dtype=torch.float32)
    assert len(report.inventory.dequantised) == len(stored) == 16 and report.comparison.relative < 1e-5
    for name, weight in stored.items():
        torch.testing.assert_close(tensors(tmp_path / "out")[name], weight, atol=0, rtol=1e-6)
    convert(folder, tmp_path / "half", check=False)
    assert tensors(tmp_path / "half")["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    if block == 2:
        torch.testing.assert_close(logits(tmp_path / "out"), logits(folder), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        (None, "quantization_config"),
    ],
)
def test_other_quantised_checkpoints_are_refused(copied, tmp_path, settings, message):
    """Quantisation that is not DeepSeek's, or that the config does not tell of, is named."""

    def quantise(content):
        content["lm_head.weight"] = content["lm_head.weight"].to(torch.float8_e4m3fn)

    folder = single_file(copied("deepseek_v2"), quantise)
    config = json.loads((folder / "config.json").read_text())
    if settings:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=message):
        convert(folder, tmp_path / "out")


def test_files_beside_the_weights_are_carried(copied, tmp_path):
    """Tokenizer, chat template and generation config come along; what stays behind is listed."""
    folder = copied("deepseek_v2")
    save_tokenizer(folder, chat_template="{{ messages[0].content }}")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "do_sample": True}))
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoint-10").mkdir()
    report = convert(folder, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages[0].content }}"
    assert EGMLAForCausalLM.from_pretrained(tmp_path / "out").generation_config.temperature == 0.3
    assert report.left == ["checkpoint-10/", "notes.txt"]


@pytest.mark.parametrize("to", ["egmla", "deepseek_v2"])
def test_ids_without_token_are_not_generated(copied, tmp_path, to):
    """A converted model with a padded vocabulary never samples an id that no token stands for, as an exported one."""
    folder = copied("deepseek_v2")
    tiny_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [7], "temperature": 0.5}))
    convert(folder, tmp_path / "out", to=to)
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.suppress_tokens == [7, *range(TOKENS, TINY["vocab_size"])]
    assert (generation.temperature, generation.bos_token_id, generation.pad_token_id) == (0.5, 1, 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = torch.arange(2, 10).view(1, -1)
    new = model.generate(prompt, max_new_tokens=40, do_sample=True, temperature=5.0)[:, 8:]
    assert (new < TOKENS).all() and (new != 7).all()


def test_tokenizer_with_code_of_its_own_is_not_run(copied, tmp_path):
    """Code that a tokenizer brings along is neither run nor taken over, and the report says that it is needed."""
    folder, proof = copied("deepseek_v2"), tmp_path / "it ran"
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(proof)!r})\nclass Own: pass\n")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    report = convert(folder, tmp_path / "out")
    assert any("does not load without code of its own" in note for note in report.notes)
    assert report.left == ["own.py"] and not proof.exists()


def test_calibration_begins_as_the_tokenizer_does(tmp_path):
    """Windows of a tokenizer that puts a bos in front of texts have it, each in front of its own piece of the text."""
    tokenizer = tiny_tokenizer(97)
    tokenizer.save_pretrained(tmp_path / "without")
    tokenizer.add_special_tokens({"eos_token": "!"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "with")
    (tmp_path / "text.txt").write_text("PEACE AND TRADE " * 20)
    config = EGMLAConfig(**{**TINY, "max_position_embeddings": 40})
    windows = {name: read_windows(tmp_path / "text.txt", 300, tmp_path / name, config) for name in ("without", "with")}
    text = windows["without"].flatten()
    assert all(len(of) > 4 and of.shape[1] == 40 for of in windows.values())
    assert (windows["with"][:, 0] == 1).all() and (text != 1).all()
    begun = windows["with"][:, 1:].flatten()[: len(text)]
    assert torch.equal(begun, text[: len(begun)])


def save_tokenizer(folder: Path, **settings) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TINY["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = settings.get("chat_template")
    tokenizer.save_pretrained(folder)


# MLA to EG-MLA.


@pytest.mark.parametrize("gate", ["multiply", "add"])
def test_gate_without_norm_starts_exactly(sources, tmp_path, gate):
    """A neutral gate without LayerNorm changes no logit, and its tables can learn (their gradients are not zero)."""
    report = convert(sources["deepseek_v3"], tmp_path / "out", gate=gate, gate_norm="none", gate_dim=6)
    assert report.new == tuple(f"model.layers.{{n}}.self_attn.kv_gate_{part}.weight" for part in ("embed", "proj"))
    torch.testing.assert_close(logits(tmp_path / "out"), logits(sources["deepseek_v3"]), atol=2e-5, rtol=0)
    model = EGMLAForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].self_attn.kv_gate_embed.weight.grad[:11, 1:].abs().min() > 0


@pytest.mark.parametrize("groups", [1, 2])
def test_gate_with_norm_is_exact_where_an_isometry_exists(tmp_path, groups):
    """A latent no wider than the channels of a head: the change of basis makes the LayerNorm neutral."""
    model = tiny_model(kv_gate="none", kv_lora_rank=8, layer_group_size=groups)
    # The epsilons are what is left of the difference.
    model.save_pretrained(tmp_path / "mla")
    report = convert(tmp_path / "mla", tmp_path / "out", gate="multiply", gate_dim=12)
    assert report.comparison.relative < 1e-4
    assert len(report.new) == 4


def test_gate_with_norm_comes_nearer_with_each_stage(tmp_path):
    """Where no isometry exists, the change of basis brings the model nearer to its source, and so does the fit."""
    tiny_model(kv_gate="none").save_pretrained(tmp_path / "mla")
    calibration = torch.randint(0, 97, (16, 64), generator=torch.Generator().manual_seed(1))
    report = convert(tmp_path / "mla", tmp_path / "out", gate="multiply", gate_dim=12, calibration=calibration)
    source, naive, basis, fitted = (score.divergence for score in report.stages.values())
    assert source == 0 and basis < 0.2 * naive and fitted < 1.2 * basis
    assert list(report.stages) == [
        "source",
        "neutral gate, LayerNorm as it is initialised",
        "change of basis",
        "LayerNorm fitted",
    ]


def test_rise_is_that_of_what_is_written(tmp_path):
    """A fit that text too short made worse is neither written, nor the last stage, nor what --max-rise judges."""
    tiny_model(kv_gate="none").save_pretrained(tmp_path / "mla")
    calibration = torch.randint(0, 97, (3, 12), generator=torch.Generator().manual_seed(0))
    settings = {"gate": "multiply", "gate_dim": 12, "calibration": calibration}
    report = convert(tmp_path / "mla", tmp_path / "out", **settings)
    source, *_, written = (score.loss for score in report.stages.values())
    assert list(report.stages)[-1] == "change of basis" and written > source
    assert any("was no better on held-out text and was not used" in note for note in report.notes)
    convert(tmp_path / "mla", tmp_path / "passes", max_rise=written - source + 1e-6, **settings)
    with pytest.raises(CheckFailed, match="above --max-rise"):
        convert(tmp_path / "mla", tmp_path / "fails", max_rise=written - source - 1e-6, **settings)


def test_calibration_text_goes_through_the_tokenizer(tmp_path):
    """`calibration` takes a text file and the source's own tokenizer."""
    tiny_model(kv_gate="none").save_pretrained(tmp_path / "mla")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * i % 97}" for i in range(1200)))
    settings = {"gate": "multiply", "gate_dim": 6, "calibration": tmp_path / "text.txt", "calibration_tokens": 1024}
    with pytest.raises(ConversionError, match="tokenizer"):
        convert(tmp_path / "mla", tmp_path / "out", **settings)
    save_tokenizer(tmp_path / "mla")
    assert len(convert(tmp_path / "mla", tmp_path / "out", **settings).stages) == 4


def test_near_isometry_is_undone_exactly():
    """The bases can be inverted well, the channels sum to zero, and singular values come together."""
    torch.manual_seed(0)
    heads, nope, value, rank = 3, 8, 10, 16
    kv_b, weight = torch.randn(heads * (nope + value), rank), 0.5 + torch.rand(rank)
    basis = near_isometry(kv_b, weight, heads, nope)
    assert torch.linalg.cond(basis.keys).max() < 100 and torch.linalg.cond(basis.values).max() < 100
    up = (kv_b.double() * weight).unflatten(0, (heads, -1))
    after = torch.cat([basis.keys @ up[:, :nope], basis.values @ up[:, nope:]], dim=1).flatten(0, 1)
    assert after.sum(0).abs().max() < 1e-9
    assert basis.spread_after < 0.5 * basis.spread_before
    torch.testing.assert_close(after.square().sum(), torch.tensor(float(after.shape[0])).double())


# Faults. Each is named, and leaves nothing under the target's name.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("model.layers.1.mlp.up_proj.weight"), r"missing: model\.layers\.1\.mlp\.up_proj"),
        (
            lambda c: c.update({"model.layers.2.eh_proj.weight": torch.ones(2)}),
            r"unexpected: model\.layers\.2\.eh_proj",
        ),
        (lambda c: c.update({"model.norm.weight": torch.ones(31)}), r"model\.norm\.weight has shape \(31,\)"),
        (lambda c: c.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "dtype int8"),
    ],
)
def test_tensors_that_do_not_fit(copied, tmp_path, change, message):
    """Missing, unexpected, misshapen and quantised tensors are refused by name."""
    folder = single_file(copied("deepseek_v2"), change)
    with pytest.raises(ConversionError, match=message):
        convert(folder, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_unexpected_tensors_can_be_dropped(copied, tmp_path):
    """`drop` leaves out what its patterns name, and the report says so; recomputed tensors need no pattern."""
    extra = {
        "model.layers.2.eh_proj.weight": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    folder = single_file(copied("deepseek_v2"), lambda content: content.update(extra))
    report = convert(folder, tmp_path / "out", drop=["model.layers.2.*"])
    assert report.inventory.dropped == ("model.layers.2.eh_proj.weight",)
    assert report.inventory.derived == ("model.layers.0.self_attn.rotary_emb.inv_freq",)


def test_values_that_do_not_fit_a_dtype(copied, tmp_path):
    """A value that overflows in the dtype that was asked for, or is no number, is named also without the check."""
    folder = single_file(copied("deepseek_v2"), lambda content: content["model.norm.weight"].fill_(1e6))
    with pytest.raises(ConversionError, match=r"model\.norm\.weight holds values that are not finite in float16"):
        convert(folder, tmp_path / "out", dtype=torch.float16, check=False)
    single_file(folder, lambda content: content["model.norm.weight"][3:4].fill_(torch.nan))
    for dtype in (None, torch.bfloat16):
        with pytest.raises(ConversionError, match="not finite"):
            convert(folder, tmp_path / "out", dtype=dtype, check=False)


def test_settings_as_older_files_have_them(copied, tmp_path):
    """MiniCPM3's published config.json has `rope_scaling` with `type`, and no `v_head_dim`."""
    folder = copied("minicpm3")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope.pop("rope_type")}}
    (folder / "config.json").write_text(json.dumps(config))
    convert(folder, tmp_path / "out")
    assert EGMLAConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_type"] == "longrope"
    torch.testing.assert_close(logits(tmp_path / "out"), logits(folder), atol=2e-5, rtol=0)


def test_tied_head_in_the_file(copied, tmp_path):
    """A stored head that equals the embedding it is tied to is left out and listed; one that differs is refused."""
    name = "deepseek_v3-halves-tied"

    def add_head(content):
        content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()

    folder = single_file(copied(name), add_head)
    assert convert(folder, tmp_path / "out").inventory.duplicates == ("lm_head.weight",)
    single_file(folder, lambda content: content["lm_head.weight"].add_(1))
    with pytest.raises(ConversionError, match=r"lm_head\.weight differs"):
        convert(folder, tmp_path / "out2")


def test_an_index_that_was_left_behind(make_model, tmp_path):
    """A model that was saved in shards and then in one file is that of the file, as the library loads it."""
    make_model().save_pretrained(tmp_path / "in", max_shard_size="10KB")
    model = make_model(kv_gate="none")
    model.save_pretrained(tmp_path / "in")
    assert (tmp_path / "in" / "model.safetensors.index.json").is_file()
    convert(tmp_path / "in", tmp_path / "out")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(written.lm_head.weight, model.lm_head.weight)


def test_damaged_files(copied, tmp_path):
    """A shard that is cut short, missing, listed outside of the folder, or in two files at once is refused."""
    folder = copied("deepseek_v2")
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConversionError, match="cut short or damaged"):
        convert(folder, tmp_path / "out")
    shard.unlink()
    with pytest.raises(ConversionError, match="is missing, which"):
        convert(folder, tmp_path / "out")
    shard.write_bytes(whole)

    index = folder / "model.safetensors.index.json"
    content = index.read_text()
    index.write_text(content.replace(shard.name, f"../{shard.name}"))
    with pytest.raises(ConversionError, match="outside of its folder"):
        convert(folder, tmp_path / "out")
    other = sorted(folder.glob("*.safetensors"))[0]
    index.write_text(content.replace(shard.name, other.name, 1))
    with pytest.raises(ConversionError, match="The index says"):
        convert(folder, tmp_path / "out")
    index.write_text(content)
    other.write_bytes(whole)
    with pytest.raises(ConversionError, match="lies in"):
        convert(folder, tmp_path / "out")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ConversionError, match="holds no weights"):
        convert(folder, tmp_path / "out")
    torch.save(torch.load, folder / "pytorch_model.bin")
    content = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConversionError, match="cut short or damaged"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_hostile_pickle_runs_nothing(copied, tmp_path):
    """A .bin that would run code when unpickled is refused, and its code is not run."""
    folder, proof = copied("deepseek_v2"), tmp_path / "it ran"
    for path in folder.glob("*.safetensors*"):
        path.unlink()

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(proof),)

    for write in (torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))):
        write({"model.norm.weight": Hostile()}, folder / "pytorch_model.bin")
        with pytest.raises(ConversionError, match="Nothing was run"):
            convert(folder, tmp_path / "out")
        assert not proof.exists()
    (folder / "pytorch_model.bin").write_bytes(b"no weights at all")
    with pytest.raises(ConversionError, match=r"pytorch_model\.bin"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_k_dense_replace": 1}, "first_k_dense_replace"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"model_type": "gpt2"}, "model_type"),
        ({"eos_token_id": 97}, "eos_token_id"),
        ({"attn_implementation": "someone/kernel"}, "run it unasked"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}}, "factor"),
    ],
)
def test_settings_that_cannot_be_expressed(copied, tmp_path, change, message):
    """What EG-MLA does not have (experts, grouped heads, ...) is refused by the field's name."""
    folder = copied("deepseek_v3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConversionError, match=message):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "to", "message"),
    [
        ({}, "deepseek_v3", "`kv_gate`"),
        ({"kv_gate": "none", "layer_group_size": 2}, "deepseek_v3", "`layer_group_size`"),
        ({"kv_gate": "none", "attention_bias": True, "q_lora_rank": 8}, "deepseek", "`attention_bias`"),
        ({"kv_gate": "none", "rms_norm_eps": 1e-5}, "deepseek", "`rms_norm_eps`"),
        ({"kv_gate": "none", "rope_parameters": {**YARN, "mscale": 1.0}}, "deepseek", "mscale_all_dim"),
        ({"kv_gate": "none"}, "minicpm3", "can be read, not written"),
        ({"kv_gate": "none"}, "llama", "can be read, not written"),
        ({"kv_gate": "none"}, "gpt2", "no layout 'gpt2'"),
    ],
)
def test_targets_that_cannot_hold_a_model(tmp_path, settings, to, message):
    """A layout refuses what it has no place for, by name, before it writes anything."""
    tiny_model(**settings).save_pretrained(tmp_path / "model")
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "model", tmp_path / "out", to=to)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensors: [", "is not YAML"),
        ("config: {}", "needs an entry `tensors`"),
        ("tensors: {}\nweights: {}", "unknown entries: weights"),
        ("tensors: {model.head.weight: head}", r"model\.head\.weight"),
        ("tensors: {model.norm.weight: 3}", "must give a name"),
        ("tensors: {model.norm.weight: a, lm_head.weight: a}", "to more than one tensor"),
        ("tensors: {model.norm.weight: 'a.{n}'}", "must both have"),
        ("tensors: {model.norm.weight: a}\nconfig: {width: w}", "width"),
    ],
)
def test_layout_files_with_mistakes(tmp_path, text, message):
    """A mistake in a layout file is named."""
    (tmp_path / "layout.yaml").write_text(text)
    with pytest.raises(ConversionError, match=message):
        get_layout(str(tmp_path / "layout.yaml"))


def test_difference_fails_the_check(sources, tmp_path, monkeypatch):
    """A converted model that computes something else is not published."""
    from modeling_egmla.conversion import converter

    def wrong(*args):
        weights, inventory = source_weights(*args)
        name = "model.layers.0.mlp.up_proj.weight"
        read = weights.read
        return type(weights)(weights.config, lambda n: read(n) * (1.01 if n == name else 1), weights.dtype), inventory

    source_weights = converter.source_weights
    monkeypatch.setattr(converter, "source_weights", wrong)
    with pytest.raises(CheckFailed, match="does not agree"):
        convert(sources["deepseek_v2"], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_existing_target_is_replaced_whole_or_not_at_all(sources, tmp_path):
    """Without `overwrite` a target is left alone; with it, an interruption leaves the old folder as it was."""
    target = tmp_path / "out"
    convert(sources["deepseek_v2"], target, check=False)
    old = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(FileExistsError, match="--overwrite"):
        convert(sources["deepseek_v3"], target)

    def interrupt(done, total):
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(sources["deepseek_v3"], target, overwrite=True, progress=interrupt)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == old
    with pytest.raises(KeyboardInterrupt):
        convert(sources["deepseek_v3"], tmp_path / "new", progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

    (target / "log.jsonl").touch()
    with pytest.raises(FileExistsError, match="holds a training run"):
        convert(sources["deepseek_v3"], target, overwrite=True)
    (target / "log.jsonl").unlink()

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("keep")
    for folder, message in ((tmp_path / "mine", "no model"), (sources["deepseek_v3"].parent, "no model")):
        with pytest.raises(FileExistsError, match=message):
            convert(sources["deepseek_v3"], folder, overwrite=True)
    with pytest.raises(ConversionError, match="is the target"):
        convert(sources["deepseek_v3"], sources["deepseek_v3"], overwrite=True)
    (tmp_path / "mine/letter.txt").unlink()
    (tmp_path / "mine").rmdir()

    convert(sources["deepseek_v3"], target, overwrite=True)
    torch.testing.assert_close(logits(target), logits(sources["deepseek_v3"]), atol=2e-5, rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


PROLOGUE = """
    import json, os, pathlib, re, signal, sys
    import torch
    torch.set_num_threads(1)
    from modeling_egmla.conversion.converter import convert
    source, target = sys.argv[1:3]
"""


def run_python(code: str, *arguments) -> subprocess.CompletedProcess:
    code = textwrap.dedent(PROLOGUE) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


def test_killed_conversion_leaves_no_target(sources, tmp_path):
    """A process that is killed leaves nothing under the target's name, and the next run tells of what it left."""
    result = run_python(
        """
        def kill(done, total):
            if done == total // 2:
                os.kill(os.getpid(), signal.SIGKILL)
        convert(source, target, check=False, progress=kill)
        """,
        sources["deepseek_v2"],
        tmp_path / "out",
    )
    assert result.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    report = convert(sources["deepseek_v2"], tmp_path / "out", check=False)
    assert any("a killed run left" in note for note in report.notes)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells and forgets a peak")
@pytest.mark.parametrize(
    ("dtype", "options", "largest_tensors"),
    [
        (torch.float32, {"to": "deepseek_v3", "rope_layout": "halves"}, 2),
        (torch.bfloat16, {"gate": "multiply", "gate_dim": 8}, 6),
    ],
    ids=["names", "gates"],
)
def test_memory_stays_near_the_largest_tensor(tmp_path, dtype, options, largest_tensors):
    """
    A model of four shards is converted in less than one shard of memory: one tensor at a time, below twice the largest
    where nothing is computed, and below six times where 16-bit tensors are computed in float32.
    """
    shape = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 2048}
    model = EGMLAForCausalLM(EGMLAConfig(**{**TINY, **shape, "kv_gate": "none", "rope_interleave": True})).to(dtype)
    size, largest = sum(p.nbytes for p in model.parameters()), max(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path / "in", max_shard_size=size // 4)
    result = run_python(
        """
        def resident(kind):
            return int(re.search(rf"{kind}:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
        options = {"check": False, "max_shard_size": "30MB", **json.loads(sys.argv[3])}
        convert(source, target + "-first", **options)  # what the first use of torch and of the library takes
        peaks = []
        for attempt in range(3):  # what else is resident for a moment only adds, so the least is the conversion's own
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of imports, is forgotten
            before = resident("VmRSS")
            convert(source, f"{target}-{attempt}", **options)
            peaks.append(resident("VmHWM") - before)
        print(min(peaks))
        """,
        tmp_path / "in",
        tmp_path / "out",
        json.dumps(options),
    )
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "in").glob("*.safetensors"))) >= 4
    assert int(result.stdout) < largest_tensors * largest < size / 2, int(result.stdout) / largest
    assert int(result.stdout) < size / 4, int(result.stdout) / size


# The command.


def run_command(*arguments) -> tuple[int, str]:
    app = typer.Typer(cls=Commands)
    app.command()(convert_command)
    app.command()(lambda: None)  # with one command alone, its name would not be given
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    return result.exit_code, result.output


def test_command(sources, copied, tmp_path):
    """Exit status 0 with a report, 1 for what cannot be converted or differs, 2 for wrong usage."""
    code, output = run_command(sources["minicpm3"], tmp_path / "out")
    assert code == 0 and "minicpm3 to egmla" in output and "relative difference" in output
    code, output = run_command(sources["minicpm3"], tmp_path / "out")
    assert code == 1 and "--overwrite" in output
    code, output = run_command(sources["minicpm3"], tmp_path / "out", "--overwrite", "--threshold", "1e-12")
    assert code == 1 and "does not agree" in output
    code, output = run_command(sources["minicpm3"], tmp_path / "out", "--overwrite", "--no-check")
    assert code == 0 and "not compared" in output
    single_file(folder := copied("deepseek_v2"), lambda content: content.pop("model.norm.weight"))
    code, output = run_command(folder, tmp_path / "other")
    assert code == 1 and "missing: model.norm.weight" in output and not (tmp_path / "other").exists()
    code, output = run_command(tmp_path / "nothing", tmp_path / "other")
    assert code == 1 and "neither a folder nor" in output and not (tmp_path / "other").exists()
    code, output = run_command(folder, tmp_path / "other", "--revision", "v1")
    assert code == 1 and "no revision v1" in output
    assert run_command(folder, tmp_path / "other", "--gate", "sigmoid")[0] == 2
    assert run_command("--help")[0] == 0


def test_gate_on_low_rank_queries(tmp_path):
    """A change of the keys' basis is undone in low-rank queries too: with a narrow latent the start is exact."""
    tiny_model(kv_gate="none", kv_lora_rank=8, q_lora_rank=14).save_pretrained(tmp_path / "mla")
    report = convert(tmp_path / "mla", tmp_path / "out", gate="multiply", gate_dim=12)
    assert report.comparison.relative < 1e-4


def test_held_out_windows_are_not_fitted_on():
    """The last quarter of the calibration text measures, and nothing else sees it."""
    fit, held_out = split_windows(torch.arange(16)[:, None].expand(16, 4))
    assert fit[:, 0].tolist() == list(range(12))
    assert held_out[:, 0].tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rope-dim", "2"], "--rope-dim and --rotary go with --latent"),
        (["--rotary", "heads"], "--rope-dim and --rotary go with --latent"),
        (["--gate-dim", "7"], "--gate-dim and --gate-norm go with --gate"),
        (["--gate-norm", "none"], "--gate-dim and --gate-norm go with --gate"),
        (["--calibration-tokens", "600"], "goes with --calibration"),
        (["--threshold", "1", "--no-check"], "give one of them"),
        (["--threshold", "nan"], "--threshold must be a number"),
        (["--plan"], "--plan writes nothing"),
        (["--drop", "no.such.tensor"], "--drop no.such.tensor names no tensor"),
    ],
    ids=str,
)
def test_options_without_effect_are_refused(sources, tmp_path, options, said):
    """An option that would change nothing is an error that says what it goes with, before any work."""
    code, output = run_command(sources["deepseek_v3"], tmp_path / "out", *options)
    assert code == 1 and said in " ".join(output.split()) and not (tmp_path / "out").exists()
