"""The Core ML reference: the only place that touches coremltools, an extra that no release needs."""
