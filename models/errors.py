"""The one exception that a user can fix: a sentence with the key, the rule, the value and the remedy."""


class UserError(Exception):
    """A user's mistake. `str(error)` reads `<config key>: <rule>, got <value>; <remedy>`."""
