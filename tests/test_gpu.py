"""What only a CUDA device can show; skipped where there is none."""

import copy

import pytest
import torch

from modeling_egmla import EGMLACache


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=[1, 2], ids=["groups of 1", "groups of 2"])
def models(request, make_model):
    """One model on the CPU and its copy on the device."""
    model = make_model(layer_group_size=request.param, num_hidden_layers=4)
    return model, copy.deepcopy(model).to("cuda")


@pytest.mark.parametrize("cache_implementation", [None, "offloaded", "static", "offloaded_static"])
def test_generation_on_the_device_equals_that_on_the_cpu(models, cache_implementation):
    """Greedy text is the same on a CUDA device, with every cache that `generate` makes, offloaded ones included."""
    on_cpu, on_device = models
    ids = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = on_cpu.generate(ids, max_new_tokens=24, do_sample=False)
    actual = on_device.generate(
        ids.cuda(), max_new_tokens=24, do_sample=False, cache_implementation=cache_implementation
    )
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("decoding", ["expanded", "tiles", "grouped"])
def test_decoding_on_the_device(models, decoding):
    """Every way to decode gives the logits of the whole text at once."""
    _, model = models
    model.set_kv_decoding(decoding)
    ids = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(1)).cuda()
    cache = EGMLACache(model.config)
    with torch.no_grad():
        model(ids[:, :39], cache=cache)
        step = model(ids[:, 39:], cache=cache).logits
        torch.testing.assert_close(step, model(ids, use_cache=False).logits[:, 39:], atol=1e-4, rtol=1e-4)
