"""Whatever is wrong with a configuration or a command line: status 2, one line, and nothing left behind."""

import contextlib
import io
import itertools
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless import cli
from skipless.config.run import RunConfig
from skipless.training.trainer import Trainer

SETTINGS = {"derandomize": True, "database": None}


@pytest.fixture(scope="module", autouse=True)
def _no_training():
    """A value that slips through must not train for hours, but fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", lambda _: pytest.fail("training began"))
        yield


@pytest.fixture(scope="module")
def refused(tmp_path_factory, source, cache_dir):
    """Runs a command line that is to be refused, and returns the line that says why."""
    folder, numbers = tmp_path_factory.mktemp("refused"), itertools.count()

    def run(*arguments, data=source):
        runs = folder / str(next(numbers))
        before = ["--recipe", "smoke", "--runs", str(runs), "--cache-dir", str(cache_dir), "--track", "none"]
        given = ["--source", data, "--set", "data.valid_fraction=0.2"] if data else []
        err = io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            status = cli.run(["train", *before, *given, *arguments])
        assert status == 2, arguments
        assert_one_line(err.getvalue())
        assert not runs.exists() or not list(runs.iterdir())
        return err.getvalue()

    return run


@pytest.fixture(scope="module")
def refused_file(tmp_path_factory, refused):
    """The same for the content of a configuration file."""
    path = tmp_path_factory.mktemp("file") / "config.yaml"

    def run(content):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return refused("--config", str(path), data=None)

    return run


def assert_one_line(err: str) -> None:
    assert err.startswith("skipless: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1, err
    assert len(err) > len("skipless: \n") + 5
    assert "Traceback" not in err


# ------------------------------------------------------------------------------------ wrong values

WORDS = st.text("qxzäß漢😀", min_size=1, max_size=12)
NOT_FINITE = st.sampled_from([float("nan"), float("inf"), float("-inf")])
FRACTIONS = st.floats(0.001, 0.999).map(lambda share: 3 + share)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS
NESTED = st.recursive(
    st.lists(LEAVES, max_size=3) | st.dictionaries(WORDS, LEAVES, min_size=1, max_size=3),
    lambda inner: st.lists(inner, min_size=1, max_size=2) | st.dictionaries(WORDS, inner, min_size=1, max_size=2),
    max_leaves=8,
)
DEEP = st.integers(2, 60).map(lambda depth: json.loads("[" * depth + "]" * depth))
NO_NUMBER = WORDS | NESTED | DEEP | NOT_FINITE | st.just("") | st.dates()


def below(limit):
    return st.integers(max_value=limit - 1)


def whole(least, most=None):
    """What is not a whole number from `least` on."""
    above = st.integers(min_value=most + 1) if most else st.nothing()
    return NO_NUMBER | FRACTIONS | below(least) | above


def real(least=None, *, above=None, most=None):
    """What is not a number in a range."""
    wrong = NO_NUMBER
    if least is not None:
        wrong |= st.floats(max_value=least, exclude_max=True, allow_infinity=False)
    if above is not None:
        wrong |= st.floats(max_value=above, allow_infinity=False)
    if most is not None:
        wrong |= st.floats(min_value=most, exclude_min=True, allow_infinity=False)
    return wrong


NO_CHOICE = WORDS | NESTED | DEEP | st.integers() | st.floats() | st.none() | st.just("")
NO_TEXT = NESTED | DEEP | st.integers() | st.floats() | st.booleans() | st.dates()
NO_BOOLEAN = WORDS | NESTED | DEEP | st.integers(2) | below(0) | st.just("")
NO_GAIN = WORDS | NOT_FINITE | st.lists(LEAVES) | st.dictionaries(WORDS, LEAVES, min_size=1)

WRONG = {
    "task": NO_CHOICE,
    "model": NO_TEXT | st.none() | WORDS,
    "model.block": WORDS | st.integers() | st.lists(LEAVES) | st.none() | st.just(""),
    "model.block.layout": NO_CHOICE,
    "model.block.norm_eps": real(above=0),
    "model.block.mixing": NO_CHOICE,
    "model.block.beta_ff": NO_GAIN,
    "model.block.beta_ff.init": WORDS | NOT_FINITE | NESTED,
    "model.block.value.kind": NO_CHOICE,
    "model.block.per_head_gains": NO_BOOLEAN,
    "model.n_layer": whole(1, 10_000) | st.none(),
    "model.d_model": whole(1, 1_000_000) | st.none() | st.just(33),
    "model.n_head": whole(1) | st.none() | st.sampled_from([3, 5, 64, 10**9]),
    "model.d_ff": whole(1, 10_000_000),
    "model.max_seq_len": whole(1, 10_000_000) | st.none() | st.integers(1, 127),
    "model.positions": NO_CHOICE,
    "model.tie_embeddings": NO_BOOLEAN | st.none(),
    "model.dropout": real(0, most=1) | st.none() | st.just(1),
    "model.init_std": real(above=0) | st.none(),
    "data": NO_TEXT | st.none() | WORDS,
    "data.source": NO_TEXT | WORDS | st.none() | st.just(""),
    "data.valid_source": NO_TEXT | WORDS | st.just(""),
    "data.valid_fraction": real(0, most=1) | st.none() | st.just(1),
    "data.tokenizer": NO_TEXT | st.none() | st.just("") | WORDS.map(lambda word: f"{word}/{word}/{word}.json"),
    "data.vocab_size": whole(1, 10_000_000) | st.none() | st.integers(1, 256),
    "data.lowercase": NO_BOOLEAN | st.none(),
    "data.packing": NO_CHOICE,
    "data.seq_len": whole(1, 10_000_000) | st.none() | st.integers(129, 10_000),
    "data.max_documents": whole(1),
    "train": NO_TEXT | st.none() | WORDS,
    "train.steps": whole(1) | st.none(),
    "train.tokens": whole(1) | st.integers(1),
    "train.minutes": real(above=0) | st.floats(1, 100),
    "train.batch_size": whole(1, 10_000_000) | st.none(),
    "train.micro_batch": whole(1) | st.sampled_from([3, 5, 6, 7, 9, 10**30]),
    "train.batch_ramp": real(0, most=1) | st.none(),
    "train.optimizer": NO_CHOICE,
    "train.lr": real(above=0) | st.none(),
    "train.vp_lr_factor": real(0) | st.none(),
    "train.betas": NO_NUMBER
    | st.lists(st.floats(0, 0.9), min_size=3)
    | st.tuples(st.floats(1), st.floats(1)).map(list),
    "train.weight_decay": real(0) | st.none(),
    "train.clip": real(above=0),
    "train.schedule": NO_CHOICE,
    "train.warmup": real(0) | st.floats(21, 1e300),
    "train.mask_share": real(above=0, most=1) | st.none() | st.just(1),
    "train.precision": NO_CHOICE | st.just("fp16"),
    "train.device": NO_TEXT | WORDS | st.just("") | st.none() | st.sampled_from(["cuda:99", "cpu:x", "tpu"]),
    "train.compile": NO_CHOICE,
    "train.eval_every": whole(0) | st.none(),
    "train.eval_rows": whole(1) | st.none(),
    "train.sample_prompt": NO_TEXT | st.none(),
    "train.save_every": whole(1) | st.none(),
    "train.keep_last": whole(1) | st.none(),
    "train.log_every": whole(1) | st.none(),
    "train.seed": whole(0) | st.none(),
}


def as_yaml(value) -> str:
    """A value as it stands on the right of `--set key=`."""
    return yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10**9).rstrip()[1:-1]


def as_file(changes: dict) -> str:
    """Dotted names as a nested file."""
    tree = {}
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = tree
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return yaml.safe_dump(tree, allow_unicode=True)


WRONG_VALUES = st.sampled_from(sorted(WRONG)).flatmap(lambda key: st.tuples(st.just(key), WRONG[key]))


def test_the_table_names_real_keys():
    tree = RunConfig().model_dump()
    for path in WRONG:
        place = tree
        for name in path.split("."):
            assert name in place, path
            place = place[name]


@settings(max_examples=150, **SETTINGS)
@given(WRONG_VALUES)
def test_wrong_values_by_name(refused, wrong):
    key, value = wrong
    refused("--set", f"{key}={as_yaml(value)}")


@settings(max_examples=100, **SETTINGS)
@given(WRONG_VALUES)
def test_wrong_values_in_a_file(refused_file, source, wrong):
    key, value = wrong
    given_data = {"data.source": source, "data.valid_fraction": 0.2} if not key.startswith("data") else {}
    refused_file(as_file({**given_data, key: value}))


@settings(max_examples=50, **SETTINGS)
@given(parent=st.sampled_from(["", "model.", "data.", "train.", "model.block.", "model.block.value."]), word=WORDS)
def test_unknown_keys_are_named(refused, refused_file, parent, word):
    for line in (refused("--set", f"{parent}{word}=1"), refused_file(as_file({parent + word: 1}))):
        assert word in line
        assert "unknown key" in line


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("train.step=5", "'train.steps'"),
        ("trian.steps=5", "'train'"),
        ("model.nlayer=5", "'model.n_layer'"),
        ("train.schedule=cosin", "'cosine'"),
        ("model.block=pre-lm", "'pre-ln'"),
        ("train.lr.x=5", "has no parts"),
        ("model.n_head=5", "near: 2, 4, 8"),
        ("train.steps=0", "greater than or equal to 1, got 0"),
        ("train.device=gpu", "try auto or cpu"),
        ("data.vocab_size=100", "at least 257"),
    ],
)
def test_the_line_says_what_is_allowed_or_near(refused, setting, hint):
    assert hint in refused("--set", setting)


COMBINATIONS = [
    ["train.steps=5", "train.tokens=5"],
    ["train.steps=5", "train.minutes=5"],
    ["train.steps=null"],
    ["train.steps=null", "train.tokens=100", "train.warmup=10"],
    ["train.batch_size=8", "train.micro_batch=3"],
    ["model.d_model=33", "model.n_head=3"],
    ["model.d_model=30", "model.n_head=10", "model.positions=rotary"],
    ["task=masked", "data.packing=chunks"],
    ["data.packing=chunks", "data.seq_len=1"],
    ["model.block.layout=sequential", "model.block.alpha_comb=1"],
    ["model.block.beta_sa=null", "model.block.beta_ff=null"],
    ["model.block.value.kind=reparam"],
    ["data.seq_len=100000", "model.max_seq_len=100000"],
    ["data.max_documents=1"],
    ["model.d_model=1000000"],
    ["train.batch_size=10000000"],
]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=", ".join)
def test_values_that_do_not_go_together(refused, combination):
    refused(*(part for setting in combination for part in ("--set", setting)))


# ------------------------------------------------------------------------------------------- files


@settings(max_examples=80, **SETTINGS)
@given(st.text("abc:{}[],-&*#|>'\"%@`? \n\tä", min_size=1, max_size=40).filter(str.strip))
def test_text_that_is_no_configuration(refused_file, text):
    if text.strip() not in ("{}", "{ }"):
        refused_file(text)


@settings(max_examples=40, **SETTINGS)
@given(st.binary(min_size=1, max_size=40).filter(lambda data: not data.isascii()))
def test_bytes_that_are_no_configuration(refused_file, data):
    refused_file(data)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "5",
        "1: 2",
        "train: [1]",
        "train: {1: 2}",
        "a: &a {b: *a}",
        "train: &a {steps: *a}",
        "train: !!python/object/apply:os.system ['true']",
        "--- {}\n--- {}",
        "train: {steps: 5",
        "? [a]\n: b",
    ],
)
def test_files_that_are_no_configuration(refused_file, content):
    refused_file(content)


def test_files_that_cannot_be_read(refused, tmp_path):
    assert "No such file" in refused("--config", str(tmp_path / "nowhere.yaml"))
    assert "directory" in refused("--config", str(tmp_path))


NOT_YAML_ERRORS = ["2001-99-99", "0b_", "0x_", "!!int x", "!!float x", "!!timestamp x", "[" * 600, "9" * 5000]


@pytest.mark.parametrize("text", NOT_YAML_ERRORS, ids=lambda text: text[:14])
@pytest.mark.parametrize("way", ["set", "file", "block"])
def test_values_that_yaml_itself_stumbles_over(refused, refused_file, way, text):
    if way == "file":
        refused_file(f"train: {{lr: {text}")
        refused_file(f"train: {{lr: {text}}}")
    else:
        refused(*(["--set", f"train.lr={text}"] if way == "set" else ["--block", f"sas:beta_ff={text}"]))


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_gain_that_is_a_truth_value(refused, value):
    refused("--set", f"model.block.beta_ff={value}")


def test_a_seed_that_is_too_large(refused):
    refused("--seed", str(2**64))


# ------------------------------------------------------------------------------------ command lines

OPTIONS = ["--recipe", "--block", "--config", "--name", "--runs", "--source", "--n-layer", "--steps", "--lr", "--set"]
NUMBERS = ["--n-layer", "--d-model", "--n-head", "--seq-len", "--steps", "--tokens", "--batch-size", "--seed"]


@settings(max_examples=40, **SETTINGS)
@given(option=WORDS, value=st.none() | WORDS)
def test_unknown_options(refused, option, value):
    assert "No such option" in refused(f"--{option}", *([value] if value else []))


@settings(max_examples=30, **SETTINGS)
@given(st.sampled_from(NUMBERS), WORDS | FRACTIONS.map(str) | st.just("") | below(0).map(str) | st.just("nan"))
def test_options_that_take_whole_numbers(refused, option, value):
    refused(option, value)


@settings(max_examples=20, **SETTINGS)
@given(st.sampled_from(["--lr", "--minutes"]), WORDS | st.sampled_from(["", "nan", "inf", "-inf", "-1", "0"]))
def test_options_that_take_numbers(refused, option, value):
    refused(option, value)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_without_their_value(refused, option):
    assert "requires an argument" in refused(option)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--recipe", "smok"], "did you mean 'smoke'"),
        (["--recipe", ""], "known: laptop"),
        (["--block", "saz"], "did you mean 'sas'"),
        (["--block", "sas:beta_fff=1"], "did you mean 'beta_ff'"),
        (["--block", "sas:="], "expected key=value"),
        (["--block", "sas:layout=["], "not valid YAML"),
        (["--name", "a/b"], "a plain folder name, got 'a/b'"),
        (["--name", "/tmp/x"], "a plain folder name"),
        (["--name", ".."], "a plain folder name"),
        (["--name", ".hidden"], "a plain folder name"),
        (["--resume", "yes"], "unexpected extra argument(s) (yes)"),
        (["--resume", "runs/x"], "unexpected extra argument(s) (runs/x)"),
        (["--resume=yes"], "--resume"),
        (["--track", "tensorbord"], "did you mean 'tensorboard'"),
        (["--track", ""], "known: tensorboard, wandb, trackio"),
        (["--track", "tensorboard,,"], "unknown tracker ''"),
        (["--steps", "5", "--tokens", "5"], "exactly one budget"),
        (["--tokens", "5", "--minutes", "5"], "exactly one budget"),
        (["--seq-len", "100000"], "not one row of"),
        (["--set", "train.steps"], "expected key=value"),
        (["--set", "=5"], "expected key=value"),
        (["--set", "train.lr=["], "not valid YAML"),
        (["extra"], "unexpected extra argument"),
        (["--steps", "5", "6"], "unexpected extra argument"),
    ],
)
def test_wrong_command_lines(refused, arguments, hint):
    assert hint in refused(*arguments)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("", "unknown source ''; known: python-stdlib, files, jsonl, hf, corpus"),
        ("nonsense", "unknown source 'nonsense'"),
        ("file:x", "did you mean 'files'"),
        ("files:", "needs an argument: files:GLOB"),
        ("files:nothing-here/*.x", "folder 'nothing-here' does not exist"),
        ("files:{folder}", "it is a folder; did you mean"),
        ("files:{folder}/*.nothing", "no file matches"),
        ("jsonl:", "needs an argument: jsonl:PATH#field"),
        ("jsonl:{folder}/nothing.jsonl", "no file matches"),
        ("jsonl:{folder}/good.jsonl#txt", "no field 'txt'; fields: text; did you mean 'text'?"),
        ("jsonl:{folder}/bad.jsonl", "bad.jsonl, line 2: not valid JSON"),
        ("jsonl:{folder}/list.jsonl", "expected a JSON object, got list"),
        ("jsonl:{folder}/number.jsonl", "holds int, expected a string"),
        ("jsonl:{folder}/cut.jsonl.gz", "cannot be read"),
        ("files:{folder}/empty.txt", "has no documents"),
        ("hf:", "needs an argument: hf:DATASET"),
        ("python-stdlib:x", "takes no argument, got 'x'"),
    ],
)
def test_wrong_sources(refused, tmp_path, spec, hint):
    contents = {
        "good.jsonl": '{"text": "a"}\n',
        "bad.jsonl": '{"text": "a"}\n{"text": \n',
        "list.jsonl": "[1]\n",
        "number.jsonl": '{"text": 5}\n',
        "cut.jsonl.gz": "no gzip",
        "empty.txt": " \n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    assert hint in refused(data=spec.format(folder=tmp_path)) if spec else refused("--source", "", data=None)


def test_the_cache_cannot_be_a_file(refused, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in refused("--cache-dir", str(tmp_path / "file"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--set", "train.lr=nan"],
        ["train", "--recipe", "nonsense"],
        ["train", "--source", "files:nothing-here/*.x"],
        ["evaluate", "nowhere"],
    ],
    ids=" ".join,
)
def test_in_a_process_of_its_own(commands, tmp_path, arguments):
    where = ["--runs", str(tmp_path / "runs")] if arguments[0] == "train" else []
    child = commands.start([*arguments, *where, "--cache-dir", str(tmp_path / "cache")])
    assert child.wait() == 2
    assert_one_line(child.err)
    assert child.out == ""
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------ paths, devices, names and data that cannot be

LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--name", LONG], id="name-too-long"),
        pytest.param(["--runs", __file__], id="runs-is-a-file"),
        pytest.param(["--runs", "/proc/nothing"], id="runs-cannot-be-made"),
        pytest.param(["--set", f"data.source=files:{LONG}"], id="source-too-long"),
        pytest.param(["--set", f"data.source=jsonl:{LONG}"], id="jsonl-too-long"),
        pytest.param(["--set", f"data.tokenizer={LONG}.json"], id="tokenizer-too-long"),
    ],
)
def test_paths_that_cannot_be(refused, arguments):
    refused(*arguments)


@pytest.mark.parametrize("device", ["meta", "privateuseone"])
def test_devices_that_cannot_train(refused, device):
    refused("--set", f"train.device={device}")


def test_text_that_is_no_unicode(refused_file):
    refused_file('data: {source: "\\ud800"}')


@pytest.mark.parametrize("option", ["--block", "--name"])
def test_empty_names(refused, option):
    refused(option, "")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["task=masked"], id="masked-without-mask-token"),
        pytest.param(["data.valid_fraction=0"], id="nothing-held-out"),
        pytest.param(["data.valid_fraction=0", "train.eval_every=0"], id="nothing-held-out-for-the-end"),
    ],
)
def test_what_the_data_cannot_give(refused, tmp_path, arguments):
    settings = [part for setting in arguments for part in ("--set", setting)]
    refused(*settings, "--runs", str(tmp_path / "runs"))
    assert not Path(tmp_path / "runs").exists()
