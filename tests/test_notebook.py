"""docs/one_step.ipynb, run as a reader runs it, with the real engine. Its cells assert what they say."""

import copy
import os
import uuid
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from runs import PATIENCE, assert_nothing_left

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "one_step.ipynb"


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook, folder):
    """Run all cells where a notebook program would, in docs/. No process may be left, however it ends."""
    mark = uuid.uuid4().hex
    places = {name: str(folder) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    waits = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), PATIENCE)
    client = NotebookClient(notebook, resources={"metadata": {"path": str(NOTEBOOK.parent)}}, **waits)
    try:
        client.execute(env=os.environ | places | {"KILO_TEST": mark})
    finally:
        assert_nothing_left(mark)


def test_every_cell_runs_and_a_wrong_formula_is_noticed(notebook, tmp_path):
    """Before the cell that computes GRPO's advantages by hand stands one more: the same with RLOO's in their
    place. It alone fails, and the cells after it find everything as it was."""
    executed, ours = copy.deepcopy(notebook), "trainer.add_advantages"
    place = next(place for place, cell in enumerate(executed.cells) if ours in cell.source)
    wrong = f"grpo, algos.ADVANTAGES['grpo'] = algos.grpo, algos.rloo\n{executed.cells[place].source}"
    metadata = {"tags": ["raises-exception"]}  # of nbclient: the cells after it run all the same
    executed.cells.insert(place, nbformat.v4.new_code_cell(wrong, metadata=metadata))
    executed.cells[place + 1].source = f"algos.ADVANTAGES['grpo'] = grpo\n{executed.cells[place + 1].source}"
    execute(executed, tmp_path)
    assert code(executed)[-1].execution_count == len(code(notebook)) + 1
    failed = [cell for cell in code(executed) if any(out.output_type == "error" for out in cell.outputs)]
    assert failed == [executed.cells[place]]
    assert "Tensor-likes are not close" in failed[0].outputs[-1].evalue


def test_its_outputs_are_of_one_run_from_top_to_bottom(notebook):
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert not [output for cell in code(notebook) for output in cell.outputs if output.output_type == "error"]
