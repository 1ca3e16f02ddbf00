"""Watch the rounds of a decoder."""


def watch_rounds(decoder, on_round):
    """Call `on_round` after each round with the verified tree, the emitted ids and their number."""
    run_round = decoder.session.run_round

    def watched(state, end_phase=None):
        proposal = state.proposal
        state, output = run_round(state, end_phase)
        on_round(proposal, output.ids, output.count)
        return state, output

    decoder.session.run_round = watched
