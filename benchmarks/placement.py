"""
Gate tables on the device, on the host and memory-mapped: time of a decode step, bytes moved, resident memory.

    python benchmarks/placement.py FOLDER ids.pt --steps 33
    python benchmarks/placement.py FOLDER ids.pt --memory mmap:projected:none

FOLDER gets a model of random weights of the Base preset, and its precomputed gates, if it is not there. Token ids are
those of real text (a saved 1-D tensor). A system is `placement:gates:dtype`; systems take turns step by step in one
process, on caches that are filled directly with random states; medians are printed. With `--memory` one system is
loaded, decodes by itself, and its resident memory is printed: of files (which the system may drop) and of the rest.
"""

import argparse
import gc
import statistics
import time
from pathlib import Path

import torch

from modeling_egmla import EGMLACache, EGMLAConfig, EGMLAForCausalLM


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
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("ids")
    parser.add_argument("--gates", choices=["projected", "precomputed"], default="projected")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=33)
    parser.add_argument("--pool-rows", type=int, default=4096)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--memory", metavar="SYSTEM")
    args = parser.parse_args()
    if not (args.folder / "model.safetensors").exists():
        make_folder(args.folder)

    ids, length = torch.load(args.ids), args.context + args.steps + 2
    ids = torch.stack([ids[i * length : (i + 1) * length] for i in range(args.batch)])
    before = resident()
    names = [args.memory] if args.memory else [system.format(args.gates) for system in args.systems]
    systems = {}
    for name in names:
        model = load(name, args.folder, args.pool_rows)
        systems[name] = (model, filled_cache(model.config, ids[:, : args.context]))
    gc.collect()
    loaded = resident()

    clock = time.perf_counter if args.clock == "wall" else time.process_time
    seconds, first_bytes = {name: [] for name in names}, {}
    for step in range(args.steps + 2):
        new = ids[:, args.context + step :][:, :1]
        for name, (model, cache) in systems.items():
            start = clock()
            model(new, cache=cache, use_cache=True)
            seconds[name].append(clock() - start)
            first_bytes.setdefault(name, model.kv_gate_statistics().bytes_moved)
    print(
        f"batch {args.batch}, context {args.context}, distinct ids {len(ids[:, : args.context].unique())}, pool "
        f"{args.pool_rows}, {args.clock} clock, threads {torch.get_num_threads()}"
    )
    for name, (model, _) in systems.items():
        median, held = statistics.median(seconds[name][2:]), model.kv_gate_statistics()
        moved = (held.bytes_moved - first_bytes[name]) / (args.steps + 1) / args.batch
        print(
            f"{name:26s} {median * 1e3:7.1f} ms a step, {args.batch / median:6.1f} tokens/s; first step "
            f"{seconds[name][0] * 1e3:.0f} ms and {first_bytes[name]:,} bytes, then {moved:,.0f} bytes a token; "
            f"device {(held.device + held.pool) / 2**20:,.0f} MiB, host {held.host / 2**20:,.0f}, file "
            f"{held.file / 2**20:,.0f}"
        )
    if args.memory:
        print(f"MiB resident: {before} at first, {loaded} loaded, {resident()} after decoding")


if __name__ == "__main__":
    main()
