"""What the project asserts of itself, run by make: reproducibility and the cost of rebuilding."""
