"""Models of the hub by name, from a stand-in of it on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import torch
from transformers import GPT2Config, GPT2LMHeadModel

TINY = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 500, "n_positions": 64}
TINY |= {"bos_token_id": 0, "eos_token_id": 0}

REVISION = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for files of models, of which it has some."""

    models: ClassVar[dict[str, Path]] = {}
    fetched: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.answer(sends=False)

    def do_GET(self) -> None:
        self.answer(sends=True)

    def answer(self, sends: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            name, _, listed = path.removeprefix("api/models/").partition("/tree/")
            name = name.partition("/revision/")[0]
            if name not in self.models:
                return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
            files = [
                {"type": "file", "path": own.name, "size": own.stat().st_size, "oid": own.name}
                for own in self.models[name].iterdir()
            ]
            entry = files if listed else {"id": name, "modelId": name, "sha": REVISION}
            return self.reply(200, json.dumps(entry).encode(), {})
        name, _, file = path.partition("/resolve/")
        if not file:
            return self.reply(200, b"", {})
        if name not in self.models:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        found = self.models[name] / file.partition("/")[2]
        if not found.is_file():
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        if sends:
            self.fetched.append(f"{name}/{found.name}")
        tag = {"ETag": f'"{name}-{found.name}"', "X-Repo-Commit": REVISION}
        return self.reply(200, found.read_bytes(), tag)

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def hub(models: dict[str, Path]) -> Iterator[str]:
    """The address of a stand-in that has some models."""
    Hub.models, Hub.fetched = models, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


TRAINED = (
    "plan=null", "model.name=owner/tiny", "model.config={}", "data.tokenizer=train",
    "data.vocabulary=300", "data.sequence=16", "data.held_out=0", "arguments.max_steps=1",
    "arguments.global_batch=2",
    "arguments.per_device_train_batch_size=2",
)  # fmt: skip


def changed(flag: str, **fields: object) -> list[str]:
    """Words of a command line that change fields of a recipe."""
    pairs = [f"{name.replace('__', '.')}={value}" for name, value in fields.items()]
    return [word for pair in pairs for word in (flag, pair)]


COMMANDS = """
import json, sys
from merak.cli.main import main
print("codes", json.dumps([main(words) for words in json.loads(sys.argv[1])]))
"""


def test_a_model_of_the_hub_is_named_as_any_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**TINY)).save_pretrained(tmp_path / "tiny")  # type: ignore[arg-type]
    text = tmp_path / "texts"
    text.mkdir()
    (text / "one.txt").write_text("one two three four five six seven eight nine ten\n" * 200)
    layout = ["--dp", "1", "--seq", "16"]
    words = [
        ["memory", "owner/tiny", *layout],
        ["memory", "gpt2", *layout],
        ["memory", "recipe:gpt2", *changed("--set", plan="null", model__config__n_layer=1)],
        ["memory", "vit", *changed("--set", plan="null", model__config__num_hidden_layers=1)],
        ["memory", "owner/unknown"],
        ["train", "recipe:gpt2", "--device", "cpu", *TRAINED, f"data.source={text}",
         f"arguments.output_dir={tmp_path}/out"],
    ]  # fmt: skip
    models = {"owner/tiny": tmp_path / "tiny", "gpt2": tmp_path / "tiny"}
    with hub(models) as address:
        own = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS, json.dumps(words)],
            env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        before_training = Hub.fetched[:2]
    assert done.returncode == 0, done.stderr
    assert "codes [0, 0, 0, 0, 2, 0]" in done.stdout, done.stderr
    # Of what is planned the config alone; weights where they are trained.
    assert before_training == ["owner/tiny/config.json", "gpt2/config.json"]
    assert "owner/tiny/model.safetensors" in Hub.fetched[2:]
    assert "gpt2/model.safetensors" not in Hub.fetched
    assert done.stderr.count("vit is taken for the recipe") == 1
    assert "write recipe:vit" in done.stderr
    assert "neither the hub nor its cache on this machine has it" in done.stderr
