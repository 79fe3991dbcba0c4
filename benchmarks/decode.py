"""
Milliseconds a decode step on filled caches, EG-MLA beside the library's MLA and MHA at the same shape.

    python benchmarks/decode.py --context 4096 --batch 1 --dtype float32 --ids ids.pt

Caches are filled directly with random states. Token ids are consecutive pieces of `--ids` (a saved 1-D tensor, real
text), or drawn from Zipf's law. Systems take turns step by step in one process; medians and ratios to MHA are printed.
On a machine that others use too, `--clock cpu` with one thread counts the process's own time only.
"""

import argparse
import statistics
import time

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from modeling_egmla import EGMLACache, EGMLAConfig, EGMLAForCausalLM


SHAPE = {
    "vocab_size": 50304,
    "hidden_size": 768,
    "intermediate_size": 1920,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}


def text_ids(path: str | None, batch_size: int, length: int) -> torch.Tensor:
    if path is not None:
        ids = torch.load(path)
        return torch.stack([ids[i * length : (i + 1) * length] for i in range(batch_size)]).int()
    rank = torch.arange(1, SHAPE["vocab_size"] + 1, dtype=torch.double)
    return torch.multinomial((rank + 2.7) ** -1.15, batch_size * length, replacement=True).view(batch_size, -1).int()


def egmla(decoding: str, token_ids: torch.Tensor, dtype: torch.dtype, **changes):
    config = EGMLAConfig(**SHAPE, **changes)
    model = EGMLAForCausalLM(config).eval().to(dtype)
    model.set_kv_decoding(decoding)
    (B, T), cache = token_ids.shape, EGMLACache(config)
    latents = [torch.randn(B, 1, T, config.kv_lora_rank, dtype=dtype) for _ in range(config.num_layer_groups)]
    keys = [torch.randn(B, 1, T, config.qk_rope_head_dim, dtype=dtype) for _ in range(config.num_layer_groups)]
    return model, cache.fill(latents, keys, token_ids)


def library(model, key_width: int, batch_size: int, length: int, dtype: torch.dtype):
    model = model.eval().to(dtype)
    cache = DynamicCache(config=model.config)
    for layer in range(SHAPE["num_hidden_layers"]):
        heads = 1 if key_width != 64 else SHAPE["num_attention_heads"]
        keys, values = (torch.randn(batch_size, heads, length, width, dtype=dtype) for width in (key_width, 64))
        cache.update(keys, values, layer)
    return model, cache


def build(name: str, token_ids: torch.Tensor, dtype: torch.dtype):
    B, T = token_ids.shape
    if name == "mha":
        return library(LlamaForCausalLM(LlamaConfig(**SHAPE)), 64, B, T, dtype)
    if name == "mla":
        config = DeepseekV3Config(
            **SHAPE,
            num_key_value_heads=12,
            q_lora_rank=None,
            kv_lora_rank=256,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=64,
            first_k_dense_replace=SHAPE["num_hidden_layers"],
        )
        return library(DeepseekV3ForCausalLM(config), 256, B, T, dtype)
    kind, decoding = name.split(":")
    changes = {"our-mla": {"kv_gate": "none", "kv_lora_rank": 256}, "our-add": {"kv_gate": "add"}}.get(kind, {})
    model, cache = egmla(decoding, token_ids, dtype, **changes)
    if kind != "projected" and model.config.kv_gate != "none":
        model.precompute_kv_gates()
    return model, cache


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="egmla:auto,mha,mla")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--queries", type=int, default=1, help="new tokens a step")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--ids")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    args = parser.parse_args()
    SHAPE["num_hidden_layers"] = args.layers

    torch.manual_seed(0)
    token_ids = text_ids(args.ids, args.batch, args.context + 64 * args.queries)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    dtype, history = getattr(torch, args.dtype), token_ids[:, : args.context]
    systems = {name: build(name, history, dtype) for name in args.systems.split(",")}
    seconds = {name: [] for name in systems}
    for step in range(args.steps + 2):
        new = token_ids[:, args.context + step * args.queries :][:, : args.queries].long()
        for name, (model, cache) in systems.items():
            start = clock()
            model(new, cache=cache, use_cache=True)
            seconds[name].append(clock() - start)
    print(
        f"context {args.context} batch {args.batch} queries {args.queries} {args.dtype} layers {args.layers} "
        f"{args.clock} clock, threads {torch.get_num_threads()}, distinct ids {[len(row.unique()) for row in history]}"
    )
    times = {name: sorted(values[2:]) for name, values in seconds.items()}
    peer = statistics.median(times["mha"]) if "mha" in times else None
    for name, values in times.items():
        median = statistics.median(values)
        ratio = f"  {median / peer:.2f} of mha (fastest {values[0] / times['mha'][0]:.2f})" if peer else ""
        print(f"{name:22s} median {median * 1e3:8.1f} ms  fastest {values[0] * 1e3:8.1f} ms{ratio}")
        if hasattr(systems[name][1], "memory"):
            memory = systems[name][1].memory()
            print(f"{'':22s} cache {memory.latents:,} bytes, workspace {memory.workspace / memory.latents:.3f} of it")


if __name__ == "__main__":
    main()
