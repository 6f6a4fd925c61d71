import pytest

from tests.parallel.launch import Crew


@pytest.fixture(scope="session")
def run_tasks(tmp_path_factory):
    """Does tasks of `worker.py` by some number of processes, which are started when they are first needed.

    To read or write a pickle is an error in them, unless they may: PyTorch's compiler does.
    """
    crews: dict[tuple[int, bool], Crew] = {}

    def run(size: int, tasks: list, *, may_pickle: bool = False) -> list:
        key = size, may_pickle
        if key not in crews or crews[key].process.poll() is not None:
            crews[key] = Crew(tmp_path_factory.mktemp(f"crew-of-{size}"), size, may_pickle=may_pickle)
        return crews[key].do(tasks)

    yield run
    for crew in crews.values():
        crew.close()
