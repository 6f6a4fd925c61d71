import pytest

from tests.parallel.launch import Crew


@pytest.fixture(scope="session")
def run_tasks(tmp_path_factory):
    """Does tasks of `worker.py` by some number of processes, which are started when they are first needed."""
    crews: dict[int, Crew] = {}

    def run(size: int, tasks: list) -> list:
        if size not in crews or crews[size].process.poll() is not None:
            crews[size] = Crew(tmp_path_factory.mktemp(f"crew-of-{size}"), size)
        return crews[size].do(tasks)

    yield run
    for crew in crews.values():
        crew.close()
