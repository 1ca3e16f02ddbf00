"""The embedded demo: a trained target, its text and its prompts, which work offline."""
