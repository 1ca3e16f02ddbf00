"""The comparison by category counts every round once, and batches change no answer."""

from data.eval_prompts.prompts import EvalPrompt
from scripts.engines.groups import Run, build_table, decode_in_batches
from tests.support.models.tiny import mixed


def test_a_batch_emits_what_prompts_emit_alone(target, learned, tmp_path):
    draft, texts = learned
    draft.save(tmp_path, target)
    prompts = [
        EvalPrompt(id=f"q{number}", category=category, ids=text[:5])
        for number, (text, category) in enumerate(zip(texts, ["qa", "rag", "qa"], strict=False))
    ]
    alone, together = (decode_in_batches(target, [tmp_path], mixed(), prompts, 6, batch) for batch in (1, 3))
    assert together == alone
    assert {run.contender for run in alone} == {
        "n-gram, ours, chain, 4",
        "eagle3, ours, chain, 4",
        "eagle3, ours, tree, 10",
    }


def test_tokens_a_round_are_those_of_all_rounds_and_positions_count_accepted_prefixes():
    rounds = {"qa": [[4, 0], [2]], "rag": [[1, 1, 1]]}
    runs = [
        Run(category=category, contender="ours, chain", ids=[], accepted=accepted)
        for category, prompts in rounds.items()
        for accepted in prompts
    ]
    assert [[row[0], row[1][:4], row[2]] for row in build_table(runs).rows] == [
        ["qa", "3.00", "67 67 33 33"],
        ["rag", "2.00", "100"],
        ["all", "2.50", "83 33 17 17"],
    ]
