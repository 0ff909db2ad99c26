"""One thin module per rule: it reads the arguments, calls the rooms below and fills one output folder."""
