"""
Gate tables on the device, on the host and memory-mapped: time of a decode step, bytes moved, resident memory.

    python benchmarks/placement.py FOLDER --steps 33
    python benchmarks/placement.py FOLDER --memory mmap:projected:none

FOLDER gets a model of random weights of the Base preset, and its precomputed gates, if it is not there. Token ids are
those of real text. A system is `placement:gates:dtype`; systems take turns step by step in one process, on caches that
are filled directly with random states; medians are printed. With `--memory` one system is loaded, decodes by itself,
and its resident memory is printed: of files (which the system may drop) and of the rest.
"""

import gc
import statistics
import time
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from modeling_egmla import EGMLACache, EGMLAConfig, EGMLAForCausalLM
from modeling_egmla.benchmark.text import token_ids


SYSTEMS = [f"{placement}:{{}}:{dtype}" for placement in ("device", "host", "mmap") for dtype in ("none", "int8")]


def make_folder(folder: Path) -> None:
    torch.manual_seed(0)
    model = EGMLAForCausalLM(EGMLAConfig.from_preset("egmla-base-kv64-emb256")).to(torch.bfloat16)
    model.save_pretrained(folder)
    for dtype in ("bfloat16", "int8"):
        model.save_kv_gates(folder / f"gates-{dtype}", dtype)


def load(system: str, folder: Path, pool_rows: int) -> EGMLAForCausalLM:
    placement, gates, dtype = system.split(":")
    dtype = None if dtype == "none" else dtype
    kv_gates = {"placement": placement, "pool_rows": pool_rows}
    if gates == "projected":
        kv_gates["dtype"] = dtype
    elif placement == "mmap":
        kv_gates |= {"gates_file": folder / f"gates-{dtype or 'bfloat16'}"}
    model = EGMLAForCausalLM.from_pretrained(folder, kv_gates=kv_gates)
    if gates == "precomputed" and placement != "mmap":
        model.precompute_kv_gates(dtype)
    return model


def filled_cache(config: EGMLAConfig, ids: torch.Tensor) -> EGMLACache:
    B, T = ids.shape
    latents, keys = (
        [torch.randn(B, 1, T, width, dtype=torch.bfloat16) for _ in range(config.num_layer_groups)]
        for width in (config.kv_lora_rank, config.qk_rope_head_dim)
    )
    return EGMLACache(config).fill(latents, keys, ids.int())


def resident() -> dict[str, int]:
    """MiB of this process in memory: of files, and of its own."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) // 1024 for name in ("RssAnon", "RssFile")}


@torch.no_grad()
def main(
    folder: Path,
    gates: Literal["projected", "precomputed"] = "projected",
    system: Annotated[list[str], typer.Option(help="May be repeated; `{}` stands for --gates.")] = SYSTEMS,
    batch: int = 1,
    context: int = 4096,
    steps: int = 33,
    pool_rows: int = 4096,
    clock: Annotated[Literal["wall", "cpu"], typer.Option(help="Or the process's own time.")] = "wall",
    memory: Annotated[str | None, typer.Option(metavar="SYSTEM")] = None,
) -> None:
    """Prints a line for each system."""
    if not (folder / "model.safetensors").exists():
        make_folder(folder)

    ids = token_ids(batch, context + steps + 2, EGMLAConfig.from_pretrained(folder).vocab_size).long()
    before = resident()
    names = [memory] if memory else [name.format(gates) for name in system]
    systems = {}
    for name in names:
        model = load(name, folder, pool_rows)
        systems[name] = (model, filled_cache(model.config, ids[:, :context]))
    gc.collect()
    loaded = resident()

    now = time.perf_counter if clock == "wall" else time.process_time
    seconds, first_bytes = {name: [] for name in names}, {}
    for step in range(steps + 2):
        new = ids[:, context + step :][:, :1]
        for name, (model, cache) in systems.items():
            start = now()
            model(new, cache=cache, use_cache=True)
            seconds[name].append(now() - start)
            first_bytes.setdefault(name, model.kv_gate_statistics().bytes_moved)
    print(
        f"batch {batch}, context {context}, distinct ids {len(ids[:, :context].unique())}, pool "
        f"{pool_rows}, {clock} clock, threads {torch.get_num_threads()}"
    )
    for name, (model, _) in systems.items():
        median, held = statistics.median(seconds[name][2:]), model.kv_gate_statistics()
        moved = (held.bytes_moved - first_bytes[name]) / (steps + 1) / batch
        print(
            f"{name:26s} {median * 1e3:7.1f} ms a step, {batch / median:6.1f} tokens/s; first step "
            f"{seconds[name][0] * 1e3:.0f} ms and {first_bytes[name]:,} bytes, then {moved:,.0f} bytes a token; "
            f"device {(held.device + held.pool) / 2**20:,.0f} MiB, host {held.host / 2**20:,.0f}, file "
            f"{held.file / 2**20:,.0f}"
        )
    if memory:
        print(f"MiB resident: {before} at first, {loaded} loaded, {resident()} after decoding")


if __name__ == "__main__":
    typer.run(main)
