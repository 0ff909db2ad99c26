"""The catalogue of `make mutants`: single faults by layer, each with the gate that must catch it."""

from workflow_scripts.checks.mutant_catalogue import export, kernels, model, packaging, quantization, tables
from workflow_scripts.checks.mutant_catalogue.mutant import Mutant

LAYERS: dict[str, tuple[Mutant, ...]] = {
    "model": model.MUTANTS,
    "quantization": quantization.MUTANTS,
    "tables": tables.MUTANTS,
    "export": export.MUTANTS,
    "kernels": kernels.MUTANTS,
    "packaging": packaging.MUTANTS,
}
"""Layer -> its mutants; names are unique over all layers."""


def layer_of(name: str) -> str:
    """The layer of a mutant by its name."""
    return next(layer for layer, mutants in LAYERS.items() if name in {mutant.name for mutant in mutants})


def by_name() -> dict[str, Mutant]:
    """All mutants."""
    return {mutant.name: mutant for mutants in LAYERS.values() for mutant in mutants}
