"""The program that the benches of saving and of gates share."""

from collections.abc import Sequence

import coreai_torch
import torch
from coreai.authoring import AIProgram
from coreai_torch import TorchConverter

from workflow_scripts.checks.measure import quiet
from workflow_scripts.model.linear import PaletteLinear
from workflow_scripts.quantize.weights import Palette

INPUT, OUTPUT, FUNCTION = "x", "y", "main"


def program_of(palettes: Sequence[Palette]) -> AIProgram:
    """A function from `x` float32 [1, 1, K] to the sum `y` [1, 1, N] of all products, in float32."""
    columns = palettes[0].indices.shape[1]
    with quiet(), torch.no_grad():
        exported = torch.export.export(_Sum(palettes), args=(torch.zeros(1, 1, columns),), strict=False)
        converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
        converter.add_exported_program(
            exported.run_decompositions(coreai_torch.get_decomp_table()),
            input_names=[INPUT],
            output_names=[OUTPUT],
            entrypoint_name=FUNCTION,
        )
        return converter.to_coreai()


class _Sum(torch.nn.Module):
    def __init__(self, palettes: Sequence[Palette]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(PaletteLinear(palette, torch.float32) for palette in palettes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all layers' outputs."""
        return sum(layer(x) for layer in self.layers)
