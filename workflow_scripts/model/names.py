"""Canonical tensor names that more than one room needs."""

HEAD_WEIGHT = "embed_tokens.weight"
