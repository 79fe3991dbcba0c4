"""
The paper's evaluation: twelve tasks and three perplexities, in a file of results that is continued task by task.

The twelve count alike in the mean, MMLU's 57 subjects together as one. The paper does not say whether it took acc or
acc_norm, which variants of the tasks, or what its perplexities are a mean over; what is taken here stands in the
results.
"""

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import write_whole
from ..gate_egmla import token_gates
from ..version import __version__
from .harness import PAPER, load_tasks, local_tasks_folder, run_tasks, scores
from .perplexity import TextPerplexity, text_perplexity


CLIMBMIX, WIKITEXT, LAMBADA = "climbmix", "wikitext", "lambada_openai"
NO_LOGITS = ("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version", "use_cache")
CLIMBMIX_RECIPE = "egmla-base-kv64-emb256"  # all recipes of presets hold out the same documents


def paper_tasks() -> dict[str, int]:
    """The paper's tasks by the harness's names, with the solved examples in front of each row."""
    group = yaml.safe_load((local_tasks_folder() / f"{PAPER}.yaml").read_text(encoding="utf-8"))
    return {entry.get("task") or entry["group"]: entry["num_fewshot"] for entry in group["task"]}


def paper_results() -> dict[str, Any]:
    """What the paper reports: `source`, and `models` by the name of their preset."""
    return json.loads((local_tasks_folder() / f"{PAPER}.json").read_text(encoding="utf-8"))


def identify(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> dict[str, Any]:
    """What results must have in common to stand in one file: model, tokenizer, versions, and rows."""
    from ..training.data import hash_tokenizer

    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    config = {key: value for key, value in model.config.to_dict().items() if key not in NO_LOGITS}
    return {
        "weights_sha256": weights.hexdigest(),
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "gate_tables": sorted({str(gate.kv_gate_placement.dtype) for gate in token_gates(model)}),
        "tokenizer_sha256": hash_tokenizer(tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": model.config.max_position_embeddings,
        "limit": limit,
        "egmla": __version__,
        "lm_eval": importlib.metadata.version("lm_eval"),
        "transformers": importlib.metadata.version("transformers"),
    }


def run_paper_suite(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    limit: int | None = None,
    batch_size: int = 8,
    report: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """
    Runs what is not in the file of results yet, which is written after each task.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        path: file of results, JSON. Tasks that it holds are not run again.
        limit: score the first so many rows (of texts: documents) of each task only.
        batch_size: rows at once; scores do not depend on it.
        report: told of each task as it begins, and of each whose data cannot be had.

    Returns:
        What the file holds: `identity`, `tasks` (a task's metrics, standard errors, rows, shots and version),
        `perplexity` (with exact sources and counts), `unavailable` (reasons, by task) and `summary`.

    Raises:
        ValueError: the file's results are of another model or version.
    """
    path = Path(path)
    results = _open_results(path, identify(model, tokenizer, limit))
    jobs: list[tuple[str, str, Callable[[], dict]]] = [
        ("tasks", name, lambda name=name, shots=shots: _run_task(model, tokenizer, name, shots, limit, batch_size))
        for name, shots in paper_tasks().items()
    ]
    jobs.append(("perplexity", WIKITEXT, lambda: _run_wikitext(model, tokenizer, limit, batch_size)))
    jobs.append(("perplexity", CLIMBMIX, lambda: _run_climbmix(model, tokenizer, limit, batch_size)))
    for section, name, job in jobs:
        if name in results[section]:
            continue
        report(f"{name} ...")
        started = time.perf_counter()
        try:
            outcome = job()
        except UnavailableError as error:
            results["unavailable"][name] = str(error)
            report(f"{name} is LEFT OUT, its data cannot be had: {error}")
        else:
            results["unavailable"].pop(name, None)
            results[section][name] = outcome | {"seconds": round(time.perf_counter() - started, 1)}
        results["summary"] = summarise(results)
        write_whole(path, json.dumps(results, indent=2) + "\n")
    return results


class UnavailableError(Exception):
    """The data of a task cannot be downloaded."""


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """
    The unweighted means over the tasks that are there: of acc; of acc_norm where a task has it and else acc; and of
    the three perplexities, if all are there.
    """
    tasks = results["tasks"]
    missing = [name for name in paper_tasks() if name not in tasks]
    accuracies = [task["metrics"]["acc"]["value"] for task in tasks.values()]
    normalised = [task["metrics"].get("acc_norm", task["metrics"]["acc"])["value"] for task in tasks.values()]
    perplexities = {name: entry["token_perplexity"] for name, entry in results["perplexity"].items()}
    if LAMBADA in tasks:
        perplexities["lambada"] = tasks[LAMBADA]["metrics"]["perplexity"]["value"]
    return {
        "tasks_in_mean": len(tasks),
        "tasks_missing": missing,
        "mean_acc": sum(accuracies) / len(tasks) if tasks else None,
        "mean_acc_norm_or_acc": sum(normalised) / len(tasks) if tasks else None,
        "perplexity": perplexities,
        "mean_perplexity": sum(perplexities.values()) / 3 if len(perplexities) == 3 else None,
    }


def _open_results(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The results to continue, or empty ones."""
    if not path.exists():
        return {"suite": PAPER, "identity": identity, "tasks": {}, "perplexity": {}, "unavailable": {}}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        earlier = results["identity"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of the paper's suite: name another file with --output.") from error
    if different := [key for key in identity if earlier.get(key) != identity[key]]:
        key = different[0]
        raise ValueError(
            f"{path} holds results of another run: `{key}` is {earlier.get(key)} there and {identity[key]} here. Name "
            "another file with --output, or remove this one."
        )
    return results


def _load(name: str, shots: int) -> dict:
    from datasets.exceptions import DatasetsError

    try:
        return load_tasks([name], shots)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:  # the last: datasets that are scripts
        raise UnavailableError(" ".join(str(error).split())) from error


def _run_task(model, tokenizer, name: str, shots: int, limit: int | None, batch_size: int) -> dict[str, Any]:
    """A task's metrics; of a group, its own."""
    loaded = _load(name, shots)
    results = run_tasks(model, tokenizer, loaded, limit, batch_size)
    rows = sum(results["n-samples"][leaf]["effective"] for leaf in loaded["tasks"])
    return {
        "metrics": _metrics(results, name),
        "rows": rows,
        "num_fewshot": shots,
        "version": results["versions"][name],
        "dataset": sorted({str(task.config.dataset_path) for task in loaded["tasks"].values()}),
    }


def _metrics(results: dict, name: str) -> dict[str, dict[str, float | None]]:
    listed = (score for score in scores(results) if score.task == name)
    return {score.metric: {"value": score.value, "stderr": score.stderr} for score in listed}


def _run_wikitext(model, tokenizer, limit: int | None, batch_size: int) -> dict[str, Any]:
    """The harness's word and byte perplexities, and ours a token over the same texts."""
    loaded = _load(WIKITEXT, 0)
    results = run_tasks(model, tokenizer, loaded, limit, batch_size)
    task = loaded["tasks"][WIKITEXT]
    texts = [task.doc_to_target(doc) for doc in task.eval_docs][:limit]
    return {
        "source": (
            "test split of EleutherAI/wikitext_document_level, wikitext-2-raw-v1, as the harness's task wikitext "
            "detokenises it; WikiText-103's test split is the same text"
        ),
        "harness": {"metrics": _metrics(results, WIKITEXT), "version": results["versions"][WIKITEXT]},
    } | perplexity_entry(text_perplexity(model, tokenizer, texts, batch_size=batch_size))


def _run_climbmix(model, tokenizer, limit: int | None, batch_size: int) -> dict[str, Any]:
    """Perplexity of the documents that training by the presets' recipes holds out."""
    from datasets.exceptions import DatasetsError

    from ..training.data import held_out_documents, load_documents
    from ..training.recipe import load_recipe

    recipe = load_recipe(local_tasks_folder().parent / "recipes" / f"{CLIMBMIX_RECIPE}.yaml")
    data, seed = recipe.data, recipe.training.seed
    limit = data.validation_documents if limit is None else min(limit, data.validation_documents)
    try:
        texts = held_out_documents(load_documents(data, seed), data.validation_share, limit)["text"]
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise UnavailableError(" ".join(str(error).split())) from error
    return {
        "source": (
            f"{data.dataset}, split {data.dataset_split}: the first {limit} documents whose SHA-256 lies in the "
            f"lowest {data.validation_share:g}, in the order of a shuffle with seed {seed} and a buffer of "
            f"{data.shuffle_buffer}"
        ),
        "texts_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
    } | perplexity_entry(text_perplexity(model, tokenizer, texts, batch_size=batch_size))


def perplexity_entry(result: TextPerplexity) -> dict[str, Any]:
    """The counts and perplexities of a result, for JSON."""
    return {
        "token_perplexity": result.token_perplexity,
        "word_perplexity": result.word_perplexity,
        "byte_perplexity": result.byte_perplexity,
        "bits_per_byte": result.bits_per_byte,
        "documents": result.documents,
        "tokens": result.tokens,
        "words": result.words,
        "bytes": result.bytes,
        "context": result.context,
        "stride": result.stride,
    }
