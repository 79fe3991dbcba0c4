"""Training time of the study's variants beside plain MLA's: whole steps, taking turns, one thread."""

import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from rich.progress import track
from runs import BATCH_TOKENS, CONTEXT, SHAPE, VARIANTS, VOCABULARY

from modeling_egmla import EGMLAConfig, EGMLAForCausalLM
from modeling_egmla.files import write_whole


REFERENCE = "mla"
ACCUMULATED = 4  # batches of a step, as in `Run.recipe`


class Trained:
    """A variant that takes steps, and the seconds of processor time of each."""

    def __init__(self, variant: str):
        fields = {**SHAPE, **VARIANTS[variant]}
        self.model = EGMLAForCausalLM(EGMLAConfig(vocab_size=VOCABULARY, **fields)).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.ids = torch.randint(VOCABULARY, (BATCH_TOKENS // CONTEXT // ACCUMULATED, CONTEXT))

    def step(self) -> float:
        started = time.process_time()
        for _ in range(ACCUMULATED):
            self.model(self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - started


def measure_speed(path: Path, pairs: int) -> None:
    """
    Writes how long each variant's steps take, of those of plain MLA before and behind them: a machine that is slow for
    a while is so for both. Quartiles and medians over `pairs`.
    """
    torch.set_num_threads(1)
    reference, all_seconds, ratios = Trained(REFERENCE), [], {}
    reference.step()  # the optimizer makes its moments
    for variant in track([name for name in VARIANTS if name != REFERENCE], "variants"):
        trained = Trained(variant)
        trained.step()
        before, of_variant = reference.step(), []
        for _ in range(pairs):
            seconds, behind = trained.step(), reference.step()
            of_variant.append(2 * seconds / (before + behind))
            all_seconds.append(before := behind)
        ratios[variant] = [round(quartile, 3) for quartile in statistics.quantiles(of_variant, n=4)]
    result = {
        "time_of_mla": ratios,
        "mla_tokens_per_second": round(BATCH_TOKENS / statistics.median(all_seconds)),
        "what": "a step's time of plain MLA's: lower quartile, median, upper quartile; steps of 2,048 tokens, one "
        "thread, processor time, float32",
        "pairs": pairs,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n")
