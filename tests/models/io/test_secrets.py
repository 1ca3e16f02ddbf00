"""Credentials stay out of config.yaml, logs and errors."""

import os

import pytest

from conf.entry import compose, config_to_yaml, entry_point, reject_windows
from data.answers.endpoint import check_endpoint
from data.prepare_config import AnswersConf, AnswerSource, PrepareConf
from models.io.errors import UserError
from models.io.secrets import find_secrets, redact
from models.targets.config import TargetConf
from tests.support.commands.ports import find_free_port

ENDPOINT = ["mixture=one", "mixture.sources.rows.path=rows.jsonl", "target=demo", "answers=endpoint"]
URL = "answers.url=http://localhost:8000/v1"


@pytest.mark.parametrize(
    "url",
    (
        "http://me:hunter2@localhost:8000/v1 http://hunter2@localhost:8000/v1 "
        "http://localhost:8000/v1?api_key=hunter2 http://localhost:8000/v1?hunter2 "
        "http://localhost:8000/v1#hunter2 ftp://me:hunter2@localhost/v1 me:hunter2@localhost:8000/v1 "
        "http://me:hunter2/x@localhost:8000/v1 http://me:hunter2@localhost:99999/v1"
    ).split(),
)
def test_an_address_with_credentials_is_refused_without_showing_them(url):
    with pytest.raises(UserError, match=r"^answers\.url: must be an address ") as refused:
        AnswersConf(source=AnswerSource.endpoint, url=url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("+answers.extra_body.api_key=hunter2", "api_key"),
        ("+answers.extra_body.headers={Authorization: hunter2}", "headers.Authorization"),
        ("+answers.extra_body.more=[{password: hunter2}]", r"more\[0\].password"),
        ("+answers.extra_body.session_token=hunter2", "session_token"),
        ("+answers.extra_body.note='Bearer hunter2'", "note"),
        ("+answers.extra_body.proxy='http://me:hunter2@proxy'", "proxy"),
    ],
)
def test_a_secret_among_further_fields_is_refused_by_its_key(override, key):
    with pytest.raises(UserError, match=rf"^answers\.extra_body\.{key}: must not be a secret") as refused:
        compose("prepare", PrepareConf, [*ENDPOINT, URL, override])
    assert "hunter2" not in str(refused.value)
    assert "OPENAI_API_KEY (answers.api_key_env)" in str(refused.value)


def test_fields_that_servers_know_are_no_secrets(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    fields = (
        "return_token_ids=true skip_special_tokens=false stop_token_ids=[1] min_tokens=1 truncate_prompt_tokens=9 "
        "allowed_token_ids=[1] cache_salt=x bad_words=[a]"
    ).split()
    extra = [f"++answers.extra_body.{field}" for field in fields]
    conf = compose("prepare", PrepareConf, [*ENDPOINT, URL, *extra])
    assert conf.answers.api_key == "hunter2"
    assert "hunter2" not in config_to_yaml(conf)


def test_an_address_in_a_mistyped_override_is_shown_without_its_password(read_refusal, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    @entry_point("prepare", PrepareConf)
    def main(conf: PrepareConf) -> None:
        pytest.fail("the mistake was not refused")

    line = read_refusal(main, *ENDPOINT, "+answers.extra_body.x=http://me:hunter2@a,b")
    assert line.startswith("error: +answers.extra_body.x: must be one value, got 'http://***@a,b'")
    assert "hunter2" not in line


def test_a_proxy_of_the_environment_is_not_shown_where_it_does_not_answer(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://me:hunter2@127.0.0.1:{find_free_port()}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    conf = AnswersConf(source=AnswerSource.endpoint, url="http://server.invalid/v1")
    with pytest.raises(UserError, match=r"answers\.url: must be a reachable endpoint") as refused:
        check_endpoint(conf, TargetConf())
    assert "hunter2" not in str(refused.value)


def test_plain_messages_are_left_as_they_are():
    plain = "data.key: must be 5 tokens, got a@b and http://host:8000/v1; set key_env=A"
    assert redact(plain) == plain
    assert not list(find_secrets({"a": ["plain", 1, None], "key": None}, "x"))


def test_windows_is_refused_in_a_single_line(read_refusal):
    reject_windows(os.name)
    line = read_refusal(lambda: reject_windows("nt"))
    assert line == "error: system: must be Linux or macOS, got Windows; use WSL 2 or a container"
