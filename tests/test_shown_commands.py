"""What the documents tell a user to type exists: commands, flags, config files and keys, make targets, files."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from dspark_jax.errors import UserError
from tests.shown_commands import ROOT, Wrong, blocks, check_command, check_python, check_words, inline, shell_commands

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("[a-z]*/README.md"))]
DOORS = [ROOT / "train.py", ROOT / "serve.py", *ROOT.glob("configs/*.py"), *ROOT.glob("bench/*.py")]
DOORS += [*ROOT.glob("dspark_jax/*.py"), *ROOT.glob("dspark_jax/*/bench.py")]
ids = lambda path: str(path.relative_to(ROOT))  # noqa: E731


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_commands_in_documents_would_be_taken(path: Path) -> None:
    text = path.read_text()
    shell = "\n".join(blocks(text, "", "sh", "bash"))
    for words in shell_commands(shell):
        check_command(words)
    for code in inline(text):
        check_words(code, shell)
    for block in blocks(text, "python"):
        check_python(block)


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_blocks_for_a_shell_are_shell(path: Path) -> None:
    for block in blocks(path.read_text(), "sh", "bash"):
        checked = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert not checked.returncode, checked.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_lead_to_files(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert link.startswith("http") or (path.parent / link).exists(), link


@pytest.mark.parametrize("path", DOORS, ids=ids)
def test_commands_in_docstrings_would_be_taken(path: Path) -> None:
    for words in shell_commands(ast.get_docstring(ast.parse(path.read_text())) or ""):
        check_command(words)


def test_a_command_is_found_wherever_it_stands() -> None:
    text = "the drafter's\nJAX_PLATFORMS=cpu python a.py --x=1 \\\n  --y > log 2>&1 && make demo  # python no.py\n"
    assert [*shell_commands(text)] == [["python", "a.py", "--x=1", "--y"], ["make", "demo"]]
    remote = """ssh vm --command='cd here && .venv/bin/python -m dspark_jax doctor "--a=b c"' --worker=all"""
    assert [*shell_commands(remote)] == [[".venv/bin/python", "-m", "dspark_jax", "doctor", "--a=b c"]]


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --config=configs/nope.py",
        "python train.py --config=configs/smollm2_135m.py --config.train.stepz=5",
        "python train.py --config=configs/qwen3.py:9b",
        "python train.py --config=configs/qwen3.py:8b --config.mesh=8",
        "python -m dspark_jax calibrate --config=configs/smollm2_135m.py --prompt=x",
        "python -m dspark_jax export --config=configs/smollm2_135m.py --to=nobody --out=DIR",
        "python -m dspark_jax plan --config=configs/smollm2_135m.py --topology=v99:2x4",
        "python -m dspark_jax fly --config=configs/smollm2_135m.py",
        "python serve.py --config=configs/smollm2_135m.py --prompts=dspark_jax/data/none.jsonl --out=a.jsonl",
        "python nowhere.py",
        "make tea",
    ],
)
def test_a_command_that_would_be_refused_is_found(line: str) -> None:
    (words,) = shell_commands(line)
    with pytest.raises((Wrong, UserError)):
        check_command(words)


@pytest.mark.parametrize(
    "code", ["train.stepz", "serve.strategi=off", "--config.data.nope=1", "--nope", "bench --nope"]
)
def test_words_that_name_nothing_are_found(code: str) -> None:
    with pytest.raises((Wrong, UserError)):
        check_words(code)


def test_a_block_that_uses_what_is_not_public_is_found() -> None:
    with pytest.raises(Wrong, match="load_everything"):
        check_python("import dspark_jax\ndspark_jax.load_everything()")
