"""Variants of a drafter, trained and evaluated on equal terms."""

import json
from pathlib import Path

import pytest

from configs.base import get_base
from dspark_jax import compare
from dspark_jax.errors import UserError
from dspark_jax.training.variants import CHANGES, changed


@pytest.fixture
def config_file(chat_model: Path, tmp_path: Path) -> Path:
    prompts = "".join(json.dumps({"id": str(i), "turns": [f"question number {i}?"]}) + "\n" for i in range(10))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gsm8k.jsonl").write_text(json.dumps({"turns": ["one?"]}) + "\n")
    (tmp_path / "config.py").write_text(
        "from configs.base import get_base\n\n\ndef get_config():\n    c = get_base()\n"
        f"    c.target.path, c.workdir = {str(chat_model)!r}, {str(tmp_path / 'run')!r}\n"
        f"    c.data.prompts, c.data.validation = {str(tmp_path / 'prompts.jsonl')!r}, 0.4\n"
        "    c.drafter.num_layers, c.drafter.block_size, c.drafter.tap_layers = 1, 4, (0, 2)\n"
        "    c.drafter.mask_token, c.drafter.draft_vocab_size, c.drafter.markov_rank = '<|mask|>', 64, 8\n"
        "    c.data.num_prompts, c.data.max_answer_tokens, c.data.max_length, c.data.max_slots = 10, 16, 64, 8\n"
        "    c.train.steps, c.train.batch_size, c.train.num_anchors = 2, 2, 2\n"
        "    c.serve.max_slots, c.serve.max_length, c.sampling.max_tokens = 1, 64, 5\n    return c\n"
    )
    return tmp_path / "config.py"


def run(config_file: Path, *more: str) -> None:
    data = config_file.parent / "data"
    compare.main(["compare", f"--config={config_file}", f"--data={data}", "--temperatures=0", *more])


@pytest.mark.slow
def test_variants_learn_from_the_same_answers_and_stand_in_one_table(config_file, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    run(config_file, "--variants=dflash,eagle3,block8")
    out = config_file.parent / "run" / "comparison"
    result = json.loads((out / "comparison.json").read_text())
    assert [row["variant"] for row in result["variants"]] == ["dflash", "eagle3", "block8"]
    assert [row["run"]["drafts"] for row in result["variants"]] == [4, 7, 8]
    assert all(1 <= row["expected"] and 1 <= row["tokens_per_round"]["0"] for row in result["variants"])
    printed = capsys.readouterr().out
    assert "% dflash, " in printed and "% eagle3)" in printed
    answers = (out / "answers.jsonl").read_bytes()
    run(config_file, "--variants=dflash,eagle3,block8")
    assert json.loads((out / "comparison.json").read_text()) == result
    assert (out / "answers.jsonl").read_bytes() == answers


def test_an_unknown_variant_stops_before_any_work(config_file):
    with pytest.raises(UserError, match="unknown variant 'dspork': it is one of dspark, gated"):
        run(config_file, "--variants=dflash,dspork")
    assert not (config_file.parent / "run").exists()


def test_variants_change_what_they_say_and_nothing_else():
    base = get_base()
    for name, changes in CHANGES.items():
        config = changed(base, name)
        for key in changes:
            section, name = key.split(".")
            config[section][name] = base[section][name]
        assert config == base
