"""The coverage of a draft vocabulary is counted on answer tokens, in all, by category and by language."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.packing.documents import Documents
from data.packing.pack import pack_documents
from data.sources.rows import TokenizedDocument, document_from_pair
from data.vocabulary.counts import MAX_TABLE_GROUPS, build_coverage_table, count_answer_tokens, sizes_around
from data.vocabulary.draft_vocab import choose_kept_ids, required_token_ids
from tests.support.models.tiny import byte_tokenizer, new_draft
from train.rows.row_facts import choose_vocabulary

TEXTS = {  # one sentence in five languages
    "en": "The committee will meet on Thursday because the weather has been so bad this week.",
    "de": "Der Ausschuss trifft sich am Donnerstag, weil das Wetter diese Woche so schlecht war.",
    "fr": "Le comit\u00e9 se r\u00e9unira jeudi parce que le temps \u00e9tait mauvais.",
    "es": "El comite se reunira el jueves porque el tiempo ha sido muy malo esta semana.",
    "zh": "\u56e0\u4e3a\u8fd9\u4e2a\u661f\u671f\u5929\u6c14\u975e\u5e38\u4e0d\u597d"
    "\u59d4\u5458\u4f1a\u51b3\u5b9a\u661f\u671f\u56db\u5f00\u4f1a",
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(["<end>"], template=None, eos_token="<end>")


def build_document(tokenizer, text, *, prompt="Say it!", **labels):
    question, answer = tokenizer([prompt, text])["input_ids"]
    piece = document_from_pair(question, [*answer, tokenizer.eos_token_id])
    return TokenizedDocument(ids=piece.ids, answer=piece.answer, **labels)


@pytest.fixture(scope="module")
def documents(tokenizer):
    """Return a document of each language in each of two categories."""
    return Documents.from_documents(
        build_document(tokenizer, text, category=category) for text in TEXTS.values() for category in ("chat", "mail")
    )


def test_answers_alone_are_counted_and_every_token_once_a_kind(documents, tokenizer):
    counts = count_answer_tokens(documents, len(tokenizer), tokenizer)
    answers = documents.ids[documents.answer]
    assert counts.total.tolist() == np.bincount(answers, minlength=len(tokenizer)).tolist()
    by_language = np.sum(list(counts.languages.values()), axis=0)
    assert counts.total.tolist() == by_language.tolist()
    assert counts.categories["chat"].sum() * 2 == counts.total.sum()


def test_each_language_is_detected_from_its_text(documents, tokenizer):
    counts = count_answer_tokens(documents, len(tokenizer), tokenizer)
    assert set(counts.languages) == set(TEXTS)
    for language, text in TEXTS.items():
        answer = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        expected = 2 * np.bincount(answer, minlength=len(tokenizer))
        assert counts.languages[language].tolist() == expected.tolist()


def test_the_language_that_a_row_names_is_used(tokenizer):
    labeled = build_document(tokenizer, TEXTS["de"], language="nds")
    assert set(count_answer_tokens([labeled], len(tokenizer), tokenizer).languages) == {"nds"}


def test_the_shares_of_the_groups_grow_with_the_vocabulary_to_all_of_their_tokens(documents, tokenizer):
    counts = count_answer_tokens(documents, len(tokenizer), tokenizer)
    always = required_token_ids(tokenizer)
    _, *rows = build_coverage_table(counts, [len(always), len(always) + 4, len(tokenizer)], always)
    sizes = {name: int(count) for name, count, *_ in rows}
    shares = {name: [float(share.rstrip("%")) for share in shares] for name, _, *shares in rows}
    for kind in ("category", "language"):
        parts = [name for name in shares if name.startswith(kind)]
        for index in range(3):
            tokens = sum(shares[name][index] * sizes[name] for name in parts)
            assert tokens == pytest.approx(shares["all"][index] * sizes["all"], rel=1e-3)
    least, more, most = shares["language en"]
    assert least < more < most == shares["all"][2] == 100.0


def test_a_document_without_an_answer_forms_no_group(tokenizer):
    silent = [TokenizedDocument(ids=ids, answer=[False] * len(ids), category="none") for ids in ([], [1])]
    counts = count_answer_tokens([*silent, build_document(tokenizer, TEXTS["en"])], len(tokenizer), tokenizer)
    assert set(counts.groups) == {"all", "category unnamed", "language en"}


def test_a_table_has_the_largest_groups_and_the_others_together(tokenizer):
    pieces = [
        build_document(tokenizer, TEXTS["en"] * (40 - index), category=f"c{index:02d}", language="en")
        for index in range(MAX_TABLE_GROUPS + 3)
    ]
    rows = build_coverage_table(
        count_answer_tokens(pieces, len(tokenizer), tokenizer), [300], required_token_ids(tokenizer)
    )
    names = [row[0] for row in rows[1:]]
    assert names[: MAX_TABLE_GROUPS + 1] == ["all", *(f"category c{index:02d}" for index in range(MAX_TABLE_GROUPS))]
    assert names[MAX_TABLE_GROUPS + 1 :] == ["category: 3 others", "language en"]


def test_the_sizes_of_the_table_are_those_that_the_vocabulary_allows():
    assert sizes_around(512, 300, 4096) == [512, 1024]
    assert sizes_around(4096, 300, 4096) == [2048, 4096]


def test_a_run_says_what_its_map_covers_and_keeps_it_in_the_checkpoint_alone(target, tmp_path, capsys):
    draft = new_draft(target, vocab_size=20)
    texts = [[1, 2, 3, 4, *range(10, 30)], [1, 2, *range(10, 20)]]
    documents = Documents.from_documents(
        TokenizedDocument(ids=ids, answer=[index > 1 for index in range(len(ids))], category=category)
        for ids, category in zip(texts, ("long", "short"), strict=True)
    )
    choose_vocabulary(draft, target, pack_documents(documents, 24)[0], tmp_path)
    printed = capsys.readouterr().out.splitlines()
    page = (tmp_path / "vocabulary.md").read_text().splitlines()
    assert page[0] == "| answer tokens | count | 10 kept | 20 kept | 40 kept |"
    assert [line.split(" | ")[0] for line in page[2:]] == [
        "| all",
        "| category long",
        "| category short",
        "| language und",
    ]
    cells = [line.strip("| ").split(" | ") for line in (page[0], *page[2:])]
    assert [line.split() for line in printed] == [" ".join(row).split() for row in cells]
    draft.save(tmp_path / "checkpoint", target)
    saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
    answers = documents.ids[documents.answer]
    counted = torch.from_numpy(np.bincount(answers, minlength=target.vocab_size))
    expected = choose_kept_ids(counted, 20, required_token_ids(target.tokenizer))
    assert torch.equal(saved["d2t"] + torch.arange(20), expected)
    assert saved["t2d"].nonzero()[:, 0].tolist() == expected.tolist()
