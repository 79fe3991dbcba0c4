"""lm-evaluation-harness on a model that is loaded: its tasks by name, and tasks of our own that need no network."""

import functools
import importlib.metadata
import importlib.resources
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


FEWSHOT_SEED = 1234  # the harness's default
PAPER = "paper"  # the group of the paper's tasks, whose rows come from the Hub


@dataclass(frozen=True)
class Score:
    """
    One metric of one task.

    Attributes:
        task, metric: as the harness names them.
        value: mean over the rows.
        stderr: its standard error; None where the harness gives none.
        rows: rows that were scored; None, as also below, where the results do not say.
        num_fewshot: solved examples in front of each.
        all_rows: rows that the task has.
        filter: what the harness did to outputs before it scored them, as it names that; `"none"` is nothing.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    rows: int | None
    num_fewshot: int | None
    all_rows: int | None = None
    filter: str = "none"


def local_tasks_folder() -> Path:
    """Folder with the task files and rows that come with this package."""
    return Path(str(importlib.resources.files("modeling_egmla.configuration").joinpath("tasks")))


def local_tasks() -> list[str]:
    """Names of the tasks that run without network; the suite of all of them is one of the names."""
    return sorted(path.stem for path in local_tasks_folder().glob("*.yaml") if path.stem != PAPER)


@contextmanager
def _only_errors(*names: str) -> Iterator[None]:
    """Silences the harness's account of its own defaults."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


@contextmanager
def _random_numbers_of_the_harness() -> Iterator[None]:
    """Random numbers as the harness's own command seeds them, which some tasks shuffle by; then the caller's again."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        random.seed(0)
        numpy.random.seed(FEWSHOT_SEED)
        torch.manual_seed(FEWSHOT_SEED)
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


@functools.cache
def _task_manager(include_defaults: bool):
    """What knows the task files. Reading the harness's thousands takes a while, so it is done once, and if need be."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=local_tasks_folder(), include_defaults=include_defaults)


def load_tasks(names: Sequence[str], num_fewshot: int | None = None) -> dict:
    """
    Loads tasks with their rows.

    Args:
        names: tasks, groups or patterns.
        num_fewshot: solved examples in front of each row; by default what the task says.

    Returns:
        What the harness's `evaluate` takes: `tasks`, `groups` and `group_map`.

    Raises:
        ValueError: no such task, or one that is defined without solved examples is to have some.
        OSError: the rows cannot be downloaded.
    """
    with _only_errors("lm_eval", "datasets"), _random_numbers_of_the_harness():
        manager = _task_manager(include_defaults=not set(names) <= set(local_tasks()))
        if unknown := [name for name in names if not manager.match_tasks([name])]:
            raise ValueError(
                f"lm-evaluation-harness has no task {unknown[0]!r}: `lm_eval ls tasks` lists those it has, and "
                f"{', '.join(local_tasks())} come with egmla and need no network."
            )
        loaded = manager.load(list(names))
        # As the harness's simple_evaluate does, which would go on to ask git and pip about this machine.
        for name, task in loaded["tasks"].items():
            own_fewshot = task.get_config("num_fewshot")
            if own_fewshot == 0 and num_fewshot:
                raise ValueError(
                    f"--num-fewshot {num_fewshot}: the task {name} is defined without solved examples. Run it apart, "
                    "without that option."
                )
            if own_fewshot is None or num_fewshot is not None:
                task.set_config(key="num_fewshot", value=num_fewshot or 0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        return loaded


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    loaded: dict,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict:
    """Runs what [`load_tasks`] loaded; arguments and result as of [`evaluate`]."""
    with _only_errors("lm_eval", "datasets"), _random_numbers_of_the_harness():
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        results = lm_eval.evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            loaded,
            limit=limit,
            bootstrap_iters=1000,
            log_samples=False,
        )
        return results | {"lm_eval_version": importlib.metadata.version("lm_eval")}


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
) -> dict:
    """
    Runs tasks of lm-evaluation-harness on a model that is loaded. Inputs are cut to the model's own context length.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        tasks: names, groups or patterns (`"arc_*"`) of tasks; [`local_tasks`] need no network.
        limit: score the first so many rows of each task only.
        num_fewshot: solved examples in front of each row; by default what the task says.
        batch_size: rows at once; scores do not depend on it.

    Returns:
        The harness's results: `results`, `n-samples`, `n-shot`, `configs`, `versions`, `lm_eval_version` and more; see
        [`scores`].

    Raises:
        ValueError: no such task, or one that is defined without solved examples is to have some.
        OSError: the rows of a task cannot be downloaded.
    """
    return run_tasks(model, tokenizer, load_tasks(tasks, num_fewshot), limit, batch_size)


def scores(results: dict) -> list[Score]:
    """The metrics in the harness's results, which [`evaluate`] returns, in its order."""

    def number(value) -> float | None:
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    listed = []
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, filter_name = name.partition(",")
            if not filter_name or metric.endswith("_stderr") or number(value) is None:
                continue
            samples = results.get("n-samples", {}).get(task, {})
            listed.append(
                Score(
                    task=task,
                    metric=metric,
                    value=value,
                    stderr=number(metrics.get(f"{metric}_stderr,{filter_name}")),
                    rows=samples.get("effective"),
                    num_fewshot=results.get("n-shot", {}).get(task),
                    all_rows=samples.get("original"),
                    filter=filter_name,
                )
            )
    return listed
