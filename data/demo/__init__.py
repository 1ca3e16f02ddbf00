"""The embedded demo: a trained target, its training text and its prompts, all usable offline."""
