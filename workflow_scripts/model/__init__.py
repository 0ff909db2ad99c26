"""The Gemma 4 text decoder, written to be read as its specification, and the graph forms made of it."""
