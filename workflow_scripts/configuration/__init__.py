"""What the configuration means: its data, the checks of its shape and meaning, and their wording."""
