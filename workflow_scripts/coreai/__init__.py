"""The only place that touches coreai_*: reproducible save, running a bundle, inspecting it."""
