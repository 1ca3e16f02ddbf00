"""Sample answers in pieces: each token by where it came from, and not a character lost."""

from data.eval_prompts.prompts import EvalPrompt
from infer.measure.records import PromptResult
from infer.measure.samples import MAX_SAMPLES, collect_samples, token_origins
from tests.support.tiny import tiny_target


def prompt(number, category="code"):
    return EvalPrompt(id=f"{category}-{number}", category=category, ids=[1, 2])


def trace(**kwargs):
    usual = {"prompt_id": "code-0", "category": "code", "ids": [5, 6, 7, 8, 9, 10]}
    return PromptResult(**usual | {"depth": 3, "prefill_s": 0.1} | kwargs)


def test_the_first_token_is_the_targets_and_each_round_ends_with_its_own():
    said = trace(accepted=[2, 0, 3], drafted=[3, 3, 3], round_s=[0.1] * 3, ids=[9] * 8)
    short = ["target", "accepted", "accepted", "target", "target"]
    assert list(token_origins(said)) == [*short, *["accepted"] * 3]  # the answer was cut there
    assert list(token_origins(trace(accepted=[], drafted=[], round_s=[], ids=[9]))) == ["target"]


def test_pieces_are_the_whole_text_in_runs_of_one_origin():
    target = tiny_target(seed=0)
    said = trace(accepted=[0, 2, 0], drafted=[3] * 3, round_s=[0.1] * 3)
    (sample,) = collect_samples(target, [prompt(0)], [said], mode="tree")
    assert (sample.prompt_id, sample.mode) == ("code-0", "tree")
    text = "".join(piece.text for piece in sample.pieces)
    assert text == target.tokenizer.decode([1, 2, *said.ids])
    assert [piece.kind for piece in sample.pieces] == ["prompt", "target", "accepted", "target"]
    assert sample.pieces[2].text.split() == ["7", "8"]


def test_a_sample_is_the_first_prompt_of_its_category():
    prompts = [prompt(number, category) for category in "abcdef" for number in range(2)]
    said = [trace(prompt_id=p.id, accepted=[5], drafted=[5], round_s=[0.1]) for p in prompts]
    shown = collect_samples(tiny_target(seed=0), prompts, said, mode="tree")
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
    said = trace(ids=ids, accepted=[1, 0], drafted=[1, 1], round_s=[0.1] * 2)
    start = EvalPrompt(id="code-0", category="code", ids=list(b"1 "))
    (sample,) = collect_samples(target, [start], [said], mode="tree")
    assert [(p.text, p.kind) for p in sample.pieces] == [
        ("1 ", "prompt"), ("\N{EURO SIGN}!", "target")
    ]  # fmt: skip
