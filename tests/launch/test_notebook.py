"""polyhvd.run in a real kernel of Jupyter, which `make matrix` has; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

from notebooks import Notebook


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    notebook.run("import os, time, polyhvd\nclass Mine(Exception): pass\ndef fail(): raise Mine('x')")
    yield notebook
    notebook.kernel.shutdown_kernel(now=True)


def test_a_cell_shows_what_ranks_print_and_has_their_results(notebook: Notebook) -> None:
    printed, result = notebook.run("polyhvd.run(lambda: print('hello') or os.getenv('POLYHVD_RANK'), np=2)")
    assert sorted(printed.splitlines()) == ["[0] hello", "[1] hello"]
    assert result == "['0', '1']"


def test_an_exception_of_the_notebooks_own_class_ends_the_cell(notebook: Notebook) -> None:
    assert notebook.run("polyhvd.run(fail, np=1)")[1] == "Mine"
    cell = "try: polyhvd.run(fail, np=1)\nexcept Mine as error: found = error.args\nfound"
    assert notebook.run(cell)[1] == "('x',)"


def test_an_interruption_ends_the_ranks_and_the_next_cell_runs(notebook: Notebook) -> None:
    cell = "polyhvd.run(lambda: print('ready', os.getpid(), flush=True) or time.sleep(600), np=1)"
    printed, result = notebook.run(cell, interrupt_at="\n")
    assert result == "KeyboardInterrupt"
    assert notebook.run(f"os.path.exists('/proc/{printed.split()[-1]}')")[1] == "False"
