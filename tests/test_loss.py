"""The loss a few tokens at a time: its value and gradient from the definition, the library's, and what it keeps."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from modeling_egmla import loss_egmla
from modeling_egmla.loss_egmla import causal_lm_loss, token_losses


BATCH, LENGTH, VOCAB = 3, 29, 53
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 5e-3}  # relative error of gradients


@pytest.fixture(params=[1, 2 * VOCAB + 1, 1 << 20], ids=["token", "two-tokens", "all"])
def chunk(request, monkeypatch):
    """Logits at a time: less than one token's, two tokens' with a rest at the end, all."""
    monkeypatch.setattr(loss_egmla, "CPU_CHUNK", request.param)


def random_batch(dtype=torch.float32):
    logits = (4 * torch.randn(BATCH, LENGTH, VOCAB)).to(dtype)
    labels = torch.randint(VOCAB, (BATCH, LENGTH))
    labels[0, :5], labels[2, -7:] = -100, -100
    return logits, labels


@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradient_are_those_of_the_definition(dtype, chunk):
    """-log softmax at the next token, mean over labels that count, with its gradient by hand in float64."""
    logits, labels = random_batch(dtype)
    loss = causal_lm_loss(ours := logits.clone().requires_grad_(), labels, VOCAB)
    (3 * loss).backward()

    probabilities, counted, total = logits.double().softmax(-1), 0, 0.0
    gradient = torch.zeros_like(probabilities)
    for b in range(BATCH):
        for s in range(LENGTH - 1):
            if (label := labels[b, s + 1]) != -100:
                total -= probabilities[b, s, label].log()
                gradient[b, s] = probabilities[b, s]
                gradient[b, s, label] -= 1
                counted += 1
    torch.testing.assert_close(loss.double(), total / counted, atol=0, rtol=min(DTYPES[dtype], 1e-6))
    assert loss.dtype == torch.promote_types(dtype, torch.float32) and ours.grad.dtype == dtype
    expected = 3 * gradient / counted
    assert (ours.grad.double() - expected).norm() < DTYPES[dtype] * expected.norm()
    assert not ours.grad[0, :4].any() and not ours.grad[:, -1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["mean", "number", "tensor", "shifted", "another-index", "nothing-counts"])
def test_agrees_with_the_librarys(dtype, how, chunk):
    logits, labels = random_batch(dtype)
    kwargs = {"vocab_size": VOCAB}
    if how in ("number", "tensor"):
        kwargs["num_items_in_batch"] = 31 if how == "number" else torch.tensor(31)
    if how == "shifted":
        kwargs["shift_labels"] = labels.roll(3, 1)
    if how == "another-index":
        kwargs["ignore_index"] = 7
        labels = labels.masked_fill(labels == -100, 7)
    if how == "nothing-counts":
        labels, kwargs["num_items_in_batch"] = torch.full_like(labels, -100), 5
    losses, gradients = [], []
    for function in (causal_lm_loss, ForCausalLMLoss):
        leaf = logits.clone().requires_grad_()
        losses.append(function(leaf, labels, **kwargs))
        losses[-1].backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*losses, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=1e-5 if dtype == torch.float32 else 2**-7)


def test_without_a_label_that_counts_the_mean_is_not_a_number():
    """As in the library: zero would look like a perfect model."""
    logits, labels = random_batch()
    assert causal_lm_loss(logits, torch.full_like(labels, -100), VOCAB).isnan()


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_large_logits_and_sure_tokens_keep_their_digits(offset, chunk):
    """Softmax does not see what all logits have in common, nor may the loss: at most twice the library's error."""
    logits = (4 * torch.randn(1, 64, VOCAB) + offset).requires_grad_()
    labels = logits.argmax(-1).roll(1, 1)  # the next token is the likeliest one
    exact = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(exact[0, :-1], labels[0, 1:])
    (gradient,) = torch.autograd.grad(loss, exact)

    def errors(function):
        value = function(logits, labels, VOCAB)
        return abs(value.item() - loss.item()), (torch.autograd.grad(value, logits)[0] - gradient).norm()

    for ours, librarys in zip(errors(causal_lm_loss), errors(ForCausalLMLoss)):
        assert ours <= 2 * librarys + 1e-7


@pytest.mark.parametrize("label", [-1, VOCAB, -101])
def test_labels_that_are_no_ids_are_named(label):
    logits, labels = random_batch()
    labels[1, 4] = label
    with pytest.raises(ValueError, match=f"`labels` holds {label}, but must hold ids from 0 to {VOCAB - 1}, or -100"):
        causal_lm_loss(logits, labels, VOCAB)


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        ((5, 7), torch.tensor([3]), "logits of 5 tokens, but `labels` of 1"),
        ((2, 7), torch.tensor([3, 1, 2]), "logits of 2 tokens, but `labels` of 3"),
        ((2, 7), torch.tensor([3.0, 1.0]), "whole numbers, but are torch.float32"),
        ((2, 7), torch.tensor([True, False]), "whole numbers, but are torch.bool"),
    ],
)
def test_other_labels_are_refused(logits, targets, message):
    with pytest.raises(ValueError, match=message):
        token_losses(torch.randn(logits), targets)


def test_labels_of_any_whole_type():
    logits, targets = torch.randn(3, 5, requires_grad=True), torch.tensor([4, 0, 2])
    for dtype in (torch.uint8, torch.int32):
        torch.testing.assert_close(token_losses(logits, targets.to(dtype)), token_losses(logits, targets))
        torch.autograd.grad(token_losses(logits, targets.to(dtype)).sum(), logits, create_graph=True)


def test_under_transforms_and_without_data():
    """`torch.func.grad` differentiates it, and fake tensors, which have no numbers to look at, pass through it."""
    logits, labels = random_batch()
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(causal_lm_loss(leaf, labels, VOCAB), leaf)
    torch.testing.assert_close(torch.func.grad(causal_lm_loss)(logits, labels, VOCAB), expected)
    with FakeTensorMode():
        fake = torch.randn(2, 5, 11, requires_grad=True)
        causal_lm_loss(fake, torch.zeros(2, 5, dtype=torch.long), 11).backward()
    assert fake.grad.shape == fake.shape


def test_keeps_the_logits_and_two_numbers_a_token():
    """For the backward pass; the library keeps float32 logarithms of all logits."""
    logits, labels = random_batch(torch.bfloat16)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
    ):
        causal_lm_loss(logits.requires_grad_(), labels, VOCAB)
    assert (
        sum(tensor.nbytes for tensor in kept.values()) < logits.nbytes + 20 * labels.numel()
    )  # two float32, a label, a flag


def test_second_derivatives():
    """As of a gradient penalty."""
    logits, targets = torch.randn(4, 5, dtype=torch.float64), torch.tensor([3, -100, 0, 4])
    assert torch.autograd.gradgradcheck(lambda x: token_losses(x, targets), logits.requires_grad_())


def test_the_model_computes_it(make_model, monkeypatch):
    """Trainer's number of tokens reaches it; a float64 model stays float64; compiled, it is the library's."""
    model = make_model().double()
    ids = torch.randint(2, 97, (2, 11))
    outputs = model(input_ids=ids, labels=ids, num_items_in_batch=7)
    nll = -outputs.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    assert outputs.loss.dtype == torch.float64
    torch.testing.assert_close(outputs.loss, nll.sum() / 7, atol=1e-12, rtol=1e-12)

    called = []
    monkeypatch.setattr(loss_egmla, "token_losses", lambda *args: called.append(args))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(
        loss_egmla.causal_lm_loss(outputs.logits, ids, 97), (nll.sum() / 20).float(), atol=1e-5, rtol=1e-5
    )
    assert not called


def test_the_models_loss_can_be_replaced(make_model):
    """As of every model of the library; its type stays that of causal models, whose labels Trainer counts shifted."""
    model = make_model()
    assert model.loss_function is causal_lm_loss and copy.deepcopy(model).loss_function is causal_lm_loss
    assert LOSS_MAPPING[model.loss_type] is ForCausalLMLoss
    ids = torch.tensor([[3, 4, 5]])
    loss = model(input_ids=ids, labels=ids).loss
    model.loss_function = ForCausalLMLoss
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, loss)
    model.loss_function = lambda **kwargs: 5.0
    assert model(input_ids=ids, labels=ids).loss == 5.0


def test_token_losses_are_zero_where_nothing_is_predicted():
    logits, targets = torch.randn(6, 5), torch.tensor([0, -100, 4, 2, -100, 1])
    losses = token_losses(logits, targets)
    assert (losses == 0).tolist() == [False, True, False, False, True, False]
