"""The drafting methods: options in options.py, their modules here, found by registry.py."""
