"""Sample five tokens of many rows with the small target, and compare them with its distribution."""

import torch
from scipy.stats import chisquare
from torch import Tensor

from infer.engine.decode import Decoder, build_acceptance_rule
from infer.verify.config import Verification
from models.targets.target import Target
from models.trees.sampling import warp_logits
from tests.support.decoding.agreeing import SHAPES, WORDS

PROMPT = [5, 9, 2]
NEW = 5
ROWS = 2000
LEAST = 1e-4  # bound of each p-value; there are about two hundred


def compute_logits_behind(target: Target) -> list[Tensor]:
    """Return the logits behind the prompt and behind each continuation of it: [words] * (0 .. 4), words."""
    every = torch.cartesian_prod(*[torch.arange(WORDS)] * (NEW - 1))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(every), -1), every], 1)
    with torch.no_grad():
        logits = torch.cat([target.model(part).logits for part in ids.split(4096)])
    return [logits[:: WORDS ** (NEW - 1 - depth), depth - NEW].reshape([WORDS] * (depth + 1)) for depth in range(NEW)]


def compute_joint_distribution(behind, sampling):
    """Return the joint distribution of all five tokens."""
    joint = torch.ones((), dtype=torch.float64)
    for logits in behind:
        joint = joint[..., None] * warp_logits(sampling, logits).double().softmax(-1)
    return joint


def sample_tokens(target, draft, rule, shape, sampling, rows=ROWS):
    """Return the emitted tokens and the share of rounds that accepted something."""
    decoder = Decoder(
        target,
        draft,
        SHAPES[shape],
        sampling=sampling,
        slots=len(PROMPT) + NEW,
        batch=rows,
        acceptance_rule=build_acceptance_rule(Verification(rule), sampling),
    )
    generations = decoder.decode([PROMPT] * rows, row_ids=list(range(rows)), max_new_tokens=NEW)
    accepted = torch.tensor([min(count, 1) for row in generations for count in row.accepted])
    return torch.tensor([row.ids for row in generations]), float(accepted.float().mean())


def sample_token_by_token(target, sampling):
    decoder = Decoder(target, sampling=sampling, slots=len(PROMPT) + NEW, batch=ROWS)
    generations = decoder.decode([PROMPT] * ROWS, row_ids=list(range(ROWS)), max_new_tokens=NEW)
    return torch.tensor([row.ids for row in generations])


def compute_p_value(ids, joint, positions):
    """Return the p-value of the tokens at these positions together; rare outcomes are counted as a single outcome."""
    expected = joint.sum([position for position in range(NEW) if position not in positions]).flatten()
    powers = WORDS ** torch.arange(len(positions) - 1, -1, -1)
    observed = (ids[:, positions] * powers).sum(1).bincount(minlength=len(expected)).double()
    assert observed[expected == 0].sum() == 0
    likely = expected * len(ids) >= 5
    observed, expected = (torch.cat([part[likely], part[~likely].sum()[None]]) for part in (observed, expected))
    possible = expected > 0
    assert possible.sum() > 20
    return chisquare(observed[possible], expected[possible] / expected.sum() * observed.sum()).pvalue


def compute_p_values(ids, joint):
    """Return the p-values of the first rounds, of the later ones, and of the two against each other."""
    return [compute_p_value(ids, joint, positions) for positions in ([1, 2, 3], [2, 3, 4], [1, 4])]
