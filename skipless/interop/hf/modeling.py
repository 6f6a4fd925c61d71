"""The library's models as Hugging Face's libraries expect them: nothing is computed here that `skipless.nn` does not.

Shaped attention needs two things of what came before: A·V, from keys and values as everyone, and C·V, the (discounted)
mean of the values. So the caches of `transformers` hold enough, static and dynamic alike, and whatever is done to them
(reordered for beams, cropped, repeated) holds for C·V too: there is no running sum beside them to keep in step.

Shapes: B batch, H heads, D width of a head, t new tokens, S tokens so far (the new ones included), V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput, SequenceClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from skipless.config.model import ModelConfig
from skipless.errors import UserError
from skipless.interop.hf.configuration import SkiplessConfig
from skipless.nn.masks import Mask, alibi_slopes
from skipless.nn.model import CausalLM, MaskedLM, SequenceClassifier, Transformer, as_padding

logger = logging.get_logger(__name__)


class Pass:
    """What all layers share of one pass with a cache: which of the tokens so far each new token sees."""

    def __init__(self, cfg: ModelConfig, cache: Cache, ids: Tensor, padding: Tensor | None) -> None:
        self.cache, self.padding, self.new = cache, padding, ids.shape[1]
        self.first = cache.get_seq_length()  # a static cache's is a tensor
        self.index = self.first + torch.arange(self.new, device=ids.device)  # (t,)
        self._check(cfg, ids)
        alibi = alibi_slopes(cfg.n_head, ids.device) if cfg.positions == "alibi" else None
        ranks = None if padding is None else Mask(True, padding).positions(padding.shape[1], ids.device)
        self.positions = self.index[None] if ranks is None else ranks[:, self.index]  # (1 or B, t)
        # of a prompt the mask is square, and its fast forms need no (T, T) matrix; but where padding stands between
        # tokens, only an explicit one counts ALiBi's distances without it
        if isinstance(self.first, int) and self.first == 0 and (padding is None or alibi is None):
            self.mask = Mask(True, None if padding is None else padding[:, : self.new], alibi=alibi)
        else:
            self.mask = Mask(True, padding, alibi=alibi, queries=self.index, places=ranks)
        self._centring: Tensor | None = None

    def _check(self, cfg: ModelConfig, ids: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        end = int(self.first) + self.new
        if end > cfg.max_seq_len:
            raise UserError(f"a sequence of {end} tokens is longer than max_seq_len {cfg.max_seq_len}")
        if cfg.block.beta_sa is None:
            raise UserError("without attention nothing is remembered: this block needs use_cache=False")
        if self.padding is not None and (self.padding.shape[0] != ids.shape[0] or self.padding.shape[1] < end):
            raise UserError(
                f"with a cache, attention_mask covers all tokens so far: ({ids.shape[0]}, {end}), "
                f"got {tuple(self.padding.shape)}"
            )

    def centring(self, values: Tensor) -> Tensor:
        """The new rows of C, (1 or B, 1 or H, t, S), in float32 at least, made once for all layers."""
        if self._centring is None:
            like = values.new_empty(0, dtype=torch.promote_types(values.dtype, torch.float32))
            self._centring = self.mask.centring(like, self.new, values.shape[-2])
        return self._centring


class CachedLayer:
    """One layer of a pass with a cache of `transformers`, in the place of its mask."""

    of_inputs: ClassVar[bool] = False

    def __init__(self, shared: Pass, layer: int) -> None:
        self.shared, self.layer = shared, layer
        self.values: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Remember the new keys and values, and mix all values so far: (B, H, t, D)."""
        keys, self.values = self.shared.cache.update(k, v, self.layer)
        if self.shared.mask.queries is None:  # a prompt: a static cache holds more than there is yet
            return self.shared.mask.attend(q, k, v)
        return self.shared.mask.attend(q, keys, self.values)

    def mean(self, v: Tensor) -> Tensor:
        """C·V of the new tokens, (B, H, t, D), summed in float32 at least."""
        if self.shared.mask.queries is None:
            return self.shared.mask.mean(v)
        assert self.values is not None
        centring = self.shared.centring(self.values)
        return (centring @ self.values.to(centring.dtype)).to(v.dtype)


class SkiplessPreTrainedModel(PreTrainedModel):
    """What the three models share: `model` is the library's own."""

    config_class = SkiplessConfig
    config: SkiplessConfig  # pyrefly: ignore
    model: Any  # the library's own
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    _no_split_modules = ["SequentialBlock", "ParallelBlock"]
    supports_gradient_checkpointing = True
    # Attention is inside the modules. An attention function of transformers, chosen by name, would not be saved with
    # the configuration, and a model opened again would silently be another one.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = False

    def __init__(self, config: SkiplessConfig) -> None:
        super().__init__(config)
        self._compare_with(config.architectures or [])
        self.gradient_checkpointing = False
        self.model = self.make_model()
        for tensor in self.model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = not tensor.is_meta  # pyrefly: ignore
        self.post_init()

    def _compare_with(self, trained_as: list[str]) -> None:
        """The tensors of a causal model fit into one that looks both ways, so that nothing else would tell of it."""
        for name in trained_as:
            if name.endswith("CausalLM") != isinstance(self, GenerationMixin):
                logger.warning(
                    f"{type(self).__name__} opens the weights of a {name}: "
                    "in one a token sees all others, in the other only those before it"
                )

    def make_model(self) -> Transformer:
        """The library's model, with initial weights."""
        raise NotImplementedError

    @property
    def model_config(self) -> ModelConfig:
        """The library's configuration.

        Made again, for `transformers` may have loaded the sources of an export twice: the configuration's `ModelConfig`
        is then another class than the one that this file knows.
        """
        return ModelConfig.model_validate(self.config.to_model_config().model_dump())

    def get_output_embeddings(self) -> nn.Linear | None:
        """The head, where it has a matrix of its own."""
        return getattr(self.model, "head", None)

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the head."""
        self.model.head = new_embeddings

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Fill what a checkpoint did not have, a new head for instance, as `skipless.nn.init_weights` fills it."""
        tensors = self.model.state_dict(keep_vars=True)
        missing = [name for name, tensor in tensors.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if missing:
            initial = self.make_model().state_dict()
            for name in missing:
                tensors[name].copy_(initial[name])

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Keep only the inputs of every n-th block, and run it again in the backward pass."""
        self.gradient_checkpointing = enable
        for layer, block in enumerate(self.model.blocks):
            vars(block).pop("forward", None)
            if enable and layer % every_n_layers == 0:
                block.forward = partial(_again, gradient_checkpointing_func, block.forward)

    def _hidden_states(self, run: Callable[[], Tensor]) -> tuple[Tensor, Any]:
        """What the head sees, and the stream before each block and at the end, L + 1 tensors."""
        before: list[Tensor] = []
        hooks = [
            block.register_forward_pre_hook(lambda block, args: before.append(args[0])) for block in self.model.blocks
        ]
        try:
            hidden = run()
        finally:
            for hook in hooks:
                hook.remove()
        return hidden, (*before, hidden)


def _again(func: Callable[..., Any], forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """A block's forward under a checkpoint, where there will be a backward pass."""
    return func(forward, *inputs) if torch.is_grad_enabled() and inputs[0].requires_grad else forward(*inputs)


LOSS_ARGUMENTS = ("num_items_in_batch",)
STRAY_ARGUMENTS = ("tokenizer", "assistant_tokenizer")
"""Arguments of `generate` that it hands on to the model."""


def loss_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """What is meant for the loss; anything else that is not None cannot be served, and says so."""
    asked = [key for key, value in given.items() if value is not None and value is not False]
    unknown = [key for key in asked if key not in (*LOSS_ARGUMENTS, *STRAY_ARGUMENTS)]
    if unknown:
        raise UserError(f"skipless models do not take {', '.join(unknown)}")
    return {key: given[key] for key in LOSS_ARGUMENTS if key in given}


class SkiplessForCausalLM(SkiplessPreTrainedModel, GenerationMixin):
    """`skipless.CausalLM` with `generate`: greedy, sampling, beams, assisted, with any cache of `transformers`."""

    def make_model(self) -> CausalLM:
        """The library's model, with initial weights."""
        return CausalLM(self.model_config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B, t, V) of the tokens, or of the last `logits_to_keep`; `labels` are the ids, shifted here.

        With a cache the ids are the new tokens, and `attention_mask` covers all tokens so far.
        """
        more = loss_arguments(others)
        wants_cache = self.config.use_cache if use_cache is None else use_cache
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if past_key_values is None and wants_cache and not self.training and labels is None:
            past_key_values = DynamicCache()
        run = partial(self._hidden, input_ids, attention_mask, past_key_values, in_place=bool(wants_states))
        hidden, states = self._hidden_states(run) if wants_states else (run(), None)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits: Any = F.linear(hidden[:, rows], self.model.head_weight)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1], **more)
        output = CausalLMOutputWithPast(loss, logits, past_key_values, states)
        return output if return_dict is not False else output.to_tuple()

    def _hidden(self, ids: Tensor, mask: Tensor | None, cache: Cache | None, *, in_place: bool) -> Tensor:
        """What the head sees, (B, t, d). Without a cache padding is moved aside, unless tokens must stay in place."""
        if cache is None and (mask is None or not in_place):
            return self.model.hidden(ids, mask)
        padding = as_padding(mask)
        if padding is not None and padding.ndim != 2:
            raise UserError(f"attention_mask must be (batch, tokens), got {tuple(padding.shape)}")
        shared = Pass(self.model.config, DynamicCache() if cache is None else cache, ids, padding)
        layers = [CachedLayer(shared, layer) for layer in range(len(self.model.blocks))]
        return self.model._through(ids, shared.positions, layers)

    def _prepare_generated_length(self, generation_config: Any, *others: Any, **more: Any) -> Any:
        """No longer than the context, whatever was asked for: the text ends there, rather than in an error."""
        prepared = super()._prepare_generated_length(generation_config, *others, **more)  # pyrefly: ignore
        prepared.max_length = min(prepared.max_length, self.config.max_seq_len)
        return prepared

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None = None, past_key_values: Cache | None = None, **others: Any
    ) -> Tensor | None:
        """The mask that `generate` gives with a static cache: as it is, of a length that does not change."""
        if attention_mask is None or past_key_values is None:
            return attention_mask
        return F.pad(attention_mask, (0, past_key_values.get_max_length() - attention_mask.shape[1]))


class SkiplessForMaskedLM(SkiplessPreTrainedModel):
    """`skipless.MaskedLM`."""

    def make_model(self) -> MaskedLM:
        """The library's model, with initial weights."""
        return MaskedLM(self.model_config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """Logits (B, T, V); labels of −100 have no loss."""
        more = loss_arguments(others)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        run = partial(self.model.hidden, input_ids, attention_mask)
        hidden, states = self._hidden_states(run) if wants_states else (run(), None)
        logits: Any = F.linear(hidden, self.model.head_weight)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1], **more)
        output = MaskedLMOutput(loss, logits, states)
        return output if return_dict is not False else output.to_tuple()


class SkiplessForSequenceClassification(SkiplessPreTrainedModel):
    """`skipless.SequenceClassifier`: `num_labels`, `id2label` and `problem_type` as everywhere in `transformers`."""

    def make_model(self) -> SequenceClassifier:
        """The library's model, with initial weights."""
        causal = getattr(self.config, "causal", False)  # a decoder's head is on its last token
        return SequenceClassifier(self.model_config, self.config.num_labels or 2, causal=causal)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits (B, num_labels)."""
        more = loss_arguments(others)
        logits = self.model(input_ids, attention_mask)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **more)
        output = SequenceClassifierOutput(loss, logits)
        return output if return_dict is not False else output.to_tuple()
