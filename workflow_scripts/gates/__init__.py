"""Gates: the oracle, the comparisons and their verdicts."""
