"""`SkiplessModel`, the bare model under every head, and what all models share: how weights are named, filled and tied.

Nothing is computed here that `skipless.nn` does not: the bare model is the same stack of the same parts.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging
from transformers.utils.output_capturing import capture_outputs

from skipless.config.model import ModelConfig
from skipless.errors import UserError
from skipless.interop.hf.configuration import SkiplessConfig
from skipless.interop.hf.passes import Pass, packed_documents, read_mask
from skipless.nn.init import init_weights
from skipless.nn.kernels.install import install
from skipless.nn.kernels.predicate import have_no_hooks
from skipless.nn.masks import MaskLike
from skipless.nn.model import Transformer
from skipless.nn.positions import Rope
from skipless.nn.stack import PARTS, Stack, check_ids, check_length, refuse_folded

logger = logging.get_logger(__name__)

EARLIER_NAMES = {"model.head.": "lm_head.", "model.pooler.": "pooler.", "model.classifier.": "classifier."}
"""How names began in exports of earlier versions, and how they begin now."""

HARMLESS = ("tokenizer", "assistant_tokenizer", "cache_position", "token_type_ids", "return_dict")
"""What libraries hand on and what changes nothing here: a cache knows where it is, there are no token types."""

OF_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What collators say of packed documents beside `position_ids`, which say the same."""


OF_OUTPUT = ("output_attentions", "output_hidden_states")


class Asked(TypedDict, total=False):
    """What may be asked of every forward by keyword; a model without a loss refuses what is for one."""

    output_attentions: bool | None
    output_hidden_states: bool | None
    num_items_in_batch: Tensor | int | None
    shift_labels: Tensor | None


def refuse_unknown(given: dict[str, Any], positions: Tensor | None, *known: str) -> dict[str, Any]:
    """Those of the arguments that are known; any other that asks for something cannot be served, and that is said."""
    fine = (*known, *HARMLESS, *(() if positions is None else OF_PACKED))
    asked = [key for key, value in given.items() if value is not None and (value is not False or key == "is_causal")]
    unknown = [key for key in asked if key not in fine]
    if unknown:
        raise UserError(f"skipless models do not take {', '.join(unknown)}")
    return {key: value for key, value in given.items() if key in known and value is not None}


class SkiplessPreTrainedModel(PreTrainedModel):
    """What all models share."""

    config_class = SkiplessConfig
    config: SkiplessConfig  # pyrefly: ignore
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    _no_split_modules = ["SequentialBlock", "ParallelBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    supports_gradient_checkpointing = True
    # Attention is inside the modules: `sdpa` is PyTorch's fused attention, `eager` the explicit matrices. A function of
    # transformers, chosen by name, would compute A·V alone, so none of them can be chosen.
    _supports_sdpa = True
    _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = False
    _can_compile_fullgraph = True

    def __init__(self, config: SkiplessConfig, *inputs: Any, **more: Any) -> None:
        super().__init__(config, *inputs, **more)
        _tell_peft()
        _tell_trainer()
        self.register_load_state_dict_pre_hook(_rename_earlier)

    @classmethod
    def from_pretrained(cls, *places: Any, key_mapping: dict[str, str] | None = None, **more: Any) -> Any:
        """As everywhere in `transformers`. The names of earlier exports are understood."""
        earlier = {f"^{old.replace('.', chr(92) + '.')}": new for old, new in EARLIER_NAMES.items()}
        found = super().from_pretrained(*places, key_mapping={**earlier, **(key_mapping or {})}, **more)
        model = found[0] if isinstance(found, tuple) else found
        used = getattr(model, "_weight_conversions", None) or []  # and would be undone when the model is saved
        vars(model)["_weight_conversions"] = [
            one for one in used if not set(one.target_patterns) & set(EARLIER_NAMES.values())
        ]
        return found

    @property
    def model_config(self) -> ModelConfig:
        """The library's configuration.

        Made again, for `transformers` may have loaded the sources of an export twice: the configuration's `ModelConfig`
        is then another class than the one that this file knows.
        """
        return ModelConfig.model_validate(self.config.to_model_config().model_dump())

    def save_pretrained(self, save_directory: str | os.PathLike[str], *others: Any, **more: Any) -> None:
        """As everywhere in `transformers`. The configuration says which way tokens look."""
        refuse_folded(self.base_model.blocks)  # pyrefly: ignore
        self.config.is_causal = bool(self.base_model.causal)
        super().save_pretrained(save_directory, *others, **more)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Fill what a checkpoint did not have, a new head for instance, as `skipless.nn.init_weights` fills it."""
        if getattr(self, "_is_hf_initialized", False):
            return
        missing = {
            f"{path}.{name}".lstrip("."): tensor
            for path, module in self.named_modules()
            if not getattr(module, "_is_hf_initialized", False)
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            if not getattr(tensor, "_is_hf_initialized", False) and not tensor.is_meta
        }
        base = self.base_model
        prefix = "" if base is self else f"{self.base_model_prefix}."
        inside = {name.removeprefix(prefix): tensor for name, tensor in missing.items() if name.startswith(prefix)}
        if isinstance(base, SkiplessModel):
            base.fill(inside if prefix else missing)
        for name, tensor in missing.items():
            if prefix and not name.startswith(prefix):  # a head's
                tensor.normal_(std=self.config.init_std) if name.endswith("weight") else tensor.zero_()
        if not any(tensor.is_meta for tensor in self.state_dict().values()):
            for module in self.modules():
                module._is_hf_initialized = True  # pyrefly: ignore


@cache
def _tell_peft() -> None:
    """Where LoRA goes that is not told where: the maps that every block has."""
    try:
        from peft.utils import constants
    except ImportError:
        return
    known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    known.setdefault(SkiplessConfig.model_type, ["query", "key", "up", "down"])


@cache
def _tell_trainer() -> None:
    """Which model's labels are shifted: `Trainer` looks for its name in a table before it smooths them."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(SkiplessConfig.model_type, "SkiplessForCausalLM")


def _rename_earlier(module: nn.Module, tensors: dict[str, Any], prefix: str, *_: Any) -> None:
    """Names of earlier versions in a state dict, as those of today."""
    for name in list(tensors):
        for old, new in EARLIER_NAMES.items():
            if name.startswith(prefix + old):
                tensors[prefix + new + name.removeprefix(prefix + old)] = tensors.pop(name)


class Step(GradientCheckpointingLayer):
    """Runs one block; and again in the backward pass, where gradient checkpointing is on. It has no weights."""

    def forward(self, x: Tensor, block: nn.Module, mask: MaskLike, rope: Rope | None) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        return block(x, mask, rope)


class SkiplessModel(SkiplessPreTrainedModel, Stack):
    """Embedding, blocks and norm without a head: what `AutoModel` opens, and `base_model` of every other.

    `config.is_causal` says whether a token sees only those before it; unless it is given, the architecture does in
    which the weights were trained, and without one it is true.
    """

    _can_record_outputs = {"hidden_states": Step}

    def __init__(self, config: SkiplessConfig) -> None:
        super().__init__(config)
        cfg = self.model_config
        self.causal = config.looks_back
        self.add_parts(cfg)
        self.steps = nn.ModuleList(Step() for _ in range(cfg.n_layer))
        self.gradient_checkpointing = False
        init_weights(self, cfg)
        install(self)
        for tensor in self.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = not tensor.is_meta  # pyrefly: ignore
        self.post_init()

    @torch.no_grad()
    def fill(self, missing: dict[str, Tensor]) -> None:
        """Give these tensors of the model their initial values."""
        if missing.keys() >= self.state_dict().keys():
            init_weights(self, self.model_config)
        elif missing:
            fresh = Transformer(self.model_config)
            init_weights(fresh)
            initial = fresh.state_dict()
            for name, tensor in missing.items():
                if name in initial:
                    tensor.copy_(initial[name])

    def through(self, inputs: Tensor, positions: Tensor, masks: Sequence[MaskLike]) -> Tensor:
        """The pass, through as many blocks as the configuration says: who wants fewer for a while sets it there."""
        return super().through(inputs, positions, masks[: self.config.n_layer])

    def step(self, layer: int, x: Tensor, mask: MaskLike, rope: Rope | None) -> Tensor:
        """Through one block."""
        return self.steps[layer](x, self.blocks[layer], mask, rope)

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[Asked],
    ) -> BaseModelOutputWithPast:
        """What a head sees, (B, t, d), of token ids (B, t) or embeddings (B, t, d).

        With a cache these are the new tokens, and `attention_mask` covers all tokens so far. `position_ids` say where
        tokens stand; without mask and cache, a new document begins wherever they do not go on by one. The attentions of
        `output_attentions` are the mixing matrices αI + βA − γC.
        """
        asked = refuse_unknown(dict(kwargs), position_ids, *OF_OUTPUT)
        self._check_attention()
        inputs = self._inputs(input_ids, inputs_embeds)
        wants_matrices = asked.get("output_attentions", self.config.output_attentions)
        wants_states = kwargs.get("output_hidden_states", self.config.output_hidden_states)  # as in `capture_outputs`
        mask = read_mask(attention_mask, inputs)
        alone = mask is None and past_key_values is None
        packed = packed_documents(position_ids, inputs.shape[0]) if alone else None
        if past_key_values is None and packed is None and self._may_cache(use_cache):
            past_key_values = DynamicCache()
        self._check_cache(past_key_values)
        self._check_positions(inputs, position_ids, past_key_values, packed)
        seen: list[Tensor] | None = [] if wants_matrices or self.config._attn_implementation == "eager" else None
        in_place = seen is not None or wants_states or past_key_values is not None
        in_place = in_place or (self.config.positions == "alibi" and position_ids is not None)
        if in_place or (mask is not None and (mask.ndim == 4 or self._is_watched(mask))):
            shared = Pass(
                self.config, self.causal, inputs, past_key_values, mask, position_ids, packed, seen is not None
            )
            hidden = self.through(inputs, shared.positions, shared.layers(len(self.blocks), seen))
        else:
            hidden = self.encode(inputs, mask, packed, position_ids)
        matrices: Any = tuple(seen) if seen is not None and wants_matrices else None
        place: Any = () if wants_states else None  # which `capture_outputs` fills: it stands before the matrices
        return BaseModelOutputWithPast(hidden, past_key_values, place, matrices)  # pyrefly: ignore

    def _is_watched(self, real: Tensor) -> bool:
        """Whether a hook, or somebody's own forward, would see tokens that were moved away from padding before them."""
        parts: list[Any] = [getattr(self, name) for name in PARTS]
        if not self.causal or have_no_hooks(*(module for part in parts for module in part.modules())):
            return False
        return torch.compiler.is_compiling() or bool((real[:, 1:] > real[:, :-1]).any())

    def _check_attention(self) -> None:
        """Whoever runs a model for others, vLLM for one, sets the name of its attention in the configuration itself."""
        if self.config._attn_implementation not in ("sdpa", "eager"):
            raise UserError(
                f"attention {self.config._attn_implementation!r} gives A·V alone, and these models need αI + βA − γC: "
                "only 'sdpa' and 'eager' can be chosen"
            )

    def _inputs(self, ids: Tensor | None, embedded: Tensor | None) -> Tensor:
        if (ids is None) == (embedded is None):
            raise UserError("give exactly one of input_ids and inputs_embeds")
        if embedded is None:
            assert ids is not None
            check_ids(ids)
            return ids
        if embedded.ndim != 3 or not embedded.is_floating_point():
            raise UserError(f"inputs_embeds must be (batch, tokens, width), got {tuple(embedded.shape)}")
        return embedded

    def _may_cache(self, use_cache: bool | None) -> bool:
        """Whether a cache is made: unless asked for, where it may be of use."""
        if use_cache is None:
            return bool(self.config.use_cache) and self.causal and not self.training
        return bool(use_cache) and self.causal and not (self.training and self.is_gradient_checkpointing)

    def _check_cache(self, cache: Cache | None) -> None:
        if cache is None:
            return
        if not self.causal:
            raise UserError("a model in which tokens see those after them has nothing to cache: use_cache=False")
        if self.training and self.is_gradient_checkpointing and torch.is_grad_enabled():
            raise UserError(
                "under gradient checkpointing a layer runs twice and would fill a cache twice: leave it out"
            )

    def _check_positions(
        self, inputs: Tensor, positions: Tensor | None, cache: Cache | None, packed: Tensor | None
    ) -> None:
        if cache is None and packed is None:
            check_length(inputs.shape[1], self.config.max_seq_len)
        if positions is None:
            return
        if (
            positions.ndim != 2
            or positions.shape[1] != inputs.shape[1]
            or positions.shape[0] not in (1, inputs.shape[0])
        ):
            raise UserError(f"position_ids must be {tuple(inputs.shape[:2])}, got {tuple(positions.shape)}")
        if not torch.compiler.is_compiling() and positions.numel() and int(positions.max()) >= self.config.max_seq_len:
            check_length(int(positions.max()) + 1, self.config.max_seq_len)
