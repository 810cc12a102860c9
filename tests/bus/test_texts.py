import io
import logging

import pytest

from rankscope.bus.environment import HIDDEN, without_secrets
from rankscope.bus.words import TRACE, make_printable


@pytest.fixture
def heard():
    logger = logging.Logger("lines")
    logger.addFilter(make_printable)
    logger.addFilter(make_printable)
    stream = io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    return logger, stream


def test_a_traceback_keeps_its_lines_and_loses_its_control_characters(heard):
    logger, stream = heard
    try:
        raise ValueError("bad\x1b[2J")
    except ValueError:
        logger.exception("it failed\n")
    first, *trace, last = stream.getvalue().splitlines()
    assert first == "it failed "
    assert trace[0] == "Traceback (most recent call last):"
    assert last == "ValueError: bad [2J"


def test_a_traceback_of_another_process_stands_below_the_message(heard):
    logger, stream = heard
    logger.warning("%s", "one\ntwo", extra={TRACE: "Traceback:\n  a\x07\n"})
    logger.warning("%s", "three", extra={TRACE: ""})
    assert stream.getvalue() == "one two\nTraceback:\n  a \nthree\n"


@pytest.mark.parametrize(
    "name",
    ["authorization", "Authorization", "passphrase", "ssh_passphrase", "aws_access_key_id",
     "AWS_SECRET_ACCESS_KEY", "hub_token", "hubToken", "api-key", "apiKey", "db.password", "dsn",
     "webhook_url", "DB_PASS", "session_cookie", "auth", "private_key", "hf_token_2"],
)  # fmt: skip
def test_text_under_the_name_of_a_secret_is_hidden(name):
    assert without_secrets({name: "tell-nobody"}) == {name: HIDDEN}
    assert without_secrets({name: {"a": ["tell-nobody"]}}) == {name: {"a": [HIDDEN]}}


@pytest.mark.parametrize(
    "text",
    ["https://me:tell/nobody@example.org/x", "see s3://bucket/x?X-Amz-Signature=tell-nobody",
     "python train.py --hub_token tell-nobody --lr 3", "Namespace(api_key='tell-nobody', lr=3)",
     "Authorization: Bearer tell-nobody", "{'password': 'tell-nobody'}", "x --api-key tell-nobody",
     "Authorization: Token tell-nobody", "psql me:tell-nobody@db.example.org",
     "hf_tellnobodytellno",
     "-----BEGIN RSA PRIVATE KEY-----\ntell\nnobody\n-----END RSA PRIVATE KEY-----",
     "-----BEGIN PRIVATE KEY-----\ntell\nnobody", "call sk-proj-tell-nobody-tell-nobody now"],
)  # fmt: skip
def test_secrets_inside_of_text_are_hidden(text):
    said = without_secrets({"said": text})["said"]
    assert "tell" not in said
    assert "nobody" not in said
    assert HIDDEN in said


def test_the_argument_after_the_name_of_a_secret_is_hidden():
    command = ["train.py", "--hf-token", "tell-nobody", "--lr", "3", "--api-key=tell-nobody"]
    hidden = ["train.py", "--hf-token", HIDDEN, "--lr", "3", f"--api-key={HIDDEN}"]
    assert without_secrets({"command": command}) == {"command": hidden}


def test_what_describes_a_training_stays():
    config = {
        "lr": 1e-4, "max_tokens": 512, "pad_token": "<pad>", "monkey": "kong", "author": "me",
        "tokenizer": "bert-base", "keys": [1, 2], "model": "org/name", "path": "/data/a@b",
        "none": None, "resume": True, "said": "max_tokens=512, 3 epochs", "dtype": "torch.float32",
        "image": "registry/app:2.1@sha256:0ab",
        "sweep": ["--max-tokens", "8", "--use-auth-token", "--lr"],
        "masks": "sk-learn and a:b", "shape": "layers:3, width:64", "at": "12:30@gpu",
    }  # fmt: skip
    assert without_secrets(config) == config
