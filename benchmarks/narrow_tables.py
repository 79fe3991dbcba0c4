"""
What gate tables in bfloat16 and int8 cost: change of a model's logits and loss on text.

    python benchmarks/narrow_tables.py configuration/egmla-sotu speech.txt
    python benchmarks/narrow_tables.py egmla-base-kv64-emb256

A folder or Hub id is loaded in float32 with its tokenizer, and reads a text file; a preset gets random weights and
reads the text of the benchmark. Printed: relative change of the logits, ||a - b|| / ||b||, the largest change of one,
the share of positions whose likeliest token stays, and the loss before and after.
"""

from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_egmla import EGMLAConfig, EGMLAForCausalLM
from modeling_egmla.benchmark.text import token_ids


@torch.no_grad()
def main(
    model: str,
    text: Annotated[Path | None, typer.Argument(help="A file; without one, MODEL is a preset.")] = None,
    batch: int = 8,
    context: int = 512,
) -> None:
    """Prints a line for each kind of gates and each precision."""
    if text is not None:
        ids = AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
        ids = ids[: batch * context].view(batch, context)
    else:
        ids = token_ids(batch, context, EGMLAConfig.from_preset(model).vocab_size).long()

    def load():
        if text is not None:
            return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        torch.manual_seed(0)
        return EGMLAForCausalLM(EGMLAConfig.from_preset(model)).eval()

    def read(loaded):
        logits = torch.cat([loaded(row[None], use_cache=False).logits for row in ids])
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()

    expected, loss = read(load())
    print(f"{model}, {batch} x {context} tokens, loss {loss:.5f}, logits' deviation {expected.std():.3f}")
    for gates in ("projected", "precomputed"):
        for dtype in ("bfloat16", "int8"):
            narrowed = load()
            if gates == "precomputed":
                narrowed.precompute_kv_gates(dtype)
            else:
                narrowed.place_kv_gates("device", dtype)
            actual, new_loss = read(narrowed)
            del narrowed  # before the next is loaded
            print(
                f"{gates:11s} {dtype:8s} relative {(actual - expected).norm() / expected.norm():.2e}  largest "
                f"{(actual - expected).abs().max():.4f}  same token "
                f"{(actual.argmax(-1) == expected.argmax(-1)).float().mean():.4f}  loss {new_loss - loss:+.5f}"
            )


if __name__ == "__main__":
    typer.run(main)
