"""The error that a command line shows in one line."""


class UserError(ValueError):
    """A setting or a file that the user supplied is invalid: the message names it, its value and what is wanted.

    It has a class so that the command line can tell it from a `ValueError` raised by a model or an operation under
    development, whose traceback is needed.
    """
