"""What a person did wrong, told in one line."""


class UserError(ValueError):
    """A mistake of the person at the keyboard: the commands print it as one line and exit with status 2.

    The message names the thing, its value and the way out. Our own invariants use `assert` instead.
    It lives in `model/` because that room imports nothing of ours, so every other room can import it.
    """


class NotFinite(UserError):  # noqa: N818 - a result, in a comparison
    """A training that has left the finite numbers: in a comparison it is a result, not an end."""
