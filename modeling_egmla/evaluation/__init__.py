"""
Evaluation (the `eval` extra): tasks of lm-evaluation-harness by name, tasks of our own that run without network on
rows in `configuration/tasks`, the paper's suite, and the perplexity of any text.
"""

from .harness import Score, evaluate, local_tasks, local_tasks_folder, scores
from .perplexity import TextPerplexity, text_perplexity
from .suite import run_paper_suite


__all__ = [
    "Score",
    "TextPerplexity",
    "evaluate",
    "local_tasks",
    "local_tasks_folder",
    "run_paper_suite",
    "scores",
    "text_perplexity",
]
