"""The notebook: every cell is Python that names what exists, and all of them run, in order, on a tiny model."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shown_commands import ROOT, check_command, check_python, shell_commands

IPython = pytest.importorskip("IPython")
NOTEBOOK = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
SOURCES = ["".join(cell["source"]) for cell in CODE]
DIALS = next(i for i, cell in enumerate(CODE) if "parameters" in cell["metadata"].get("tags", ()))
TINY = """
from configs.base import get_base


def get_config():
    c = get_base()
    c.target.path = {target!r}
    c.drafter.num_layers, c.drafter.block_size, c.drafter.tap_layers = 1, 3, (0, 2)
    c.drafter.mask_token, c.drafter.draft_vocab_size, c.drafter.markov_rank = "<|mask|>", 64, 8
    c.data.prompts, c.data.max_answer_tokens, c.data.max_length, c.data.max_slots = {prompts!r}, 24, 96, 4
    c.train.num_anchors = 4
    c.serve.max_slots = 2
    return c
"""


def test_no_outputs_are_committed() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CODE)


def test_every_cell_is_python_and_its_commands_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.core.inputtransformer2 import TransformerManager

    monkeypatch.chdir(ROOT)
    dials: dict[str, Any] = {}
    exec(SOURCES[DIALS], dials)
    found = 0
    for source in SOURCES:
        check_python(TransformerManager().transform_cell(source))
        for line in re.findall(r"^\s*!((?:.*\\\n)*.*)", source, re.MULTILINE):
            for words in shell_commands(re.sub(r"\{(\w+)\}", lambda dial: str(dials.get(dial[1])), line)):
                check_command(words)
                found += 1
    assert found == 4  # doctor, training, calibrate, profile


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An IPython that keeps no history, in the repository, with pictures that go nowhere."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for name in ("PATH", "TTY_COMPATIBLE"):  # the notebook changes them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "argv", ["notebook"])
    yield InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    InteractiveShell.clear_instance()


@pytest.mark.slow
def test_the_notebook_runs(shell: Any, chat_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import jax
    from matplotlib import pyplot

    config, prompts = tmp_path / "tiny.py", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question number {i}?"}) + "\n" for i in range(8)))
    config.write_text(TINY.format(target=str(chat_model), prompts=str(prompts)))
    dials = {"CONFIG": str(config), "WORKDIR": str(tmp_path / "run"), "PROMPTS": 8, "STEPS": 10, "TOKENS": 32}
    before = jax.config.jax_default_matmul_precision
    try:
        for number, source in enumerate(SOURCES):
            shell.run_cell(source).raise_error()
            assert not shell.user_ns.get("_exit_code"), source
            if number == DIALS:
                shell.user_ns.update(dials)
        out = capfd.readouterr().out
        assert out.count("the same text: True") == 3 and "problems: 0" in out
        drawn = [axis for number in pyplot.get_fignums() for axis in pyplot.figure(number).axes]
        assert len(drawn) == 4 and all(axis.lines or axis.patches for axis in drawn)
    finally:
        pyplot.close("all")
        jax.config.update("jax_default_matmul_precision", before)
