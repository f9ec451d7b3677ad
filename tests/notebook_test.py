"""Runs the notebook of examples/ in a real kernel: all cells, all cells again, and interrupts."""

import asyncio
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
NOTEBOOK = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
FIT = """
fitted = parallel.fit(
    x, y, batch_size=128, epochs={epochs}, verbose=2, callbacks=[towers.Resume("runs/{name}")]
)
"""
SLOW = """
import time
def wait(batch, logs):
    for count in range(1, 100):
        print("waits", count)
        time.sleep(0.3)
slow = keras.callbacks.LambdaCallback(on_train_batch_end=wait)
parallel.fit(x, y, callbacks=[slow, towers.Resume("runs/twice")])
"""
HANDLERS = "[signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]"


class Kernel:
    """A kernel in a new directory."""

    def __init__(self, loop, directory):
        self._loop = loop
        self.client = NotebookClient(
            nbformat.v4.new_notebook(),
            allow_errors=True,
            timeout=60,
            shutdown_kernel="immediate",
            resources={"metadata": {"path": str(directory)}},
        )

    def run(self, source, *interrupts):
        """Runs a cell and returns its outputs; interrupts it once its stdout has each text."""
        return self._loop.run_until_complete(self._run(source, interrupts))

    async def _run(self, source, interrupts):
        cell = nbformat.v4.new_code_cell(source)
        self.client.nb.cells.append(cell)
        index = len(self.client.nb.cells) - 1
        running = asyncio.ensure_future(self.client.async_execute_cell(cell, index))
        for text in interrupts:
            while text not in stdout(cell.outputs) and not running.done():
                await asyncio.sleep(0.01)
            assert not running.done(), cell.outputs
            await self.client.km.interrupt_kernel()
        await running
        return cell.outputs


def stdout(outputs):
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")


def errors(outputs):
    """Returns (name, text) of each error."""
    return [(o.ename, o.evalue) for o in outputs if o.output_type == "error"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A kernel in which all cells of the notebook have run."""
    directory = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(directory / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(directory / "runtime"))
        patch.delenv("MPLBACKEND", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # GPUs may add in another order each time
        patch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)  # the notebook sets it
        patch.delenv("PYTEST_CURRENT_TEST")  # with it, a kernel shows less of stderr
        loop = asyncio.new_event_loop()
        kernel = Kernel(loop, directory)
        setup = kernel.client.async_setup_kernel()
        loop.run_until_complete(setup.__aenter__())
        kernel.run(f"import signal\nbefore = {HANDLERS}")
        kernel.first = run_all(kernel)
        yield kernel
        loop.run_until_complete(setup.__aexit__(None, None, None))
        loop.close()


def run_all(kernel):
    """Runs all code cells of the notebook; returns {id of the cell: its outputs}."""
    return {cell.id: kernel.run(cell.source) for cell in NOTEBOOK.cells if cell.cell_type == "code"}


def test_the_committed_notebook_has_no_outputs():
    cells = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
    assert len(cells) > 3
    assert not any(cell.outputs or cell.execution_count for cell in cells)


def test_all_cells_run_and_write_plain_text_and_the_model_learns(kernel):
    cells = kernel.first
    assert [errors(outputs) for outputs in cells.values()] == [[]] * len(cells)
    assert cells["devices"][-1].data["text/plain"] == "['/cpu:0', '/cpu:1', '/cpu:2', '/cpu:3']"
    losses = [float(text) for text in re.findall(r" loss: ([\d.]+)", stdout(cells["fit"]))]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert "image/png" in cells["plot"][-1].data
    assert "part of a step" in stdout(cells["profile"])
    assert "Bottleneck" in stdout(cells["profile"])
    for name, outputs in cells.items():
        if name == "devices":  # importing TensorFlow writes to stderr
            continue
        text = "".join(o.text for o in outputs if o.output_type == "stream")
        assert not CONTROL.search(text)
        assert text == stdout(outputs)
        assert len(text.splitlines()) <= 25
    assert len(stdout(cells["fit"]).splitlines()) == 6  # two per epoch


def test_all_cells_run_again_in_the_same_kernel(kernel):
    cells = run_all(kernel)
    assert [errors(outputs) for outputs in cells.values()] == [[]] * len(cells)
    assert cells["devices"][-1].data == kernel.first["devices"][-1].data
    assert stdout(cells["fit"]) == ""  # all epochs are done
    assert "3 [1, 2, 3]" in stdout(kernel.run('print(len(history["loss"]), list(epochs))'))


def test_an_interrupted_cell_saves_and_the_kernel_remains_usable(kernel):
    kernel.run(source("model"))
    outputs = kernel.run(FIT.format(epochs=99, name="interrupted"), "Epoch 2/99")
    assert errors(outputs) == [("KeyboardInterrupt", "")]
    assert "During handling of" not in "".join(outputs[-1].traceback)
    step = int(re.search(r"\nsaved at step (\d+): ", stdout(outputs))[1])
    assert 47 < step <= 2 * 47
    assert stdout(kernel.run(f"print(before == {HANDLERS})")) == "True\n"
    kernel.run(source("model"))
    outputs = kernel.run(FIT.format(epochs=3, name="interrupted"))
    assert errors(outputs) == []
    assert "Epoch 1/" not in stdout(outputs)
    shown = kernel.run('print(fitted.history["loss"] == history["loss"])')
    assert stdout(shown) == "True\n"  # as if it was not interrupted


def test_a_second_interrupt_does_not_end_the_kernel(kernel):
    kernel.run(source("model"))
    outputs = kernel.run(SLOW, "waits 1", "waits 3")
    assert errors(outputs) == [("KeyboardInterrupt", "")]
    assert stdout(kernel.run(f"print(before == {HANDLERS})")) == "True\n"


def test_a_run_prints_plain_lines(kernel):
    outputs = kernel.run("""
config = towers.TrainConfig(epochs=2, num_gpus=TOWERS, batch_size=512)
parallel.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
towers.train(config, model=parallel, train=(x, y), test=test);
""")
    assert errors(outputs) == []
    assert len(re.findall("^Epoch [12]/2  loss ", stdout(outputs), re.MULTILINE)) == 2
    assert len(re.findall("^ +val_loss ", stdout(outputs), re.MULTILINE)) == 2
    assert not CONTROL.search(stdout(outputs))


def test_an_error_message_of_towers_is_one_line(kernel):
    ((name, text),) = errors(kernel.run("towers.logical_cpus(3)"))
    assert name == "ValueError" and "\n" not in text
    assert text.endswith("(in a notebook: restart the kernel, call it first).")


def source(name):
    """Returns the text of a cell of the notebook."""
    return next(cell.source for cell in NOTEBOOK.cells if cell.id == name)
