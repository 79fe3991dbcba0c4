"""`egmla bench`: speed and memory beside the library's own attention."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import console, is_installed
from .common import load_config
from .plan import DEFAULT_PRESET


LISTS = "with commas between"
QUICK = {
    "prompts": "1024,4096",
    "batches": "1,4",
    "dtypes": "bfloat16",
    "allocators": "default",
    "steps": 5,
    "seconds": 5.0,
}


def bench(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Shape: a preset, a folder or a Hub id.")] = DEFAULT_PRESET,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where results are kept and continued.")
    ] = Path("out/bench"),
    quick: Annotated[bool, typer.Option(help="Decoding and prefill in a few cells, in some two minutes.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Measure nothing, show what the folder holds.")] = False,
    phases: Annotated[str, typer.Option(help=f"Of decode, prefill, memory and groups, {LISTS}.")] = "all",
    prompts: Annotated[str, typer.Option(help=f"Tokens of a sequence, {LISTS}.")] = "1024,2048,4096,16384",
    batches: Annotated[str, typer.Option(help=f"Sequences, {LISTS}.")] = "1,4,8,16,32",
    dtypes: Annotated[str, typer.Option(help=f"Of weights and cache, {LISTS}.")] = "bfloat16,float32",
    allocators: Annotated[
        str, typer.Option(help=f"default, and retained (glibc keeps freed memory), {LISTS}.")
    ] = "default,retained",
    systems: Annotated[
        str,
        typer.Option(
            help=f"Of mha, gqa, mla, our-mla, egmla, egmla-a, egmla-stock and, on CUDA, egmla-a-fused, {LISTS}; all "
            "but the last unless some are named."
        ),
    ] = "all",
    layers: Annotated[int | None, typer.Option(min=1, help="Measure so many layers in place of all.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="By default as many as PyTorch takes.")] = None,
    steps: Annotated[int, typer.Option(min=5, help="Timed steps of each system, after two that are not.")] = 7,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Leave a system out of a cell where its steps would take longer.")
    ] = 60.0,
    prefill_tokens: Annotated[int, typer.Option(min=1, help="Prefill no larger batch x prompt.")] = 8192,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default CUDA where there is any.")] = None,
) -> None:
    """
    Time prefill and decoding, and count memory, of EG-MLA, MLA, MHA and GQA at one shape.

    Systems take turns within a cell; each cell is a file in the folder, and a second call measures only what is
    missing. Caches are filled directly with random states and the ids of real text.

    Examples:

    - `egmla bench --quick`
    - `egmla bench --output results --phases decode --dtypes bfloat16 --batches 1,4`
    - `egmla bench --output results --report`
    """
    import torch

    from ..benchmark.cells import ALLOCATORS, PHASES, Cell, Results
    from ..benchmark.report import Report
    from ..benchmark.schedule import describe, open_results, run_missing
    from ..benchmark.systems import ALL_SYSTEMS, FUSED, GROUPED, LABELS, LAYER_GROUPS, Shape
    from ..benchmark.worker import Job

    out = console()
    if report:
        if not (output / "machine.json").exists():
            raise ValueError(f"{output} holds no results: measure some first, without --report.")
        show(Report(Results(output)), output)
        return

    config = load_config(model)
    shape = Shape.of(config, layers)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError("--device takes cpu or cuda; of several GPUs CUDA_VISIBLE_DEVICES=1, say, chooses one.")
    threads = threads or torch.get_num_threads()
    if quick:
        for name in QUICK:
            if context.get_parameter_source(name).name == "COMMANDLINE":
                raise ValueError(f"--quick sets --{name} itself: leave one of the two out.")
        prompts, batches, dtypes, allocators = (QUICK[name] for name in ("prompts", "batches", "dtypes", "allocators"))
        steps, seconds = QUICK["steps"], QUICK["seconds"]
        phases, prefill_tokens = "decode,prefill" if phases == "all" else phases, min(prefill_tokens, 1024)
    if device != "cpu":
        allocators = "default"
    chosen_phases = _choices("--phases", phases, PHASES)
    chosen_systems = list(ALL_SYSTEMS) if systems == "all" else _choices("--systems", systems, tuple(LABELS))
    if FUSED in chosen_systems and device == "cpu":
        raise ValueError(f"--systems {FUSED} is a kernel for CUDA, and cannot be measured on a CPU.")
    if FUSED in chosen_systems and torch.cuda.get_device_capability() < (8, 0):
        raise ValueError(f"--systems {FUSED} needs compute capability 8.0, and this device has less.")
    chosen_dtypes = _choices("--dtypes", dtypes, ("bfloat16", "float32"))
    chosen_allocators = _choices("--allocators", allocators, ALLOCATORS)
    sizes = sorted(
        ((prompt, batch) for prompt in _numbers("--prompts", prompts) for batch in _numbers("--batches", batches)),
        key=lambda size: size[0] * size[1],
    )
    groups = [f"{GROUPED}{size}" for size in LAYER_GROUPS if size <= shape.config.num_hidden_layers]

    wanted = []
    for phase in chosen_phases:
        for dtype in chosen_dtypes:
            for allocator in chosen_allocators if phase in ("decode", "prefill") else chosen_allocators[:1]:
                for prompt, batch in sizes:
                    if phase == "prefill" and prompt * batch > prefill_tokens:
                        continue
                    names = groups if phase == "groups" else chosen_systems
                    if phase == "prefill":
                        names = [name for name in names if name != FUSED]  # as without the kernel
                    if names:
                        wanted.append((Cell(phase, prompt, batch, dtype, allocator), names))
    environment = describe(config, shape.config.num_hidden_layers, device, threads)
    measured_layers = "" if layers is None else f" with {layers} of {config.num_hidden_layers} layers"
    out.print(f"{model}{measured_layers} on {device}, {threads} threads, {len(wanted)} cells, results in {output}")
    results = open_results(output, environment, chosen_dtypes, device, out.print)
    job = Job(str(output), environment, config.to_dict(), layers, device, threads, steps, seconds, [])
    run_missing(results, environment, wanted, job, out.print)
    show(Report(results), output)


def _choices(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    chosen = list(known) if text == "all" else [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in chosen if word not in known]
    if unknown or not chosen:
        raise ValueError(f"{option} knows {', '.join(known)}, but was given {text!r}.")
    return chosen


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{option} takes whole numbers with commas between, but was given {text!r}.")
    return sorted({int(word) for word in words})


def show(report, folder: Path) -> None:
    """Prints the tables; writes them to `report.md`, and the figure where matplotlib is installed."""
    out = console()
    for table in report.tables():
        out.print(table)
    report.write_markdown(folder / "report.md")
    if is_installed("matplotlib"):
        report.draw(folder / "figure.png")
    out.print(f"Tables and figure: {folder}" if is_installed("matplotlib") else f"Tables: {folder / 'report.md'}")
