"""Where models are looked for."""

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from dspark_jax.errors import UserError
from dspark_jax.interop.checkpoint_files import HUB_PATTERNS, locate
from dspark_jax.interop.target_io import load_target


def test_a_hub_id_is_fetched_through_huggingface_hub_without_code_or_pickles(monkeypatch, golden_target):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(golden_target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    target = load_target("someone/some-model")
    assert target.config.num_layers == 6 and asked == [("someone/some-model", HUB_PATTERNS)]
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pkl")) for pattern in HUB_PATTERNS)


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch):
    def snapshot_download(name, allow_patterns):
        raise LocalEntryNotFoundError("no connection\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match="someone/some-model") as error:
        locate("someone/some-model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["/no/such/dir", "./no/such", "nothing.gguf", "justaname", "a/b/c"])
def test_a_path_that_is_not_there_is_named(name):
    with pytest.raises(UserError, match="no model at"):
        locate(name)


@pytest.mark.parametrize("name", ["wheel:no_such_package/x.gguf", "wheel:jax/no-such.gguf", "wheel:jax", "wheel:"])
def test_a_file_that_no_wheel_has_says_what_to_install(name):
    with pytest.raises(UserError, match="pip install"):
        locate(name)
