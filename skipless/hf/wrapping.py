"""The library's models and tokenisers in the clothes of Hugging Face's, sharing their weights."""

from typing import Any

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from skipless.data import Tokenizer
from skipless.hf.configuration import SkiplessConfig
from skipless.hf.modeling import (
    SkiplessForCausalLM,
    SkiplessForMaskedLM,
    SkiplessForSequenceClassification,
    SkiplessPreTrainedModel,
)
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier

CLASSES: dict[type, type[SkiplessPreTrainedModel]] = {
    CausalLM: SkiplessForCausalLM,
    MaskedLM: SkiplessForMaskedLM,
    SequenceClassifier: SkiplessForSequenceClassification,
}
SPECIALS = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def wrap(model: CausalLM | MaskedLM | SequenceClassifier) -> SkiplessPreTrainedModel:
    """The model with `generate`, `save_pretrained` and the rest; its weights are the same tensors."""
    labels: dict[str, Any] = {"num_labels": model.num_labels} if isinstance(model, SequenceClassifier) else {}
    config = SkiplessConfig(**model.config.model_dump(), **labels)
    with torch.device("meta"):
        wrapped = CLASSES[type(model)](config)
    wrapped.model = model
    if isinstance(wrapped, SkiplessForCausalLM) and model.tokenizer is not None:
        wrapped.generation_config.eos_token_id = model.tokenizer.end_id
        wrapped.generation_config.pad_token_id = model.tokenizer.pad_id
    return wrapped.train(model.training)


def wrap_tokenizer(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """The tokeniser, padding on the left as decoding wants it.

    Text is never read as a special token, so that `<|endoftext|>` in a document is text, but for tokenisers with a
    mask, which people write as `[MASK]`.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    vocab = backend.get_vocab(with_added_tokens=True)
    names = {token_id: token for token, token_id in vocab.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=names[tokenizer.end_id],
        pad_token=names[tokenizer.pad_id],
        **{role: token for role, token in SPECIALS.items() if token in vocab},
        split_special_tokens=tokenizer.mask_id is None,
        model_max_length=max_length,
        padding_side="left" if tokenizer.mask_id is None else "right",
        clean_up_tokenization_spaces=False,
    )
