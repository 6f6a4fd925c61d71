"""Text → distinct documents → tokens in flat files → batches that are pure functions of a seed and an index.

    from skipless.config import DataConfig
    from skipless.data import prepare
    corpus = prepare(DataConfig(source="files:src/**/*.py", vocab_size=4096, seq_len=128))
    rows = corpus.train.batch(seed=0, first=0, count=32)  # (32, 129): inputs rows[:, :-1], targets rows[:, 1:]

Nothing here imports torch, and there is no loader whose state would have to be saved.
"""

from skipless.data.corpus import Corpus, prepare
from skipless.data.masking import mask_tokens
from skipless.data.mixed_tokens import MixedTokens
from skipless.data.sources import SOURCES
from skipless.data.tokenizer import Tokenizer
from skipless.data.tokens import Tokens

__all__ = ["SOURCES", "Corpus", "MixedTokens", "Tokenizer", "Tokens", "mask_tokens", "prepare"]
