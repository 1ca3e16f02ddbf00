"""What the whole runtime samples has the target's own distribution, from round to round.

Five tokens of thousands of row ids, decoded as one batch. The first comes from the prompt's pass;
a round emits three at most, so that the fifth is always of a second round or a later one.
"""

import pytest
import torch
from scipy.stats import chisquare

from infer.config import Verification
from infer.engine import steps
from infer.engine.decode import Decoder
from infer.verify.rules import build_acceptance_rule
from models.trees.sampling import warp_logits
from models.trees.sampling_config import SamplingConf
from tests.support.models.agreeing import METHODS, SHAPES, WORDS, noised

pytestmark = pytest.mark.no_shapes

PROMPT = [5, 9, 2]
NEW = 5
ROWS = 2000
FEW, MANY = 300, 6000
WRONG = 0.4  # noise on the weights of a draft that seldom agrees
LEAST = 1e-4  # of each p-value; two hundred of them are looked at
TEMPERATURES = [0.7, 1.0, 1.3]
RATIOS = [("rejection", shape) for shape in ("chain", "static", "dynamic", "dynamic, copied")]
RATIOS += [("block", "chain")]
PROVEN = [(*ratio, method) for ratio in RATIOS for method in METHODS]
PROVEN += [("rejection", "product", "medusa")]  # of independent heads
EVERY_TRIAL = [(*proven, temperature) for proven in PROVEN for temperature in TEMPERATURES]
QUICK_TRIALS = {  # each rule and shape, each draft and each temperature
    ("rejection", "chain", "eagle3", 0.7),
    ("rejection", "static", "draft model", 1.0),
    ("rejection", "dynamic", "eagle3, reduced", 1.3),
    ("rejection", "dynamic, copied", "eagle3", 1.0),
    ("rejection", "product", "medusa", 1.3),
    ("block", "chain", "draft model", 1.0),
    ("block", "chain", "medusa", 0.7),
}


TRIALS = [trial if trial in QUICK_TRIALS else pytest.param(*trial, marks=pytest.mark.system) for trial in EVERY_TRIAL]


@pytest.fixture(scope="module")
def behind(small):
    """Logits behind the prompt and behind each continuation of it: [words] * (0 .. 4), words."""
    every = torch.cartesian_prod(*[torch.arange(WORDS)] * (NEW - 1))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(every), -1), every], 1)
    with torch.no_grad():
        logits = torch.cat([small.model(part).logits for part in ids.split(4096)])
    return [logits[:: WORDS ** (NEW - 1 - depth), depth - NEW].reshape([WORDS] * (depth + 1)) for depth in range(NEW)]


def expected(behind, sampling):
    """The joint distribution of all five tokens."""
    rule = sampling
    joint = torch.ones((), dtype=torch.float64)
    for logits in behind:
        joint = joint[..., None] * warp_logits(rule, logits).double().softmax(-1)
    return joint


def sample(target, draft, rule, shape, sampling, rows=ROWS):
    """Emitted tokens, and the share of rounds that accepted something."""
    decoder = Decoder(
        target,
        draft,
        SHAPES[shape],
        sampling=sampling,
        slots=len(PROMPT) + NEW,
        batch=rows,
        acceptance_rule=build_acceptance_rule(Verification(rule), sampling),
    )
    done = decoder.decode([PROMPT] * rows, row_ids=list(range(rows)), max_new_tokens=NEW)
    accepted = torch.tensor([min(count, 1) for row in done for count in row.accepted])
    return torch.tensor([row.ids for row in done]), float(accepted.float().mean())


def one_by_one(target, sampling):
    decoder = Decoder(target, sampling=sampling, slots=len(PROMPT) + NEW, batch=ROWS)
    done = decoder.decode([PROMPT] * ROWS, row_ids=list(range(ROWS)), max_new_tokens=NEW)
    return torch.tensor([row.ids for row in done])


def p_value(ids, joint, places):
    """Of the tokens at these places together; what is rare is counted as one."""
    wanted = joint.sum([place for place in range(NEW) if place not in places]).flatten()
    powers = WORDS ** torch.arange(len(places) - 1, -1, -1)
    seen = (ids[:, places] * powers).sum(1).bincount(minlength=len(wanted)).double()
    assert seen[wanted == 0].sum() == 0
    likely = wanted * len(ids) >= 5
    seen, wanted = (torch.cat([part[likely], part[~likely].sum()[None]]) for part in (seen, wanted))
    some = wanted > 0
    assert some.sum() > 20
    return chisquare(seen[some], wanted[some] / wanted.sum() * seen.sum()).pvalue


def p_values(ids, joint):
    """Of the first rounds, of the later ones, and of the two against each other."""
    return [p_value(ids, joint, places) for places in ([1, 2, 3], [2, 3, 4], [1, 4])]


@pytest.mark.parametrize(("rule", "shape", "method", "temperature"), TRIALS)
def test_ratio_tests_sample_the_target(small, drafts, behind, rule, shape, method, temperature):
    sampling = SamplingConf(temperature=temperature, seed=11)
    ids, accepted = sample(small, drafts[method], rule, shape, sampling)
    found = p_values(ids, expected(behind, sampling))
    assert 0.1 < accepted < 0.97
    assert min(found) > LEAST, found


@pytest.mark.parametrize("temperature", [0.7, *(pytest.param(t, marks=pytest.mark.system) for t in (1.0, 1.3))])
def test_coupled_rows_sample_the_target_and_are_those_of_their_key(small, drafts, behind, temperature):
    """Every tree and draft emits the rows of one-token-at-a-time decoding: so one test of them."""
    sampling = SamplingConf(temperature=temperature, seed=11)
    plain = one_by_one(small, sampling)
    found = p_values(plain, expected(behind, sampling))
    assert min(found) > LEAST, found
    for method in METHODS:
        for shape in SHAPES:
            ids, accepted = sample(small, drafts[method], "coupled", shape, sampling, FEW)
            assert torch.equal(ids, plain[:FEW]), (method, shape)
            assert 0.1 < accepted < 0.98, (method, shape)


@pytest.mark.parametrize(("rule", "shape"), [("coupled", "dynamic"), *RATIOS])
def test_cut_distributions_are_sampled_too(small, drafts, behind, rule, shape):
    sampling = SamplingConf(temperature=1.3, top_k=7, top_p=0.9, min_p=0.1, seed=11)
    ids, accepted = sample(small, drafts["eagle3"], rule, shape, sampling)
    found = p_values(ids, expected(behind, sampling))
    assert 0.1 < accepted < 0.97
    assert min(found) > LEAST, found


@pytest.mark.parametrize(
    "use",
    [
        steps.COIN_NOISE,
        pytest.param(steps.DRAFT_NOISE, marks=pytest.mark.system),
        pytest.param(steps.RESIDUAL_NOISE, marks=pytest.mark.system),
    ],
)
def test_chance_that_comes_back_in_a_later_round_is_caught(small, behind, monkeypatch, use):
    """The same draws, coins or residual noise in every round; of a draft that is often wrong."""
    draft, sampling = noised(small, noise=WRONG), SamplingConf(temperature=1.0, seed=11)
    joint = expected(behind, sampling)
    ids, _ = sample(small, draft, "rejection", "chain", sampling, MANY)
    assert min(p_values(ids, joint)) > LEAST

    def forgetful(honest):
        def keyed(seed, row_ids, turn, *places):
            return honest(seed, row_ids, 0 if seed >> 48 == use else turn, *places)

        return keyed

    for name in ("gumbel_noise", "uniform_noise"):
        monkeypatch.setattr(steps, name, forgetful(getattr(steps, name)))
    ids, _ = sample(small, draft, "rejection", "chain", sampling, MANY)
    found = p_values(ids, joint)
    assert min(found) < 1e-6, found
