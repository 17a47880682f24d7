"""The directories that exports go to, and `python -m dspark_jax export`."""

import json
import os
import sys

import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import load_file

from dspark_jax.__main__ import main
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, load_drafter
from dspark_jax.interop.export import EXPORT_RECORD, export_drafter, save_drafter
from dspark_jax.interop.target_io import Target, load_target


@pytest.fixture(scope="module")
def target(golden_target) -> Target:
    return load_target(golden_target, dtype="float32")


@pytest.fixture(scope="module")
def drafter(golden, target) -> Drafter:
    return load_drafter(golden / "dspark_vanilla", target)


# ---------------------------------------------------------------------------------------------------------- directories


def test_a_failure_leaves_the_earlier_export_alone(tmp_path, drafter, target, monkeypatch):
    export_drafter(tmp_path / "export", drafter, target, "vllm")
    before = (tmp_path / "export" / "config.json").read_bytes()

    def full_disk(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full_disk)
    with pytest.raises(UserError, match="cannot write .*No space left"):
        export_drafter(tmp_path / "export", drafter, target, "sglang")
    with pytest.raises(UserError, match="cannot write .*No space left"):
        save_drafter(tmp_path / "export", drafter, target)
    assert (tmp_path / "export" / "config.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["export"]


def test_an_export_replaces_an_earlier_one_as_a_whole(tmp_path, drafter, target):
    export_drafter(tmp_path, drafter, target, "deepspec")  # an empty directory is free
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    export_drafter(tmp_path, drafter, target, "vllm")
    assert sorted(os.listdir(tmp_path)) == ["config.json", EXPORT_RECORD, "model.safetensors"]
    record = {"consumer": "vllm", "target": target.name, "target_fingerprint": target.fingerprint}
    assert json.loads((tmp_path / EXPORT_RECORD).read_text()) == record


def test_what_is_no_export_of_ours_is_not_replaced(tmp_path, drafter, target):
    save_drafter(tmp_path / "model", drafter, target)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, overwrite in (("model", False), ("notes", False), ("notes", True), ("file", False), ("file", True)):
        with pytest.raises(UserError, match=f"{name} is in use"):
            export_drafter(tmp_path / name, drafter, target, "vllm", overwrite=overwrite)
    assert (tmp_path / "notes" / "a.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    export_drafter(tmp_path / "model", drafter, target, "vllm", overwrite=True)
    assert (tmp_path / "model" / EXPORT_RECORD).exists()


# ------------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def run(golden, tmp_path, capsys, monkeypatch):
    """Runs the command on a golden drafter; returns what it prints."""
    config = tmp_path / "config.py"
    config.write_text("from configs.base import get_base as get_config\n")

    def command(*options: str, drafter: str = "dspark_vanilla") -> str:
        models = [f"--config.target.path={golden / 'target'}"]
        models += [f"--config.serve.drafter={golden / drafter}"] if drafter else []
        argv = ["dspark_jax", "export", f"--config={config}", *models, *options]
        monkeypatch.setattr(sys, "argv", argv)  # where overrides of a config are looked up
        main(argv)
        return capsys.readouterr().out

    return command


@pytest.mark.parametrize(
    ("consumer", "drafter", "words"),
    [
        ("vllm", "dspark_vanilla", ('"method": "dspark"', '"num_speculative_tokens": 5')),
        ("sglang", "dspark_rnn", ("--speculative-algorithm DSPARK", "--speculative-num-draft-tokens 6")),
        ("deepspec", "eagle3", ("eval.py --target_name_or_path", "--draft_name_or_path")),
        ("speculators", "dflash", ("SpeculatorModel.from_pretrained",)),
    ],
)
def test_the_command_says_how_to_use_the_export(run, tmp_path, target, consumer, drafter, words):
    out = tmp_path / "export"
    text = run(f"--to={consumer}", f"--out={out}", drafter=drafter)
    assert all(word in text for word in (*words, f"{out}/model.safetensors", "drafts 5 tokens"))
    assert load_drafter(out, target).config.num_drafts == 5
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_command_takes_a_dtype_and_a_name(run, tmp_path, golden):
    run("--to=speculators", f"--out={tmp_path / 'export'}", "--dtype=float32", "--target_name=owner/model")
    raw = json.loads((tmp_path / "export" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "owner/model"
    written, read = (load_file(path / "model.safetensors") for path in (tmp_path / "export", golden / "dspark_vanilla"))
    np.testing.assert_array_equal(written["fc.weight"], read["fc.weight"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out=x"], "--to="),
        (["--to=vllm"], "--out=DIR"),
        (["--to=banana", "--out=x"], "deepspec|vllm"),
        (["--to=vllm", "--out=x", "--dtype=int8"], "bfloat16"),
    ],
)
def test_the_command_names_what_is_missing(run, options, words):
    with pytest.raises(UserError) as error:
        run(*options)
    assert words in str(error.value)


def test_the_command_needs_a_drafter(run, tmp_path):
    with pytest.raises(UserError, match="serve.drafter"):
        run("--to=vllm", f"--out={tmp_path / 'export'}", drafter="")


@pytest.mark.parametrize("name", ["lookup", "auto"])
def test_a_lookup_has_nothing_to_export(run, tmp_path, name):
    with pytest.raises(UserError, match="no weights to export"):
        run("--to=vllm", f"--out={tmp_path / 'export'}", f"--config.serve.drafter={name}", drafter="")
    assert not (tmp_path / "export").exists()


def test_a_directory_in_use_is_refused_before_anything_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr("dspark_jax.export.load_target", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(UserError, match="is in use"):
        run("--to=vllm", f"--out={tmp_path}")
