"""A run: its model, its data, its training; and how a pre-trained model is fine-tuned."""

import hashlib
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PositiveInt,
    model_validator,
)

from skipless.config.base import Config, Text, unicode_text
from skipless.config.model import ModelConfig
from skipless.config.parts import OptimizerPart, SchedulePart

OWN = "own"
"""Source and tokeniser of a run on data of one's own, which no configuration can open (`skipless.fit`)."""


def weighted_source(text: str) -> tuple[str, Fraction]:
    """`SOURCE=WEIGHT`: what stands before the last `=`, and the number after it, exactly as it is written."""
    spec, _, number = text.rpartition("=")
    try:
        weight = Fraction(number) if "/" not in number else Fraction(0)
    except ValueError:
        weight = Fraction(0)
    if not spec or weight <= 0:
        raise ValueError(f"one of several sources needs a weight above 0 at its end, as in {text + '=0.5'!r}")
    return spec, weight


def _checked_source(value: Any) -> str | tuple[str, ...]:
    """One source, or several."""
    several = isinstance(value, list | tuple)
    texts = tuple(value) if several else (value,)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a source is a text, or several are a list of texts with weights, got {value!r}")
    texts = tuple(unicode_text(text) for text in texts)
    return texts if several else texts[0]


class DataConfig(Config):
    """A corpus: where its text comes from, how it is tokenised, and how the tokens are cut into rows."""

    source: Annotated[str | tuple[str, ...], BeforeValidator(_checked_source)] = Field(
        "python-stdlib",
        description="`python-stdlib`, `files:GLOB`, `jsonl:PATH#field` (also .gz, .zst), or "
        "`hf:DATASET[:config][@split]#field`; or a list of several with their weights, "
        "`[files:a/*.py=0.7, jsonl:b.jsonl#text=0.3]`: their shares of the training sequences.",
    )
    valid_source: Text | None = Field(
        None, description="A source of held-out text; if not given, a part of the source's documents is held out."
    )
    valid_fraction: float = Field(
        0.02, ge=0, lt=1, description="Share of the documents that is held out, chosen by their content."
    )
    tokenizer: Text = Field(
        "bpe",
        min_length=1,
        description="`bpe` (byte-level) or `wordpiece`, trained on the corpus; the path of a tokenizer.json or of "
        "BERT's vocab.txt; or a name on the Hugging Face hub.",
    )
    vocab_size: int = Field(
        4096, ge=1, le=10_000_000, description="Size of a trained vocabulary; a small corpus may give fewer."
    )
    lowercase: bool = Field(False, description="Whether a trained tokeniser lowers the case of the text.")
    tokenizer_bytes: int = Field(
        64 * 2**20, ge=1, description="How many bytes of the training text the tokeniser is trained on."
    )
    packing: Literal["stream", "chunks"] = Field(
        "stream",
        description="`stream`: documents one after another with an end-of-text token between them; `chunks`: windows "
        "of exactly seq_len tokens of one document, the rest dropped, as CodeParrot was prepared.",
    )
    seq_len: int = Field(128, ge=1, le=10_000_000, description="T: tokens in a sequence.")
    max_documents: int | None = Field(None, ge=1, description="Read at most this many distinct documents of a source.")
    max_bytes: int | None = Field(
        None, ge=1, description="Read no further in a source once its distinct documents have this many bytes."
    )

    @property
    def mix(self) -> dict[str, Fraction] | None:
        """The share of each source, where there are several; they add up to 1."""
        if isinstance(self.source, str):
            return None
        weights = dict(map(weighted_source, self.source))
        return {spec: weight / sum(weights.values()) for spec, weight in weights.items()}

    @property
    def source_text(self) -> str:
        """The source or the sources, for people."""
        return self.source if isinstance(self.source, str) else ", ".join(self.source)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not isinstance(self.source, str):
            specs = [weighted_source(source)[0] for source in self.source]
            if len(specs) < 2:
                raise ValueError("a list of sources has two or more; one alone is a text")
            if len(set(specs)) != len(specs):
                raise ValueError(f"a source is named twice: {max(specs, key=specs.count)!r}")
        smallest = {"bpe": 257, "wordpiece": 64}.get(self.tokenizer, 1)
        if self.vocab_size < smallest:
            reason = "256 bytes and an end-of-text token" if self.tokenizer == "bpe" else "special tokens and letters"
            raise ValueError(f"vocab_size {self.vocab_size} is too small for {reason}: at least {smallest}")
        if self.packing == "chunks" and self.seq_len < 2:
            raise ValueError("packing 'chunks' has inputs and targets inside a row, so seq_len must be at least 2")
        return self


class TrainConfig(Config):
    """How a model is trained. Exactly one of `steps`, `tokens` and `minutes` is the budget."""

    steps: int | None = Field(2000, ge=1, description="Budget in optimiser steps.")
    tokens: int | None = Field(None, ge=1, description="Budget in training tokens.")
    minutes: float | None = Field(None, gt=0, description="Budget in minutes of training, evaluation not counted.")

    batch_size: int = Field(8, ge=1, le=10_000_000, description="Sequences in a step.")
    micro_batch: int | None = Field(None, ge=1, description="Sequences in memory at a time; gradients are accumulated.")
    batch_ramp: float = Field(
        0.0, ge=0, le=1, description="Share of the budget over which the batch grows from a micro-batch to batch_size."
    )

    optimizer: OptimizerPart = Field(
        "adamw",
        description="adamw; muon for the matrices inside the blocks, with AdamW for the rest; or sgd, which is plain.",
    )
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    vp_lr_factor: float = Field(1.0, ge=0, description="Factor on the learning rate of W^V and W^P.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Adam's averaging factors.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.1, ge=0, description="On matrices and embeddings; never on gains, norms, biases.")
    clip: float | None = Field(1.0, gt=0, description="Largest norm of the gradient.")

    schedule: SchedulePart = Field(
        "linear",
        description="Learning rate after the warm-up: linear (also as triangle) or cosine to zero, constant, or wsd: "
        "constant and then a line to zero (warm-up, stable, decay).",
    )
    warmup: float | None = Field(
        None, ge=0, description="Share of the budget below 1, else steps; by default 0.05, and 0.75 for `triangle`."
    )
    warmup_from: float = Field(0.0, ge=0, le=1, description="Where the warm-up begins, as a share of the peak.")
    decay: float | None = Field(
        None, gt=0, description="wsd: the decay at the end, a share of the budget below 1, else steps; by default 0.2."
    )
    branch: Text | None = Field(
        None,
        description="The run (its configuration's hash) and the step that this one continued from: `1a2b3c4d@500`.",
    )
    ema: float | None = Field(
        None, gt=0, lt=1, description="Average the weights over steps by this factor, such as 0.999, and evaluate both."
    )
    activation_checkpointing: bool = Field(
        False, description="Keep only the inputs of each block, and run it again in the backward pass: less memory."
    )

    mask_share: float = Field(0.25, gt=0, lt=1, description="Masked language models: share of the tokens masked.")

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 on a GPU, fp32 on a CPU."
    )
    device: Text = Field("auto", description="auto: an accelerator if there is one.")
    compile: Literal["off", "block", "model"] = Field("off", description="What torch.compile is given.")

    eval_every: int = Field(200, ge=0, description="Steps between evaluations; 0: only at the end.")
    eval_rows: int = Field(256, ge=1, description="Held-out sequences in an evaluation during training.")
    tuning_rows: int = Field(
        0, ge=0, description="Other held-out sequences, whose loss (`tuning_loss`) hyper-parameters are chosen by."
    )
    sample_every: int = Field(500, ge=0, description="Steps between text samples; 0: none.")
    sample_prompt: Text = Field("def ", description="What the samples begin with.")
    save_every: int = Field(500, ge=1, description="Steps between checkpoints.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept, besides the best.")
    log_every: int = Field(10, ge=1, description="Steps between lines of metrics.")
    gains_every: int = Field(50, ge=0, description="Steps between records of all gains; 0: none.")
    health_every: int = Field(
        0, ge=0, description="Steps between records of kurtosis, attention entropy and token similarity; 0: none."
    )
    seed: int = Field(
        0, ge=0, le=2**62, description="Of the weights, the order of the data, masks, dropout and samples."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(budget is not None for budget in (self.steps, self.tokens, self.minutes)) != 1:
            raise ValueError("give exactly one budget: steps, tokens or minutes (set the others to null)")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide batch_size {self.batch_size}")
        if self.warmup is not None and self.warmup >= 1 and self.steps is None:
            raise ValueError("a warm-up in steps needs a budget in steps; give a share below 1")
        if self.warmup is not None and self.steps is not None and self.warmup >= 1 and self.warmup > self.steps:
            raise ValueError(f"a warm-up of {self.warmup:g} steps is longer than the training of {self.steps}")
        self._check_decay()
        return self

    def _check_decay(self) -> None:
        if self.decay is not None and self.schedule != "wsd":
            raise ValueError(f"decay belongs to schedule 'wsd', and this one is {self.schedule!r}")
        if self.decay is not None and self.decay >= 1 and self.steps is None:
            raise ValueError("a decay in steps needs a budget in steps; give a share below 1")
        if self.schedule == "wsd" and self.warmup_share + self.decay_share > 1:
            raise ValueError("warm-up and decay together are longer than the training")

    @property
    def micro_rows(self) -> int:
        """Sequences in memory at a time."""
        return self.micro_batch or self.batch_size

    @property
    def warmup_share(self) -> float:
        """The warm-up as a share of the budget."""
        if self.warmup is None:
            return 0.75 if self.schedule == "triangle" else 0.05
        return self.warmup / self.steps if self.warmup >= 1 and self.steps else self.warmup

    @property
    def decay_share(self) -> float:
        """The decay of `wsd` as a share of the budget."""
        decay = 0.2 if self.decay is None else self.decay
        return decay / self.steps if decay >= 1 and self.steps else decay


ADDED = ("decay", "branch", "ema", "activation_checkpointing")
"""Keys that came after runs were published: at their defaults they are not in a digest, which stays what it was."""


class ParallelConfig(Config):
    """How several processes share a training, as torchrun starts them. One process alone needs none of it.

    It changes speed and memory, not the training, so it is no part of what makes two runs the same.
    """

    kind: Literal["ddp", "fsdp"] = Field(
        "ddp", description="Each process has the whole model (DDP), or a share of every tensor (FSDP2)."
    )
    replicas: int = Field(
        1, ge=1, description="fsdp: copies of the sharded model; processes / replicas of them share one (hybrid)."
    )
    reshard: bool = Field(
        True, description="fsdp: let a gathered block go after its forward pass and gather it again for the backward."
    )
    reduce: Literal["fp32", "bf16"] = Field("fp32", description="Type in which gradients are added up.")
    shard_accumulated: bool = Field(
        False,
        description="fsdp: add up each micro-batch's gradients across processes, so that none holds them whole; "
        "by default that is done once a step.",
    )
    checkpoint: Literal["whole", "sharded"] = Field(
        "whole", description="Tensors gathered into one file, or for fsdp each process's shares in a file of its own."
    )
    timeout: float = Field(600.0, gt=0, description="Seconds after which a process that does not answer ends the run.")

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "ddp" and (self.replicas > 1 or self.checkpoint == "sharded" or self.shard_accumulated):
            raise ValueError("replicas, shard_accumulated and checkpoint 'sharded' belong to kind 'fsdp'")
        return self


class RunConfig(Config):
    """Everything that makes a run what it is, and how it is spread over processes."""

    task: Literal["causal", "masked"] = Field("causal", description="Next-token or masked-token prediction.")
    model: ModelConfig = Field(ModelConfig(), description="The model; its vocabulary is the tokeniser's.")
    data: DataConfig = Field(DataConfig(), description="The corpus.")
    train: TrainConfig = Field(TrainConfig(), description="The training.")
    parallel: ParallelConfig = Field(ParallelConfig(), description="How processes share it; `ddp` or `fsdp` will do.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} is longer than model.max_seq_len {self.model.max_seq_len}"
            )
        if self.task == "masked" and self.data.packing == "chunks":
            raise ValueError("packing 'chunks' is for causal models; a masked one needs packing 'stream'")
        if self.parallel.kind == "fsdp" and self.train.compile == "model":
            raise ValueError(
                "train.compile 'model' cannot go with parallel 'fsdp', which gathers block by block: 'block'"
            )
        return self

    @property
    def predicted_share(self) -> float:
        """Share of the tokens at which the model has something to predict, and so computes its head."""
        return self.train.mask_share if self.task == "masked" else 1.0

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of a hash of the configuration: equal ones are the same run."""
        added = {key for key in ADDED if getattr(self.train, key) == TrainConfig.model_fields[key].default}
        text = self.model_dump_json(exclude={"parallel": True, "train": added})
        return hashlib.sha256(text.encode()).hexdigest()[:8]


class FinetuneConfig(Config):
    """How a pre-trained encoder is fine-tuned on a task: the paper's protocol, the same for every task."""

    epochs: int = Field(5, ge=1, description="Passes over the training rows.")
    batch_size: int = Field(32, ge=1, description="Sequences in a step.")
    lr: float = Field(1.5e-4, gt=0, description="Peak learning rate.")
    warmup: float = Field(0.1, ge=0, lt=1, description="Share of the steps; after it, half a cosine to zero.")
    betas: tuple[float, float] = Field((0.9, 0.98), description="Adam's averaging factors.")
    eps: float = Field(1e-6, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="On matrices and embeddings.")
    clip: float | None = Field(None, gt=0, description="Largest norm of the gradient.")
    dropout: float = Field(0.1, ge=0, lt=1, description="After the embedding, the attention, the MLP and the pooler.")
    seq_len: int = Field(128, ge=4, description="Longest input; both sentences are cut to fit.")
    rows: PositiveInt | dict[str, PositiveInt] | None = Field(
        None,
        description="Train on this many rows, drawn by each seed, of every task or of those named; all if not given.",
    )
    head_only: bool = Field(False, description="Train pooler and classifier on an encoder that stays as it is.")
    from_scratch: bool = Field(False, description="Begin with a random encoder instead of the pre-trained one.")

    def rows_of(self, task: str) -> int | None:
        """How many rows of a task are trained on at most."""
        return self.rows.get(task) if isinstance(self.rows, dict) else self.rows

    def training(self, steps: int, seed: int) -> TrainConfig:
        """The same as the configuration of a training of `steps` steps."""
        return TrainConfig(
            steps=steps,
            batch_size=self.batch_size,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            clip=self.clip,
            schedule="cosine",
            warmup=self.warmup,
            seed=seed,
        )
