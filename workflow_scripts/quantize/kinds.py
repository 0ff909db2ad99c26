"""Kinds of matrices: what a recipe can store in different ways, and what Metal kernels read."""

HEAD = "embed_tokens.weight"  # tied: the head is the token embedding

KINDS = ("mlp", "head", "other")
"""Gate, up and down projections; the head; the matrices of attention and per-layer embedding."""


def matrix_kind(name: str) -> str:
    """The kind of a matrix by its canonical tensor name."""
    if name == HEAD:
        return "head"
    return "mlp" if ".mlp." in name else "other"
