"""Picking tokens, and writing with a cache."""

import pytest
import torch

from skipless import CausalLM, ModelConfig
from skipless.errors import UserError
from skipless.nn.sampling import Sampling, generate, nucleus, penalised
from tests.helpers.weights import disturbed

V = 30


@pytest.fixture(params=["pre-ln", "sas-p"])
def model(request):
    cfg = ModelConfig(block=request.param, n_layer=2, d_model=16, n_head=2, vocab_size=V, max_seq_len=24)
    return disturbed(CausalLM(cfg), 0.2).eval()


def tokens(model, prompts, n_new, sampling=None, **how):
    """The new tokens of each prompt."""
    steps = list(generate(model, prompts, n_new, sampling, **how))
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]


def greedy_by_hand(model, prompt, n_new):
    text = list(prompt)
    for _ in range(n_new):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


GREEDY = Sampling(temperature=0)


def test_greedy_is_the_argmax_of_full_passes(model):
    prompt = [3, 1, 4, 1, 5]
    expected = greedy_by_hand(model, prompt, 12)
    for mode in ("auto", "kv", *(["kx", "x"] if model.config.block.mixing == "shaped" else [])):
        assert tokens(model, [prompt], 12, GREEDY, mode=mode) == [expected]


def test_a_row_does_not_depend_on_its_batch(model):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    sampling = Sampling(temperature=0.9, top_k=10, seed=7)
    together = tokens(model, prompts, 8, sampling)
    for row, prompt in enumerate(prompts):
        assert tokens(model, [prompt], 8, Sampling(temperature=0.9, top_k=10, seed=7 + row)) == [together[row]]
    assert together != tokens(model, prompts, 8, Sampling(temperature=0.9, top_k=10, seed=8))


def test_stop_tokens_end_a_row(model):
    expected = greedy_by_hand(model, [3, 1, 4], 12)
    stop = expected[5]
    (row,) = tokens(model, [[3, 1, 4]], 12, Sampling(temperature=0, stop_ids=(stop,)))
    assert row == expected[: expected.index(stop) + 1]


def test_full_context_slides_or_ends(model):
    """Slide: the newer half is read again as a prompt."""
    prompt = [1, 2, 3, 4]
    assert len(tokens(model, [prompt], 50, GREEDY, when_full="end")[0]) == 24 - 4 + 1
    (slid,) = tokens(model, [prompt], 30, GREEDY)
    assert len(slid) == 30
    text = prompt + slid
    full = 24  # tokens in the cache when it is full; the next one is picked from the newer half alone
    again = greedy_by_hand(model, text[full + 1 - 12 : full + 1], 1)
    assert text[full + 1] == again[0]


def test_prompt_longer_than_the_context(model):
    long = [n % V for n in range(60)]
    assert tokens(model, [long], 3, GREEDY)[0][0] == greedy_by_hand(model, long[-24:], 1)[0]


def test_chunked_prefill(model, monkeypatch):
    prompt = [n % V for n in range(20)]
    expected = tokens(model, [prompt], 4, GREEDY)
    monkeypatch.setattr("skipless.nn.sampling.PREFILL", 7)
    assert tokens(model, [prompt], 4, GREEDY) == expected


def test_top_k_and_top_p():
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    draw = torch.Generator().manual_seed(0)
    picked = {Sampling(top_k=2).pick(logits, [], draw) for _ in range(200)}
    assert picked == {1, 2}
    kept = nucleus(logits, 0.7).isfinite()
    assert kept.tolist() == [False, True, True, False]
    assert nucleus(logits, 1e-6).isfinite().tolist() == [False, True, False, False]
    assert nucleus(logits, 1.0).isfinite().all()
    probability = torch.softmax(logits, 0)
    draws = torch.bincount(torch.tensor([Sampling().pick(logits, [], draw) for _ in range(4000)]), minlength=4) / 4000
    torch.testing.assert_close(draws, probability, atol=0.03, rtol=0)


def test_repetition_penalty():
    logits = torch.tensor([2.0, -2.0, 1.0])
    torch.testing.assert_close(penalised(logits, [0, 1, 1], 2.0), torch.tensor([1.0, -4.0, 1.0]))
    assert Sampling(temperature=0, repetition_penalty=3.0).pick(logits, [0], torch.Generator()) == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
def test_bad_sampling(how, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**how)


def test_empty_prompt(model):
    with pytest.raises(ValueError, match="empty"):
        next(generate(model, [[1], []], 1))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_said(temperature, value):
    for logits in (torch.full((V,), value), torch.cat([torch.full((1,), abs(value)), torch.zeros(V - 1)])):
        with pytest.raises(UserError, match="logits are not finite"):
            Sampling(temperature=temperature).pick(logits, [], torch.Generator().manual_seed(0))
