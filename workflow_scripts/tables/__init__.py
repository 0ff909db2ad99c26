"""Per-layer embedding (PLE) and embedding tables: the raw gather dump and its reader."""
