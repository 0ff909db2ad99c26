"""The store: results of stages kept under the key over everything that went into them."""
