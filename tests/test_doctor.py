"""The `doctor` command: a line per check, exit code 1 for problems; and the commands of `python -m dspark_jax`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from dspark_jax import __main__ as door
from dspark_jax import doctor
from dspark_jax.errors import UserError

ROOT = Path(door.__file__).parents[1]
CONFIG = """
from configs.base import get_base

def get_config():
    c = get_base()
    c.target.path = {target!r}
    c.serve.drafter = {drafter!r}
    return c
"""
Run = Callable[..., tuple[int, dict[tuple[str, str], dict[str, str]]]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs doctor on a target and a drafter ("" for none). Returns exit code and checks by (area, name)."""

    def run(target: Path | str, drafter: Path | str) -> tuple[int, dict[tuple[str, str], dict[str, str]]]:
        config, out = tmp_path / "config.py", tmp_path / "doctor.json"
        config.write_text(CONFIG.format(target=str(target), drafter=str(drafter)))
        code = 0
        try:
            doctor.main(["doctor", f"--config={config}", f"--json={out}"])
        except SystemExit as stop:
            code = stop.code
        checks = json.loads(out.read_text())["checks"]
        printed = capsys.readouterr().out
        assert all(check["text"] in printed for check in checks)
        return code, {(check["area"], check["name"]): check for check in checks}

    return run


@pytest.fixture
def drafter(golden: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies the golden drafter with other values in its config.json."""

    def copy(**changes: object) -> Path:
        path = shutil.copytree(golden / "dspark_vanilla", tmp_path / "drafter")
        config = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(config))
        return path

    return copy


@pytest.fixture
def chat_target(golden_target: Path, tmp_path: Path) -> Path:
    """The golden target with a tokenizer: 320 words, of which 256 to 319 are special, and a chat template."""
    path = shutil.copytree(golden_target, tmp_path / "target")
    words = {f"word{i}" if i < 256 else f"<special{i}>": i for i in range(320)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([word for word, i in words.items() if i >= 256])
    backend.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}<special258> {{ m.content }} <special257> {% endfor %}"
    named = {"eos_token": "<special257>", "pad_token": "<special256>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    return path


def test_a_lookup_fits_every_target(run: Run, golden_target: Path) -> None:
    code, checks = run(golden_target, "lookup")
    assert code == 0 and checks["drafter", "lookup"]["text"].startswith("drafts 7 tokens")


def test_fitting_pair_is_ok(run: Run, golden: Path, golden_target: Path) -> None:
    code, checks = run(golden_target, golden / "dspark_vanilla")
    assert code == 0
    assert {check["status"] for check in checks.values() if check["area"] in ("devices", "drafter")} == {"ok"}
    assert "6 layers, width 96, 6 heads and 2 KV heads of 24" in checks["target", "sizes"]["text"]
    assert "MB in float32" in checks["target", "weights"]["text"]
    assert checks["target", "tokenizer"]["status"] == "warning"  # the golden target has none
    assert checks["target", "end tokens"]["text"] == "257"
    assert "-1, 1, 2, 4 of the target's 6" in checks["drafter", "taps"]["text"]
    assert checks["drafter", "vocabulary"]["text"] == "320 of 320 tokens (all)"
    assert checks["drafter", "mask token"]["text"].startswith("300")


def test_works_without_config(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["doctor"])
    out = capsys.readouterr().out
    assert "python" in out and "orbax-checkpoint" in out and "devices" in out
    assert "target" not in out and "problems: 0" in out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"hidden_size": 64}, "hidden size is 64"), ({"num_target_layers": 30}, "target layers is 30"),
     ({"vocab_size": 999}, "vocabulary is 999"), ({"mask_token_id": 257}, "mask token 257"),
     ({"target_layer_ids": [1, 6]}, "tap layers [1, 6]")],
)  # fmt: skip
def test_drafter_of_another_target_is_a_problem(
    changes: dict, reason: str, run: Run, drafter: Callable[..., Path], golden_target: Path
) -> None:
    code, checks = run(golden_target, drafter(**changes))
    assert code == 1
    assert checks["drafter", "load"]["status"] == "problem" and reason in checks["drafter", "load"]["text"]
    assert checks["target", "sizes"]["status"] == "ok"


@pytest.mark.parametrize("damage", ["missing", "truncated", "no json", "nonsense"])
def test_damaged_drafter_is_a_problem(damage: str, run: Run, drafter: Callable[..., Path], golden_target: Path) -> None:
    """Whatever a library raises becomes a line."""
    path = drafter(**({"rms_norm_eps": "small", "head_dim": "wide"} if damage == "nonsense" else {}))
    if damage == "missing":
        shutil.rmtree(path)
    elif damage == "truncated":
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "no json":
        (path / "config.json").write_text("{")
    code, checks = run(golden_target, path)
    assert code == 1 and checks["drafter", "load"]["status"] == "problem"
    assert "\n" not in checks["drafter", "load"]["text"]


def test_missing_target_is_a_problem_and_its_drafter_stays_unchecked(run: Run, golden: Path, tmp_path: Path) -> None:
    code, checks = run(tmp_path / "nowhere", golden / "dspark_vanilla")
    assert code == 1
    assert checks["target", "load"]["status"] == "problem" and "nowhere" in checks["target", "load"]["text"]
    assert checks["drafter", "file"]["status"] == "warning"


def test_other_fingerprint_is_a_warning(run: Run, drafter: Callable[..., Path], golden_target: Path) -> None:
    path = drafter(target_fingerprint="0123456789abcdef")
    code, checks = run(golden_target, path)
    assert code == 0 and checks["drafter", "fingerprint"]["status"] == "warning"
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("0123456789abcdef", checks["target", "fingerprint"]["text"]))
    code, checks = run(golden_target, path)
    assert code == 0 and checks["drafter", "fingerprint"]["status"] == "ok"


@pytest.mark.parametrize(
    ("mask", "status", "words"),
    [(300, "ok", "'<special300>', an unused special token"), (258, "warning", "also marks something in prompts"),
     (17, "warning", "'word17' is an ordinary token")],
)  # fmt: skip
def test_mask_token_should_be_an_unused_special(
    mask: int, status: str, words: str, run: Run, drafter: Callable[..., Path], chat_target: Path
) -> None:
    code, checks = run(chat_target, drafter(mask_token_id=mask))
    assert code == 0 and checks["target", "tokenizer"]["text"] == "320 tokens"
    assert checks["target", "end tokens"]["text"] == "257 '<special257>'"
    assert checks["drafter", "mask token"]["status"] == status and words in checks["drafter", "mask token"]["text"]


def test_broken_chat_template_is_a_problem(run: Run, golden: Path, chat_target: Path) -> None:
    (chat_target / "chat_template.jinja").write_text("{% for %}")
    code, checks = run(chat_target, golden / "dspark_vanilla")
    assert code == 1 and checks["target", "chat template"]["status"] == "problem"
    assert checks["drafter", "mask token"]["status"] == "ok"


def test_models_without_chat_template(run: Run, golden: Path, chat_target: Path) -> None:
    (chat_target / "tokenizer_config.json").unlink()
    code, checks = run(chat_target, "")
    assert code == 0 and checks["target", "chat template"]["status"] == "warning"
    assert checks["drafter", "file"]["text"] == "the config names none: plain decoding"


def test_missing_package_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", ("jax", "no-such-package"))
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-extra": "nothing"})
    with pytest.raises(SystemExit) as stop:
        doctor.main(["doctor"])
    out = capsys.readouterr().out
    assert stop.value.code == 1 and "missing: pip install no-such-package" in out
    assert "not installed; only nothing needs it" in out and "problems: 1, warnings: 0" in out


@pytest.mark.parametrize("argument", ["--jason=x", "--json=/no/such/folder/x.json", "stray"])
def test_bad_arguments_are_refused(argument: str) -> None:
    with pytest.raises(UserError, match=argument.removeprefix("--").partition("=")[0]):
        doctor.main(["doctor", argument])


@pytest.mark.parametrize(("arguments", "what"), [([], "no command given"), (["cook"], "unknown command 'cook'")])
def test_unknown_command_exits_with_2_and_one_line(arguments: list[str], what: str) -> None:
    command = [sys.executable, "-m", "dspark_jax", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"error: {what}")
    assert all(name in done.stderr for name in door.COMMANDS)


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    door.main(["dspark_jax", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in door.COMMANDS)


def test_commands_reach_their_modules(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command shows its own flags, before JAX is asked for anything."""
    for name in door.COMMANDS:
        with pytest.raises(SystemExit) as stop:
            door.main(["dspark_jax", name, "--help"])
        assert stop.value.code == 0 and "--config" in capsys.readouterr().out
