"""What decodes beside our models: each case reads a prompt and writes so many tokens, greedily where that can be asked.

Others' models are GPT-2s of the same size with random weights: Hugging Face's, llama.cpp's (`llama-cpp-python` and
`gguf`) and CTranslate2's, each only where it is installed. llama.cpp is fed tokens that
were chosen before and picks none, so it is timed on slightly less work than the others.
"""

import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from skipless.config.model import ModelConfig
from skipless.interop.export import export_model
from skipless.interop.onnx_options import OnnxOptions
from skipless.interop.quiet import quiet
from skipless.nn import CausalLM
from skipless.nn.sampling import Decodes, Sampling, generate
from skipless.runtime.model import OnnxCausalLM
from skipless.tasks.gguf_gpt2 import TYPES, write_gpt2

Case = Callable[[int], float | None]
"""Reads the prompts and writes so many tokens; when the first was there, by the clock, if it can say that."""

LLAMA, CTRANSLATE, HF = "llama.cpp", "CTranslate2", "HF GPT-2"


@dataclass(frozen=True)
class Size:
    """A model, and how long its texts become."""

    n_layer: int
    d_model: int
    n_head: int
    vocab_size: int
    max_seq_len: int

    def config(self, block: str) -> ModelConfig:
        """One of ours."""
        return ModelConfig(block=block, **asdict(self))  # pyrefly: ignore


def own_case(model: Decodes, prompts: Sequence[Sequence[int]], mode: str = "auto") -> Case:
    """One of our models, in PyTorch or in ONNX Runtime."""
    greedy = Sampling(temperature=0)

    def run(new: int) -> float:
        tokens = generate(model, prompts, new, greedy, mode=mode, when_full="end")
        next(tokens)
        first = time.perf_counter()
        for _ in tokens:
            pass
        return first

    return run


def onnx_cases(
    size: Size, prompts: Sequence[Sequence[int]], folder: Path, block: str = "sas-p", kinds: Sequence[str] = ("32",)
) -> dict[str, Case]:
    """Exports of one random model: `32`, `8`, `4`, with what else is chosen behind it (`8 x`, `4 block=128`)."""
    model, cases = CausalLM(size.config(block)).eval(), {}
    for kind in kinds:
        place = folder / f"{block} {kind}"
        if not place.exists():
            export_model(model, "onnx", place, onnx=onnx_options(kind))
        found = OnnxCausalLM(place, size.config(block), threads=torch.get_num_threads())
        cases[f"{block} ONNX {kind}"] = own_case(found, prompts)
    return cases


def onnx_options(kind: str) -> OnnxOptions:
    """`4`, `8 x`, `8 x8` (what the cache remembers at 8 bits), `4 block=128 asymmetric`."""
    bits, *more = kind.split()
    chosen: dict[str, Any] = {"bits": int(bits)}
    for word in more:
        if word in ("x", "kx", "kv"):
            chosen["cache"] = word
        elif word in ("x8", "kx8", "kv8"):
            chosen |= {"cache": word.removesuffix("8"), "cache_bits": 8}
        elif word == "asymmetric":
            chosen["symmetric"] = False
        else:
            chosen["block_size"] = int(word.removeprefix("block="))
    return OnnxOptions(**chosen)


# ----------------------------------------------------------------------------------------- others


LLAMA_FLAGS: dict[str, dict[str, Any]] = {
    "": {},
    ", flash": {"flash_attn": True},
    ", flash, cache q8_0": {"flash_attn": True, "type_k": 8, "type_v": 8},  # ggml's number of that type
}
"""Flags of llama.cpp's that change its speed: attention in one pass, and a cache at 8 bits."""


def llama_cases(
    size: Size, prompts: Sequence[Sequence[int]], folder: Path, *, every_flag: bool = False
) -> dict[str, Case]:
    """llama.cpp with each of its types, or nothing where it is not installed; for one prompt."""
    if not (find_spec("llama_cpp") and find_spec("gguf")) or len(prompts) > 1:
        return {}
    from llama_cpp import Llama  # pyrefly: ignore

    threads = torch.get_num_threads()
    cases = {}
    for kind in TYPES:
        path = folder / f"gpt2-{kind}.gguf"
        if not path.exists():
            write_gpt2(path, kind, **asdict(size))
        sizes = {"n_ctx": size.max_seq_len, "n_batch": 512, "n_threads": threads, "n_threads_batch": threads}
        for flags, chosen in LLAMA_FLAGS.items() if every_flag else [("", {})]:
            model = Llama(model_path=str(path), verbose=False, **sizes, **chosen)
            cases[f"{LLAMA} {kind}{flags}"] = _llama_case(model, list(prompts[0]), size.vocab_size)
    return cases


def _llama_case(model: Any, prompt: list[int], vocab_size: int) -> Case:
    def run(new: int) -> float:
        model.reset()
        model.eval(prompt)
        first = time.perf_counter()
        for _ in range(new - 1):
            model.eval([random.randrange(vocab_size)])
        return first

    return run


def ctranslate_cases(
    size: Size, prompts: Sequence[Sequence[int]], folder: Path, kinds: Sequence[str] = ("float32", "int8")
) -> dict[str, Case]:
    """CTranslate2 in float32 and in int8, or nothing where it is not installed."""
    if not (find_spec("ctranslate2") and find_spec("transformers")):
        return {}
    import ctranslate2  # pyrefly: ignore

    source = folder / "gpt2-hf"
    if not source.exists():
        hf_model(size).save_pretrained(source)
        _write_words(source, size.vocab_size)
    words = [[f"t{token}" for token in prompt] for prompt in prompts]
    cases = {}
    for kind in kinds:
        place = folder / f"gpt2-ct2-{kind}"
        if not place.exists():
            with quiet("transformers"):
                converter = ctranslate2.converters.TransformersConverter(str(source))
                converter.convert(str(place), quantization=kind)
        threads = torch.get_num_threads()
        model = ctranslate2.Generator(str(place), device="cpu", compute_type=kind, intra_threads=threads)
        cases[f"{CTRANSLATE} {kind}"] = _ctranslate_case(model, words)
    return cases


def _ctranslate_case(model: Any, words: list[list[str]]) -> Case:
    def run(new: int) -> None:
        how = {"sampling_topk": 1, "include_prompt_in_result": False, "end_token": []}
        model.generate_batch(words, max_length=new, min_length=new, **how)

    return run


def _write_words(folder: Path, vocab_size: int) -> None:
    """A tokeniser whose words nobody reads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"t{n}": n for n in range(vocab_size)}, unk_token="t0")).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "bos_token": "t0", "eos_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def hf_model(size: Size) -> Any:
    """Hugging Face's GPT-2 of a size."""
    import transformers  # pyrefly: ignore

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.GPT2Config(
        n_embd=size.d_model,
        n_head=size.n_head,
        n_layer=size.n_layer,
        n_positions=size.max_seq_len,
        vocab_size=size.vocab_size,
        activation_function="relu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",  # pyrefly: ignore
    )
    return transformers.GPT2LMHeadModel(config).eval()


def hf_cases(size: Size, prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, Case]:
    """`generate` of Hugging Face's GPT-2 with its two caches, or nothing where it is not installed."""
    if not find_spec("transformers"):
        return {}
    model = hf_model(size).to(device)
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts, device=device)
    mask = torch.ones_like(ids)

    def case(cache: str) -> Case:
        def run(new: int) -> None:
            counts = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            model.generate(ids, attention_mask=mask, cache_implementation=cache, **counts)

        return run

    return {f"{HF} ({cache})": case(cache) for cache in ("dynamic", "static")}


def versions() -> dict[str, str]:
    """Of everything that is measured."""
    names = ("torch", "onnxruntime", "transformers", "llama_cpp_python", "ctranslate2")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except ImportError:
            continue
    return found
