"""The error that a command line shows in one line."""


class UserError(ValueError):
    """Something that the user asked for or supplied cannot be: the message names it, what it is and what is wanted.

    A class of its own so that the command line can tell it from a `ValueError` out of a model or an operation under
    development, whose traceback is needed.
    """
