"""Admission of requests: how many are prefilled next, how they are padded, which rows they take."""

import time

import torch
from torch import Tensor

from infer.engine.requests import Request, StopCriteria
from infer.engine.session import Buffers, Session
from infer.engine.steps import SessionState
from models.trees.keyed_noise import split_row_ids

MIN_BUCKET = 64  # tokens; longer prompts are padded to a power of two: one graph per length
PROMPT_ALIGNMENT = 16  # tokens, where one graph reads all prompts: it needs a view of the cache per padded length
PASS_COST = 64  # padded tokens that cost as much as the weights' read of one more pass


def bucket_length(length: int) -> int:
    """Return the length to which a prompt is padded: a power of two, to need few graphs."""
    return max(MIN_BUCKET, 1 << (length - 1).bit_length())


def pad_length(length: int, session: Session) -> int:
    """Return the padded length of prompts that have at most `length` tokens."""
    if session.reads_any_length:
        return -(-length // PROMPT_ALIGNMENT) * PROMPT_ALIGNMENT  # rounded up
    return bucket_length(length) if session.device.has_static_shapes else length


def count_admissible(session: Session, num_running: int, min_free_rows: int) -> int:
    """Return how many prompts to prefill next.

    With static shapes this is at most 1, to need fewer graphs. With dynamic shapes it is the number
    of free rows, or 0 while some row is running and fewer than `min_free_rows` are free.
    """
    free = session.batch - num_running
    if session.device.has_static_shapes:
        return min(free, 1)
    return free if free >= min_free_rows or not num_running else 0


def split_by_length(requests: list[Request]) -> list[list[Request]]:
    """Return the requests in groups that share a prefill pass, the shortest prompts first.

    A pass pads its prompts to the longest. No other split has fewer padded tokens, when each pass
    counts as PASS_COST more.
    """
    requests = sorted(requests, key=lambda request: len(request.ids))
    # The best split of the first n requests: its cost, and where its last group begins.
    best = [(0, 0)]
    for end, request in enumerate(requests, 1):
        best.append(min((best[start][0] + (end - start) * len(request.ids) + PASS_COST, start) for start in range(end)))
    groups, end = [], len(requests)
    while end:
        start = best[end][1]
        groups.append(requests[start:end])
        end = start
    return groups[::-1]


def pad_and_start(
    session: Session, prompts: list[list[int]], row_ids: list[int], buffers: Buffers | None = None
) -> tuple[SessionState, Tensor, Tensor]:
    """Prefill prompts into the first rows; return the state, and first tokens' logits and scores.

    The prompts are padded to one length, and the batch is filled with empty prompts. With `buffers`
    the rows are those of the buffers, as in `Session.start_prompts`.
    """
    batch = buffers[0].batch if buffers else session.batch
    length = min(pad_length(max(map(len, prompts)), session), session.slots)
    padding = batch - len(prompts)
    input_ids = torch.tensor([ids + [0] * (length - len(ids)) for ids in prompts] + [[0] * length] * padding)
    lengths = torch.tensor([*map(len, prompts), *[0] * padding])
    row_limbs = split_row_ids(row_ids + [0] * padding)
    return session.start_prompts(
        *(tensor.to(session.device.torch_device) for tensor in (input_ids, lengths, row_limbs)),
        buffers=buffers,
        num_slots=length if session.reads_views else None,
    )


def admit_requests(
    session: Session,
    state: SessionState | None,
    requests: list[Request],
    running: dict[int, Request],
    criteria: StopCriteria,
) -> SessionState:
    """Prefill requests into free rows, in passes of similar lengths; return the new state.

    Each request gets its first token and the time of its pass, and is added to `running` by row. A
    request that already ends with its first token is marked as finished instead.
    """
    groups = split_by_length(requests)
    fills_rows = session.batch == 1 or not session.device.has_static_shapes
    overwrites = fills_rows and not running and len(groups) == 1
    for group in groups:
        start = time.perf_counter()
        rows = [row for row in range(session.batch) if row not in running][: len(group)]
        prompts, row_ids = [request.ids for request in group], [request.row_id for request in group]
        if overwrites:  # the state is that of these requests alone
            state = prefilled = pad_and_start(session, prompts, row_ids)[0]
        else:
            prefilled = pad_and_start(session, prompts, row_ids, session.side_buffers(len(group)))[0]
            state = session.insert(state, prefilled, torch.tensor(rows, device=session.device.torch_device))
        first_tokens = prefilled.rows.root.tolist()[: len(group)]  # rows beyond them are empty
        prefill_s = time.perf_counter() - start
        for row, first_token, request in zip(rows, first_tokens, group, strict=True):
            request.generation.ids, request.generation.prefill_s = [first_token], prefill_s
            request.truncate_if_finished(criteria, num_new=1)
            if not request.finished:
                running[row] = request
    assert state is not None  # there is a request
    return state
