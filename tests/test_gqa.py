"""Models of the Llama form become MLA models: exactly with all of their width, and with known errors below it."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from conftest import scramble
from safetensors.torch import load_file, save_file
from tiny_export import tiny_tokenizer
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from modeling_egmla import EGMLACache
from modeling_egmla.commands import app
from modeling_egmla.conversion import gqa
from modeling_egmla.conversion.checkpoint import ConversionError
from modeling_egmla.conversion.converter import CheckFailed, convert
from modeling_egmla.conversion.gating import GateStart, with_gate
from modeling_egmla.conversion.gqa import GQAFactors, GQAPlan, full_latent, input_moments, mla_weights
from modeling_egmla.conversion.stages import LatentStart
from modeling_egmla.conversion.weights import build_model


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "rms_norm_eps": 1e-5,
}
FULL_ROPE, FULL_RANK = 24, 25  # of 3 heads of 8; values, and one constant channel
IDS = torch.randint(0, 97, (4, 64), generator=torch.Generator().manual_seed(3))


def tiny_llama(**changes) -> LlamaForCausalLM:
    return scramble(LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))).eval()


@pytest.fixture(scope="module")
def llama():
    return tiny_llama()


def factors_of(model, **plan) -> GQAFactors:
    state = model.state_dict()
    return GQAFactors(state.__getitem__, model.config, input_moments(model, IDS[:2]), GQAPlan(**plan))


@torch.no_grad()
def converted_logits(factors: GQAFactors) -> torch.Tensor:
    return build_model(mla_weights(factors, lambda name: torch.float32))(IDS[2:], use_cache=False).logits


@torch.no_grad()
def difference(model, factors: GQAFactors) -> float:
    logits = model(IDS[2:], use_cache=False).logits
    return ((converted_logits(factors) - logits).norm() / logits.norm()).item()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["grouped", "multi-head", "multi-query", "tied", "linear", "llama3"],
)
@pytest.mark.parametrize("mix", [True, False])
def test_full_width_is_exact(changes, mix):
    """With all rotary channels and a latent as wide as what is left, logits are the source's."""
    model = tiny_llama(**changes)
    width = model.config.num_key_value_heads * 8
    latent = min(width + 1, full_latent(model.config))
    factors = factors_of(model, latent=latent, rope_dim=width, mix=mix)
    torch.testing.assert_close(converted_logits(factors), model(IDS[2:]).logits.detach(), atol=1e-5, rtol=0)


def rotated(x: torch.Tensor, frequencies: torch.Tensor, position: int) -> torch.Tensor:
    """Rotates halves [..., 2 F] by position, with complex numbers."""
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(frequencies), frequencies * position)
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize("mix", [True, False])
@pytest.mark.parametrize("rope_dim", [2, 10, 24])
def test_rotary_parts_in_float64(llama, rope_dim, mix):
    """
    Scores of the split are, to 1e-12, those of the source in which only what left the rotary part lost its rotation;
    with all components rotary they are the source's.
    """
    factors = factors_of(llama, latent=9, rope_dim=rope_dim, mix=mix)
    layer, split = factors.layer(1), factors.split(1)
    frequencies = gqa.llama_frequencies(llama.config)
    kept = frequencies.repeat_interleave(factors.counts)
    x, y = torch.randn(2, 36, dtype=torch.float64)
    parts = gqa.components(layer, factors.inputs[1], mix)
    for head in range(6):
        shared = rotated(split.rotary_queries[head] @ x, kept, 11) @ rotated(split.rotary_keys @ y, kept, 4)
        score = shared + (layer.queries[head] @ x) @ (split.rest_keys[head // 2] @ y)
        query, expected = layer.queries[head] @ x, 0.0
        for f in range(4):
            for m in range(3):
                component = parts.from_keys[f, m] @ (layer.keys[:, [f, f + 4]] @ y)
                positions = (11, 4) if m < factors.counts[f] else (0, 0)
                pair = [
                    rotated(part, frequencies[f : f + 1], position)
                    for part, position in zip((query[[f, f + 4]], component), positions)
                ]
                expected += parts.to_keys[f, head // 2, m] * (pair[0] @ pair[1])
        torch.testing.assert_close(score, expected, atol=1e-12, rtol=1e-12)
        if rope_dim == 24:
            key = layer.keys[head // 2] @ y
            torch.testing.assert_close(score, rotated(query, frequencies, 11) @ rotated(key, frequencies, 4))


def test_components_are_the_best_at_their_number(llama):
    """Mixing heads puts more of the scores' energy in the first component of each frequency than any one head has."""
    factors = factors_of(llama, latent=9, rope_dim=8)
    mixed, apart = (gqa.components(factors.layer(0), factors.inputs[0], mix) for mix in (True, False))
    assert (mixed.energies[:, 0] / mixed.energies.sum(1) >= apart.energies[:, 0] / apart.energies.sum(1)).all()
    torch.testing.assert_close(mixed.to_keys @ mixed.from_keys, torch.eye(3, dtype=torch.float64).expand(4, 3, 3))


def test_frequencies_that_matter_stay_rotary():
    """By energy the strongest components stay; by position not those that hardly turn within the length."""
    energies = torch.tensor([[0.2, 0.1], [0.3, 0.05], [0.34, 0.01]])
    frequencies = torch.tensor([1.0, 0.1, 1e-6])
    assert gqa.choose_frequencies(energies, frequencies, 4, 64, by="energy").tolist() == [0, 1, 1]
    assert gqa.choose_frequencies(energies, frequencies, 4, 64, by="position").tolist() == [1, 1, 0]
    assert gqa.choose_frequencies(energies, frequencies, 12, 64).tolist() == [2, 2, 2]


def weighted_error(factors: GQAFactors, low: gqa.LowRank) -> float:
    """Share of keys' score energy and of values' output energy that factors lose, from their definitions."""
    layer, inputs = factors.layer(0), factors.inputs[0]
    rest, lost = factors.split(0).rest_keys, []
    for projections, up, readers in (
        (rest, low.keys, layer.queries),
        (layer.values, low.values, layer.output.permute(1, 2, 0)),
    ):
        total = error = 0.0
        for head in range(6):
            residue = projections[head // 2] - up[head // 2] @ low.down
            reader = readers[head]
            metric = reader @ inputs @ reader.T if readers is layer.queries else reader @ reader.T
            total += (metric @ projections[head // 2] @ inputs @ projections[head // 2].T).trace()
            error += (metric @ residue @ inputs @ residue.T).trace()
        lost.append(error / total)
    return (sum(lost) / 2).item()


def test_rank_costs_what_it_says(llama):
    """The error of the factors falls with every rank, is what `kept` says, and is gone at the full rank."""
    factors = factors_of(llama, latent=9, rope_dim=8)
    joint = factors.joint(0)
    cuts = [joint.cut(rank) for rank in range(1, 37)]
    errors = [weighted_error(factors, low) for low in cuts]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert [1 - low.kept for low in cuts] == pytest.approx(errors, abs=1e-5)
    assert errors[-1] < 1e-10
    down = cuts[5].down
    length = (down @ down.T).diagonal().mean()
    torch.testing.assert_close(down @ down.T, length * torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close((down @ factors.inputs[0] @ down.T).trace(), torch.tensor(6.0).double())


def test_inputs_unlike_the_calibration_text(llama):
    """Full width is exact also on ids that calibration did not see: norms stay neutral whatever comes in."""
    inputs = input_moments(llama, torch.full((1, 8), 5))
    factors = GQAFactors(llama.state_dict().__getitem__, llama.config, inputs, GQAPlan(latent=37, rope_dim=24))
    torch.testing.assert_close(converted_logits(factors), llama(IDS[2:]).logits.detach(), atol=1e-4, rtol=0)


def test_wider_is_nearer(llama):
    """Logits come nearer to the source's with a wider latent and with more rotary channels."""
    by_latent = [difference(llama, factors_of(llama, latent=latent, rope_dim=24)) for latent in (5, 13, 25)]
    by_rope = [difference(llama, factors_of(llama, latent=37, rope_dim=rope_dim)) for rope_dim in (4, 12, 24)]
    for differences in (by_latent, by_rope):
        assert differences[0] > 1.3 * differences[1] > 0.01 and differences[2] < 1e-5, differences


@pytest.mark.parametrize(
    ("changes", "plan", "message"),
    [
        ({}, {"rope_dim": 26}, "from 2 to 24"),
        ({}, {"rope_dim": 7}, "must be even"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {"rope_dim": 8}, "dynamic"),
    ],
)
def test_plans_that_do_not_fit(changes, plan, message):
    with pytest.raises(ConversionError, match=message):
        factors_of(tiny_llama(**changes), latent=9, **plan)


# The whole conversion.


CALIBRATION = torch.randint(0, 97, (16, 64), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def folder(llama, tmp_path) -> Path:
    """The source, in a folder that a test may spoil."""
    llama.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS, use_cache=False).logits


NO_NORM = {"gate": "multiply", "gate_norm": "none"}


@pytest.mark.parametrize("gate", [{}, NO_NORM, {"gate": "multiply"}, {"gate": "add"}], ids=str)
def test_conversion_that_keeps_everything(folder, llama, tmp_path, gate):
    """With all rotary channels and all of the latent, also the start with gates and their LayerNorm is the source."""
    stages = []
    report = convert(
        folder,
        tmp_path / "out",
        latent=LatentStart(width=37, rope_dim=24),
        calibration=CALIBRATION,
        gate_dim=6,
        max_rise=1e-3,
        staged=lambda stage, score: stages.append(stage),
        **gate,
    )
    assert list(report.stages) == stages and report.comparison.relative < 1e-5
    exact = 1e-5 if gate in ({}, NO_NORM) else 5e-3
    torch.testing.assert_close(logits_of(tmp_path / "out"), llama(IDS).logits.detach(), atol=exact, rtol=0)
    new = {name.rpartition("self_attn.")[2] for name in report.new}
    assert {"kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias", "kv_b_proj.weight", "o_proj.bias"} <= new
    assert "o_proj.weight" not in new and ("kv_gate_embed.weight" in new) == bool(gate)


def test_each_stage_is_told(folder, tmp_path):
    """Rotary channels, low rank, each norm: each has its loss, and norms cost next to nothing once they are fitted."""
    report = convert(
        folder,
        tmp_path / "out",
        latent=LatentStart(width=13, rope_dim=8),
        calibration=CALIBRATION,
        gate="multiply",
        gate_dim=6,
        dtype=torch.bfloat16,
    )
    assert list(report.stages) == [
        "source",
        "rotary in 8 channels of 24",
        "latent of 13",
        "RMSNorm of the latent",
        "gate of one, LayerNorm as it is initialised",
        "LayerNorm fitted",
    ]
    source, rotary, low_rank, latent_norm, unfitted, fitted = (score.divergence for score in report.stages.values())
    assert source < 1e-9 < rotary < low_rank and unfitted > 1.2 * low_rank
    assert latent_norm == pytest.approx(low_rank, rel=1e-3) and fitted == pytest.approx(low_rank, rel=1e-2)
    assert any("of the weighted energy" in note for note in report.notes)


def test_latent_by_energy(folder, tmp_path):
    """The width is the narrowest that keeps the share of energy that was asked for, and the report says the share."""
    widths = []
    for energy in (0.5, 0.9, 1.0):
        out = tmp_path / str(energy)
        latent = LatentStart(energy=energy, rope_dim=8)
        report = convert(folder, out, latent=latent, calibration=CALIBRATION, check=False)
        widths.append(json.loads((out / "config.json").read_text())["kv_lora_rank"])
        kept = next(note for note in report.notes if "energy" in note).split("keeps ")[1].split("%")[0]
        assert float(kept) >= 100 * energy - 0.01
    assert 2 < widths[0] < widths[1] < widths[2] == 37


@pytest.mark.parametrize("rotary", ["position", "energy", "heads"])
def test_ways_to_choose_rotary_channels(folder, tmp_path, rotary):
    """Each way converts; which frequencies stay is in the config, and the report counts them."""
    latent = LatentStart(width=37, rope_dim=6, rotary=rotary)
    report = convert(folder, tmp_path / "out", latent=latent, calibration=CALIBRATION)
    rope = json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"]
    assert len(rope["long_factor"]) == 3 and any("rotary pairs by frequency" in note for note in report.notes)
    score = report.stages["rotary in 6 channels of 24"]
    assert report.stages["RMSNorm of the latent"].divergence == pytest.approx(score.divergence, rel=1e-2)


def test_costly_starts_are_refused(folder, tmp_path):
    """A loss that rises above the bound leaves nothing behind; the message tells every stage."""
    latent = LatentStart(width=3, rope_dim=2)
    with pytest.raises(CheckFailed, match=r"above --max-rise 1e-06 .* RMSNorm of the latent"):
        convert(folder, tmp_path / "out", latent=latent, calibration=CALIBRATION, max_rise=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "self_attn.q_norm.weight", "mlp.down_proj.bias"])
def test_other_forms_are_refused_by_tensor(folder, tmp_path, name):
    """Biases, norms of queries and whatever else is not of the Llama form are named."""
    tensors = load_file(folder / "model.safetensors") | {f"model.layers.1.{name}": torch.ones(8)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=f"unexpected: model.layers.1.{name}; of the Llama form are"):
        convert(folder, tmp_path / "out", latent=LatentStart(width=9), calibration=CALIBRATION)


def test_a_scale_in_the_code_is_noticed(tmp_path):
    """Granite has the tensors of the Llama form, and multiplies by numbers that Llama has not: read so, it fails."""
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attention_multiplier=0.5, residual_multiplier=0.2,
        tie_word_embeddings=False,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
    with pytest.raises(CheckFailed, match="does not agree with it"):
        convert(
            tmp_path / "granite",
            tmp_path / "out",
            layout="llama",
            latent=LatentStart(width=9),
            calibration=CALIBRATION,
        )


def test_code_that_computes_something_else_is_noticed(folder, tmp_path, monkeypatch):
    """Tensors of the Llama form under code that is not: the model that should lose nothing does, and that is said."""
    from modeling_egmla.conversion import stages

    def other(*args):
        model = load(*args)
        model.model.norm.weight.data *= 1.5
        return model

    load = stages.load_library_model
    monkeypatch.setattr(stages, "load_library_model", other)
    with pytest.raises(CheckFailed, match="does not agree with it"):
        convert(folder, tmp_path / "out", latent=LatentStart(width=9), calibration=CALIBRATION)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": CALIBRATION}, "--latent"),
        ({"latent": LatentStart(width=9)}, "--calibration"),
        ({"latent": LatentStart(width=1), "calibration": CALIBRATION}, "2 or wider"),
        ({"latent": LatentStart(width=99), "calibration": CALIBRATION}, "no wider than 37"),
        ({"latent": LatentStart(width=9), "calibration": CALIBRATION, "to": "llama"}, "can be read, not written"),
    ],
)
def test_what_is_missing_is_said(folder, tmp_path, options, message):
    with pytest.raises(ConversionError, match=message):
        convert(folder, tmp_path / "out", **options)


def test_sliding_windows_are_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mistral", "sliding_window": 64}))
    with pytest.raises(ConversionError, match="`sliding_window` is 64"):
        convert(folder, tmp_path / "out", latent=LatentStart(width=9), calibration=CALIBRATION)


# The command.


@pytest.fixture
def egmla(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
        return result.exit_code, result.output

    return run


def test_plan_is_what_comes_out(folder, tmp_path, egmla):
    """`--plan` says, without reading a weight, the parameters, tables and cached elements that the result then has."""
    (folder / "model.safetensors").rename(tmp_path / "weights")
    options = ("--latent", 13, "--rope-dim", 8, "--gate", "multiply", "--gate-dim", 6)
    code, output = egmla(folder, *options, "--plan")
    assert code == 0, output
    (tmp_path / "weights").rename(folder / "model.safetensors")
    tiny_tokenizer().save_pretrained(folder)
    (tmp_path / "text.txt").write_text("THE STATE OF THE UNION 1790! " * 200)
    arguments = ("--calibration", tmp_path / "text.txt", "--calibration-tokens", 2048)
    code, told = egmla(folder, tmp_path / "out", *options, *arguments)
    assert code == 0, told
    assert told.count("perplexity") == 12  # as each stage is done, and in the report
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tables = sum(p.numel() for name, p in model.named_parameters() if "kv_gate_embed" in name)
    source = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    for number in (source, model.num_parameters(), tables, model.config.cache_elements_per_token, 2 * 24 * 2):
        assert f"{number:,}" in output, (number, output)
    code, told = egmla(folder, tmp_path / "more", *options, *arguments, "--max-rise", 0)
    assert code == 1 and "above --max-rise 0" in told and not (tmp_path / "more").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan"], "--latent"),
        (["--plan", "--latent-energy", 0.9], "only calibration tells"),
        (["--latent-energy", 0.9, "--latent", 9], "exclude each other"),
        (["--latent", 9], "TARGET"),
        (["--plan", "--latent", 9, "--rope-dim", 99], "must be even"),
    ],
)
def test_options_that_do_not_fit(folder, egmla, options, message):
    code, output = egmla(folder, *options)
    assert code == 1 and message in output


def test_plan_of_a_gated_model(make_model, tmp_path, egmla):
    """Gate tables that the source has already are counted on both sides; another layout than ours is not planned."""
    make_model().save_pretrained(tmp_path / "gated")
    code, output = egmla(tmp_path / "gated", "--plan")
    assert code == 0 and output.count(f"{2 * 97 * make_model().config.kv_gate_dim:,}") == 2, output
    code, output = egmla(tmp_path / "gated", "--plan", "--to", "deepseek_v3")
    assert code == 1 and "leave --to out" in output


def test_plan_of_an_mla_model(make_model, tmp_path, egmla):
    """The cache stays, and the tables come on top."""
    make_model(kv_gate="none").save_pretrained(tmp_path / "mla")
    code, output = egmla(tmp_path / "mla", "--gate", "multiply", "--gate-dim", 10, "--plan")
    assert code == 0 and f"{2 * 97 * 10:,}" in output and "100.0%" in output


@pytest.mark.parametrize("decoding", ["expanded", "tiles", "grouped"])
def test_cached_steps_of_a_converted_model(llama, decoding):
    """Constant channels are no burden to decoding: each way gives, step by step, the logits of one whole forward."""
    factors = factors_of(llama, latent=13, rope_dim=8, norm_channels=True)
    model = build_model(with_gate(mla_weights(factors, lambda name: torch.float32), GateStart("multiply", 6)))
    for layer in model.model.layers:
        layer.self_attn.kv_gate_norm.weight.data.fill_(20.0)
        layer.self_attn.kv_gate_embed.weight.data.add_(0.3 * torch.randn(97, 6))
    model.set_kv_decoding(decoding)
    with torch.no_grad():
        whole = model(IDS, use_cache=False).logits
        cache = EGMLACache(model.config)
        steps = [model(ids, cache=cache).logits for ids in IDS.split([40, *[1] * 24], dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=2e-4, rtol=0)
