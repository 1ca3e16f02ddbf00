"""An endpoint answers as the target in this process does, and its faults are refused in one line."""

import itertools
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from fastapi import Response

from data.answers.answering import AnswersReport, answer_rows
from data.answers.dialogue import PROMPT_TOO_LONG, derive_answer_seed
from data.answers.endpoint import EndpointAnswerBackend, check_endpoint, find_end_of_turn_id
from data.prepare_config import AnswersConf, AnswerSource
from data.sources.prepared_rows import PreparedRow
from infer.engine.answer_backend import TargetAnswerBackend
from models.io.errors import UserError
from models.targets.config import TargetConf
from models.targets.pretrained import load_tokenizer, read_eos_ids
from tests.support.commands.ports import find_free_port
from tests.support.data.chat import asked, chat_target, conf, save
from tests.support.data.openai_server import app

ROWS = 9
ABORTED = {"choices": [{"text": "3", "token_ids": [3], "finish_reason": "abort"}]}
IDS = {"return_token_ids": True, "skip_special_tokens": False, "top_k": -1}


@pytest.fixture(scope="module")
def target():
    return chat_target()


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    return save(target, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def local_answers(target, tmp_path_factory):
    """Return the rows as the target answers them in this process, and the report."""
    backend, report = TargetAnswerBackend(target, conf()), AnswersReport()
    journal = tmp_path_factory.mktemp("local") / "journal"
    answers = answer_rows(asked(ROWS), backend, target.tokenizer, conf(), journal, report=report, total=ROWS)
    return list(answers), report


@contextmanager
def serve_target(folder, **options):
    """Run the server in a thread; yield its URL and the requests that it gets."""
    served = app(str(folder), name="tiny", **options)
    port = find_free_port()
    server = uvicorn.Server(uvicorn.Config(served, port=port, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}/v1", served.state.requests
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def connect_endpoint(url, folder, **changes) -> tuple[AnswersConf, EndpointAnswerBackend]:
    answers_conf = conf(**{"source": AnswerSource.endpoint, "url": url, "extra_body": IDS, "concurrency": 8} | changes)
    target_conf = TargetConf(name="tiny", path=str(folder))
    served = check_endpoint(answers_conf, target_conf)
    return answers_conf, EndpointAnswerBackend(answers_conf, served, target_conf, load_tokenizer(target_conf))


def answer_all(rows, connection, journal):
    (answers_conf, endpoint), report = connection, AnswersReport()
    answers = answer_rows(rows, endpoint, endpoint.tokenizer, answers_conf, journal, report=report, total=len(rows))
    return list(answers), report


def test_an_endpoint_answers_as_the_target_does(folder, local_answers, tmp_path):
    with serve_target(folder) as (url, requests):
        answers = answer_all(asked(ROWS), connect_endpoint(url, folder), tmp_path / "j")
    assert answers == local_answers
    probe, *rest = requests
    assert probe["max_tokens"] == 1
    assert {request["seed"] for request in rest} == {
        derive_answer_seed(0, row.id, drawn.turn) for row in answers[0] for drawn in row.answers
    }
    for request in rest:
        sent = {k: v for k, v in request.items() if k not in ("prompt", "seed")}
        assert sent == {"model": "tiny", "max_tokens": 16, "temperature": 0.7, "top_p": 1.0, **IDS}
        assert all(isinstance(token, int) for token in request["prompt"])


def test_top_k_is_sent_as_set_and_can_be_left_out_for_a_server_without_it(folder):
    with serve_target(folder) as (url, requests):
        for body, top_k, sent in ((IDS, 0, -1), (IDS, 5, 5), ({}, 5, 5), ({}, 0, None)):
            connect_endpoint(url, folder, extra_body=body, top_k=top_k)
            assert requests[-1].get("top_k") == sent


def test_answers_without_ids_are_tokenized_again_and_counted(folder, local_answers, tmp_path):
    with serve_target(folder, ids=False) as (url, _):
        answers, report = answer_all(asked(ROWS), connect_endpoint(url, folder), tmp_path / "j")
    rows, _ = local_answers
    assert [row.documents for row in answers] == [row.documents for row in rows]  # one token a word
    assert all(drawn.retokenized for row in answers for drawn in row.answers)
    assert report.retokenized == report.finished.total()
    assert f"{report.retokenized} answers re-tokenized" in report.summary_lines()


def test_a_fifth_of_the_requests_may_fail(folder, local_answers, tmp_path):
    with serve_target(folder, faulty=True) as (url, requests):
        answers = answer_all(asked(ROWS), connect_endpoint(url, folder, concurrency=3), tmp_path / "j")
    assert answers == local_answers
    assert len(requests) > 1 + local_answers[1].finished.total()


def test_a_request_with_status_400_is_not_repeated(folder, tmp_path):
    rows = [PreparedRow(id=str(i), source="source", text="3 4") for i in range(3)]
    with serve_target(folder, context=17) as (url, requests):
        answers_conf, endpoint = connect_endpoint(url, folder)
        endpoint.max_prompt_tokens = 256  # as of a server that does not report its own
        with pytest.raises(UserError, match=r"got 3 that failed for good \(3 status 400\)"):
            answer_all(rows, (answers_conf, endpoint), tmp_path / "j")
        assert len(requests) == 1 + 3


def test_a_request_whose_reply_has_no_answer_is_repeated(folder, local_answers, tmp_path):
    """A server that is stopped ends its requests as aborted; proxies send HTML pages and partial replies."""
    odd = [
        ABORTED,
        ABORTED,
        {"choices": []},
        {"error": {"message": "no worker"}},
        Response("<html>Sign in</html>"),
        Response('{"choices": [{"te', media_type="application/json"),
    ]
    with serve_target(folder, odd=odd) as (url, requests):
        answers = answer_all(asked(ROWS), connect_endpoint(url, folder), tmp_path / "j")
    assert answers == local_answers
    assert len(requests) == 1 + local_answers[1].finished.total() + len(odd)


def test_a_request_that_is_always_aborted_is_counted_as_aborted(folder, tmp_path):
    with serve_target(folder, odd=itertools.repeat(ABORTED)) as (url, requests):
        rows = [PreparedRow(id="0", source="source", text="3 4")]
        with pytest.raises(UserError, match=r"\(1 finish_reason abort\)"):
            answer_all(rows, connect_endpoint(url, folder, retries=1), tmp_path / "j")
        assert len(requests) == 1 + 2


def test_prompts_longer_than_the_servers_context_allows_are_dropped(folder, tmp_path):
    rows = [PreparedRow(id=str(n), source="source", text="7 " * n) for n in (7, 8)]
    with serve_target(folder, context=24) as (url, _):
        answers, report = answer_all(rows, connect_endpoint(url, folder), tmp_path / "j")
    assert [row.id for row in answers] == ["7"]
    assert report.dropped == {"source": {PROMPT_TOO_LONG: 1}}


def test_a_field_that_the_server_refuses_is_named_before_a_row_is_asked(folder):
    message = r"got Error code: 400 .*not permitted: top_k.*remove a field .*~answers.extra_body.FIELD"
    with serve_target(folder, refused="top_k") as (url, _), pytest.raises(UserError, match=message):
        connect_endpoint(url, folder)


def test_an_endpoint_that_is_unreachable_or_serves_another_model_is_refused_in_one_line(folder):
    with pytest.raises(UserError, match=r"answers.url: must be a reachable endpoint, .* \(no connection\)"):
        connect_endpoint(f"http://127.0.0.1:{find_free_port()}/v1", folder)
    with serve_target(folder, context=64) as (url, requests):
        with pytest.raises(UserError, match=r"\(status 404\).*end in /v1"):
            connect_endpoint(url.removesuffix("/v1"), folder)
        with pytest.raises(UserError, match=r"got another, but it serves tiny, adapter; start"):
            connect_endpoint(url, folder, model="another")
        for path, names in (("9b", "9b or other"), (None, "other")):
            with pytest.raises(UserError, match=f"got {names}, but it serves tiny, adapter; "):
                check_endpoint(conf(source=AnswerSource.endpoint, url=url), TargetConf(name="other", path=path))
        with pytest.raises(UserError, match=r"max_new_tokens: must leave room for a prompt in the 64 .*, got 64"):
            connect_endpoint(url, folder, max_new_tokens=64)
        with pytest.raises(UserError, match=r"context: must fit into the 64 tokens .*, got 128"):
            connect_endpoint(url, folder, context=128)
        assert not requests  # before the first request
        assert connect_endpoint(url, folder)[1].max_prompt_tokens == 47
        assert connect_endpoint(url, folder, model="tiny")[1].model == "tiny"
        adapter = connect_endpoint(url, folder, model="adapter")[1]
        assert (adapter.model, adapter.max_prompt_tokens) == ("adapter", 47)
    for wrong in (None, "localhost:8000/v1", "http://[::1/v1", "http://host:99999/v1"):
        with pytest.raises(UserError, match=r"answers.url: must be an address .*got "):
            conf(source=AnswerSource.endpoint, url=wrong)


def test_errors_name_the_keys_of_the_answers():
    with pytest.raises(UserError, match=r"^answers.temperature: .*; answers.top_p: must be in"):
        conf(temperature=-1.0, top_p=0.0)
    with pytest.raises(UserError, match=r"^answers.url: must be an address .*got http://\[::1;"):
        conf(source=AnswerSource.target, url="http://[::1")


def test_a_key_that_a_header_cannot_carry_is_refused(monkeypatch):
    monkeypatch.setenv("THEIRS", "sk-1\n")  # as `cat` of a file gives it
    settings = {"source": AnswerSource.endpoint, "url": "http://localhost:8000/v1", "api_key_env": "THEIRS"}
    assert conf(**settings).api_key == "sk-1"
    for wrong in ("sk-\u00e9", "sk-1\nsk-2"):
        monkeypatch.setenv("THEIRS", wrong)
        with pytest.raises(UserError, match=r"answers.api_key_env: must name .* THEIRS beyond printab"):
            conf(**settings)


def test_the_end_of_turn_token_is_that_of_the_template(target, folder):
    assert find_end_of_turn_id(target.tokenizer, [0, 3]) == 0
    assert read_eos_ids(TargetConf(path=str(folder))) == target.eos_ids == [0]
