"""Adapters for inference engines, each imported by its own name and each an optional extra.

Nothing here is imported by `import kvcs`, and an adapter brings its engine only when it is used.
"""
