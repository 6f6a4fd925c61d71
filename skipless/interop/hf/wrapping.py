"""The library's models and tokenisers in the clothes of Hugging Face's, sharing their weights."""

from typing import Any

import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from skipless.data import Tokenizer
from skipless.interop.hf.configuration import SkiplessConfig
from skipless.interop.hf.modeling import (
    SkiplessForCausalLM,
    SkiplessForMaskedLM,
    SkiplessForSequenceClassification,
    SkiplessPreTrainedModel,
)
from skipless.nn.kernels import plain_type
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier
from skipless.nn.saving import classifier_keys

CLASSES: dict[type, type[SkiplessPreTrainedModel]] = {
    CausalLM: SkiplessForCausalLM,
    MaskedLM: SkiplessForMaskedLM,
    SequenceClassifier: SkiplessForSequenceClassification,
}
SPECIALS = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def wrap(model: CausalLM | MaskedLM | SequenceClassifier) -> SkiplessPreTrainedModel:
    """The model with `generate`, `save_pretrained` and the rest; its weights are the same tensors."""
    labels: dict[str, Any] = {}
    if isinstance(model, SequenceClassifier):
        keys = classifier_keys(model)
        names = {int(number): name for number, name in keys["id2label"].items()}
        labels = {**keys, "id2label": names, "label2id": {name: number for number, name in names.items()}}
    config = SkiplessConfig(**model.config.model_dump(), **labels)
    with torch.device("meta"):
        wrapped = CLASSES[plain_type(model)](config)
    wrapped.model = model
    if isinstance(wrapped, SkiplessForCausalLM) and model.tokenizer is not None:
        wrapped.generation_config.eos_token_id = model.tokenizer.end_id
        wrapped.generation_config.pad_token_id = model.tokenizer.pad_id
    return wrapped.train(model.training)


def wrap_tokenizer(tokenizer: Tokenizer, max_length: int, *, closes: bool = False) -> PreTrainedTokenizerFast:
    """The tokeniser, giving the tokens that the model was trained on, and padding on the left as decoding wants it.

    Text is never read as a special token, so that `<|endoftext|>` in a document is text, but for tokenisers with a
    mask, which people write as `[MASK]`. With these, or where it `closes` for a classifier, an end token follows each
    sentence, as in pre-training and in `skipless.data.labelled`.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    vocab = backend.get_vocab(with_added_tokens=True)
    names = {token_id: token for token, token_id in vocab.items()}
    end, has_mask = names[tokenizer.end_id], tokenizer.mask_id is not None
    closed = TemplateProcessing(single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.end_id)])
    backend.post_processor = closed if has_mask or closes else None  # pyrefly: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        pad_token=names[tokenizer.pad_id],
        **{role: token for role, token in SPECIALS.items() if token in vocab},
        split_special_tokens=not has_mask,
        model_max_length=max_length,
        padding_side="right" if has_mask else "left",
        clean_up_tokenization_spaces=False,
    )
