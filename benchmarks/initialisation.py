"""
Compares initialisations of the gate: signal and gradients before the first step, validation loss after some hundred.

    python benchmarks/initialisation.py 'texts/*.txt' --gates none,0.02,auto,1 --steps 400 --output init.jsonl

`none` is plain MLA with the same latents; a number is the standard deviation of `kv_gate_proj`; `auto` is
`kv_gate_dim ** -0.5`. All see the same blocks in the same order, from the same seed.
"""

import json
import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from modeling_egmla import EGMLAConfig, EGMLAForCausalLM
from modeling_egmla.training.data import load_documents, pack_documents, split_documents, train_tokenizer
from modeling_egmla.training.recipe import DataRecipe


def build_model(config: EGMLAConfig, gate_std: float | None, table_std: float, seed: int) -> EGMLAForCausalLM:
    """A fresh model whose gate tables and projections have the given standard deviations."""
    torch.manual_seed(seed)
    model = EGMLAForCausalLM(config)
    for layer in model.model.layers:
        if config.kv_gate != "none":
            torch.nn.init.normal_(layer.self_attn.kv_gate_embed.weight, std=table_std)
            torch.nn.init.normal_(layer.self_attn.kv_gate_proj.weight, std=gate_std)
    return model


def measure_start(model: EGMLAForCausalLM, ids: torch.Tensor) -> list[dict[str, float]]:
    """
    Signal and gradients of each layer at the given batch, ids [B, S].

    Returns:
        A row a layer: `product_std` of gated K/V before their LayerNorm, `product_var_over_eps` (median over tokens),
        `kv_std` of K/V as attention gets them, `grad_*` norms of parameters' gradients.
    """
    attentions = [layer.self_attn for layer in model.model.layers]
    rows = [{} for _ in attentions]
    gated = model.config.kv_gate != "none"

    def record(row):
        def hook(module, inputs, output):
            if gated:
                variance = inputs[0].var(-1, unbiased=False)
                row["product_std"] = variance.mean().sqrt().item()
                row["product_var_over_eps"] = variance.median().item() / module.eps
            row["kv_std"] = output.std().item()

        return hook

    hooks = [
        (attention.kv_gate_norm if gated else attention.kv_b_proj).register_forward_hook(record(row))
        for attention, row in zip(attentions, rows)
    ]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for hook in hooks:
        hook.remove()
    for attention, row in zip(attentions, rows):
        for name, parameter in attention.named_parameters():
            if name.endswith("proj.weight") or name == "kv_gate_embed.weight":
                row[f"grad_{name.removesuffix('.weight')}"] = parameter.grad.norm().item()
    model.zero_grad()
    return rows


def train(model: EGMLAForCausalLM, batches: torch.Tensor, learning_rate: float, warmup_steps: int) -> list[float]:
    """AdamW with a cosine schedule, one step for each of batches [steps, B, S]; returns the training losses."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "kv_gate_embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "kv_gate_embed" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    losses = []
    for step, ids in enumerate(batches):
        warmup = min(1.0, (step + 1) / warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * warmup * 0.5 * (1 + math.cos(math.pi * step / len(batches)))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluate(model: EGMLAForCausalLM, blocks: torch.Tensor) -> float:
    """Mean loss over blocks [N, S], nats a token."""
    model.eval()
    return sum(model(input_ids=ids, labels=ids, use_cache=False).loss.item() for ids in blocks.split(1)) / len(blocks)


def main(
    files: Annotated[list[str], typer.Argument(help="Globs of text files, one document each.")],
    gates: Annotated[
        str, typer.Option(help="Comma-separated: none, auto or standard deviations.")
    ] = "none,0.02,auto,1",
    table_std: Annotated[float, typer.Option(help="Standard deviation of the gate tables.")] = 0.02,
    seed: Annotated[int, typer.Option(help="Seed of weights and order of the text.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps of 4 blocks of 256 tokens.")] = 400,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    hidden_size: int = 160,
    layers: int = 4,
    kv_lora_rank: int = 32,
    kv_gate_dim: int = 48,
    output: Annotated[Path | None, typer.Option(help="JSON Lines file to append results to.")] = None,
):
    """Trains one small model for each gate and prints what it measures."""
    torch.set_num_threads(1)
    train_text, validation_text = split_documents(load_documents(DataRecipe(files=files)), 0.05)
    tokenizer = train_tokenizer(train_text, 4096)
    blocks = torch.tensor(pack_documents(train_text, tokenizer, 256, keep_all=False)["input_ids"])
    blocks = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))]
    batches = blocks[: 4 * steps].view(steps, 4, 256)
    validation = torch.tensor(pack_documents(validation_text, tokenizer, 256, keep_all=False)["input_ids"])

    for gate in gates.split(","):
        config = EGMLAConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 5 // 2,
            num_hidden_layers=layers,
            num_attention_heads=4,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            kv_gate="none" if gate == "none" else "multiply",
            kv_gate_dim=kv_gate_dim,
        )
        gate_std = {"none": None, "auto": kv_gate_dim**-0.5}.get(gate) if gate in ("none", "auto") else float(gate)
        model = build_model(config, gate_std, table_std, seed)
        start = measure_start(model, batches[0])
        began = time.perf_counter()
        losses = train(model, batches, learning_rate, warmup_steps=max(1, steps // 20))
        result = {
            "gate": gate,
            "gate_std": gate_std,
            "table_std": None if gate == "none" else table_std,
            "seed": seed,
            "steps": steps,
            "learning_rate": learning_rate,
            "parameters": model.num_parameters(),
            "train_loss_last_50": sum(losses[-50:]) / len(losses[-50:]),
            "validation_loss": evaluate(model, validation),
            "seconds": time.perf_counter() - began,
            "start": start,
        }
        typer.echo(json.dumps({key: value for key, value in result.items() if key != "start"}))
        for number, row in enumerate(start):
            typer.echo(f"  layer {number}: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
        if output is not None:
            with output.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    typer.run(main)
