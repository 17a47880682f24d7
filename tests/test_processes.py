"""Several processes that serve one file of prompts together, killed and started again."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark_jax.data.jsonl import ResumableJsonl
from dspark_jax.data.parts import give_part, part_path, parts_of, take_parts, written_rows
from dspark_jax.errors import UserError
from dspark_jax.progress import Progress

ROOT = Path(__file__).parents[1]
PROMPTS = [{"id": f"q{i}", "prompt": f"question {i}, with {'many ' * i}words"} for i in range(7)]
CONFIG = """
from configs.base import get_base

def get_config():
    c = get_base()
    c.target.path, c.target.dtype = {model!r}, "float64"
    c.serve.max_slots, c.serve.max_length = 2, 128
    c.sampling.max_tokens, c.sampling.temperature = 24, 0.7
    return c
"""


@pytest.fixture
def files(chat_model, tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(model=str(chat_model)))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return tmp_path


def start(files: Path, out: str, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "serve.py", f"--config={files / 'config.py'}", f"--prompts={files / 'prompts.jsonl'}",
               f"--out={files / out}", *overrides]  # fmt: skip
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_ENABLE_X64": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def start_two(files: Path, out: str) -> list[subprocess.Popen]:
    address = free_address()
    return [
        start(files, out, "--config.mesh=2x2", f"--config.serve.processes={address},2,{index}") for index in range(2)
    ]


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output[-3000:]


def tokens(path: Path) -> dict[str, list[int]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["token_ids"] for row in rows}


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one_and_go_on_when_one_was_killed(files):
    """Each has four virtual devices in a 2x2 mesh; the one that serves alone has no mesh."""
    alone = start(files, "alone.jsonl")
    end([alone])
    whole = tokens(files / "alone.jsonl")
    assert sorted(whole) == [row["id"] for row in PROMPTS]

    end(start_two(files, "two.jsonl"))
    assert tokens(files / "two.jsonl") == whole
    report = json.loads((files / "two.jsonl.report.json").read_text())
    assert (report["processes"], report["mesh"], report["requests"]) == (2, "data=2,model=2", len(PROMPTS))
    assert report["tokens"] == sum(map(len, whole.values()))

    both = start_two(files, "killed.jsonl")
    while not written_rows(files / "killed.jsonl.part1") and both[1].poll() is None:
        time.sleep(0.02)
    for process in reversed(both):  # the second dies; the first one's operator stops it
        process.kill()
        process.communicate()
    assert written_rows(files / "killed.jsonl.part1")
    end(start_two(files, "killed.jsonl"))
    assert tokens(files / "killed.jsonl") == whole
    assert not parts_of(files / "killed.jsonl")


@pytest.mark.slow
def test_a_process_that_counts_otherwise_is_refused_in_one_line(files):
    address = free_address()
    first, second = (start(files, "o.jsonl", f"--config.serve.processes={address},{n}") for n in ("2,0", "3,1"))
    # It says so at once; its end waits for the others', as JAX has it.
    said = next((line for line in second.stdout if line.startswith("error:")), "")
    for process in (first, second):
        process.kill()
        process.communicate()
    assert "processes" in said and "process 0 was started with 2 of them" in said


RUN = {"seed": 1}


def fill(path: Path, ids: list[str]) -> None:
    with ResumableJsonl(path, RUN) as file:
        for key in ids:
            file.append({"id": key})


def test_the_first_process_takes_in_what_the_others_wrote(tmp_path):
    out = tmp_path / "out.jsonl"
    fill(out, ["a", "b"])
    fill(part_path(out, 1), ["c", "b"])  # b twice: it was answered in two starts
    fill(part_path(out, 2), ["d"])  # of an earlier start with three processes
    with part_path(out, 2).open("a") as torn:
        torn.write('{"id": "e", "te')
    with ResumableJsonl(out, RUN) as file, Progress("answers", 4) as progress:
        take_parts(file, ["a", "b", "c", "d"], 2, progress)
    assert [row["id"] for row in written_rows(out)] == ["a", "b", "c", "d"]
    assert parts_of(out) == [part_path(out, 1)]
    give_part(part_path(out, 1), out, ["a", "b", "c", "d"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.run.json"]


def test_a_process_that_never_writes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("dspark_jax.data.parts.PATIENCE", 0.0)
    with ResumableJsonl(tmp_path / "o.jsonl", RUN) as file, Progress("answers", 1) as progress:
        with pytest.raises(UserError, match="process 1 .* same folder"):
            take_parts(file, ["a"], 2, progress)
