"""Training speed of the study's variants: whole steps, alternating between variants, one thread."""

import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from runs import BATCH_TOKENS, CONTEXT, SHAPE, VARIANTS, VOCABULARY

from modeling_egmla import EGMLAConfig, EGMLAForCausalLM
from modeling_egmla.files import write_whole


def measure_speed(path: Path, repeats: int) -> None:
    """Writes the median tokens a second of every variant, with its quartiles."""
    torch.set_num_threads(1)
    ids = torch.randint(VOCABULARY, (BATCH_TOKENS // CONTEXT // 4, CONTEXT))
    seconds = {name: [] for name in VARIANTS}
    for repeat in range(repeats + 1):  # the first is for warming up
        for name, fields in VARIANTS.items():
            model = EGMLAForCausalLM(EGMLAConfig(vocab_size=VOCABULARY, **{**SHAPE, **fields}))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(2):  # the optimizer makes its moments in the first
                started = time.perf_counter()
                for _ in range(4):
                    model(ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step and repeat:
                    seconds[name].append(time.perf_counter() - started)
    result = {
        "tokens_per_second": {
            name: [round(BATCH_TOKENS / quartile) for quartile in reversed(statistics.quantiles(values, n=4))]
            for name, values in seconds.items()
        },
        "what": "lower quartile, median and upper quartile of whole steps of 2,048 tokens, one thread, float32",
        "repeats": repeats,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n")
