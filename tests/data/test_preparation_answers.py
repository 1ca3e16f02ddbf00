"""A prepared folder with answers by the target is complete, counted, resumable and learned as recorded."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from conf.entry import compose
from data.answers.endpoint import ServedModel
from data.chat.tokenization import iter_documents
from data.config import DataConf, DataSource
from data.eval_prompts.held_out_files import rows_from_prepared
from data.preparation import build_filter_rules
from data.prepare import main
from data.prepare_config import PrepareConf
from data.preview import preview_data
from data.sources.prepared_rows import PreparedRow, read_prepared_rows
from models.io.errors import UserError
from models.targets.config import TargetConf
from tests.support.data.chat import asked, chat_target, save

ROWS = 12
TOOL = {"role": "tool", "content": "3"}  # a role that the target's chat template refuses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a target and conversations; some are too long or have an unknown role."""
    folder = tmp_path_factory.mktemp("answers")
    save(chat_target(), folder / "target")
    lines = [{"id": row.id, "messages": row.messages} for row in asked(ROWS)]
    lines.append({"id": "long", "messages": [{"role": "user", "content": "7 " * 250}]})
    lines.append({"id": "role", "messages": [{"role": "user", "content": "3"}, TOOL]})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def run_prepare(folder: Path, run: str, *changes: str) -> Path:
    conf = compose(
        "prepare",
        PrepareConf,
        [
            "mixture=one",
            f"mixture.sources.rows.path={folder / 'rows.jsonl'}",
            "mixture.exclude=[]",
            "target=demo",
            "target.name=tiny",
            f"target.path={folder / 'target'}",
            *"mixture.held_out=0.2 answers=target answers.max_new_tokens=8 device=cpu".split(),
            f"output_dir={folder}",
            f"run_name={run}",
            *changes,
        ],
    )
    main.__wrapped__(conf)
    return folder / run


@pytest.fixture(scope="module")
def prepared(folder):
    return run_prepare(folder, "single")


def test_every_row_is_answered_or_counted(prepared):
    report = json.loads((prepared / "report.json").read_text())
    train, held_out = list(read_prepared_rows(prepared)), list(read_prepared_rows(prepared, "held_out"))
    assert report["read"] == ROWS + 2 == len(train) + len(held_out) + report["dropped"]
    assert report["dropped_by_reason"] == {
        "a prompt of more than 248 tokens": 1,
        "rejected by the chat template: no such role": 1,
    }
    assert report["answers"]["rows"] == len(train)
    assert report["answers"]["tokens"] == sum(a.tokens for row in train for a in row.answers)
    assert sum(report["answers"]["finished"].values()) == sum(len(row.answers) for row in train)
    assert "Answers by the target" in (prepared / "report.md").read_text()
    assert not any(row.documents for row in held_out)  # prompts, for evaluation to answer
    assert not list(prepared.glob("answers-*"))


def test_a_folder_that_lacks_files_of_other_workers_is_refused(prepared, tmp_path):
    unfinished = tmp_path / "unfinished"
    shutil.copytree(prepared, unfinished)
    (file,) = unfinished.glob("train-*.parquet")
    file.rename(file.with_name("train-00000-of-00002.parquet"))
    with pytest.raises(
        UserError, match=r"^data.path: must be a finished folder .* with 1 of 2 files of train; let its"
    ):
        list(read_prepared_rows(unfinished))


@pytest.mark.parametrize(("split", "is_read"), [("train", False), ("train+held_out", True), ("held_out[:2]", True)])
def test_a_report_takes_prompts_that_preparation_held_out_unless_they_are_read(prepared, split, is_read):
    conf = DataConf(source=DataSource.prepared, path=str(prepared), split=split)
    rows = rows_from_prepared(conf, chat_target().tokenizer, 4, None, 10_000)
    assert (not rows) is is_read


def test_the_learned_tokens_are_the_generated_tokens(prepared, folder):
    """Masks come from the recorded spans, token by token."""
    conf = DataConf(source=DataSource.prepared, path=str(prepared))
    tokenizer = chat_target().tokenizer
    learned = list(iter_documents(conf, tokenizer, Counter()))
    recorded = [document for row in read_prepared_rows(prepared) for document in row.documents]
    assert [document.ids for document in learned] == [document.ids for document in recorded]
    for document, recorded_document in zip(learned, recorded, strict=True):
        inside = {t for begin, end in recorded_document.spans for t in range(begin, end)}
        assert document.answer == [t in inside for t in range(len(document.ids))]


def test_several_workers_give_the_answers_of_a_single_worker(prepared, folder):
    for worker in (1, 0):
        several = run_prepare(folder, "several", "workers=2", f"worker={worker}", "answers.batch=3")
    assert {row.id: row for row in read_prepared_rows(several)} == {row.id: row for row in read_prepared_rows(prepared)}
    single, parallel = (json.loads((run / "report.json").read_text()) for run in (prepared, several))
    assert single["answers"] == parallel["answers"]


def test_workers_select_the_same_rows_whatever_their_servers_take(folder):
    row = PreparedRow(id="", source="", messages=[{"role": "user", "content": "7 " * 200}])
    words = ["mixture=one", "mixture.sources.rows.path=x", "target.name=tiny", f"target.path={folder / 'target'}"]
    conf = compose("prepare", PrepareConf, [*words, "answers=target", "answers.max_new_tokens=8"])
    for context in (None, 256, 64):
        rules = build_filter_rules(conf, [], ServedModel(model="tiny", context=context))
        assert rules.check_prompt is not None
        rules.check_prompt(row)  # longer than some of the servers take, which is counted with their answers


def test_other_answers_need_another_folder(prepared, folder):
    with pytest.raises(UserError, match=r"^answers.temperature: must be 0.7 as in .*, got 0.8"):
        run_prepare(folder, "single", "answers.temperature=0.8")
    run_prepare(folder, "single", "answers.batch=5")


def test_answers_need_a_target(folder):
    with pytest.raises(UserError, match=r"^target: must be set for answers=target, got none"):
        compose("prepare", PrepareConf, ["mixture=one", "mixture.sources.rows.path=rows.jsonl", "answers=target"])
    with pytest.raises(UserError, match=r"^answers.url: must be an address for answers=endpoint"):
        compose("prepare", PrepareConf, ["answers=endpoint"])
    with pytest.raises(UserError, match=r"^parallel.tensor: must be 1 for answers=none, which loads no target, got 2"):
        compose("prepare", PrepareConf, ["answers=none", "parallel.tensor=2"])


def test_the_answers_are_those_of_a_named_target_and_not_for_another_tokenizer(prepared, folder):
    conf, target = DataConf(source=DataSource.prepared, path=str(prepared)), TargetConf(path=str(folder / "target"))
    assert preview_data(conf, target).kind == f"answers by {folder / 'target'}, recorded by data.prepare"
    other = folder / "other"
    shutil.copytree(folder / "target", other)
    content = json.loads((other / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["7"], words["9"] = words["9"], words["7"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"^data.path: must have token ids of the target's .* {folder / 'target'}"):
        preview_data(conf, TargetConf(path=str(other)))


def test_an_argument_that_the_chat_template_does_not_read_is_refused(folder):
    words = "+mixture.sources.rows.template.enable_thinkin=false"
    with pytest.raises(UserError, match=r"^mixture.sources.rows.template.enable_thinkin: must be an argument that the"):
        run_prepare(folder, "typo", words)
