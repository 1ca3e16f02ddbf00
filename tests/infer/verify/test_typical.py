"""Typical acceptance takes the longest path that is likely enough under the target; it is not lossless."""

import math
from dataclasses import dataclass

import pytest
import torch

from infer.config import EvaluationConf
from infer.engine.decode import Decoder
from infer.measure.eval_modes import build_evaluation_rule
from infer.verify.base import ScoredNodes
from infer.verify.config import Verification
from infer.verify.greedy_and_coupled import TypicalRule
from models.io.errors import UserError
from models.trees.growth import Proposal
from models.trees.sampling import warp_logits
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE
from tests.infer.engine.test_decode import SHAPES, cut_prompts, decode_each
from tests.support.models.tiny import chain, new_draft, tree

pytestmark = pytest.mark.no_shapes

MEDUSA = TypicalRule()  # epsilon 0.09, delta 0.3
EVERYTHING = TypicalRule(epsilon=1e-30, delta=1e-30)
WARM = SamplingConf(temperature=1.0, seed=2)


@dataclass(kw_only=True)
class ChosenTree(ScoredNodes):
    """A scored tree after whose nodes the target chooses given tokens."""

    chosen: torch.Tensor

    @property
    def choice(self):
        return self.chosen


def accept_typical_path(proposal, choice, warped, depth, *, typical):
    """Return the path that the rule accepts."""
    return typical.accept(proposal, ChosenTree(warped_logits=warped, chosen=choice), depth)


def draw_random_case(number: int):
    """Draw nine nodes, distinct among siblings; a third of each distribution is cut away."""
    numbers = torch.Generator().manual_seed(number)
    parents, ids, taken = [], [], {}
    for node in range(9):
        parent = int(torch.randint(-1, max(node, 1), (1,), generator=numbers)) if node else -1
        free = sorted(set(range(8)) - taken.setdefault(parent, set()))
        token = free[int(torch.randint(len(free), (1,), generator=numbers))]
        taken[parent].add(token)
        parents.append(parent)
        ids.append(token)
    warped = 2 * torch.randn(1, 10, 8, generator=numbers)
    warped[torch.rand(1, 10, 8, generator=numbers) < 0.33] = -math.inf
    warped[..., 0] = 0.5  # so that some of it is left
    choice = torch.randint(8, (1, 10), generator=numbers)
    return Proposal(ids=torch.tensor([ids]), parents=torch.tensor([parents])), warped, choice


def find_longest_path(proposal, warped, choice, typical):
    """Find emitted tokens and nodes by loops over paths."""
    ids, parents = proposal.ids[0].tolist(), proposal.parents[0].tolist()
    best = []
    for end in range(len(ids)):
        path, at = [], end
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        if len(path) > len(best) and all(
            is_typical(warped[0, parents[node] + 1].tolist(), ids[node], typical) for node in path
        ):
            best = path
    own = int(choice[0, best[-1] + 1 if best else 0])
    return [*(ids[node] for node in best), own], [0, *(node + 1 for node in best)]


def is_typical(logits, token, typical):
    total = sum(math.exp(value) for value in logits)
    probs = [math.exp(value) / total for value in logits]
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    return probs[token] >= min(typical.epsilon, typical.delta * math.exp(-entropy))


def test_random_trees_agree_with_loops_over_their_paths():
    lengths = []
    for number in range(300):
        proposal, warped, choice = draw_random_case(number)
        typical = [MEDUSA, TypicalRule(epsilon=0.3, delta=0.9), EVERYTHING][number % 3]
        accepted = accept_typical_path(proposal, choice, warped, 9, typical=typical)
        count = int(accepted.count)
        ids, nodes = find_longest_path(proposal, warped, choice, typical)
        assert accepted.ids[0, :count].tolist() == ids
        assert accepted.nodes[0].tolist() == nodes + [nodes[-1]] * (10 - count)
        lengths.append(count)
    assert set(lengths) >= {1, 2, 3, 4}


@pytest.mark.parametrize("shape", [*SHAPES, "none"])
def test_with_one_candidate_for_each_token_both_rules_decode_alike(target, learned, shape):
    draft, texts = learned
    shape = SHAPES.get(shape, NO_TREE)
    sampling = SamplingConf(temperature=1.0, top_k=1)
    exact, typical = (
        decode_each(
            Decoder(
                target, draft if shape.nodes else None, shape, sampling=sampling, slots=64, acceptance_rule=verification
            ),
            cut_prompts(texts),
        )
        for verification in (None, MEDUSA)
    )
    assert [(row.ids, row.accepted) for row in typical] == [(r.ids, r.accepted) for r in exact]


def measure_tau(target, draft, shape, prompts, verification):
    hot = SamplingConf(temperature=3.0, seed=2)
    decoder = Decoder(target, draft, shape, sampling=hot, slots=64, acceptance_rule=verification)
    accepted = [count for row in decode_each(decoder, prompts) for count in row.accepted]
    return 1 + sum(accepted) / len(accepted)


def test_typical_verification_accepts_no_less_than_exact_verification(target, learned):
    prompts = cut_prompts(learned[1])[::2]
    for draft in (new_draft(target), learned[0]):  # the first has learned nothing
        exact, typical = (measure_tau(target, draft, tree(), prompts, rule) for rule in (None, MEDUSA))
        assert 1 < exact < typical
        assert measure_tau(target, draft, chain(3), prompts, EVERYTHING) == 4


def test_every_emitted_token_is_typical_or_the_targets_own(target, learned):
    """The answer is read again without a cache, which would show a key moved to a wrong slot."""
    sampling = SamplingConf(temperature=2.0, top_p=0.9, seed=5)
    prompts = cut_prompts(learned[1])[:3]
    plain = Decoder(target, sampling=sampling, slots=64)
    for shape in SHAPES.values():
        decoder = Decoder(target, learned[0], shape, sampling=sampling, slots=64, acceptance_rule=MEDUSA)
        not_own = 0
        for row, generation in enumerate(decode_each(decoder, prompts)):
            logits = target.model(torch.tensor([prompts[row] + generation.ids])).logits[0]
            warped = warp_logits(sampling, logits[len(prompts[row]) - 1 :])
            for position, (_, scores) in enumerate(plain.force_tokens(prompts[row], row, generation.ids)):
                if int(scores.argmax()) != generation.ids[position]:
                    assert is_typical(warped[position].tolist(), generation.ids[position], MEDUSA)
                    not_own += 1
        assert not_own > 0


def test_typical_verification_is_refused_for_greedy_decoding():
    message = (
        r"evaluation\.verification: typical needs evaluation\.sampling\.temperature above 0, "
        r"got 0\.0; raise it or take greedy"
    )
    with pytest.raises(UserError, match=message):
        EvaluationConf(verification=Verification.typical)


def test_the_configuration_chooses_the_rule_and_its_thresholds():
    assert build_evaluation_rule(EvaluationConf(sampling=WARM)).name == "coupled"
    conf = EvaluationConf(sampling=WARM, verification=Verification.typical, typical_epsilon=0.2, typical_delta=0.5)
    assert build_evaluation_rule(conf) == TypicalRule(epsilon=0.2, delta=0.5)
    for key in ("typical_epsilon", "typical_delta"):
        with pytest.raises(UserError, match=rf"evaluation\.{key}: must be positive, got 0\.0"):
            EvaluationConf(**{key: 0.0})
