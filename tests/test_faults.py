"""The list of faults fits the code and its tests; `benchmarks/faults.py` puts the faults in and runs the tests."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.test_architecture import ORDER

ROOT = Path(__file__).parent.parent


def load_script():
    spec = importlib.util.spec_from_file_location("faults", ROOT / "benchmarks" / "faults.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


faults = load_script()
FAULTS = faults.read_list()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_can_be_put_in(fault):
    """Its old text occurs once in its file, and what comes of it is another program."""
    assert fault.problem(ROOT) is None
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(fault.applied(source))) != ast.dump(ast.parse(source))
    assert fault.breaks.endswith(".")
    assert fault.survives is None or fault.survives.endswith(".")


def test_the_tests_it_names_are_there():
    named = {argument for fault in FAULTS for argument in fault.tests.split()}
    assert all(fault.tests for fault in FAULTS)
    missing = [argument for argument in named if not is_there(argument)]
    assert missing == []


def is_there(argument: str) -> bool:
    """Whether a file of tests, or a test of it, exists."""
    path, _, name = argument.partition("::")
    if not (ROOT / path).exists() or not name:
        return (ROOT / path).exists()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return name.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_list_covers_all_packages():
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    ours = [fault for fault in FAULTS if fault.file.startswith("skipless/")]
    assert {fault.package for fault in ours} == set(ORDER) - {"errors"}
    explained = [fault for fault in FAULTS if fault.survives]
    assert len(explained) <= 0.05 * len(FAULTS)


SOURCE = "def mean(values):\n    return sum(values) / len(values)\n"
TEST = "from skipless.means import mean\n\n\ndef test_mean():\n    assert mean([1, 3]) == 2\n"


def test_a_fault_is_in_the_code_while_its_tests_run(tmp_path):
    """It is caught by the test that fails, the file is as it was afterwards, and what nothing tests survives."""
    for path, text in {"skipless/__init__.py": "", "skipless/means.py": SOURCE, "tests/test_means.py": TEST}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    fault = faults.Fault("sum", "skipless/means.py", "/ len(values)", "/ 1", "It is a sum.", "tests/test_means.py")
    assert fault.problem(tmp_path) is None
    with faults.fault_in(fault, tmp_path):
        assert (tmp_path / "skipless" / "means.py").read_text() == SOURCE.replace("/ len(values)", "/ 1")
    assert (tmp_path / "skipless" / "means.py").read_text() == SOURCE
    gone = faults.Fault("gone", "skipless/means.py", "/ n", "/ 1", "It is a sum.", "tests/test_means.py")
    assert gone.problem(tmp_path) == "its old text occurs 0 times in skipless/means.py"


def test_published_runs_are_copied_and_runs_of_ones_own_are_not(tmp_path):
    """Tests read the archive, which is also called `runs`."""
    for path in (
        "runs/mine/x",
        "docs/results/runs/theirs/x",
        "skipless/__pycache__/x",
        "skipless/runs/run.py",
        ".venv/x",
    ):
        (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / path).touch()
    faults.copy_checkout(tmp_path / "root", tmp_path / "copy")
    found = {
        path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*") if path.is_file()
    }
    assert found == {"docs/results/runs/theirs/x", "skipless/runs/run.py"}


@pytest.mark.parametrize(
    ("status", "first", "caught"),
    [
        (1, "a", True),
        (2, "a", True),
        (-11, None, True),
        (-9, None, False),
        (0, None, False),
        (5, None, False),
        (None, None, False),
    ],
)
def test_what_counts_as_caught(status, first, caught):
    """A failed test, one that cannot be imported or that crashes; not that none was found, or that time was up."""
    assert faults.Outcome(status, first).caught == caught


def test_the_exit_status_is_0_only_where_every_survivor_is_explained(capsys):
    entry = {"file": "skipless/nn/masks.py", "old": "a", "new": "b", "breaks": "It is wrong.", "tests": "tests"}
    plain, known = faults.Fault("plain", **entry), faults.Fault("known", **entry, survives="Nobody can see it.")
    caught, survived, late = faults.Outcome(1, "a test"), faults.Outcome(0), faults.Outcome(None)
    assert faults.summarise({plain: caught, known: survived}) == 0
    assert "1 of 2 caught (50.0%)\nknown survived: It is wrong. Nobody can see it." in capsys.readouterr().out
    assert faults.summarise({plain: survived, known: survived}) == 1
    assert faults.summarise({known: late}) == 1
    assert faults.choose([plain, known], None, "nn") == [plain, known]
    assert faults.choose([plain, known], ["known"], None) == [known]
    with pytest.raises(SystemExit, match="no such fault: other; packages: nn"):
        faults.choose([plain, known], ["other"], None)
