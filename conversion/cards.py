"""
Model cards. Everything on a card is read from the model or from a file that lies beside it:

    config.json       shape, parameters, cache
    about.yaml        what no file can tell: licence, language, description, limits (keys: `ABOUT`)
    training.json     what `egmla train` measured
    recipe.yaml       what it ran
    evaluation.json   results of lm-evaluation-harness

`python -m modeling_egmla.conversion.cards` writes the cards of what the package ships to model_cards/.
"""

import json
import re
from importlib.resources import files
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..evaluation import Score, scores
from ..plan import TOKEN_ID_BYTES
from .vocabulary import load_tokenizer


TEMPLATE = files("modeling_egmla.model_cards") / "template.jinja"
HARNESS = "lm-evaluation-harness"
HARNESS_URL = "https://github.com/EleutherAI/lm-evaluation-harness"
TASKS = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
METADATA = ("license", "license_name", "license_link", "language", "base_model", "datasets", "tags")
ABOUT = (*METADATA, "summary", "training_data", "limits")
# What a card needs of a harness' results, which also hold the paths, settings and hardware of the machine.
EVALUATION_KEYS = ("results", "n-shot", "versions", "n-samples", "higher_is_better")
VERSION_KEYS = ("lm_eval_version", "transformers_version")
CARD_SOURCES = ("about.yaml", "training.json", "recipe.yaml", "evaluation.json")
# The model's shape is in config.json.
RECIPE_SECTIONS = ("tokenizer", "data", "training", "distillation", "gate_tables")


def read_about(path: Path) -> dict:
    """
    Content of an about.yaml.

    Raises:
        ValueError: it has a key that cards do not know.
    """
    about = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(about, dict) or (unknown := set(about) - set(ABOUT)):
        what = f"has {sorted(unknown)}" if isinstance(about, dict) else "is not a mapping"
        raise ValueError(f"{path} {what}; the keys of an about.yaml are {', '.join(ABOUT)}.")
    return about


def read_evaluation(path: Path) -> dict:
    """
    The part of a results file of lm-evaluation-harness that a card shows.

    Raises:
        ValueError: it is no such file, or does not say which version of the harness measured.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise ValueError(f"{path} has no `results`: it is not a results file of {HARNESS}.")
    if not content.get("lm_eval_version"):
        raise ValueError(f"{path} has no `lm_eval_version`, and results of unknown versions do not compare.")
    return {key: content[key] for key in (*EVALUATION_KEYS, *VERSION_KEYS) if key in content}


def _evaluation_row(score: Score) -> dict:
    """A score in a card's words; results on the first few of a task's rows are not results on the task."""
    rows = "not stated" if score.rows is None else f"{score.rows:,}"
    return {
        "task": score.task,
        "shots": "not stated" if score.num_fewshot is None else score.num_fewshot,
        "rows": rows if score.all_rows in (None, score.rows) else f"first {rows} of {score.all_rows:,}",
        "metric": score.metric if score.filter == "none" else f"{score.metric} ({score.filter})",
        "value": score.value,
        "error": score.stderr,
    }


def _fields(content: dict, prefix: str = "") -> list[tuple[str, str]]:
    """Fields of nested JSON or YAML under dotted names; texts of many lines and lists of numbers are left out."""
    fields = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            fields += _fields(value, f"{name}.")
        elif isinstance(value, list) and not all(isinstance(item, str) for item in value):
            continue
        elif value is not None and "\n" not in str(value):
            shown = f"{value:,}" if type(value) is int else f"{value:.4g}" if isinstance(value, float) else value
            shown = ", ".join(shown) if isinstance(shown, list) else str(shown)
            fields.append((name, shown.replace("|", r"\|")))
    return fields


def count_parameters(model) -> tuple[int, int]:
    """Parameters of a model, each once: all but the gate tables (which the paper calls activated), and the tables."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tables = sum(size for name, size in sizes.items() if ".kv_gate_embed." in name)
    return sum(sizes.values()) - tables, tables


def render_card(name: str, model, folder: Path, has_weights: bool, has_tokenizer: bool = False, **about) -> str:
    """
    Renders the card of a model.

    Args:
        name: title, and the name in the example.
        model: the model; on the meta device where there are no weights.
        folder: where the files are that the card is made from (`CARD_SOURCES`).
        has_weights: whether the card is of a model, or of a configuration.
        has_tokenizer: whether a tokenizer comes with it.
        about: values of an about.yaml, in place of those of the file.

    Raises:
        ValueError: one of the files is not what it should be.
    """
    paths = {source: folder / source for source in CARD_SOURCES if (folder / source).is_file()}
    if "about.yaml" in paths:
        about = read_about(paths["about.yaml"]) | about
    training, recipe = {}, {}
    if "training.json" in paths:
        training = json.loads(paths["training.json"].read_text(encoding="utf-8"))
    if "recipe.yaml" in paths:
        recipe = yaml.safe_load(paths["recipe.yaml"].read_text(encoding="utf-8"))
        recipe = {section: recipe[section] for section in RECIPE_SECTIONS if isinstance(recipe.get(section), dict)}
    evaluation = read_evaluation(paths["evaluation.json"]) if "evaluation.json" in paths else None
    rows = [_evaluation_row(score) for score in scores(evaluation)] if evaluation else []
    harness_version = evaluation["lm_eval_version"] if evaluation else None

    config, auto_class = model.config, type(model)._auto_class
    activated, tables = count_parameters(model)
    dtype = model.dtype if has_weights else "bfloat16"
    element_bytes = model.dtype.itemsize if has_weights else 2
    context = config.max_position_embeddings

    metadata = {key: about[key] for key in METADATA if key in about}
    tags = ["egmla" if config.kv_gate != "none" else "mla", "arxiv:2509.16686"]
    card_data = ModelCardData(
        **{**metadata, "tags": tags + metadata.get("tags", [])},
        library_name="transformers",
        pipeline_tag=TASKS[auto_class] if has_weights else None,
        model_name=name if rows else None,
        eval_results=[_eval_result(row, TASKS[auto_class], harness_version) for row in rows] or None,
    )
    card = ModelCard.from_template(
        card_data,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        name=name,
        summary=(about.get("summary") or "A decoder.").strip(),
        gate=config.kv_gate,
        has_weights=has_weights,
        has_tokenizer=has_tokenizer,
        auto_class=auto_class,
        activated=activated,
        tables=tables,
        cache_elements=config.cache_elements_per_token,
        cache_bytes=config.cache_elements_per_token * element_bytes * context,
        id_bytes=TOKEN_ID_BYTES * context,
        context=context,
        dtype=str(dtype).removeprefix("torch."),
        config=config,
        training_data=(about.get("training_data") or "").strip(),
        training=_fields(training),
        recipe=_fields(recipe),
        training_sources=" and ".join(f"`{s}`" for s in ("training.json", "recipe.yaml") if s in paths),
        evaluation=rows,
        harness_version=harness_version,
        limits=(about.get("limits") or "").strip(),
        licence=about.get("license_name") or about.get("license"),
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def _eval_result(row: dict, task_type: str, harness_version: str) -> EvalResult:
    return EvalResult(
        task_type=task_type,
        dataset_type=row["task"],
        dataset_name=row["task"],
        dataset_args={"num_few_shot": row["shots"]} if isinstance(row["shots"], int) else None,
        metric_type=row["metric"],
        metric_value=row["value"],
        source_name=f"{HARNESS} {harness_version}",
        source_url=HARNESS_URL,
    )


def shipped_cards() -> dict[str, str]:
    """Cards of all configurations that the package ships, by name: of presets, and of models that have weights."""
    import torch

    from ..configuration_egmla import EGMLAConfig
    from ..modeling_egmla import EGMLAForCausalLM

    cards = {}
    presets_about = read_about(Path(str(files("modeling_egmla.model_cards") / "presets.yaml")))
    for folder in sorted(Path(str(files("modeling_egmla.configuration"))).iterdir()):
        if not (folder / "config.json").is_file():
            continue
        config = EGMLAConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        has_weights = any(folder.glob("*.safetensors"))
        with torch.device("meta"):
            model = EGMLAForCausalLM(config)
        if has_weights:
            model = model.to(config.dtype)
        about = {} if has_weights else presets_about
        has_tokenizer = has_weights and load_tokenizer(folder) is not None
        cards[folder.name] = render_card(folder.name, model, folder, has_weights, has_tokenizer, **about)
    return cards


if __name__ == "__main__":
    for name, card in shipped_cards().items():
        Path(str(files("modeling_egmla.model_cards") / f"{name}.md")).write_text(card, encoding="utf-8")
