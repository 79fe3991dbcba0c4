"""
Milliseconds a training step, EG-MLA beside the library's dense MLA and MHA at the same shape, and what it allocates.

    python benchmarks/training.py                                  # the whole shape: 12 layers, 8 x 1,024 tokens
    python benchmarks/training.py --layers 2 --sequences 2         # a quick look
    python benchmarks/training.py --optimizers fused,foreach,loop,lazy --output training.json

Our models compute the loss a few tokens at a time; "egmla-plain-loss" is EG-MLA with the library's loss.
Systems take turns step by step in one process; medians and ratios are printed. A step is the forward and backward
pass and, apart, the optimizer's step. "lazy" moves only the table rows whose ids were in the batch (`SparseAdam` over
sparse gradients, AdamW for the rest), which is another optimizer than AdamW: momentum moves no row that did not
occur. Token ids are of real text. On a machine that others use too, `--clock cpu` with one thread counts the process's
own time only.
"""

import json
import platform
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from modeling_egmla import EGMLAConfig, EGMLAForCausalLM
from modeling_egmla.benchmark.systems import Shape, library_config
from modeling_egmla.benchmark.text import token_ids
from modeling_egmla.console import console, format_bytes, plain_table


PRESET = "egmla-base-kv256-emb256"
NAMES = {
    "egmla": "EG-MLA",
    "egmla-plain-loss": "EG-MLA, library's loss",
    "our-mla": "our MLA",
    "mla": "library's MLA",
    "mha": "library's MHA",
}


def build(name: str, shape: Shape) -> torch.nn.Module:
    """A fresh model by its name on the command line, in training mode."""
    if name in ("mha", "mla"):
        model_class = LlamaForCausalLM if name == "mha" else DeepseekV3ForCausalLM
        return model_class(library_config(shape, name)).train()
    model = EGMLAForCausalLM(shape.egmla_config(name)).train()
    if name == "egmla-plain-loss":
        model.loss_function = ForCausalLMLoss
    return model


class Optimizer:
    """AdamW as PyTorch has it ("fused", "foreach", "loop"), or with `SparseAdam` for gate tables ("lazy")."""

    def __init__(self, name: str, model: torch.nn.Module):
        tables = [m for n, m in model.named_modules() if n.endswith("kv_gate_embed")]
        lazy = tables if name == "lazy" else []
        for table in tables:
            table.sparse = name == "lazy"
        weights = {table.weight for table in lazy}
        rest = [p for p in model.parameters() if p not in weights]
        kind = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
        self.parts = [torch.optim.AdamW(rest, lr=1e-4, **kind.get(name, {"fused": True}))]
        if lazy:
            self.parts.append(torch.optim.SparseAdam(list(weights), lr=1e-4))

    def step(self) -> None:
        for part in self.parts:
            part.step()
            part.zero_grad()


def saved_bytes(run) -> int:
    """Bytes that autograd keeps between forward and backward, weights apart, each storage counted once."""
    storages = {}

    def pack(tensor):
        if not tensor.is_leaf:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
        total = sum(storages.values())
    loss.backward()
    return total


def main(
    systems: str = "egmla,mla,mha",
    layers: int = 12,
    sequences: int = 8,
    length: int = 1024,
    precision: Annotated[str, typer.Option(help="bfloat16, float32, or autocast (float32 weights)")] = "bfloat16",
    optimizers: Annotated[str, typer.Option(help="of fused, foreach, loop, lazy; empty: none")] = "fused",
    steps: int = 5,
    clock: Annotated[str, typer.Option(help="wall or cpu")] = "wall",
    output: Annotated[Path | None, typer.Option(help="where to write JSON")] = None,
) -> None:
    torch.manual_seed(0)
    shape = Shape.of(EGMLAConfig.from_preset(PRESET), layers)
    batch = token_ids(sequences, length, shape.config.vocab_size).long()
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    models = {name: build(name, shape).to(dtype) for name in systems.split(",")}

    def forward(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return model(input_ids=batch, labels=batch, use_cache=False).loss

    now = time.process_time if clock == "cpu" else time.perf_counter

    def timed(function):
        start = now()
        result = function()
        return result, (now() - start) * 1e3

    activations = {}
    for name, model in models.items():
        activations[name] = saved_bytes(lambda model=model: forward(model))  # and a first, untimed pass
        model.zero_grad()
    times = {name: {"forward": [], "backward": []} for name in models}
    for _ in range(steps):
        for name, model in models.items():
            loss, milliseconds = timed(lambda model=model: forward(model))
            times[name]["forward"].append(milliseconds)
            times[name]["backward"].append(timed(loss.backward)[1])
            model.zero_grad()
    for kind in filter(None, optimizers.split(",")):
        for name, model in models.items():
            if kind == "lazy" and name != "egmla":
                continue
            optimizer = Optimizer(kind, model)
            for step in range(steps + 1):
                forward(model).backward() if step == 0 or kind == "lazy" else fill_gradients(model)
                milliseconds = timed(optimizer.step)[1]
                if step:  # the first one makes the moments
                    times[name].setdefault(f"step {kind}", []).append(milliseconds)
            del optimizer

    medians = {name: {part: statistics.median(values) for part, values in of.items()} for name, of in times.items()}
    for of in medians.values():
        of["forward + backward"] = of["forward"] + of["backward"]
    report = {
        "layers": layers,
        "batch": [sequences, length],
        "distinct_ids": len(batch.unique()),
        "preset": PRESET,
        "precision": precision,
        "steps": steps,
        "clock": clock,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "processor": platform.processor() or platform.machine(),
        "parameters": {name: model.num_parameters() for name, model in models.items()},
        "activation_bytes": activations,
        "milliseconds": times,
        "medians": medians,
    }
    show(report)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def fill_gradients(model: torch.nn.Module) -> None:
    """Dense gradients without a backward pass: how long a step takes does not depend on their values."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)


def show(report: dict) -> None:
    """Prints medians, ratios to EG-MLA's peers, parameters and activations."""
    sequences, length = report["batch"]
    title = (
        f"{report['layers']} layers, {sequences} x {length:,} tokens ({report['distinct_ids']:,} distinct ids), "
        f"{report['precision']}, {report['threads']} threads, {report['clock']} clock, medians of {report['steps']}"
    )
    medians = report["medians"]
    table = plain_table(title, "", *(NAMES[name] for name in medians))
    parts = dict.fromkeys(part for of in medians.values() for part in of)
    for part in parts:
        values = [f"{of[part]:,.0f} ms" if part in of else "" for of in medians.values()]
        table.add_row(part, *values)
    for peer in ("mla", "mha"):
        if peer in medians and "egmla" in medians:
            ratio = {n: of["forward + backward"] / medians[peer]["forward + backward"] for n, of in medians.items()}
            table.add_row(f"forward + backward, of {NAMES[peer]}", *(f"{value:.2f}" for value in ratio.values()))
    table.add_row("parameters", *(f"{count:,}" for count in report["parameters"].values()))
    table.add_row("kept for the backward pass", *(format_bytes(size) for size in report["activation_bytes"].values()))
    console().print(table)


if __name__ == "__main__":
    typer.run(main)
