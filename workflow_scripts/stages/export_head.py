"""Stage: weights -> head bundle (logits with softcap, or the token id).

Params: form `head`|`head_argmax`, compute `fp32`|`fp16`.
"""

from workflow_scripts.coreai.convert import Function, torch_dtype
from workflow_scripts.coreai.weights_bundle import save_weights_bundle
from workflow_scripts.model.heads import ArgmaxHead, LogitsHead
from workflow_scripts.model.linear import exported_linears
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import signature
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, form, compute = Weights.open(job.inputs["weights"]), job.params["form"], job.params["compute"]
    dtype = torch_dtype(compute)
    lm_head = exported_linears(weights, dtype, Scratch(job.out.parent))(HEAD_WEIGHT)
    softcap = weights.config.final_logit_softcapping
    module = LogitsHead(lm_head, softcap, dtype) if form == "head" else ArgmaxHead(lm_head, dtype)
    spec = signature(form, weights.config, 0, compute)["main"]
    save_weights_bundle([Function("main", module, spec)], weights, form, compute, job.out)
