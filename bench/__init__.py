"""``python -m bench`` in a checkout: the same as ``kvcs bench``."""
