"""What the exports of token decoders share: embedding, decoder and head over stored weights and raw tables."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.coreai.convert import Function, torch_dtype
from workflow_scripts.coreai.weights_bundle import save_weights_bundle
from workflow_scripts.model.linear import exported_linears
from workflow_scripts.model.token_decoder import TokenDecoder, token_decoder
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch
from workflow_scripts.tables.open import open_tables


def save_decode(
    inputs: Mapping[str, Path],
    form: str,
    compute: str,
    functions: Callable[[TokenDecoder, TextConfig, str], Sequence[Function]],
    out: Path,
) -> None:
    """Write the decoder of the artifacts `weights` and `tables` into the folder `out`, as the functions of its form.

    `functions` gets the model, its configuration, and the layout of the tables by name.
    """
    weights, tables = Weights.open(inputs["weights"]), open_tables(inputs["tables"])
    dtype = torch_dtype(compute)
    model = token_decoder(weights, tables, exported_linears(weights, dtype, Scratch(out.parent)), dtype)
    made = functions(model, weights.config, tables.FORMAT)
    save_weights_bundle(made, weights, form, compute, out, tables=tables.FORMAT)
