"""
What gate tables in bfloat16 and int8 cost: change of a model's logits and loss on text.

    python benchmarks/narrow_tables.py configuration/egmla-sotu speech.txt
    python benchmarks/narrow_tables.py egmla-base-kv64-emb256 ids.pt

A folder or Hub id is loaded in float32 with its tokenizer, and reads a text; a preset gets random weights and reads
saved token ids. Printed: relative change of the logits, ||a - b|| / ||b||, the largest change of one, the share of
positions whose likeliest token stays, and the loss before and after.
"""

import argparse

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_egmla import EGMLAConfig, EGMLAForCausalLM


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    has_weights = not args.text.endswith(".pt")
    if has_weights:
        with open(args.text, encoding="utf-8") as text:
            ids = AutoTokenizer.from_pretrained(args.model)(text.read(), return_tensors="pt").input_ids[0]
    else:
        ids = torch.load(args.text)
    ids = ids[: args.batch * args.context].view(args.batch, args.context)

    def load():
        if has_weights:
            return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        torch.manual_seed(0)
        return EGMLAForCausalLM(EGMLAConfig.from_preset(args.model)).eval()

    def read(model):
        logits = torch.cat([model(row[None], use_cache=False).logits for row in ids])
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()

    expected, loss = read(load())
    print(
        f"{args.model}, {args.batch} x {args.context} tokens, loss {loss:.5f}, logits' deviation {expected.std():.3f}"
    )
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
    main()
