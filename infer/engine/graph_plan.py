"""List the graphs that decoding needs, from a session and the lengths of its prompts.

    prefill         one per padded prompt length, or one for all (Device.can_read_any_length)
    begin           as many per draft and tree
    fused           a whole round; one per decoder
    verify, accept, cache_move, draft                      the parts of a round, which are timed
    allocate_slots, start_rows, empty_like, scatter_rows   the code between them, on lazy devices
                                                           (Device.compile_if_lazy)

Sessions of equal shapes share graphs, so the graphs of a run are a set.
"""

from collections.abc import Iterable, Iterator

from infer.engine.admission import bucket_length
from infer.engine.session import Session
from models.device.graph_budget import KIND_SEPARATOR, Graph, graph_key_of


def list_graphs(session: Session, prompt_lengths: Iterable[int], *, in_parts: bool = False) -> Iterator[Graph]:
    """Yield the graphs that decoding prompts of these lengths needs, `in_parts` those of unfused rounds too."""
    program, batch, slots = session.program, session.batch, session.cache_slots
    draft, tree, sampling, rule = program.draft, program.tree, program.sampling, program.acceptance_rule
    target_key = (program.target.graph_key, *program.layers, slots)
    policy_key = (*program.layers, slots, tree, rule, sampling.graph_key)
    draft_key = (None if draft is None else graph_key_of(draft), *policy_key)
    padded_lengths = {min(bucket_length(length), session.slots) for length in prompt_lengths}
    for padded in {"any"} if session.reads_any_length else padded_lengths:
        yield Graph("prefill", (*target_key, sampling.graph_key, padded))
        if draft is not None:
            yield Graph(f"begin{KIND_SEPARATOR}{session.kind}", (*draft_key, padded))
    yield Graph(f"fused{KIND_SEPARATOR}{session.kind}", (*target_key, *draft_key, batch))
    moves_key = (program.lookahead, program.max_moves, slots)
    rows_key = (batch, *moves_key, sampling.has_penalties)
    proposal_key = (tree.size, rule.needs_drawn_tokens(tree))
    if in_parts:
        yield Graph("verify", (*target_key, *rows_key, *proposal_key))
        yield Graph("accept", (*policy_key, batch))
        if program.max_moves:
            yield Graph("cache_move", rows_key)
        if draft is not None:
            yield Graph(f"draft{KIND_SEPARATOR}{session.kind}", (*draft_key, batch))
    if session.device.lazy:
        buffers_key = (*target_key, draft_key[0])
        yield from (Graph("allocate_slots", (*buffers_key, rows)) for rows in {1, batch})
        yield Graph("start_rows", (*moves_key, sampling.graph_key))
        if batch > 1:
            yield Graph("empty_like", (*rows_key, *proposal_key))
            yield Graph("scatter_rows", (*buffers_key, *rows_key, *proposal_key))
