"""Checkpoints: resolve, verify and read safetensors in every layout the world really has."""
