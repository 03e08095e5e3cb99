"""docs/one_step.ipynb, run as a reader runs it, with the real engine. Its cells assert what they say."""

import os
import uuid
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from runs import assert_nothing_left

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "one_step.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook, folder):
    """Run all cells where a notebook program would, in docs/. No process may be left, however it ends."""
    mark = uuid.uuid4().hex
    places = {name: str(folder) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    try:
        client.execute(env=os.environ | places | {"KILO_TEST": mark})
    finally:
        assert_nothing_left(mark)


def test_every_cell_runs(notebook, tmp_path):
    execute(notebook, tmp_path)
    assert code(notebook)[-1].execution_count == len(code(notebook))


def test_a_wrong_formula_is_noticed(notebook, tmp_path):
    """The advantages are RLOO's: the cell that computes GRPO's by hand fails, and ends the notebook."""
    cell = next(cell for cell in code(notebook) if "trainer.add_advantages" in cell.source)
    cell.source = "algos.ADVANTAGES['grpo'] = algos.rloo\n" + cell.source
    with pytest.raises(CellExecutionError, match="Tensor-likes are not close"):
        execute(notebook, tmp_path)


def test_its_outputs_are_of_one_run_from_top_to_bottom(notebook):
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert not [output for cell in code(notebook) for output in cell.outputs if output.output_type == "error"]
