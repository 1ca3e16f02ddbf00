"""Answers end exactly where decoding one token at a time would: EOS, stop strings and limits.

Every case is decoded by a draft that has learned the texts, so that most ends fall inside accepted
paths, and compared with two others: a plain loop over the whole answer, and transformers.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from infer.engine.decode import Decoder
from infer.engine.requests import StopCriteria
from models.io.errors import UserError
from models.trees.sampling_config import SamplingConf
from tests.support.models.tiny import VOCAB, byte_fallback_ids, byte_fallback_tokenizer, chain, static, tree

pytestmark = pytest.mark.no_shapes

NEW, SLOTS, ROWS = 24, 32, 3
GREEDY = SamplingConf()
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]  # sixty, none inside two others


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The token ids, strings and number of tokens that end the answers of a case."""

    eos: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    limit: int = NEW


def build_byte_tokenizer(changed: dict[int, bytes]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a syllable a token, except those in `changed`: they may be parts of a character."""
    pieces = dict(enumerate([b"<end>", *(s.encode() for s in SYLLABLES)])) | changed
    letters = {byte: BYTES.pre_tokenize_str(chr(byte))[0][0] for byte in range(128)}
    for high in range(0xC2, 0xF4):  # two letters or more: those of the bytes of one character
        size = 2 if high < 0xE0 else 3 if high < 0xF0 else 4
        low = 0xA0 if size > 2 else 0x80
        for byte in range(low, 0xC0):
            char = bytes([high, byte, *[0x80] * (size - 2)]).decode(errors="ignore")
            if char:
                letters[high], letters[byte] = BYTES.pre_tokenize_str(char)[0][0][:2]
    letters[0x80], letters[0x82] = (BYTES.pre_tokenize_str(c)[0][0][1] for c in "\u0080\u0082")
    vocabulary = {"".join(letters[b] for b in piece): i for i, piece in pieces.items()}
    assert len(vocabulary) == VOCAB
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = BYTES, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class Runs:
    """Texts of the target, their answers without any end, and how rounds cut them into accepted paths."""

    def __init__(self, target, learned):
        self.draft, texts = learned
        # Texts that loop come last: an end can be told from its neighbors only where tokens differ.
        texts = sorted(texts, key=lambda text: -len(set(text[4:28])))[:ROWS]
        self.prompts = [text[:4] for text in texts]
        self.target = copy.copy(target)
        self.target.tokenizer = build_byte_tokenizer({})
        self.answers = [text[4 : 4 + NEW] for text in texts]
        self.decoders = [self.build_decoder(shape) for shape in (chain(4), tree())]
        free = self.decoders[0].decode(self.prompts, row_ids=[0, 1, 2], max_new_tokens=NEW)
        assert [row.ids for row in free] == self.answers
        self.inside = set()  # positions of the first answer behind which the same round goes on
        position = 1
        for count in free[0].accepted:
            self.inside |= set(range(position, position + count))
            position += count + 1

    def build_decoder(self, shape):
        return Decoder(self.target, self.draft, shape, sampling=GREEDY, slots=SLOTS, batch=ROWS)

    def set_spelling(self, changed):
        """Change the tokenizer; the target's ids stay."""
        self.target.tokenizer = build_byte_tokenizer(changed)

    def decode_text(self, ids):
        return self.target.tokenizer.decode(ids)

    def cut_answer(self, ids, ends):
        """Return the answer up to its first end, looked for behind each of its tokens."""
        for count in range(1, ends.limit + 1):
            text = self.decode_text(ids[:count])
            if ids[count - 1] in ends.eos or any(string in text for string in ends.strings):
                return ids[:count]
        return ids[: ends.limit]

    def check_answers(self, ends, *, as_transformers=True):
        """Check all rows in a batch, with both trees; return the length of the first answer."""
        expected = [self.cut_answer(ids, ends) for ids in self.answers]
        for decoder in self.decoders:
            generations = decoder.decode(
                self.prompts, row_ids=[0, 1, 2], max_new_tokens=ends.limit, eos_ids=list(ends.eos), stop=ends.strings
            )
            assert [row.ids for row in generations] == expected
        if as_transformers:
            assert self.generate_with_transformers(ends) == expected[0]
        return len(expected[0])

    def generate_with_transformers(self, ends):
        more = {"stop_strings": list(ends.strings), "tokenizer": self.target.tokenizer}
        prompt = torch.tensor([self.prompts[0]])
        out = self.target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=ends.limit,
            do_sample=False,
            eos_token_id=list(ends.eos) or None,
            pad_token_id=0,
            **(more if ends.strings else {}),
        )
        return out[0, prompt.shape[1] :].tolist()


@pytest.fixture(scope="module")
def shared_runs(target, learned):
    return Runs(target, learned)


@pytest.fixture
def runs(shared_runs):
    shared_runs.set_spelling({})
    return shared_runs


def build_stop_string(runs, position, kind):
    """Return a string that the token at `position` completes."""
    before, piece = runs.decode_text(runs.answers[0][:position]), runs.decode_text([runs.answers[0][position]])
    return {
        "a token": piece,
        "its beginning": piece[:1],
        "across two tokens": before[-1:] + piece,
        "ending inside": before[-2:] + piece[:1],
        "over three tokens": before[-3:] + piece[:1],
        "over four tokens": before[-5:] + piece,
    }[kind]


SPANS = ["a token", "its beginning", "across two tokens", "ending inside", "over three tokens", "over four tokens"]
POSITIONS = [5, 6, 8, 9]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", SPANS)
def test_a_stop_string_ends_with_the_token_that_completes_it(runs, kind, position):
    stop = build_stop_string(runs, position, kind)
    assert runs.check_answers(Ends(strings=(stop,))) <= position + 1


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 5, 6, 9])
def test_an_eos_ends_the_answer_and_stays_in_it(runs, position):
    assert runs.check_answers(Ends(eos=(runs.answers[0][position],))) <= position + 1


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6])
def test_a_limit_cuts_a_path(runs, limit):
    assert runs.check_answers(Ends(limit=limit)) == limit


@pytest.mark.parametrize(("first", "second"), [(5, 6), (6, 5), (5, 5), (4, 9)])
def test_the_sooner_of_two_stop_strings_ends_the_answer(runs, first, second):
    strings = build_stop_string(runs, first, "over three tokens"), build_stop_string(runs, second, "across two tokens")
    assert runs.check_answers(Ends(strings=strings)) <= min(first, second) + 1


@pytest.mark.parametrize(("eos", "position"), [(5, 6), (6, 5), (5, 5), (4, 7), (7, 4)])
def test_the_sooner_of_an_eos_and_a_stop_string_ends_the_answer(runs, eos, position):
    ends = Ends(eos=(runs.answers[0][eos],), strings=(build_stop_string(runs, position, "ending inside"),))
    assert runs.check_answers(ends) <= min(eos, position) + 1


@pytest.mark.parametrize(("limit", "position"), [(5, 4), (5, 5), (6, 4), (1, 4), (7, 7)])
def test_the_sooner_of_a_limit_and_another_end_ends_the_answer(runs, limit, position):
    stop = build_stop_string(runs, position, "over three tokens")
    assert runs.check_answers(Ends(limit=limit, strings=(stop,))) <= min(limit, position + 1)
    assert runs.check_answers(Ends(limit=limit, eos=(runs.answers[0][position],))) <= min(limit, position + 1)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("char", ["\u00e9", "\u20ac"], ids=["two bytes", "three bytes"])
def test_a_character_split_over_tokens_counts_when_it_is_complete(runs, char, number):
    """Each of its bytes is a token. transformers refuses some of these strings."""
    parts = char.encode()
    ends = (runs.answers[0][position - len(parts) + 1 : position + 1] for position in range(NEW))
    distinct = [p for p, tokens in enumerate(ends) if len(set(tokens)) == len(parts)]
    position = [p for p in distinct if p in runs.inside][number]
    tokens = runs.answers[0][position - len(parts) + 1 : position + 1]
    runs.set_spelling({token: bytes([part]) for token, part in zip(tokens, parts, strict=True)})
    assert char in runs.decode_text(runs.answers[0][: position + 1])
    assert runs.check_answers(Ends(strings=(char,)), as_transformers=False) <= position + 1
    following = runs.decode_text([runs.answers[0][position + 1]])
    runs.check_answers(Ends(strings=(char + following,)), as_transformers=False)


@pytest.mark.parametrize("end", ["\N{GRINNING FACE}".encode(), b"\xf0\x9f", b""])
def test_a_stop_string_before_the_bytes_of_a_character_is_found_whatever_a_round_accepts(end):
    tokenizer = byte_fallback_tokenizer(["a", "b"])
    criteria = StopCriteria(stop_strings=("\n",), detokenize=tokenizer.decode)
    ids = byte_fallback_ids(tokenizer, "a", b"\n" + end, "b")
    for accepted in range(2, len(ids) + 1):
        assert criteria.find_end(ids[:accepted], num_checked=1, max_new_tokens=NEW) == 2


def test_half_a_character_is_no_stop_string(runs):
    token = runs.answers[0][5]
    runs.set_spelling({token: "\u00e9".encode()[:1]})
    assert runs.check_answers(Ends(strings=("\u00e9",)), as_transformers=False) == NEW


def test_a_stop_string_of_the_prompt_does_not_count(runs):
    """Neither does a string that begins in the prompt; transformers would take it."""
    prompt, answer = runs.decode_text(runs.prompts[0]), runs.decode_text(runs.answers[0])
    inside, across = prompt[:5], prompt[-3:] + answer[:1]
    assert inside not in answer
    assert across not in answer
    assert runs.check_answers(Ends(strings=(inside,))) == NEW
    assert runs.check_answers(Ends(strings=(across,)), as_transformers=False) == NEW


def test_most_of_these_ends_fall_inside_accepted_paths(runs):
    assert 2 * len(set(POSITIONS) & runs.inside) > len(POSITIONS)
    assert len(runs.inside & set(range(1, 10))) >= 5


@pytest.mark.parametrize("limit", [1, 2, 9])
@pytest.mark.parametrize("shape", [chain(4), tree(), static()], ids=["chain", "dynamic", "static"])
def test_a_prompt_at_the_context_limit_is_answered(runs, shape, limit):
    """A round's nodes take no slots from the text."""
    text = (runs.prompts[0] + runs.answers[0])[: SLOTS - limit]
    prompt = (text * 2)[: SLOTS - limit]
    speculative, plain = (
        Decoder(runs.target, *more, sampling=GREEDY, slots=SLOTS).decode([prompt], row_ids=[0], max_new_tokens=limit)[0]
        for more in ((runs.draft, shape), ())
    )
    assert len(speculative.ids) == limit
    assert speculative.ids == plain.ids


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], 4, r"^evaluation\.prompts: every prompt needs a token, got none for number 1; "),
        ([5] * 29, 4, r"^evaluation\.max_new_tokens: .* must fit in 32 tokens, got 29 \+ 4; "),
    ],
)
def test_prompts_without_tokens_or_room_are_refused_in_one_line(runs, prompt, limit, message):
    with pytest.raises(UserError, match=message) as refused:
        runs.decoders[0].decode([[5, 6], prompt], row_ids=[0, 1], max_new_tokens=limit)
    assert "\n" not in str(refused.value)
