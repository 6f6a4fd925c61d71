"""The library's models as Hugging Face's libraries expect them: a bare model, and heads on it.

Nothing is computed here that `skipless.nn` does not.

Shapes: B batch, T tokens, t new tokens, d width, V vocabulary.
"""

from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss, ForSequenceClassificationLoss
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple, logging

from skipless.errors import UserError
from skipless.interop.hf.bare import OF_OUTPUT, Asked, SkiplessModel, SkiplessPreTrainedModel, refuse_unknown
from skipless.interop.hf.configuration import SkiplessConfig
from skipless.interop.hf.losses import (
    LateCausalLMOutput,
    LateMaskedLMOutput,
    chunked_loss,
    foreseeable,
    serves,
    with_late_logits,
)
from skipless.interop.hf.passes import read_mask
from skipless.nn.model import IGNORED, last_of_real, mean_of_real

__all__ = [
    "SkiplessForCausalLM",
    "SkiplessForMaskedLM",
    "SkiplessForQuestionAnswering",
    "SkiplessForSequenceClassification",
    "SkiplessForTokenClassification",
    "SkiplessModel",
]

logger = logging.get_logger(__name__)

FOR_LOSS = ("num_items_in_batch", "shift_labels")


def _for_loss(asked: dict[str, Any]) -> dict[str, Any]:
    """Take out what is meant for the loss, if it was given: a loss of somebody's own may know nothing of it."""
    taken = {key: asked.pop(key, None) for key in FOR_LOSS}
    return {key: value for key, value in taken.items() if value is not None}


class WithHead(SkiplessPreTrainedModel):
    """A bare model with something on it."""

    causal: ClassVar[bool]
    """Whether a token sees only those before it."""

    def __init__(self, config: SkiplessConfig) -> None:
        super().__init__(config)
        self._compare_with(config)
        config.is_causal = self.causal
        self.model = SkiplessModel(config)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: SkiplessConfig) -> None:
        """Make the head."""
        raise NotImplementedError

    def _compare_with(self, config: SkiplessConfig) -> None:
        """The tensors of a causal model fit into one that looks both ways, so that nothing else would tell of it."""
        for name in config.architectures or []:
            if config.looks_back != self.causal:
                logger.warning(
                    f"{type(self).__name__} opens the weights of a {name}: "
                    "in one a token sees all others, in the other only those before it"
                )

    def base(self, *inputs: Any, **asked: Any) -> Any:
        """What the bare model gives of these arguments."""
        return self.model(*inputs, **asked, return_dict=True)


class LanguageModel(WithHead):
    """A head over the vocabulary, which may be the embedding's matrix."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def add_head(self, config: SkiplessConfig) -> None:
        """A matrix (V, d)."""
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """The head, tied or not."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.lm_head = new_embeddings

    def _trains_in_chunks(self, hidden: Tensor, plain_loss: Any) -> bool:
        """Whether the loss can do without all logits at once: nobody asked for another loss, or would notice."""
        return self.training and self.loss_function is plain_loss and serves(self.lm_head, hidden)


class SkiplessForCausalLM(LanguageModel, GenerationMixin):
    """`skipless.CausalLM` with `generate`: greedy, sampling, beams, assisted, with any cache of `transformers`."""

    causal = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[Asked],
    ) -> CausalLMOutputWithPast:
        """Logits (B, t, V) of the tokens, or of the last `logits_to_keep`; `labels` are the ids, shifted here.

        The first token of a row that is padded on the left has no loss: what stands before it is not text.
        With a cache the ids are the new tokens, and `attention_mask` covers all tokens so far. In training the loss is
        computed without holding all logits, and these are made if somebody reads them.
        """
        asked = refuse_unknown(dict(kwargs), position_ids, *OF_OUTPUT, *FOR_LOSS)
        more = _for_loss(asked)
        has_loss = labels is not None or "shift_labels" in more
        labels = foreseeable(labels, attention_mask)
        if use_cache is None and has_loss:
            use_cache = False
        found = self.base(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **asked)
        hidden = found.last_hidden_state
        rest = (found.past_key_values, found.hidden_states, found.attentions)
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if has_loss and whole and self._trains_in_chunks(hidden, ForCausalLMLoss):
            target = more.get("shift_labels")
            target = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if target is None else target  # pyrefly: ignore
            loss = chunked_loss(hidden, self.lm_head.weight, target, more.get("num_items_in_batch"))
            loss = with_late_logits(loss, self.lm_head, hidden)
            return LateCausalLMOutput(loss, None, *rest)  # pyrefly: ignore
        logits = self.lm_head(slice_logits_to_keep(hidden, logits_to_keep))
        loss = None
        if has_loss:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **more)
        return CausalLMOutputWithPast(loss, logits, *rest)

    def _prepare_generated_length(self, generation_config: Any, *others: Any, **more: Any) -> Any:
        """No longer than the context, whatever was asked for: the text ends there, rather than in an error."""
        prepared = super()._prepare_generated_length(generation_config, *others, **more)  # pyrefly: ignore
        given, ids = more.get("inputs_tensor"), more.get("input_ids_length", 0)
        prompt = ids if given is None else given.shape[1]
        if prompt >= self.config.max_seq_len:
            raise UserError(
                f"the prompt has {prompt} tokens, and the context of this model (max_seq_len) "
                f"{self.config.max_seq_len}: there is no room for another"
            )
        prepared.max_length = min(prepared.max_length, self.config.max_seq_len - prompt + ids)
        return prepared

    def _prepare_position_ids_for_generation(self, *_: Any) -> None:  # pyrefly: ignore
        """`generate` gives only the positions that it was given: others are counted, wherever padding stands."""

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None = None, past_key_values: Cache | None = None, **others: Any
    ) -> Tensor | None:
        """The mask that `generate` gives with a static cache: as it is, of a length that does not change."""
        if attention_mask is None or past_key_values is None or attention_mask.ndim != 2:
            return attention_mask
        return F.pad(attention_mask, (0, past_key_values.get_max_length() - attention_mask.shape[1]))


class SkiplessForMaskedLM(LanguageModel):
    """`skipless.MaskedLM`."""

    causal = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[Asked],
    ) -> MaskedLMOutput:
        """Logits (B, T, V); labels of −100 have no loss."""
        asked = refuse_unknown(dict(kwargs), position_ids, *OF_OUTPUT, "num_items_in_batch")
        more = _for_loss(asked)
        found = self.base(input_ids, attention_mask, position_ids, None, inputs_embeds, **asked)
        hidden, rest = found.last_hidden_state, (found.hidden_states, found.attentions)
        if labels is not None and self._trains_in_chunks(hidden, ForMaskedLMLoss):
            loss = chunked_loss(hidden, self.lm_head.weight, labels, more.get("num_items_in_batch"))
            loss = with_late_logits(loss, self.lm_head, hidden)
            return LateMaskedLMOutput(loss, None, *rest)  # pyrefly: ignore
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **more)
        return MaskedLMOutput(loss, logits, *rest)


class SkiplessForSequenceClassification(WithHead):
    """`skipless.SequenceClassifier`: `num_labels`, `id2label` and `problem_type` as everywhere in `transformers`."""

    causal = False
    """Of a decoder's classifier, whose configuration says `causal`, it is true, and the head is on the last token."""

    def __init__(self, config: SkiplessConfig) -> None:
        self.causal = bool(getattr(config, "causal", False))  # pyrefly: ignore
        super().__init__(config)

    def add_head(self, config: SkiplessConfig) -> None:
        """A pooler and a matrix, on the mean of the real tokens, or on the last."""
        self.num_labels = config.num_labels or 2
        self.dropout = nn.Dropout(config.dropout)
        self.pooler = nn.Linear(config.d_model, config.d_model)
        self.classifier = nn.Linear(config.d_model, self.num_labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[Asked],
    ) -> SequenceClassifierOutput:
        """Logits (B, num_labels)."""
        asked = refuse_unknown(dict(kwargs), position_ids, *OF_OUTPUT, "num_items_in_batch")
        more = _for_loss(asked)
        alone: dict[str, Any] = {"use_cache": False} if self.causal else {}
        found = self.base(input_ids, attention_mask, position_ids, None, inputs_embeds, **asked, **alone)
        hidden = found.last_hidden_state
        padding = read_mask(attention_mask, hidden)
        if padding is not None and padding.ndim != 2:
            raise UserError("a classifier takes the mean over the real tokens: its attention_mask is (batch, tokens)")
        pooled = (last_of_real if self.causal else mean_of_real)(hidden, padding)
        logits = self.classifier(self.dropout(torch.tanh(self.pooler(pooled))))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **more)
            is_mean = self.config.problem_type in ("regression", "multi_label_classification")
            if more and is_mean and self.loss_function is ForSequenceClassificationLoss:  # whatever it is told
                loss = loss * labels.numel() / more["num_items_in_batch"]
        return SequenceClassifierOutput(loss, logits, found.hidden_states, found.attentions)


class SkiplessForTokenClassification(WithHead):
    """An encoder with a label for each token."""

    causal = False

    def add_head(self, config: SkiplessConfig) -> None:
        """A matrix."""
        self.num_labels = config.num_labels or 2
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.d_model, self.num_labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[Asked],
    ) -> TokenClassifierOutput:
        """Logits (B, T, num_labels); labels of −100 have no loss."""
        asked = refuse_unknown(dict(kwargs), position_ids, *OF_OUTPUT, "num_items_in_batch")
        more = _for_loss(asked)
        found = self.base(input_ids, attention_mask, position_ids, None, inputs_embeds, **asked)
        logits = self.classifier(self.dropout(found.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, config=self.config, **more)
        return TokenClassifierOutput(loss, logits, found.hidden_states, found.attentions)


class SkiplessForQuestionAnswering(WithHead):
    """An encoder that marks where an answer begins and ends."""

    causal = False

    def add_head(self, config: SkiplessConfig) -> None:
        """A matrix with two columns."""
        self.qa_outputs = nn.Linear(config.d_model, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Unpack[Asked],
    ) -> QuestionAnsweringModelOutput:
        """Logits (B, T) of the beginning and of the end."""
        asked = refuse_unknown(dict(kwargs), position_ids, *OF_OUTPUT, "num_items_in_batch")
        more = _for_loss(asked)
        found = self.base(input_ids, attention_mask, position_ids, None, inputs_embeds, **asked)
        start, end = self.qa_outputs(found.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions, **more)
        return QuestionAnsweringModelOutput(loss, start, end, found.hidden_states, found.attentions)  # pyrefly: ignore
