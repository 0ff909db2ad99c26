"""Quantization: palettes, recipes and error reports; tensors are streamed, a model is never held."""
