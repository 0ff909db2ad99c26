"""Runs a bundle's Metal source on the CPU: extraction, compilation behind a shim, execution under several schedules."""
