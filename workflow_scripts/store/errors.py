"""What can go wrong in the store; none of it ever breaks a build."""


class StoreTrouble(Exception):
    """A level of the store cannot be used: no permission, no network."""


class NotStored(Exception):
    """One result that the store does not take; the message says why."""


class Damaged(Exception):
    """Something in the store is not what was put there; it must not be served."""
