"""What `generate` gives beside the text: scores, hidden states and mixing matrices, with and without a cache."""

import pytest
import torch

from tests.interop.hf.small import POSITIONS, V, make

PROMPT, NEW = 5, 6
WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 8},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "sampled-beams": {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
}
ALL = {"output_attentions": True, "output_hidden_states": True, "output_scores": True, "output_logits": True}
ALL |= {"return_dict_in_generate": True, "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}


def newest(parts):
    """Of each step that `generate` reports, the rows of its last token in every layer."""
    return [[layer[..., -1, :] for layer in step] for step in parts]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("way", ["greedy", "sampling"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_states_and_matrices_of_each_step_are_those_of_the_text(positions, way, use_cache):
    """One pass over the finished text gives them all."""
    model = make("sas", positions=positions)
    ids, mask = torch.randint(1, V, (2, PROMPT)), torch.ones(2, PROMPT + NEW, dtype=torch.long)
    mask[0, :2] = 0
    torch.manual_seed(3)
    how = {**ALL, **WAYS[way], "use_cache": use_cache, "attention_mask": mask[:, :PROMPT]}
    written = model.generate(ids, **how)
    whole = model(written.sequences, mask, output_attentions=True, output_hidden_states=True)
    assert written.sequences.shape == (2, PROMPT + NEW)
    for name, count in (("attentions", 2), ("hidden_states", 3)):
        steps, expected = newest(written[name]), whole[name]
        assert (len(steps), len(steps[0]), len(expected)) == (NEW, count, count)
        for step, layers in enumerate(steps):
            last = PROMPT + step - 1
            for found, layer in zip(layers, expected, strict=True):
                wanted = layer[..., last, :]
                wanted = wanted[..., : last + 1] if name == "attentions" else wanted
                torch.testing.assert_close(found, wanted)
    for step, logits in enumerate(written.logits):
        torch.testing.assert_close(logits, whole.logits[:, PROMPT + step - 1].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["beams", "sampled-beams"])
@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p"])
def test_beams_with_a_cache_are_beams_without(block, way):
    """With everything that there is to see of them, of beams that change places."""
    model = make(block)
    ids = torch.randint(1, V, (2, PROMPT))
    found = {}
    for use_cache in (True, False):
        torch.manual_seed(3)
        found[use_cache] = model.generate(ids, **{**ALL, **WAYS[way], "use_cache": use_cache})
    one, other = found[True], found[False]
    assert torch.equal(one.sequences, other.sequences)
    torch.testing.assert_close(one.sequences_scores, other.sequences_scores)
    torch.testing.assert_close(one.scores, other.scores)
    for name in ("attentions", "hidden_states"):
        torch.testing.assert_close(newest(one[name]), newest(other[name]))
    assert one.past_key_values.get_seq_length() == PROMPT + NEW - 1
    assert other.get("past_key_values") is None


@pytest.mark.parametrize("assistant", ["same", "another"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_second_model_that_guesses_ahead(assistant, sampled):
    """What it guesses wrong is taken back from the cache; greedy text is the same, and everything can be seen."""
    model = make("sas-p")
    guesses = model if assistant == "same" else make("pre-ln", n_layer=1)
    ids = torch.randint(1, V, (1, PROMPT))
    how = {**ALL, "do_sample": sampled, "output_logits": False, "max_new_tokens": 12}
    torch.manual_seed(3)
    found = model.generate(ids, assistant_model=guesses, **how)
    assert found.sequences.shape == (1, PROMPT + 12)
    if not sampled:
        assert torch.equal(found.sequences, model.generate(ids, **how).sequences)
    sizes = [(PROMPT, PROMPT), *((1, PROMPT + step) for step in range(1, 12))]
    assert [layers[0].shape for layers in found.attentions] == [(1, 3, *size) for size in sizes]
    assert [layers[0].shape for layers in found.hidden_states] == [(1, new, 24) for new, _ in sizes]
    # which rows transformers takes of the others, where several tokens were guessed right, is its own affair
    prompt = model(ids, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(found.attentions[0], prompt.attentions)
    torch.testing.assert_close(found.hidden_states[0][:-1], prompt.hidden_states[:-1])


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_first_layers_guess_ahead(use_cache):
    """`generate` sets their number in the configuration for a while."""
    model = make("sas-p", n_layer=4)
    ids = torch.randint(1, V, (1, PROMPT))
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    depths = []
    model.model.blocks[0].register_forward_hook(lambda *_: depths.append(model.config.n_layer))
    expected = model.generate(ids, use_cache=use_cache, **how)
    assert set(depths) == {4}
    assert torch.equal(model.generate(ids, assistant_early_exit=2, **how), expected)
    assert set(depths) == {2, 4}
    model.config.num_hidden_layers = 2
    assert len(model(ids, output_hidden_states=True, use_cache=use_cache).hidden_states) == 3


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("positions", POSITIONS)
def test_embeddings_that_are_no_tokens(positions, beams):
    """They are what the text goes on from: other ones give other text, and a cache changes nothing."""
    model = make("sas", positions=positions)
    how = {"max_new_tokens": NEW, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    prompts = torch.randn(2, 2, PROMPT, 24, dtype=torch.float64) * model.get_input_embeddings().weight.std()
    written = [model.generate(inputs_embeds=prompt, **how) for prompt in prompts]
    assert not torch.allclose(written[0].logits[0], written[1].logits[0])
    again = model.generate(inputs_embeds=prompts[0], use_cache=False, **how)
    assert torch.equal(again.sequences, written[0].sequences)
    torch.testing.assert_close(again.logits, written[0].logits)


def test_text_that_began_as_embeddings_goes_on_from_its_cache():
    model = make("sas")
    embed = model.get_input_embeddings()
    prompt = embed(torch.randint(1, V, (2, PROMPT)))
    how = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    whole = model.generate(inputs_embeds=prompt, max_new_tokens=6, **how)
    first = model.generate(inputs_embeds=prompt, max_new_tokens=4, **how)
    longer = torch.cat([prompt, embed(first.sequences)], 1)
    rest = model.generate(inputs_embeds=longer, max_new_tokens=2, past_key_values=first.past_key_values, **how)
    assert torch.equal(torch.cat([first.sequences, rest.sequences], 1), whole.sequences)
    for one, other in zip(rest.past_key_values.layers, whole.past_key_values.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        torch.testing.assert_close(one.values, other.values)
