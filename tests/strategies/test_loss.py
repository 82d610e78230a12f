"""The loss in chunks of tokens: the gradient of the head is the one of all tokens at once."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

import fsdp2_grpo
import model

TOKENS, WIDTH, VOCABULARY = 4096, 32, 300


class Stub:
    """A model whose decoder returns given hidden states."""

    def __init__(self, hidden: torch.Tensor, head: torch.nn.Linear):
        output = SimpleNamespace(last_hidden_state=hidden)
        self.get_decoder = lambda: lambda **_: output
        self.get_output_embeddings = lambda: head


@pytest.fixture
def gradients(monkeypatch):
    """Return a function: the gradients of hidden states, weight and bias, in chunks of a size.

    `plain`: of a loop that keeps the logits of all chunks.
    """

    def compute(
        script, chunk: int, dtype: torch.dtype, bias=True, autocast=False, frozen=False, plain=False
    ) -> list[torch.Tensor]:
        monkeypatch.setattr(script, "CHUNK_TOKENS", chunk)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16() + 0.5
        labels = (torch.rand(TOKENS, generator=generator) ** 3 * VOCABULARY).long()
        head = torch.nn.Linear(WIDTH, VOCABULARY, bias=bias)
        weights = [torch.randn(p.shape, generator=generator) for p in head.parameters()]
        for parameter, weight in zip(head.parameters(), weights):
            parameter.data = (weight * 0.1).bfloat16().to(dtype)
        head.requires_grad_(not frozen)
        hidden = drawn.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if plain:
                parts = zip(hidden.split(chunk), labels.split(chunk))
                logits = [(linear(x, head.weight, head.bias), y) for x, y in parts]
                loss = sum(cross_entropy(x, y, reduction="sum") for x, y in logits)
            elif script is model:
                stub = Stub(hidden[None], head)
                loss = model.forward_with_loss(stub, model.chunk_loss, labels, labels)
            else:
                stub, every = Stub(hidden[None], head), torch.arange(TOKENS)
                loss = -fsdp2_grpo.forward_with_log_probs(
                    stub, fsdp2_grpo.chunk_log_probs, labels, labels, every
                ).sum()
        (loss / TOKENS).backward()
        return [hidden.grad, *(p.grad for p in head.parameters() if not frozen)]

    return compute


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "script, autocast, frozen",
    [(model, False, False), (model, True, False), (model, False, True), (fsdp2_grpo, False, False)],
)
def test_chunks_add_up_their_gradients_in_fp32(gradients, script, autocast, frozen, bias):
    """In bf16, 16 chunks would double the error of the weight's gradient."""
    dtype = torch.float32 if autocast else torch.bfloat16
    exact = gradients(script, TOKENS, torch.float64, bias, frozen=frozen, plain=True)
    chunks, at_once = (
        gradients(script, size, dtype, bias, autocast, frozen) for size in (256, TOKENS)
    )
    assert len(chunks) == len(exact) == (1 if frozen else 2 + bias)
    for got, reference, right in zip(chunks[:2], at_once, exact):
        assert got.dtype == dtype
        error, least = ((x - right).norm() / right.norm() for x in (got, reference))
        assert error < 1.2 * least


def test_in_fp32_they_have_the_bits_of_a_plain_loop(gradients):
    loop = gradients(model, 256, torch.float32, plain=True)
    assert all(map(torch.equal, gradients(model, 256, torch.float32), loop))
