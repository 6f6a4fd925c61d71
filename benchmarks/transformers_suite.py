"""transformers' own tests of models, generation and configurations, applied to the Hugging Face classes.

python benchmarks/transformers_suite.py --transformers-tests DIR [--only WORDS] [--workers N] [--json FILE]

DIR holds a folder `tests` with `test_modeling_common.py`, `test_configuration_common.py`, `generation/test_utils.py`,
and what these import. None of it is part of this project. It is made of two things:

    pip download --no-deps --no-binary :all: transformers==5.22.2     # the sdist of the version in constraints.txt
    tar xzf transformers-5.22.2.tar.gz                                # tests/*.py, and none of the folders in it
    git clone https://github.com/huggingface/transformers             # at that version, or near it
    cp -rn transformers/tests/{__init__.py,generation,exporters,utils} transformers-5.22.2/tests/
    mkdir transformers-5.22.2/utils; cp -rn transformers/utils/test_module transformers-5.22.2/utils/
    python benchmarks/transformers_suite.py --transformers-tests transformers-5.22.2

and `pip install parameterized httpx`. Absent remain transformers' conftest.py (which is not in the sdist, and only
registers marks) and whatever needs an accelerator, DeepSpeed or the network: those tests skip themselves, for Llama and
BERT too.

Every block with its defaults; sas-p and pre-ln also with learned, rotary and ALiBi positions and with an untied head;
each as a model that writes (bare, causal) and as one that reads (bare, masked, and the three classifiers). Llama and
BERT stand beside them in the same harness. No test is changed. Two of them, of packed documents, take the flag
`_supports_attention_backend` for a sign that a model can read such ("can't infer", they say); ours can, and do not have
the flag, for it says more than that, so it is set while these two run. The exit status is 0 only if nothing of ours
failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

CASES = Path(__file__).with_name("transformers_suite_cases.py")
THEIRS = {True: "Test_Llama", False: "Test_BERT"}

PACKED = "padding_free_with_position_ids"
"""In the names of the tests of packed documents, which run only where `_supports_attention_backend` is set."""


def main() -> int:
    """Run the tests, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers-tests", type=Path, required=True, metavar="DIR", help="see above")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    options = parser.parse_args()
    folder = options.transformers_tests.resolve()
    if not (folder / "tests" / "test_modeling_common.py").exists():
        parser.error(f"{folder} has no tests/test_modeling_common.py; --help says how to make such a folder")
    outcomes = run(folder, options.only, options.workers)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1, sort_keys=True), encoding="utf-8")
    show(outcomes)
    failed = [
        name for name, (kind, _) in outcomes.items() if kind == "failed" and not name.startswith(tuple(THEIRS.values()))
    ]
    return 1 if failed or not outcomes else 0


def run(folder: Path, only: str, workers: int) -> dict[str, tuple[str, str]]:
    """`Case::test` → what became of it, and why."""
    with tempfile.TemporaryDirectory() as place:
        report, settings = Path(place) / "report.jsonl", Path(place) / "pytest.ini"
        settings.write_text("[pytest]\n", encoding="utf-8")
        paths = [str(folder), str(Path(__file__).parents[1] / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SUITE_REPORT": str(report)}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(folder), str(CASES), "-q"]
        command += ["-p", "transformers_suite_report", "-p", "no:cacheprovider", "--import-mode=importlib"]
        command += ["-n", str(workers)] if workers > 1 else []
        command += ["--tb=no", "--disable-warnings", *(["-k", only] if only else [])]
        subprocess.run(command, cwd=folder, env=environment, check=False)
        lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    outcomes: dict[str, tuple[str, str]] = {}
    for line in lines:
        name, kind, why = json.loads(line)
        if outcomes.get(name, ("", ""))[0] != "failed":  # one of its parts may have failed
            outcomes[name] = (kind, why)
    return outcomes


def show(outcomes: dict[str, tuple[str, str]]) -> None:
    """A line for each case, then the failures, then what is skipped here and not by Llama or BERT."""
    cases = list(dict.fromkeys(name.split("::")[0] for name in sorted(outcomes)))
    print(f"\n{'':<34} {'passed':>7} {'failed':>7} {'skipped':>8}")
    for case in sorted(cases, key=lambda case: (case not in THEIRS.values(), case)):
        counts = Counter(kind for name, (kind, _) in outcomes.items() if name.startswith(f"{case}::"))
        print(f"{case.removeprefix('Test_'):<34} {counts['passed']:>7} {counts['failed']:>7} {counts['skipped']:>8}")
    for name, (kind, why) in sorted(outcomes.items()):
        if kind == "failed":
            print(f"failed: {name}: {why[:300]}")
    more: dict[str, set[str]] = {}
    for name, (kind, why) in outcomes.items():
        case, test = name.split("::")
        theirs = outcomes.get(f"{THEIRS[case.endswith('causal')]}::{test}")
        if kind == "skipped" and case not in THEIRS.values() and theirs and theirs[0] != "skipped":
            more.setdefault(f"{test} ({why})", set()).add(case.removeprefix("Test_"))
    for test, where in sorted(more.items()):
        print(f"skipped here and not there, {len(where)} cases: {test}")
    packed = Counter(
        f"{name.split('::')[1]}, {kind}"
        for name, (kind, _) in outcomes.items()
        if PACKED in name and kind != "skipped" and not name.startswith(tuple(THEIRS.values()))
    )
    for test, cases_of_it in sorted(packed.items()):
        print(f"run here with _supports_attention_backend set for it alone, {cases_of_it} cases: {test}")


if __name__ == "__main__":
    sys.exit(main())
