"""The model all labs train and the text they train it on."""

from __future__ import annotations

import math

import pytest
import torch

from shardlab import text
from shardlab.errors import UsageError
from shardlab.model import GPT, SMALL, TEN_MILLION, Size, loss_function


def model(size: Size = SMALL, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(size)


def test_the_text_is_what_its_notice_says() -> None:
    assert len(text.text()) == 142_489
    assert len(text.alphabet()) == text.VOCABULARY == 66
    notice = " ".join((text.FILE.parent / "README.md").read_text().split())
    assert "public domain everywhere. 142,489 characters, 66 different ones" in notice


def test_tokens_are_places_in_the_alphabet_and_back() -> None:
    words = "Alice was beginning"
    assert text.decode(text.encode(words)) == words
    assert text.decode(text.encode(words).view(1, -1)) == words
    assert text.encode("").shape == (0,)
    with pytest.raises(UsageError, match="no character 'é'"):
        text.encode("Élodie, café"[1:])


def test_targets_are_one_character_further_on() -> None:
    inputs, targets = text.batch(step=3, size=5, context=16, seed=1)
    assert inputs.shape == targets.shape == (5, 16) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert all(text.decode(row) in text.text() for row in inputs)


def test_a_batch_depends_on_its_arguments_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = text.batch(0, 4, 8)[0]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, text.batch(0, 4, 8)[0])
    others = [text.batch(1, 4, 8)[0], text.batch(0, 4, 8, seed=1)[0]]
    assert not any(torch.equal(first, other) for other in others)
    assert text.batch(0, 0, 8)[0].shape == (0, 8)


@pytest.mark.parametrize(("size", "context"), [(-1, 8), (1, 0), (1, 142_489)])
def test_a_batch_that_cannot_be_made(size: int, context: int) -> None:
    with pytest.raises(UsageError, match="cannot be made from the text"):
        text.batch(0, size, context)


def formula(size: Size) -> int:
    """Parameters counted by hand: per block 12 w^2 + 13 w, a norm of 2 w, embedding, positions and head."""
    width = size.width
    tables = (1 if size.tied else 2) * size.vocabulary * width + size.context * width
    return size.layers * (12 * width**2 + 13 * width) + 2 * width + tables


@pytest.mark.parametrize("size", [SMALL, TEN_MILLION, Size(tied=True), Size(layers=1, width=8, heads=2)])
def test_parameters_are_counted(size: Size) -> None:
    assert model(size).parameter_count == formula(size)


def test_the_course_model_has_the_size_the_text_says() -> None:
    assert formula(SMALL) == 110_592
    assert 9.5e6 < formula(TEN_MILLION) < 10.5e6


def test_logits_and_the_loss_of_knowing_nothing() -> None:
    inputs, targets = text.batch(0, 8, 32)
    logits = model()(inputs)
    assert logits.shape == (8, 32, 66) and logits.dtype == torch.float32
    assert loss_function(logits, targets).item() == pytest.approx(math.log(66), abs=0.1)


def test_the_loss_is_float32_whatever_the_weights_are() -> None:
    inputs, targets = text.batch(0, 2, 8)
    for dtype in (torch.float16, torch.bfloat16):
        logits = model().to(dtype)(inputs)
        assert logits.dtype == dtype
        assert loss_function(logits, targets).dtype == torch.float32


def test_no_token_sees_what_comes_after_it() -> None:
    inputs, _ = text.batch(0, 1, 32)
    changed = inputs.clone()
    changed[0, 20:] = 0
    before, after = model()(inputs), model()(changed)
    assert torch.allclose(before[0, :20], after[0, :20], atol=1e-6)
    assert not torch.allclose(before[0, 20:], after[0, 20:], atol=1e-3)


def test_the_loss_falls() -> None:
    small = model()
    optimizer = torch.optim.AdamW(small.parameters(), lr=3e-3)
    losses = []
    for step in range(60):
        inputs, targets = text.batch(step, 24, 32)
        loss = loss_function(small(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.3


def test_writing_continues_the_prompt_and_repeats_itself() -> None:
    small, prompt = model(), text.encode("Alice")
    state = torch.get_rng_state()
    written = small.write(prompt, 50)
    assert torch.equal(state, torch.get_rng_state())
    assert written.shape == (55,) and torch.equal(written[:5], prompt)
    assert torch.equal(written, small.write(prompt, 50))
    assert not torch.equal(written, small.write(prompt, 50, seed=1))


def test_dropout_only_while_training() -> None:
    small = model(Size(dropout=0.5))
    inputs, _ = text.batch(0, 2, 8)
    assert not torch.equal(small(inputs), small(inputs))
    small.eval()
    assert torch.equal(small(inputs), small(inputs))


def test_a_tied_head_is_the_embedding() -> None:
    tied = model(Size(tied=True))
    assert tied.head.weight is tied.embedding.weight
