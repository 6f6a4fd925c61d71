"""Cases of one library in a process of its own, so that its threads and another's do not get in each other's way.

`python -m skipless.tasks.decode_worker` reads a line of JSON that says which cases to make, and answers with their
names. After that a line `{"case": NAME, "new": N}` is a turn, answered with when its first token was there, or with
null. The clock is one that all processes of a machine share.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from skipless.errors import UserError
from skipless.tasks.decode_cases import Case, Size, ctranslate_cases, llama_cases, onnx_cases

LIBRARIES: dict[str, Callable[..., dict[str, Case]]] = {
    "onnxruntime": onnx_cases,
    "llama_cpp": llama_cases,
    "ctranslate2": ctranslate_cases,
}
"""What makes the cases of each library that is measured in a process of its own."""


@contextmanager
def cases_apart(
    library: str, size: Size, prompts: Sequence[Sequence[int]], folder: Path, **more: Any
) -> Iterator[dict[str, Case]]:
    """The cases of a library, each turn of which is taken by a process that lives as long as this context."""
    job = {
        "library": library,
        "size": asdict(size),
        "prompts": [list(prompt) for prompt in prompts],
        "folder": str(folder),
        "threads": torch.get_num_threads(),
        "more": more,
    }
    command = [sys.executable, "-m", "skipless.tasks.decode_worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        names = _ask(process, library, job)
        yield {name: _turns(process, library, name) for name in names}
    finally:
        process.kill()
        process.communicate()


def _turns(process: "subprocess.Popen[str]", library: str, name: str) -> Case:
    return lambda new: _ask(process, library, {"case": name, "new": new})


def _ask(process: "subprocess.Popen[str]", library: str, message: dict[str, Any]) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        raise UserError(f"the process that measures {library} ended with status {process.wait()}")
    return json.loads(answer)


def serve(lines: TextIO, answers: TextIO) -> None:
    """Make the cases of the first line, and take the turns of the others."""
    job = json.loads(lines.readline())
    torch.set_num_threads(job["threads"])
    make = LIBRARIES[job["library"]]
    cases = make(Size(**job["size"]), job["prompts"], Path(job["folder"]), **job["more"])
    print(json.dumps(list(cases)), file=answers, flush=True)
    for line in lines:
        turn = json.loads(line)
        print(json.dumps(cases[turn["case"]](turn["new"])), file=answers, flush=True)


if __name__ == "__main__":
    own, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    serve(sys.stdin, own)
