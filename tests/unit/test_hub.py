"""What a user reads where the Hub gives no model or data set: each case has its own cure, at a server on the loopback."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from brigade.train.host.hub import OFFLINE, stays_offline

INVALID, NOBODY = "Invalid credentials in Authorization header", "Invalid username or password."
# owner -> (status, headers) without and with a token
ANSWERS = {
    "gated": ((401, {"X-Error-Code": "GatedRepo"}), (403, {"X-Error-Code": "GatedRepo"})),
    "nobody": ((401, {"X-Error-Message": NOBODY}), (404, {"X-Error-Code": "RepoNotFound"})),
    "expired": ((401, {"X-Error-Message": INVALID}),) * 2,
    "forbidden": ((403, {}),) * 2,
    "mirror": ((404, {}),) * 2,
    "old": ((404, {"X-Error-Code": "RevisionNotFound"}),) * 2,
    "gguf": ((404, {"X-Error-Code": "EntryNotFound"}),) * 2,
}
# (owner, with a token): words of the message
CASES = {
    ("gated", False): ["accepted its licence", "no token", "/gated/thing", "HF_TOKEN", "unset HF_ENDPOINT"],
    ("gated", True): ["that of HF_TOKEN has not", "/gated/thing with that account"],
    ("nobody", False): ["no public", "(401)", "set HF_TOKEN"],
    ("nobody", True): ["of this name", "(404)", "OWNER/NAME"],
    ("expired", True): ["does not know the token", "/settings/tokens"],
    ("forbidden", True): ["may not read", "(403)"],
    ("mirror", False): ["(404)", "unset HF_ENDPOINT, which makes http://127.0.0.1:"],
    ("/nowhere", False): ["no such directory", "OWNER/NAME"],
    ("old", False): ["no revision", "/commits/main"],
}
ASK = """
import json, os, sys
from brigade.errors import UserError
{ask}
for owner, token in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    os.environ.update({{"HF_TOKEN": "hf_secret"}} if token else {{}})
    try:
        ask(f"{{owner}}/thing")
        print(json.dumps("nothing was wrong"))
    except UserError as error:
        print(json.dumps(str(error)))
"""
BEFORE_IMPORTS = """
from brigade.train.recipe import flags
from brigade.train.model import named
def ask(name):
    try:
        named.check_files(flags.load(["FLAG", name]))
    finally:
        assert not {"torch", "transformers", "datasets"} & set(sys.modules)
"""
ASKED_FOR = {
    "config": "from brigade.plan.shape.find import config_of as ask",
    "model": """
from brigade.train.model.location import load_config
from brigade.train.recipe import flags
def ask(name):
    load_config(flags.load(["--model_name_or_path", name]))
""",
    "weights": """
from brigade.train.model.load import download
from brigade.train.recipe import flags
def ask(name):
    download(name, flags.load(["--model_name_or_path", name]))
""",
    "tokenizer": """
from brigade.train.model.tokenizer import load_tokenizer
from brigade.train.recipe import flags
def ask(name):
    load_tokenizer(flags.load(["--tokenizer_name_or_path", name]), 512)
""",
    "model, before imports": BEFORE_IMPORTS.replace("FLAG", "--model_name_or_path"),
    "data, before imports": BEFORE_IMPORTS.replace("FLAG", "--dataset_name"),
    "data": """
from brigade.train.data.sources import open_origins
from brigade.train.recipe import flags
def ask(name):
    open_origins(flags.load(["--dataset_name", name]))
""",
}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        owner = next(part for part in self.path.split("/") if part not in ("", "api", "models", "datasets"))
        status, headers = ANSWERS[owner][bool(self.headers.get("Authorization"))]
        self.send_response(status)
        for name, value in (headers | {"Content-Length": "0"}).items():
            self.send_header(name, value)
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def told(hub, tmp_path_factory):
    """told(what, cases): the messages of one process that asks for all cases."""

    def ask(what, cases, **env):
        env = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path_factory.mktemp("home")), "PATH": os.environ["PATH"]} | env
        line = [sys.executable, "-c", ASK.format(ask=ASKED_FOR[what]), json.dumps(cases)]
        done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode == 0 and "hf_secret" not in done.stdout, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return ask


def check(cases, messages):
    assert len(messages) == len(cases)
    for case, message in zip(cases, messages, strict=True):
        missing = [words for words in CASES[case] if words not in message]
        assert not missing and message.count("\n") == 2, (case, missing, message)


def test_each_answer_of_the_hub_has_its_cure(told):
    cases = [case for case in CASES if case[0] != "/nowhere"]  # `plan` takes no path for a name
    check(cases, told("config", cases))
    (message,) = told("config", [("gguf", False)])
    assert "not the file that is needed" in message and "GGUF" in message


@pytest.mark.slow
@pytest.mark.parametrize("what", [what for what in ASKED_FOR if what != "config"])
def test_whatever_is_asked_for(what, told):
    cases = [("gated", False), ("gated", True), ("nobody", False), ("old", False), ("/nowhere", False)]
    check(cases, [message.replace("/datasets/", "/") for message in told(what, cases)])


@pytest.mark.slow
def test_offline_and_without_a_network(told):
    """By HF_HUB_OFFLINE, and where nobody listens. Nothing is asked six times."""
    (message,) = told("config", [("gated", False)], HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE or its like is set" in message and "`hf download gated/thing`" in message
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    (message,) = told("config", [("gated", False)], HF_ENDPOINT=nowhere)
    assert "127.0.0.1 cannot be reached (" in message and "HTTPS_PROXY" in message
    assert "where there is a network" in message


@pytest.mark.parametrize("value, offline", [("1", True), ("on", True), ("0", False), ("false", False), ("", False)])
def test_a_variable_says_offline_as_the_hubs_own_library_reads_it(value, offline, monkeypatch):
    for name in OFFLINE:
        monkeypatch.delenv(name, raising=False)
    for name in OFFLINE:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert stays_offline() is offline


@pytest.mark.slow
def test_a_data_set_without_a_network_ends_at_once(told):
    """The library asked for 50 s, with a line for each time."""
    (message,) = told("data", [("gated", False)], HF_ENDPOINT="https://hub.invalid")
    assert "hub.invalid does not resolve" in message and "`hf download gated/thing --repo-type dataset`" in message
    (message,) = told("data", [("gated", False)], HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE or its like is set" in message
