"""Answers of OpenAI-compatible servers: a server in a thread that answers, fails and refuses on demand."""

import collections
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dspark_jax import prepare
from dspark_jax.data import servers as module
from dspark_jax.data.conversations import PromptRow
from dspark_jax.data.servers import ask_servers, find_servers
from dspark_jax.door import run_door
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import load_target

OPTIONS = {"temperatures": (0.0, 0.7), "max_tokens": 10, "seed": 3}


class Server(ThreadingHTTPServer):
    """Answers "re: TEXT (n)" to the last of n messages; what the text says may go wrong instead."""

    model = "tiny"

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.tries, self.down = [], collections.Counter(), False
        self.together = None  # a barrier, for as many requests as must be here at once

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply(200, {"data": [{"id": self.server.model}]})

    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(payload)
        text = payload["messages"][-1]["content"]
        self.server.tries[text] += 1
        if self.server.together:
            self.server.together.wait(timeout=20)
        if self.server.down or ("busy" in text and self.server.tries[text] < 3):
            self.reply(503, {"error": "busy"})
        elif "refuse" in text:
            self.reply(400, {"error": "too\nlong"})
        elif "strange" in text:
            self.reply(200, {"choices": [{"message": None}]})
        else:
            content = "" if "mute" in text else f"re: {text} ({len(payload['messages'])})"
            message = {"role": "assistant", "content": content} | ({"reasoning": "hm"} if "think" in text else {})
            self.reply(200, {"choices": [{"message": message, "finish_reason": "length" if "cut" in text else "stop"}]})

    def reply(self, code, value):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def serve(monkeypatch):
    """Starts servers."""
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.001)
    monkeypatch.setenv("no_proxy", "*")
    started = []

    def start():
        started.append(Server())
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def target(chat_model):
    return load_target(chat_model)


def asks(key, *texts):
    return PromptRow(key, [{"role": "user", "content": text} for text in texts])


def by_id(lines):
    return {line["id"]: line for line in lines}


def test_every_turn_is_asked_once_with_its_own_history(serve, target, tmp_path):
    one, two = serve(), serve()
    rows = [asks(str(i), *(f"q{i}{turn}" for turn in "abc"[: 1 + i % 3])) for i in range(9)]
    found = find_servers([one.url + "/", two.url])
    lines = by_id(
        ask_servers(found, target, rows, tmp_path / "a.jsonl", **OPTIONS, thinking="off", top_p=0.9, top_k=20)
    )
    assert len(lines) == 3 * (1 + 2 + 3) == len(one.asked) + len(two.asked)
    assert one.asked and two.asked
    assert [message["content"] for message in lines["2#3"]["messages"]] == [
        "q2a", "re: q2a (1)", "q2b", "re: q2b (3)", "q2c", "re: q2c (5)"
    ]  # fmt: skip
    assert {line["finish_reason"] for line in lines.values()} == {"stop"}
    for payload in one.asked + two.asked:
        assert payload["model"] == "tiny" and payload["max_tokens"] == 10 and payload["temperature"] in (0.0, 0.7)
        assert payload["chat_template_kwargs"] == {"enable_thinking": False}
        assert (payload["top_p"], payload["top_k"]) == (0.9, 20)
    stamp = json.loads((tmp_path / "a.jsonl.run.json").read_text())
    assert (stamp["model"], stamp["thinking"], stamp["target"]) == ("tiny", "off", target.fingerprint)


def test_requests_are_under_way_together(serve, target, tmp_path):
    server = serve()
    server.together = threading.Barrier(4)  # breaks, and answers nothing, unless four are here at once
    rows = [asks(str(i), f"q{i}") for i in range(8)]
    lines = ask_servers(find_servers([server.url]), target, rows, tmp_path / "a.jsonl", **OPTIONS, at_a_time=4)
    assert len(lines) == 8 == len(server.asked)


def test_faults_are_asked_again_and_refusals_kept(serve, target, tmp_path):
    server = serve()
    rows = [asks(text, text, "more") for text in ("busy", "refuse", "mute", "fine", "cut", "think")]
    lines = by_id(ask_servers(find_servers([server.url]), target, rows, tmp_path / "a.jsonl", **OPTIONS))
    assert server.tries["busy"] == 3 and lines["busy"]["finish_reason"] == "stop"
    assert lines["refuse"]["finish_reason"] == "error" and "HTTP 400" in lines["refuse"]["error"]
    assert lines["mute"]["finish_reason"] == "error" and "refuse#2" not in lines and "mute#2" not in lines
    assert lines["cut"]["finish_reason"] == "length"
    assert lines["think"]["messages"][-1]["reasoning_content"] == "hm"
    assert set(lines) >= {"busy#2", "fine#2", "cut#2", "think#2"}


def test_what_got_no_answer_is_asked_at_the_next_start_and_nothing_twice(serve, target, tmp_path, capsys):
    server, path = serve(), tmp_path / "a.jsonl"
    rows = [asks("a", "x", "y"), asks("b", "strange"), asks("c", "z")]
    lines = by_id(ask_servers(find_servers([server.url]), target, rows, path, **OPTIONS))
    assert set(lines) == {"a", "a#2", "c"} and server.tries["strange"] == module.TRIES
    assert "1 turns got no answer" in capsys.readouterr().err
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:2]) + text[2][:20])
    server.asked.clear()
    assert by_id(ask_servers(find_servers([server.url]), target, rows, path, **OPTIONS)) == lines
    lost = json.loads(text[2])["messages"][-2]["content"]
    assert {payload["messages"][-1]["content"] for payload in server.asked} == {lost, "strange"}
    assert len(server.asked) == 1 + module.TRIES


def test_servers_that_die_end_the_run_and_what_they_gave_is_kept(serve, target, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GIVE_UP", 3)
    server, path = serve(), tmp_path / "a.jsonl"
    found = find_servers([server.url])
    ask_servers(found, target, [asks("0", "q")], path, **OPTIONS)
    server.down = True
    rows = [asks(str(i), "q") for i in range(50)]
    with pytest.raises(UserError, match="stopped answering.*503"):
        ask_servers(found, target, rows, path, **OPTIONS, at_a_time=2)
    server.down = False
    assert len(ask_servers(found, target, rows, path, **OPTIONS)) == 50
    assert len(path.read_text().splitlines()) == 50


def test_answers_under_way_when_it_is_interrupted_are_kept(serve, target, tmp_path, monkeypatch):
    server, path = serve(), tmp_path / "a.jsonl"
    found, rows = find_servers([server.url]), [asks(str(i), f"q{i}", "more") for i in range(6)]
    server.together = threading.Barrier(4)  # three requests are with the server, and we know it

    def interrupt(*args, **options):
        server.together.wait(timeout=20)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask_servers(found, target, rows, path, **OPTIONS, at_a_time=3)
    assert len(path.read_text().splitlines()) == 3
    server.together = None
    assert len(ask_servers(found, target, rows, path, **OPTIONS)) == 12 == len(server.asked)


def test_servers_are_looked_at_first(serve, capsys):
    one, two = serve(), serve()
    nobody = "http://127.0.0.1:9/v1"
    assert [server.url for server in find_servers([nobody, one.url])] == [one.url]
    assert f"{nobody} is left out" in capsys.readouterr().err
    two.model = "other"
    with pytest.raises(UserError, match="different models: other, tiny"):
        find_servers([one.url, two.url])
    with pytest.raises(UserError, match="no server of data.servers answers"):
        find_servers([nobody])


def test_the_door(serve, chat_model, tmp_path, capsys):
    server, prompts = serve(), tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["one", "two"]}\n{"no": "prompt"}\n{"prompt": "refuse"}\n')
    config = tmp_path / "config.py"
    config.write_text(
        "from configs.base import get_base\n\n\ndef get_config():\n    c = get_base()\n"
        f"    c.workdir, c.target.path = {str(tmp_path / 'run')!r}, {str(chat_model)!r}\n"
        f"    c.data.servers = ({server.url!r},)\n    return c\n"
    )
    command = ["python -m dspark_jax prepare", "answers", f"--config={config}", f"--prompts={prompts}"]
    prepare.main(command)
    out = tmp_path / "run" / "answers.jsonl"
    assert set(by_id(map(json.loads, out.read_text().splitlines()))) == {"1", "1#2", "3"}
    said = capsys.readouterr()
    assert "3 answers in" in said.out and "1 error, 2 stop" in said.out
    assert "line 2: skipped: expected one of" in said.err
    prepare.main([*command, f"--out={tmp_path / 'other.jsonl'}"])
    assert (tmp_path / "other.jsonl").exists()
    server.shutdown()
    server.server_close()
    prepare.main(command)  # all is answered: nobody need be there
    assert "3 answers in" in capsys.readouterr().out
    with pytest.raises(UserError, match="no server"):
        prepare.main([*command, f"--out={tmp_path / 'third.jsonl'}"])


@pytest.mark.parametrize("words", [[], ["questions"], ["--config=x.py"]])
def test_what_to_prepare_must_be_said(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        run_door(lambda: prepare.main(["prepare", *words]))
    assert exit_.value.code == 2 and "prepare answers" in capsys.readouterr().err
