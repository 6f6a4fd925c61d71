"""lm-evaluation-harness: the task that ships, tasks of one's own, on a run and on an export, without a network."""

import json
from importlib.resources import files

import pytest
import torch

import skipless
from skipless.cli import run as skipless_command
from skipless.interop.lm_eval.harness import evaluate_tasks

ITEMS = [
    json.loads(line)
    for line in files("skipless.interop.lm_eval").joinpath("python_next_line/items.jsonl").read_text().splitlines()
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def accuracy_by_hand(model):
    """The share of items whose right line is the likeliest, summed token by token."""
    right = 0
    for item in ITEMS:
        scores = []
        for choice in item["choices"]:
            context = item["context"].rstrip()  # the harness gives the white space to the line
            ids = model.tokenizer.encode(item["context"] + choice)
            start = len(model.tokenizer.encode(context))
            with torch.no_grad():
                logs = torch.log_softmax(model(torch.tensor([ids[:-1]]))[0], -1)
            scores.append(sum(logs[place - 1, ids[place]].item() for place in range(start, len(ids))))
        right += scores.index(max(scores)) == item["answer"]
    return right / len(ITEMS)


def test_items_are_sound():
    assert len(ITEMS) >= 30
    for item in ITEMS:
        assert len(set(item["choices"])) == 4
        assert item["context"].endswith("\n")
        compile_able = item["context"] + item["choices"][item["answer"]]
        assert compile_able.strip()
    answers = [item["answer"] for item in ITEMS]
    assert all(answers.count(place) >= 4 for place in range(4))  # no place is a good guess


def test_the_shipped_task_on_a_run_and_on_an_export(run_folder, exported, capsys):
    assert skipless_command(["evaluate", str(run_folder), "--tasks", "python_next_line", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]["python_next_line"]
    assert found["acc"] == pytest.approx(accuracy_by_hand(skipless.load(run_folder)))
    assert 0 <= found["acc_norm"] <= 1
    assert found["acc_stderr"] > 0
    assert evaluate_tasks(exported, ["python_next_line"])["python_next_line"]["acc"] == pytest.approx(found["acc"])


def test_the_harness_itself_opens_an_export(run_folder, exported):
    """As people call it: by a folder's name."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(files("skipless.interop").joinpath("lm_eval")), include_defaults=False)
    arguments = {"pretrained": str(exported), "device": "cpu"}
    found = simple_evaluate("hf", arguments, tasks=["python_next_line"], task_manager=manager, batch_size=8)
    ours = evaluate_tasks(run_folder, ["python_next_line"])
    assert found["results"]["python_next_line"]["acc,none"] == pytest.approx(ours["python_next_line"]["acc"])


def test_tasks_of_ones_own(run_folder, tmp_path, capsys):
    """A file of items and a file that says how they are asked."""
    (tmp_path / "sums.json").write_text('{"q": "1 + 1 =", "a": " 2"}\n{"q": "2 + 2 =", "a": " 4"}\n')
    (tmp_path / "sums.yaml").write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/sums.json\n"
        "  cache_dir: " + str(tmp_path / "cache") + "\n"
        'output_type: loglikelihood\ntest_split: test\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
        'target_delimiter: ""\nmetric_list:\n  - metric: perplexity\n  - metric: acc\n'
    )
    arguments = ["evaluate", str(run_folder), "--tasks", "sums", "--task-path", str(tmp_path)]
    assert skipless_command([*arguments, "--json", "--limit", "2"]) == 0
    scores = json.loads(capsys.readouterr().out)["tasks"]["sums"]
    assert scores["perplexity"] > 1
    assert skipless_command(arguments) == 0
    assert "perplexity" in capsys.readouterr().out


def test_a_data_set_that_cannot_be_read_is_a_line(run_folder, tmp_path, capsys):
    (tmp_path / "gone.yaml").write_text(
        f"task: gone\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/nothing.json\n"
        'output_type: loglikelihood\ntest_split: test\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
    )
    assert skipless_command(["evaluate", str(run_folder), "--tasks", "gone", "--task-path", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skipless: ")
    assert "gone" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "python_next_lin"], "unknown task 'python_next_lin'; here: python_next_line"),
        (["--tasks", ","], "no task"),
        (["--tasks", "python_next_line", "--task-path", "nowhere"], "no folder of tasks"),
        (["--tasks", "python_next_line", "--source", "files:x"], "give one of them"),
        (["--task-path", "."], "goes with --tasks"),
    ],
)
def test_bad_input(arguments, message, run_folder, capsys, monkeypatch):
    # the harness's own thousands of tasks take a while to list, and are not needed to say what is wrong
    import lm_eval.tasks

    original = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **how: original(**{**how, "include_defaults": False}))
    assert skipless_command(["evaluate", str(run_folder), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.strip().count("\n") == 0
