"""What looks like a secret in a configuration, and what does not."""

import pytest

from rankscope.bus.secrets import HIDDEN, without_secrets


@pytest.mark.parametrize(
    "name",
    ["authorization", "Authorization", "passphrase", "ssh_passphrase", "aws_access_key_id",
     "AWS_SECRET_ACCESS_KEY", "hub_token", "hubToken", "api-key", "apiKey", "db.password", "dsn",
     "webhook_url", "DB_PASS", "session_cookie", "auth", "private_key"],
)  # fmt: skip
def test_text_under_the_name_of_a_secret_is_hidden(name):
    assert without_secrets({name: "tell-nobody"}) == {name: HIDDEN}
    assert without_secrets({name: {"a": ["tell-nobody"]}}) == {name: {"a": [HIDDEN]}}


@pytest.mark.parametrize(
    "text",
    ["https://me:tell/nobody@example.org/x", "see s3://bucket/x?X-Amz-Signature=tell-nobody",
     "python train.py --hub_token tell-nobody --lr 3", "Namespace(api_key='tell-nobody', lr=3)",
     "Authorization: Bearer tell-nobody", "{'password': 'tell-nobody'}"],
)  # fmt: skip
def test_secrets_inside_of_text_are_hidden(text):
    said = without_secrets({"said": text})["said"]
    assert "tell" not in said
    assert "nobody" not in said
    assert HIDDEN in said


def test_what_describes_a_training_stays():
    config = {
        "lr": 1e-4, "max_tokens": 512, "pad_token": "<pad>", "monkey": "kong", "author": "me",
        "tokenizer": "bert-base", "keys": [1, 2], "model": "org/name", "path": "/data/a@b",
        "none": None, "resume": True, "said": "max_tokens=512, 3 epochs", "dtype": "torch.float32",
    }  # fmt: skip
    assert without_secrets(config) == config
