"""Release folders: packaging, verification, chat from a folder alone."""
