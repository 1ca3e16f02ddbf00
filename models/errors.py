"""The one exception that a user can fix: key, rule, value and remedy in a sentence."""


class UserError(Exception):
    """A user's mistake. `str(error)` reads `<config key>: <rule>, got <value>; <remedy>`."""
