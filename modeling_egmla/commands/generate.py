"""`egmla generate`: text from a model, and what its cache holds meanwhile."""

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..console import console, format_bytes, plain_table
from .common import Device, Dtype, Gates, Placed, PoolRows, TrustRemoteCode, check_pool_rows, load_config, load_model


if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def generate(
    text: Annotated[str, typer.Argument(help="The beginning of the text, or - to read it from standard input.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder or Hub id; by default the small model of this package.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens to add.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Below 1 safer, above 1 wilder; 0 is greedy.")] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Sample from the fewest tokens that have this probability together."),
    ] = 0.95,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token always.")] = False,
    seed: Annotated[int | None, typer.Option(help="Make the draws repeatable.")] = None,
    cache: Annotated[
        Literal["dynamic", "static"], typer.Option(help="Grow the cache by blocks, or allocate all of it at once.")
    ] = "dynamic",
    gates: Gates = "projected",
    placement: Placed = "device",
    tables_dtype: Annotated[
        Literal["bfloat16", "float16", "int8"] | None,
        typer.Option(help="Narrow the rows that gates are looked up in; by default they are as the model."),
    ] = None,
    pool_rows: PoolRows = None,
    gates_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Precomputed gates for --placement mmap; written first if not there."),
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """
    Continue a text, then show speed and the bytes that cache and gate tables really held.

    Results are the same wherever tables are. On an accelerator that is short of memory, `--placement host` keeps there
    only the rows that the text needs; `--placement mmap` needs no memory of the host either. `--tables-dtype int8`
    makes rows a quarter of float32 and changes results a little. `egmla plan` counts it all beforehand.

    Examples:

    - `egmla generate "The state of the Union is"`
    - `egmla generate "My fellow citizens," -n 300 --temperature 0.6 --seed 1`
    - `cat speech.txt | egmla generate - --greedy --model me/my-egmla`
    - `egmla generate "We" --model me/my-egmla --placement host --tables-dtype int8`
    - `egmla generate "We" --gates precomputed --placement mmap --gates-file gates.safetensors`
    """
    text = sys.stdin.read() if text == "-" else text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("The text is not UTF-8: convert it first, e.g. with `iconv -t utf-8`.") from None
    check_pool_rows(pool_rows, placement)
    is_mapped = gates == "precomputed" and placement == "mmap"
    if is_mapped != (gates_file is not None):
        raise ValueError("--gates-file goes with --gates precomputed --placement mmap, and these need it.")
    kv_gates = {"placement": placement} | ({} if pool_rows is None else {"pool_rows": pool_rows})
    if gates == "projected":
        kv_gates["dtype"] = tables_dtype
    is_placed = (gates, placement, tables_dtype) != ("projected", "device", None)
    if model is not None:
        load_config(model, trust_remote_code)  # refuses models of another type before their weights are read
    language_model, tokenizer = load_model(model, device, dtype, trust_remote_code, kv_gates if is_placed else None)
    if is_mapped:
        if not gates_file.exists():
            language_model.save_kv_gates(gates_file, tables_dtype)
        language_model.place_kv_gates(**kv_gates, dtype=tables_dtype, gates_file=gates_file)
    elif gates == "precomputed":
        language_model.precompute_kv_gates(tables_dtype)
    generate_and_report(
        language_model,
        tokenizer,
        text,
        max_new_tokens=max_new_tokens,
        sampling={} if greedy or temperature == 0 else {"temperature": temperature, "top_p": top_p},
        seed=seed,
        static=cache == "static",
    )


def generate_and_report(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    max_new_tokens: int,
    sampling: dict,
    seed: int | None = None,
    static: bool = False,
) -> None:
    """
    Prints `text` and its continuation as it is made, then tokens a second and the memory of the cache.

    Args:
        sampling: `temperature` and `top_p`; empty for greedy generation.
    """
    from transformers import TextStreamer, set_seed

    from ..loading import RefuseNotFinite

    class Streamer(TextStreamer):
        """Notes when each token came; the first is the prompt."""

        def __init__(self):
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times = []

        def put(self, value):
            self.times.append(time.perf_counter())
            super().put(value)

    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    prompt_length, context = inputs.input_ids.shape[1], model.config.max_position_embeddings
    if prompt_length == 0:
        raise ValueError("The text has no tokens: give at least one word.")
    if prompt_length + max_new_tokens > context:
        raise ValueError(
            f"The text has {prompt_length:,} tokens and {max_new_tokens:,} more are wanted, but the model's context "
            f"is {context:,}: shorten the text or lower --max-new-tokens."
        )
    if seed is not None:
        set_seed(seed)

    streamer = Streamer()
    out = console()
    out.print(text, style="bold", end="", markup=False, soft_wrap=True)
    outputs = model.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        do_sample=bool(sampling),
        **sampling,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        logits_processor=[RefuseNotFinite()],
        cache_implementation="static" if static else None,
        return_dict_in_generate=True,
    )
    new_tokens = outputs.sequences.shape[1] - prompt_length
    out.print(f"\n{speed(streamer.times, new_tokens)}", style="dim")
    out.print(cache_table(model.config, outputs.cache))
    if model.config.kv_gate != "none":
        out.print(gates_table(model.kv_gate_statistics()))


def speed(times: list[float], new_tokens: int) -> str:
    """What the moments at which prompt and tokens came say about speed: of the median token, since one may compile."""
    prefill, *steps = (after - before for before, after in itertools.pairwise(times))
    said = f"{new_tokens} tokens; the first after {1000 * prefill:,.0f} ms"
    return f"{said}, then {1 / statistics.median(steps):,.1f} tokens a second" if steps else said


def cache_table(config, cache) -> "Table":
    """Bytes in a live cache beside those that other attention of the same shape would hold for the same tokens."""
    from ..plan import multi_head_cache_elements, multi_head_kinds

    memory = cache.memory()
    batch, tokens = cache.token_ids.shape[0], int(cache.get_seq_length())
    element = cache.latents[0].element_size()
    kinds = multi_head_kinds(config)
    gated = config.kv_gate != "none"
    others = {f"MLA-{config.kv_lora_rank}": config.cache_elements_per_token} if gated else {}
    others |= {kind: multi_head_cache_elements(config, kv_heads) for kind, kv_heads in kinds.items()}
    others = {kind: batch * tokens * elements * element for kind, elements in others.items()}

    dtype = str(cache.latents[0].dtype).removeprefix("torch.")
    table = plain_table(f"Cache of {batch * tokens:,} tokens, {dtype}", "", "bytes", "", "of MHA")

    def add(name: str, size: int, style: str | None = None) -> None:
        table.add_row(name, f"{size:,}", format_bytes(size), f"{size / others['MHA']:.1%}", style=style)

    add("EG-MLA, measured" if gated else "MLA, measured", memory.latents + memory.token_ids, style="bold")
    add("  latents and rotary keys", memory.latents)
    add("  token ids", memory.token_ids)
    add("  allocated ahead, empty", memory.slack)
    if memory.workspace:
        add("  workspace of decoding", memory.workspace)
    for kind, size in others.items():
        add(kind, size)
    return table


def gates_table(statistics) -> "Table":
    """Where the tables are that gates come from, and what was brought to the device."""
    table = plain_table("Gate tables", "", "bytes", "")
    for name, size in (
        ("on the device", statistics.device),
        ("on the host", statistics.host),
        ("in a file", statistics.file),
        (f"rows on the device, {statistics.rows:,} of {statistics.pool_rows:,}", statistics.pool),
        (f"brought there, {statistics.misses:,} ids ({statistics.hits:,} times there)", statistics.bytes_moved),
    ):
        if size:
            table.add_row(name, f"{size:,}", format_bytes(size))
    return table
