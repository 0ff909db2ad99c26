"""Stage: raw tables -> front-end bundle with the functions `gather_embeds` and `gather_per_layer`.

The tables are the very int8 rows of the raw dump. The arithmetic is float32 in every precision: the gathered rows are
few, and the context projection sums over the whole hidden size. Params: compute `fp32`|`fp16` (of the outputs).
"""

import torch

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.coreai.convert import Function, save_bundle, torch_dtype
from workflow_scripts.model.frontend import GatherEmbeds, GatherPerLayer, PerLayerMix, RowTable
from workflow_scripts.model.linear import DenseLinear
from workflow_scripts.model.norm import RMSNorm
from workflow_scripts.model.signature import frontend
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.raw import RawTables


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    tables, checkpoint = RawTables.open(job.inputs["tables"]), Checkpoint.open(job.inputs["checkpoint"])
    compute = job.params["compute"]
    dtype = torch_dtype(compute)
    specs = frontend(checkpoint.config, 0, compute)
    embeds = GatherEmbeds(
        RowTable(torch.from_numpy(tables.embed_rows), torch.from_numpy(tables.embed_scale)),
        tables.meta.embed_scale_main,
        dtype,
    )
    mix = PerLayerMix(
        DenseLinear(torch.from_numpy(tables.projection)),
        RMSNorm(torch.from_numpy(tables.projection_norm), tables.meta.rms_eps),
        layers=tables.meta.layers,
        projection_scale=tables.meta.proj_scale,
        input_scale=tables.meta.input_scale,
    )
    per_layer = GatherPerLayer(
        RowTable(torch.from_numpy(tables.per_layer_rows), torch.from_numpy(tables.per_layer_scale)),
        mix,
        tables.meta.embed_scale_pl,
        dtype,
    )
    modules = {"gather_embeds": embeds, "gather_per_layer": per_layer}
    functions = [Function(name, module, specs[name]) for name, module in modules.items()]
    description = {"form": "frontend", "tables": "int8", "compute": compute, "checkpoint": checkpoint.digest}
    save_bundle(functions, job.out, description)
