"""Sample answers in pieces: each token by where it came from, and not a character lost."""

from infer.measure.samples import MAX_SAMPLES, collect_samples, token_origins
from tests.support.made_report import prompt_result
from tests.support.tiny import tiny_target


def trace(number=0, category="code", ids=(1, 2), answer=(5, 6, 7, 8, 9, 10), **kwargs):
    prompt = {"id": f"{category}-{number}", "category": category, "ids": [*ids]}
    return prompt_result(prompt=prompt, depth=3, prefill_s=0.1, ids=[*answer], **kwargs)


def origins(**kwargs):
    return token_origins(trace(**kwargs).generation)


def test_the_first_token_is_the_targets_and_each_round_ends_with_its_own():
    said = origins(accepted=[2, 0, 3], drafted=[3, 3, 3], round_s=[0.1] * 3, answer=[9] * 8)
    short = ["target", "accepted", "accepted", "target", "target"]
    assert said == [*short, *["accepted"] * 3]  # the answer was cut there
    assert origins(accepted=[], drafted=[], round_s=[], answer=[9]) == ["target"]


def test_pieces_are_the_whole_text_in_runs_of_one_origin():
    target = tiny_target(seed=0)
    said = trace(accepted=[0, 2, 0], drafted=[3] * 3, round_s=[0.1] * 3)
    (sample,) = collect_samples(target, [said], draft="a")
    assert (sample.draft, sample.prompt_id, sample.mode) == ("a", "code-0", "tree")
    text = "".join(piece.text for piece in sample.pieces)
    assert text == target.tokenizer.decode([1, 2, *said.generation.ids])
    assert [piece.kind for piece in sample.pieces] == ["prompt", "target", "accepted", "target"]
    assert sample.pieces[2].text.split() == ["7", "8"]


def test_a_sample_is_the_first_prompt_of_its_category():
    said = [
        trace(number, category, accepted=[5], drafted=[5], round_s=[0.1])
        for category in "abcdef"
        for number in range(2)
    ]
    shown = collect_samples(tiny_target(seed=0), said, draft="a")
    assert [sample.prompt_id for sample in shown] == ["a-0", "b-0", "c-0", "d-0"]
    assert len(shown) == MAX_SAMPLES


class Bytes:
    """A tokenizer whose tokens are bytes: some end within a character."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


def test_a_character_of_several_tokens_is_shown_once():
    target = tiny_target(seed=0)
    target.tokenizer = Bytes()
    ids = list("\N{EURO SIGN}!".encode())  # three bytes and one
    said = trace(ids=b"1 ", answer=ids, accepted=[1, 0], drafted=[1, 1], round_s=[0.1] * 2)
    (sample,) = collect_samples(target, [said], draft="a")
    assert [(p.text, p.kind) for p in sample.pieces] == [
        ("1 ", "prompt"), ("\N{EURO SIGN}!", "target")
    ]  # fmt: skip
