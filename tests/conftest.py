"""
What all tests share: no network, one thread, and tiny models whose logits show a single wrong id, position or sign.

`make_config(**changes)` and `make_model(model_class, **changes)` are the functions `tiny_config` and `tiny_model`.
"""

import importlib
import os
from pathlib import Path
from types import SimpleNamespace


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_XET_CLIENT_RETRY_BASE_DELAY", "1ms")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

from modeling_egmla import EGMLAConfig, EGMLAForCausalLM


torch.set_num_threads(1)
# The same examples on every machine and in every run.
settings.register_profile(
    "egmla",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("egmla")

# Every width differs from every other, so that a mixed-up one cannot pass unseen.
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "kv_gate_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def tiny_config(**changes) -> EGMLAConfig:
    """A config of two layers; no eos, so that generation runs to its full length."""
    return EGMLAConfig(**{**TINY, **changes})


@torch.no_grad()
def scramble(model, seed: int = 0):
    """
    Gives every parameter a random value (also norms, biases and the padding id's row), whatever its initial one.
    Logits then have a deviation near 2, a wrong id moves them by 0.1 to 1, and float32 rounds them by some 1e-6.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.copy_(0.3 * noise + name.endswith("weight"))
        else:
            parameter.copy_((0.3 if "embed" in name or "lm_head" in name else 0.1) * noise)
    return model


def tiny_model(model_class=EGMLAForCausalLM, *, seed: int = 0, **changes):
    """A model of `tiny_config(**changes)` in float32, in evaluation mode, with scrambled parameters."""
    return scramble(model_class(tiny_config(**changes)), seed).eval()


@pytest.fixture(scope="session")
def make_config():
    return tiny_config


@pytest.fixture(scope="session")
def make_model():
    return tiny_model


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def scripts():
    """The modules of benchmarks/study, which is no package: it is run as `python benchmarks/study`."""
    pytest.importorskip("matplotlib")
    folder = Path(__file__).parents[1] / "benchmarks" / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        names = ("healing", "report", "runs", "smollm2", "text")
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
