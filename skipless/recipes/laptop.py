"""Recipes for two cores: minutes a run."""

from skipless.config.model import ModelConfig
from skipless.config.run import DataConfig, RunConfig, TrainConfig
from skipless.recipes.paper import LANGUINI_PARTS, bert_block, crammed_bert, languini_activation, narrow
from skipless.recipes.variants import find_block


def laptop(block: str = "sas-p") -> RunConfig:
    """Real Python code on two cores in minutes: 12 layers of width 128 on the standard library's source.

    The embedding is normalised before the first block and a fifth of the steps are warm-up, which makes Pre-LN as
    strong as it gets at this size (the experiment `baseline`). To a block without a skip the norm makes no difference:
    its own does the same.
    """
    return RunConfig(
        model=ModelConfig(
            block=find_block(block),
            n_layer=12,
            d_model=128,
            n_head=4,
            vocab_size=4096,
            max_seq_len=128,
            embedding_norm=True,
        ),
        data=DataConfig(source="python-stdlib", vocab_size=4096, seq_len=128),
        train=TrainConfig(steps=2000, batch_size=8, lr=2e-3, warmup=0.2),
    )


def demo(block: str = "sas-p") -> RunConfig:
    """A shorter and shallower `laptop`, for two runs within about five minutes."""
    changes = {"model.n_layer": 6, "train.steps": 1000, "train.sample_every": 500, "train.eval_every": 100}
    return laptop(block).override(changes)


def smoke(block: str = "sas-p") -> RunConfig:
    """Seconds: shows that everything runs, learns next to nothing."""
    changes = {"model.n_layer": 2, "model.d_model": 32, "train.steps": 20, "train.eval_every": 10, "train.eval_rows": 8}
    more = {"train.warmup": None, "data.max_bytes": 2_000_000, "data.vocab_size": 512}
    return laptop(block).override({**changes, **more})


def study(block: str = "sas-p") -> RunConfig:
    """What the experiments train at laptop scale: narrow, for there are many. Their other recipes derive from it."""
    length, vocabulary = 64, 2048
    return laptop(block).override(
        {
            "data.source": "corpus:code",
            "model.n_layer": 12,
            "model.d_model": 64,
            "model.n_head": 4,
            "model.max_seq_len": length,
            "model.vocab_size": vocabulary,
            "data.seq_len": length,
            "data.vocab_size": vocabulary,
            "train.steps": 2000,
            "train.batch_size": 16,
            "train.eval_every": 200,
            "train.eval_rows": 256,
            "train.tuning_rows": 256,
            "train.sample_every": 0,
            "train.save_every": 500,
            "train.keep_last": 1,
            "train.log_every": 20,
            "train.gains_every": 100,
            "train.health_every": 500,
        }
    )


def study_long(block: str = "sas-p") -> RunConfig:
    """`study` on three times the tokens (figure 8)."""
    base = study(block)
    assert base.train.steps is not None
    return base.override({"train.steps": 3 * base.train.steps})


def study_shallow(block: str = "sas-p") -> RunConfig:
    """The shallower of the two depths of figure 6."""
    return narrow(study(block))


def study_deep(block: str = "sas-p") -> RunConfig:
    """`study_shallow` with 48 layers."""
    return narrow(study_shallow(block).override({"model.n_layer": 48}))


def study_books(block: str = "sas-p") -> RunConfig:
    """`languini` at laptop scale."""
    length = 512
    base = study(block)
    return base.override(
        {
            **LANGUINI_PARTS,
            **languini_activation(base),
            "data.source": "corpus:books",
            "model.max_seq_len": length,
            "data.seq_len": length,
            "train.batch_size": 4,
            "train.eval_rows": 64,
            "train.tuning_rows": 64,
        }
    )


LAPTOP_BERT_PEAK_LR = {"sas": 6e-3, "sas-p": 6e-3, "sas-p-nonorm": 4e-3}
"""Those of the laptop size: half of the simplified blocks' for the others."""


def crammed_bert_laptop(block: str = "sas-p") -> RunConfig:
    """`crammed-bert` for a quarter of an hour of one core: 4 layers of width 128, 8,192 words, 8 million tokens.

    The budget is in tokens, the same for every block: minutes on a machine that does other things measure nothing.

    Weights are 0.02·√(768/128) at first, so that a block of this width does to its input what the paper's does. With
    rotary positions: of sinusoids, with or without a scale, so short a training learns little (docs/notes/bert.md).
    """
    changes = {
        "model.block": bert_block(block, 4).model_dump(),
        "model.n_layer": 4,
        "model.d_model": 128,
        "model.n_head": 4,
        "model.d_ff": 512,
        "model.vocab_size": 8192,
        "model.positions": "rotary",
        "model.init_std": 0.05,
        "data.source": "corpus:wiki",
        "data.max_bytes": 80_000_000,
        "data.valid_fraction": 0.02,
        "data.vocab_size": 8192,
        "train.minutes": None,
        "train.tokens": 8_000_000,
        "train.lr": LAPTOP_BERT_PEAK_LR.get(block.partition(":")[0], 3e-3),
        "train.batch_size": 16,
        "train.micro_batch": 8,
        "train.eval_rows": 256,
        "train.tuning_rows": 256,
        "train.health_every": 500,
        "train.gains_every": 200,
        "train.log_every": 20,
    }
    return crammed_bert(block).override(changes)
