"""What the models are given beside token ids: embeddings, positions, packed documents, masks of any form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

from skipless import BLOCKS, Mask
from skipless.interop.hf import SkiplessForCausalLM, SkiplessForMaskedLM, SkiplessForSequenceClassification, unwrap
from tests.interop.hf.small import POSITIONS, V, make

KINDS = [SkiplessForCausalLM, SkiplessForMaskedLM]


# ---------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("kind", [*KINDS, SkiplessForSequenceClassification])
@pytest.mark.parametrize("block", BLOCKS)
def test_embeddings_in_the_place_of_ids(block, kind):
    model = make(block, kind)
    ids, mask = torch.randint(V, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    embedded = model.get_input_embeddings()(ids)
    for given_mask in (None, mask):
        expected = model(ids, given_mask).logits
        torch.testing.assert_close(model(inputs_embeds=embedded, attention_mask=given_mask).logits, expected)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=embedded)
    with pytest.raises(ValueError, match="exactly one"):
        model()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_goes_on_from_embeddings(cache):
    model = make("sas")
    ids, mask = torch.randint(1, V, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    how = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    how |= {"cache_implementation": cache}
    expected = model.generate(ids, **how)
    assert expected.shape == (2, 48)
    found = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **how)
    assert torch.equal(found, expected[:, 6:])
    with pytest.raises(ValueError, match="the prompt has 48 tokens"):
        model.generate(inputs_embeds=torch.zeros(1, 48, 24, dtype=torch.float64), max_new_tokens=2)


@pytest.mark.parametrize("positions", POSITIONS)
def test_generate_with_padding_is_generate_without(positions):
    """Whether positions are counted here or given, as transformers counts them."""
    model = make("sas", positions=positions)
    row, padded, mask = torch.randint(1, V, (1, 4)), torch.randint(1, V, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    padded[0, 4:], mask[0, :4] = row[0], 0
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(row, **how)[0, 4:]
    for more in ({}, {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}):
        for cache in ("dynamic", "static"):
            found = model.generate(padded, attention_mask=mask, cache_implementation=cache, **how, **more)
            assert torch.equal(found[0, 8:], alone)


# --------------------------------------------------------------------------- positions, documents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p"])
def test_packed_documents_are_as_if_alone(block, positions, kind):
    """As the collator of transformers packs them; in a row longer than the context."""
    model = make(block, kind, positions=positions)
    texts = [torch.randint(1, V, (length,)) for length in (20, 1, 30, 5)]
    batch = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)(
        [{"input_ids": text.tolist()} for text in texts]
    )
    labels = batch.pop("labels")
    for matrices in (False, True):
        output = model(**batch, output_attentions=matrices)
        assert output.get("past_key_values") is None
        expected = torch.cat([model(text[None]).logits[0] for text in texts])
        torch.testing.assert_close(output.logits[0], expected)
    if kind is SkiplessForCausalLM:
        model.train()
        with torch.no_grad():
            losses = [model(text[None], labels=text[None]).loss * (len(text) - 1) for text in texts if len(text) > 1]
        torch.testing.assert_close(model(**batch, labels=labels).loss, sum(losses) / 52)


def test_positions_of_one_row_hold_for_all():
    model = make()
    ids, positions = torch.randint(V, (2, 9)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    for given_positions in (positions, positions - positions + torch.arange(9)):
        expected = model(ids, position_ids=given_positions.expand(2, -1)).logits
        torch.testing.assert_close(model(ids, position_ids=given_positions).logits, expected)
    assert not torch.allclose(model(ids, position_ids=positions).logits, expected)


def test_documents_longer_than_the_context_are_refused():
    model = make()
    positions = torch.cat([torch.arange(10), torch.arange(49)])[None]
    with pytest.raises(ValueError, match="49 tokens is longer than max_seq_len 48"):
        model(torch.randint(V, (1, 59)), position_ids=positions)
    with pytest.raises(ValueError, match="61 tokens is longer"):
        model(torch.randint(V, (1, 3)), position_ids=torch.tensor([[58, 59, 60]]))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_as_they_would_be_counted_change_nothing(positions, side):
    model = make("sas", positions=positions)
    ids, mask = torch.randint(V, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, slice(0, 3) if side == "left" else slice(6, 9)] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    real = mask.bool()
    for use_cache in (False, True):
        expected = model(ids, mask, use_cache=use_cache).logits
        found = model(ids, mask, position_ids=places, use_cache=use_cache).logits
        torch.testing.assert_close(found[real], expected[real])


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_of_ones_own(positions):
    """Shifted by five: learned and added positions change, what acts between tokens does not; gaps change all."""
    model = make("sas", positions=positions)
    ids, mask = torch.randint(V, (1, 6)), torch.ones(1, 6, dtype=torch.long)
    plain = model(ids, mask, use_cache=False).logits
    moved = model(ids, mask, position_ids=torch.arange(5, 11)[None], use_cache=False).logits
    assert torch.allclose(moved, plain) == (positions in ("alibi", "rotary"))
    gaps = torch.tensor([[0, 1, 2, 10, 11, 30]])
    spread = model(ids, mask, position_ids=gaps, use_cache=False).logits
    assert not torch.allclose(spread, plain)
    torch.testing.assert_close(model(ids, mask, position_ids=gaps, use_cache=True).logits, spread)
    reads = make("sas", SkiplessForMaskedLM, positions=positions)
    assert not torch.allclose(reads(ids, mask, position_ids=gaps).logits, reads(ids, mask).logits)
    if positions == "alibi":  # a cache does not know where its keys stand
        cache = DynamicCache()
        model(ids[:, :3], past_key_values=cache)
        with pytest.raises(ValueError, match="position_ids must count the real tokens"):
            model(ids[:, 3:], past_key_values=cache, position_ids=gaps[:, 3:])


# ----------------------------------------------------------------------------------------- masks


@settings(max_examples=40)
@given(
    block=st.sampled_from(list(BLOCKS)),
    positions=st.sampled_from(POSITIONS),
    form=st.sampled_from(["bool", "long", "min", "inf"]),
    causal=st.booleans(),
    matrices=st.booleans(),
)
def test_masks_with_four_axes(block, positions, form, causal, matrices):
    """A mask that says what the model would do anyway changes nothing, in each of its forms."""
    kind = SkiplessForCausalLM if causal else SkiplessForMaskedLM
    model = make(block, kind, positions=positions)
    ids, padding = torch.randint(V, (2, 8)), torch.ones(2, 8, dtype=torch.bool)
    padding[0, 5:] = False
    seen = Mask(causal, padding).visible(8, 8)
    if form in ("min", "inf"):
        low = float("-inf") if form == "inf" else torch.finfo(torch.float64).min
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, low)
    else:
        mask = seen if form == "bool" else seen.long()
    expected = model(ids, padding.long()).logits
    found = model(ids, mask, output_attentions=matrices).logits
    torch.testing.assert_close(found[padding], expected[padding])


@pytest.mark.parametrize("block", ["pre-ln", "sas", "sas-p"])
def test_a_tree_of_guesses(block):
    """What four axes are for: two continuations of one prompt in one row, each as if it were alone."""
    model = make(block)
    prompt, one, other = torch.randint(V, (1, 4)), torch.randint(V, (1, 3)), torch.randint(V, (1, 3))
    seen = torch.ones(10, 10).tril().bool()
    seen[7:, 4:7] = False
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4, 5, 6]])
    ids = torch.cat([prompt, one, other], 1)
    alone = [model(torch.cat([prompt, guess], 1)).logits[:, 4:] for guess in (one, other)]
    found = model(ids, seen[None, None], position_ids=positions).logits
    torch.testing.assert_close(found[:, 4:7], alone[0])
    torch.testing.assert_close(found[:, 7:], alone[1])
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=12)):
        model(prompt, past_key_values=cache)
        rows = seen[None, None, 4:]
        if isinstance(cache, StaticCache):
            rows = torch.nn.functional.pad(rows, (0, 2))
        later = model(ids[:, 4:], rows, position_ids=positions[:, 4:], past_key_values=cache).logits
        torch.testing.assert_close(later, torch.cat(alone, 1))


def test_a_mask_of_floats_is_one_of_zeros_and_ones():
    """As prefix tuning gives it."""
    model = make("sas")
    ids, mask = torch.randint(V, (2, 7)), torch.ones(2, 7)
    mask[0, :2] = 0
    torch.testing.assert_close(model(ids, mask).logits, model(ids, mask.long()).logits)


def test_what_changes_nothing_is_taken():
    model = make("sas")
    ids = torch.randint(V, (2, 7))
    more = {"token_type_ids": torch.ones_like(ids), "cache_position": torch.arange(7)}
    torch.testing.assert_close(model(ids, **more).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("training", [True, False])
def test_hooks_see_tokens_where_they_stand(positions, training):
    """Padding is moved aside where nobody looks; what a hook saw would have the right shape and another order."""
    model = make("sas", positions=positions).train(training)
    row, padded, mask = torch.randint(V, (1, 4)), torch.randint(V, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    padded[0, 5:], mask[0, :5] = row[0], 0
    plain = model(padded, mask, use_cache=False).logits
    seen = {}
    parts = {
        "embedding": model.model.embedding,
        "block": model.model.blocks[0],
        "key": model.model.blocks[1].attention.key,
    }
    for name, part in parts.items():
        part.register_forward_hook(lambda module, _, output, name=name: seen.update({name: output}))
    found = model(padded, mask, use_cache=False).logits
    torch.testing.assert_close(found[mask.bool()], plain[mask.bool()])
    behind = {name: output[0, 5:] for name, output in seen.items()}
    model(row, use_cache=False)
    for name, output in behind.items():
        torch.testing.assert_close(output, seen[name][0], msg=name)


# -------------------------------------------------------------------------------------- matrices


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("block", BLOCKS)
def test_matrices_are_those_of_the_equations(block, positions):
    """αI + βA − γC, asked for by argument or configuration; of a cache, its newest rows."""
    model = make(block, positions=positions)
    ids = torch.randint(V, (2, 9))
    library, seen = unwrap(model), []
    hooks = [
        part.attention.register_forward_hook(
            lambda module, inputs, _: seen.append(module.matrix(*inputs)), with_kwargs=False
        )
        for part in library.blocks
    ]
    expected_logits = library(ids)
    for hook in hooks:
        hook.remove()
    output = model(ids, output_attentions=True)
    torch.testing.assert_close(output.logits, expected_logits)
    for found, expected in zip(output.attentions, seen, strict=True):
        torch.testing.assert_close(found, expected)
    model.set_attn_implementation("eager")  # or transformers does not let it be set
    model.config.output_attentions = True
    assert len(model(ids).attentions) == 2
    assert model(ids, output_attentions=False).attentions is None
    cache = DynamicCache()
    model(ids[:, :5], past_key_values=cache)
    later = model(ids[:, 5:], past_key_values=cache)
    torch.testing.assert_close(later.logits, expected_logits[:, 5:])
    for found, expected in zip(later.attentions, seen, strict=True):
        torch.testing.assert_close(found, expected[:, :, 5:])
