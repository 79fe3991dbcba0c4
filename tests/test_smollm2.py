"""benchmarks/study: the way of a real model, on a tiny one: every step once, and a report that says what was found."""

import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_gqa import tiny_llama
from tiny_export import tiny_tokenizer


ROOT = Path(__file__).parents[1]


@pytest.fixture
def study(scripts, tmp_path, monkeypatch):
    """A teacher of the Llama form, text, and little of everything; of the quantised caches, the one of torch's own."""
    teacher = tiny_llama()
    teacher.save_pretrained(tmp_path / "source")
    tiny_tokenizer(97).save_pretrained(tmp_path / "source")
    rng, words = random.Random(0), ["THE", "STATE", "OF", "UNION", "LAW", "PEACE", "TRADE", "PEOPLE", "WAR", "TREATY"]
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(" ".join(rng.choices(words, k=60)))
    monkeypatch.setattr(scripts.smollm2, "VARIANTS", (("position", 6), ("heads", 4)))
    for name, value in {"WINDOWS": 3, "CONTEXT": 32, "CHUNK": 8, "NEW_TOKENS": 4, "PROMPT": "THE STATE"}.items():
        monkeypatch.setattr(scripts.smollm2, name, value)
    recipe = {
        "models": {},
        "data": {"files": [str(tmp_path / "*.txt")], "validation_share": 0.2, "sequence_length": 32},
        "training": {
            "output_dir": "",
            "batch_tokens": 128,
            "sequences_per_device": 2,
            "steps": 8,
            "learning_rate": 0.001,
            "eval_steps": 2,
            "save_steps": 4,
        },
    }
    caches = {name: scripts.smollm2.CACHES[name] for name in ("keys and values", "float8")}
    monkeypatch.setattr(scripts.smollm2, "CACHES", caches)
    folder = tmp_path / "models"
    return scripts.smollm2.Study(
        folder, tmp_path / "results", tmp_path / "source", recipe, (9, 7), rope_dim=6, gate_dim=6
    )


def test_every_step_once(scripts, study, monkeypatch):
    """Results of all steps, none made twice; models that are gone are made again only where a step reads them."""
    scripts.smollm2.carry_out(study, Console(quiet=True))
    results = scripts.healing.load(study.results)
    kinds = {f"{kind}-{width}" for kind in ("convert", "start", "heal", "healed") for width in (9, 7)}
    assert set(results) == {"source", "variants", *kinds}
    same, other = results["variants"]["variants"][0], results["variants"]["variants"][3]
    stage = results["convert-9"]["stages"]["RMSNorm of the latent"]
    assert same["loss"] == pytest.approx(stage["loss"], rel=1e-6) and same["latent"] == 9
    assert (other["rotary"], other["rope_dim"], other["latent"], other["of_width"]) == ("heads", 4, 9, 7)
    assert "| 4, by `heads` | " in scripts.healing.variants_table(results)
    curve = results["heal-9"]["validation_loss_over_tokens"]
    assert [tokens for tokens, _ in curve] == [0, 256, 512, 768, 1024]
    assert curve[0][1] == pytest.approx(results["heal-9"]["initial_validation_loss"], abs=1e-5)
    caches = results["source"]["caches"]
    whole = 2 * 2 * 3 * 2 * 8  # bytes an element, layers, heads, K and V, channels
    assert caches["keys and values"]["bytes_per_token"] == whole
    assert whole / 2 <= caches["float8"]["bytes_per_token"] < 0.6 * whole  # and scales
    assert results["start-9"]["bytes_per_token"] == 2 * 2 * (9 + 6) + 4  # and an id

    card = (study.results / "card-9.md").read_text()
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card and "latent 9" in card
    assert "| validation_loss | " in card and "| distillation.logits | 1 |" in card

    monkeypatch.setattr(scripts.smollm2, "convert", None)
    monkeypatch.setattr(scripts.smollm2.subprocess, "run", None)
    scripts.smollm2.carry_out(study, Console(quiet=True))
    (study.results / "start-9.json").unlink()
    scripts.smollm2.carry_out(study, Console(quiet=True))
    assert scripts.healing.load(study.results)["start-9"] == results["start-9"]

    for change, named in (
        ({"rope_dim": 4}, r"convert-9.*`rope_dim`"),
        ({"recipe": tuned(study)}, r"heal-9.*`recipe`"),
    ):
        with pytest.raises(RuntimeError, match=named):
            scripts.smollm2.carry_out(dataclasses.replace(study, **change), Console(quiet=True))
    monkeypatch.setattr(scripts.smollm2, "PROMPT", "THE UNION")
    with pytest.raises(RuntimeError, match=r"source.*`prompt`"):
        scripts.smollm2.carry_out(study, Console(quiet=True))


def tuned(study) -> dict:
    """Its recipe with another learning rate."""
    return {**study.recipe, "training": {**study.recipe["training"], "learning_rate": 0.002}}


@torch.no_grad()
def test_losses_are_the_models(scripts, study):
    """Read on from an exact cache in chunks, a window's second half has the loss of the whole window at once."""
    model, windows = tiny_llama(), scripts.smollm2.held_out_windows(study)
    losses = scripts.smollm2.window_losses(model, lambda: scripts.smollm2.DynamicCache(config=model.config), windows)
    log_probs = model(windows, use_cache=False).logits[:, 15:-1].log_softmax(-1)
    expected = -log_probs.gather(-1, windows[:, 16:, None]).squeeze(-1).mean(-1)
    torch.testing.assert_close(torch.tensor(losses), expected, atol=1e-5, rtol=0)


def test_parity_of_a_known_law(scripts):
    """A power law is recovered, with an interval that holds it; one that does not fall has no end."""
    teacher, rng = 3.0, random.Random(0)
    exact = [[0, 9.0]] + [[t, teacher + 20 * t**-0.3] for t in range(100_000, 1_100_000, 100_000)]
    wanted = (20 / scripts.healing.PARITY) ** (1 / 0.3)
    fit = scripts.healing.fit_parity(exact, teacher)
    assert fit.exponent == pytest.approx(0.3) and fit.tokens == pytest.approx(wanted, rel=1e-6)
    noisy = [[t, teacher + (loss - teacher) * math.exp(rng.gauss(0, 0.02))] for t, loss in exact]
    fit = scripts.healing.fit_parity(noisy, teacher)
    assert fit.low < wanted < fit.high and fit.high > 1.2 * fit.low
    flat = scripts.healing.fit_parity([[t, 3.5] for t, _ in exact], teacher)
    assert flat.high > 1e100
    assert scripts.healing.fit_parity(exact[:4], teacher) is None  # three points behind the start
    assert scripts.healing.fit_parity([*exact, [2_000_000, 2.9]], teacher) is None


def test_numbers_of_tokens_are_readable(scripts):
    """Two digits and a unit, never an exponent."""
    numbers = {0: "0", 4096: "4.1 k", 1_024_000: "1 M", 150e6: "150 M", 999.9e6: "1000 M", 2e20: "beyond any"}
    assert {tokens: scripts.healing.count(tokens) for tokens in numbers} == numbers
    assert str(scripts.healing.Parity(math.inf, 1e9, math.inf, -0.1)) == "never, at this rate"


def test_intervals_hold_what_they_promise(scripts):
    """Of many curves that obey one law up to noise, the interval holds the truth for 19 of 20."""
    teacher, wanted, held = 3.0, (20 / scripts.healing.PARITY) ** (1 / 0.3), 0
    for seed in range(200):
        rng = random.Random(seed)
        curve = [[t, teacher + 20 * t**-0.3 * math.exp(rng.gauss(0, 0.03))] for t in range(100_000, 700_000, 100_000)]
        fit = scripts.healing.fit_parity(curve, teacher)
        held += fit.low <= wanted <= fit.high
    assert 180 <= held <= 199


def test_the_document_says_what_the_results_say(scripts):
    """The tables of docs/conversion.md are those of the committed results."""
    results = scripts.healing.load(ROOT / "benchmarks" / "results" / "smollm2")
    document = (ROOT / "docs" / "conversion.md").read_text(encoding="utf-8")
    for name, table in scripts.healing.TABLES.items():
        assert scripts.healing.fill(document, f"smollm2 {name}", table(results)) == document
