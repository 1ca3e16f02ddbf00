"""The drafting methods: options in config/, their modules here, found by registry.py."""
