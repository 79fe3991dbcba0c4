"""Model cards say what files say, and nothing else."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from tiny_export import tiny_tokenizer

import modeling_egmla.model_cards
from modeling_egmla import EGMLAConfig, EGMLAForCausalLM, EGMLAForTokenClassification
from modeling_egmla.conversion import cards
from modeling_egmla.conversion.export import export_model
from modeling_egmla.conversion.verify import check_card


CARDS = Path(modeling_egmla.model_cards.__file__).parent
TRAINING = {
    "validation_loss": 3.14159,
    "tokens_seen": 1234567,
    "command": "egmla train recipe.yaml",
    "curve": [1.0, 2.0],
}
RESULTS = {
    "results": {
        "piqa": {"alias": "piqa", "acc,none": 0.52, "acc_stderr,none": 0.01, "acc_norm,none": 0.53},
        "wikitext": {"word_perplexity,none": 99.5, "word_perplexity_stderr,none": "N/A"},
    },
    "n-shot": {"piqa": 0, "wikitext": 0},
    "n-samples": {"piqa": {"original": 1838, "effective": 100}, "wikitext": {"original": 62, "effective": 62}},
    "versions": {"piqa": 1.0},
    "lm_eval_version": "0.4.13",
    "config": {"model_args": "pretrained=/home/jane/model"},
    "pretty_env_info": "machine of jane",
}


@pytest.fixture(scope="module")
def shipped():
    return cards.shipped_cards()


def test_shipped_cards_are_current(shipped):
    """A card for all we ship, and no other; `python -m modeling_egmla.conversion.cards` writes them anew."""
    assert {path.stem for path in CARDS.glob("*.md")} == shipped.keys()
    for name, card in shipped.items():
        assert (CARDS / f"{name}.md").read_text(encoding="utf-8") == card, name


# Parameters as the paper counts them, tables, and cached elements a token (arXiv:2509.16686, and docs/paper.md).
PAPER = {
    "mla-base-kv256": (120_641_280, 0, 3_840),
    "egmla-base-kv64-emb256": (120_086_016, 154_533_888, 1_536),
    "egmla-large-kv128-emb512": (642_665_984, 309_067_776, 2_304),
    "egmla-xlarge-kv128-emb512": (1_182_307_328, 618_135_552, 4_608),
}


@pytest.mark.parametrize("name", PAPER)
def test_presets_have_no_weights_and_the_papers_size(shipped, name):
    activated, tables, elements = PAPER[name]
    card = shipped[name]
    assert "No weights, architecture only." in card and "No results of an evaluation harness." in card
    for number in (activated, tables, activated + tables, elements):
        assert f"| {number:,} |" in card
    data = ModelCard(card).data
    assert (data.license, data.library_name, data.pipeline_tag) == ("apache-2.0", "transformers", None)
    assert "arxiv:2509.16686" in data.tags and data.eval_results is None


def test_cache_bytes(make_model, tmp_path):
    """Bytes at the model's context and dtype, and the ids beside them, as the cache itself counts them."""
    model = make_model().to(torch.bfloat16)
    card = cards.render_card("tiny", model, tmp_path, has_weights=True)
    ids = torch.randint(97, (1, model.config.max_position_embeddings))
    memory = model(ids, use_cache=True).cache.memory()
    assert f"256 tokens, batch 1, bfloat16 | {memory.latents:,} |" in card
    assert f"token ids beside it, bytes | {memory.token_ids:,} |" in card


def test_sources_are_shown(make_model, tmp_path):
    """Training, recipe, evaluation and what about.yaml says are on the card, each with the file it comes from; what
    a results file says of the machine is not copied."""
    (tmp_path / "training.json").write_text(json.dumps(TRAINING))
    (tmp_path / "recipe.yaml").write_text("data:\n  files: [a.txt, b.txt]\ntraining:\n  seed: 0\n")
    about = "license: mit\nlanguage: en\nsummary: A small one.\ntraining_data: Some text.\nlimits: Do not trust it.\n"
    (tmp_path / "about.yaml").write_text(about)
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    sources = [tmp_path / name for name in ("training.json", "recipe.yaml", "about.yaml")]
    folder = export_model(
        make_model(), tmp_path / "tiny", tiny_tokenizer(), extra_files=sources, evaluation=tmp_path / "results.json"
    )
    assert "jane" not in (folder / "evaluation.json").read_text()
    assert check_card(folder) == []
    text = (folder / "README.md").read_text()
    for line in (
        "A small one.",
        "Some text.",
        "Do not trust it.",
        "Licence: `mit`.",
        "| validation_loss | 3.142 |",
        "| tokens_seen | 1,234,567 |",
        "| data.files | a.txt, b.txt |",
        "Source: `training.json` and `recipe.yaml`; losses are in nats a token.",
        "| piqa | first 100 of 1,838 | 0 | acc | 0.5200 | 0.0100 |",
        "| wikitext | 62 | 0 | word_perplexity | 99.5000 |  |",
        "Measured with lm-evaluation-harness 0.4.13. Source: `evaluation.json`.",
    ):
        assert line in text, line
    assert "curve" not in text
    data = ModelCard(text).data
    assert (data.license, data.language, data.pipeline_tag, data.model_name) == (
        "mit",
        "en",
        "text-generation",
        "tiny",
    )
    found = {(result.dataset_name, result.metric_type): result for result in data.eval_results}
    assert found["piqa", "acc"].metric_value == 0.52
    assert found["piqa", "acc"].source_name == "lm-evaluation-harness 0.4.13"
    assert len(found) == 3


def test_nothing_is_claimed_without_a_source(make_model, tmp_path):
    model = make_model(EGMLAForTokenClassification, kv_gate="none")
    card = cards.render_card("tiny", model, tmp_path, has_weights=True)
    assert "Not stated." in card and "No results of an evaluation harness." in card and "No licence is stated." in card
    assert "AutoModelForTokenClassification.from_pretrained" in card and "AutoTokenizer" not in card
    assert "plain multi-head latent attention" in card and ModelCard(card).data.pipeline_tag == "token-classification"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("evaluation.json", json.dumps({"results": {}}), "no `lm_eval_version`"),
        ("evaluation.json", "[]", "no `results`"),
        ("about.yaml", "licence: mit", r"has \['licence'\]"),
        ("about.yaml", "- mit", "is not a mapping"),
    ],
)
def test_wrong_sources_are_refused(make_model, tmp_path, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        cards.render_card("tiny", make_model(), tmp_path, has_weights=True)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("library_name: transformers", "gives no `license`"),
        ("license: other\nlibrary_name: transformers", "needs a `license_name`"),
        ("license: mit", "must be `transformers`"),
        ("license: mit\nlibrary_name: transformers\nbase_model: /models/base", "cannot be the id of a repository"),
        ("license: [", "cannot be read"),
        ("license: mit\nlibrary_name: transformers\nmodel-index: wrong", "cannot be read"),
    ],
)
def test_card_metadata_is_checked(tmp_path, metadata, message):
    (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\n# Card\n")
    assert any(message in problem for problem in check_card(tmp_path))


def test_example_of_a_preset_runs(shipped):
    """The code on a card works (on the meta device, where weights take no memory)."""
    name = "egmla-base-kv64-emb256"
    code = shipped[name].split("```python\n")[1].split("```")[0]
    with torch.device("meta"):
        scope = {}
        exec(code, scope)
    assert type(scope["model"]) is EGMLAForCausalLM
    assert scope["model"].config.to_dict() == EGMLAConfig.from_preset(name).to_dict()
