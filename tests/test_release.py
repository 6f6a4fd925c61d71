"""A release: one version everywhere, documented extras, and a wheel that works where nothing else is installed."""

import fnmatch
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.helpers.commands import commands

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def test_one_version():
    changes = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert changes[0] == VERSION
    assert len(changes) == len(set(changes)) >= 2
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == VERSION


def test_the_citation_has_what_its_format_asks_for():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert [author["family-names"] for author in citation["references"][0]["authors"]] == ["He", "Hofmann"]


def test_the_extras_are_documented():
    extras = PROJECT["project"]["optional-dependencies"]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", PAGE, flags=re.M))
    assert set(rows) == set(extras) - {"all"}
    (everything,) = extras["all"]
    in_all = everything.removeprefix("skipless[").removesuffix("]").split(",")
    assert {extra for extra, included in rows.items() if included == "yes"} == set(in_all)


def test_the_classifiers_say_what_is_tested():
    """The workflow and the make file use the Python that the classifiers name."""
    listed = PROJECT["project"]["classifiers"]
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(listed))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"python:(3\.\d+)", workflow) == versions
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"


def test_the_figures_are_those_that_were_measured():
    found = json.loads((ROOT / "benchmarks" / "results" / "install.json").read_text())
    for figure in (
        f"| the wheel | {found['wheel_bytes'] / 1e6:.2f} MB |",
        f"installed, with {found['packages'] - 1} other packages | {found['installed_bytes'] / 1e6:,.0f} MB",
        f"of which PyTorch is {found['largest']['torch'] / 1e6:,.0f} MB",
        f"compiled | {found['skipless_bytes'] / 1e6:.1f} MB |",
        f"PyTorch {found['torch']} and Python {found['python']}",
        *(f"{found['cpu_seconds'][name]:.2f} s" for name in found["cpu_seconds"]),
    ):
        assert figure in PAGE


def data_files():
    """What the package needs that is no Python."""
    package = ROOT / "skipless"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(package).as_posix() for path in files if path.suffix != ".py")


def test_every_file_of_data_is_declared():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["skipless"]
    assert [name for name in data_files() if not any(fnmatch.fnmatch(name, one) for one in patterns)] == []


def test_the_workflows_run_what_ci_runs():
    folder = ROOT / ".github" / "workflows"
    for name in ("ci.yml", "release.yml"):
        workflow = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        assert ".ci/run" in [step.get("run") for step in steps]
    publish = yaml.safe_load((folder / "release.yml").read_text(encoding="utf-8"))["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "has never been run" in (folder / "release.yml").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------- the wheel, installed


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, the source distribution, and a function that runs a command of the installed package."""
    if shutil.which("git") is None:
        pytest.skip("the source is copied by git")
    pytest.importorskip("build")
    spec = importlib.util.spec_from_file_location("install", ROOT / "benchmarks" / "install.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder, work = tmp_path_factory.mktemp("release"), tmp_path_factory.mktemp("elsewhere")
    wheel, archive = script.build(folder)
    python = script.install(wheel, folder / "environment")
    environment = {**script.clean(), "SKIPLESS_CACHE": str(work / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def run(*words):
        return subprocess.run(
            [str(python.parent / words[0]), *words[1:]], cwd=work, env=environment, capture_output=True, text=True
        )

    return SimpleNamespace(wheel=wheel, archive=archive, run=run, work=work)


@pytest.mark.slow
def test_the_distributions_are_well_formed(installed):
    pytest.importorskip("twine")
    files = [str(installed.wheel), str(installed.archive)]
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
    assert installed.wheel.name == f"skipless-{VERSION}-py3-none-any.whl"
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    assert {f"skipless/{name}" for name in data_files()} <= names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "skipless").rglob("*.py")}
    assert modules <= names
    assert {name.partition("/")[0] for name in names} == {"skipless", f"skipless-{VERSION}.dist-info"}


@pytest.mark.slow
def test_what_was_installed_is_what_runs(installed):
    done = installed.run("python", "-c", "import skipless; print(skipless.__version__, skipless.__file__)")
    version, path = done.stdout.split()
    assert version == VERSION
    assert "site-packages" in path
    assert not Path(path).is_relative_to(ROOT)
    assert installed.run("skipless", "--version").stdout.split() == ["skipless", VERSION]
    assert installed.run("skipless").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(commands()))
def test_every_command_has_help(installed, command):
    done = installed.run("skipless", *command.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert f"skipless {command}" in done.stdout


@pytest.mark.slow
def test_a_model_is_trained_shown_and_used(installed):
    """What needs files beside the code: tuned rates, the page's templates, what came out of the experiments."""
    small = ["--set", "data.max_bytes=500000", "--track", "none"]
    for words in (
        ["train", "--recipe", "smoke", "--name", "one", *small],
        ["report", "one", "--page", "page.html"],
        ["generate", "one", "--prompt", "def ", "--max-new-tokens", "5"],
        ["export", "one", "exported", "--to", "safetensors"],
        ["reproduce", "--list"],
        ["inspect", "pre-ln", "sas-p", "-L", "2", "-d", "32", "-H", "2"],
        ["new-part", "my-norm"],
        ["demo", "--set", "train.steps=4", "--set", "model.n_layer=1", "--set", "data.max_bytes=500000"],
    ):
        done = installed.run("skipless", *words)
        assert done.returncode == 0, (words, done.stderr)
    script = (ROOT / "skipless" / "experiments" / "report" / "templates" / "page.js").read_text(encoding="utf-8")
    assert script.strip() in (installed.work / "page.html").read_text(encoding="utf-8")
    assert (installed.work / "runs" / "demo.html").exists()
    assert not (installed.work / "runs" / "demo.png").exists()  # matplotlib is an extra
    # each extra that a command lacks is named
    done = installed.run("skipless", "export", "one", "for-others", "--to", "hf")
    assert done.returncode == 2
    assert "pip install 'skipless[hf]'" in done.stderr
