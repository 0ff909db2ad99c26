"""Reproducible Core AI releases of Gemma 4: from a checkpoint to verified, ready-to-ship folders."""
