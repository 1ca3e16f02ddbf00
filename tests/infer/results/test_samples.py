"""Sample answers are split into pieces by the origin of each token, without the loss of a character."""

from infer.results.samples import MAX_SAMPLES, collect_samples, list_accepted
from tests.support.models.tiny import demo_target, tiny_tokenizer
from tests.support.reports.sample_reports import prompt_result


def build_result(number=0, category="code", ids=(1, 2), answer=(5, 6, 7, 8, 9, 10), **kwargs):
    prompt = {"id": f"{category}-{number}", "category": category, "ids": [*ids]}
    return prompt_result(prompt=prompt, ids=[*answer], **kwargs)


def test_the_first_token_and_the_last_of_each_round_are_the_targets():
    answer = build_result(accepted=[2, 0, 3], answer=[9] * 8).generation
    short = [False, True, True, False, False]
    assert list_accepted(answer) == [*short, *[True] * 3]  # the answer was cut there
    assert list_accepted(build_result(accepted=[], answer=[9]).generation) == [False]


def test_pieces_are_the_whole_text_in_runs_of_one_origin():
    tokenizer, prompt_result = tiny_tokenizer(), build_result(accepted=[0, 2, 0])
    (sample,) = collect_samples(tokenizer, [prompt_result])
    assert sample.prompt_id == "code-0"
    text = "".join(piece.text for piece in sample.pieces)
    assert text == tokenizer.decode([1, 2, *prompt_result.generation.ids])
    assert [piece.kind for piece in sample.pieces] == ["prompt", "target", "accepted", "target"]
    assert sample.pieces[2].text.split() == ["7", "8"]


def test_a_sample_is_the_first_prompt_of_its_category():
    results = [build_result(number, category, accepted=[5]) for category in "abcdef" for number in range(2)]
    samples = collect_samples(tiny_tokenizer(), results)
    assert [sample.prompt_id for sample in samples] == ["a-0", "b-0", "c-0", "d-0"]
    assert len(samples) == MAX_SAMPLES


def test_a_character_of_several_tokens_belongs_to_the_last_of_them():
    tokenizer = demo_target().tokenizer
    ids = tokenizer("\N{CJK UNIFIED IDEOGRAPH-65E5}")["input_ids"]
    assert len(ids) == 3
    prompt_result = build_result(ids=tokenizer("1 ")["input_ids"], answer=ids, accepted=[1])
    (sample,) = collect_samples(tokenizer, [prompt_result])
    pieces = [(piece.text, piece.kind) for piece in sample.pieces]
    assert pieces == [("1 ", "prompt"), ("\N{CJK UNIFIED IDEOGRAPH-65E5}", "target")]
