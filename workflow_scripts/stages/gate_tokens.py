"""Gate stages `tokens` and `long_run` over one packaged folder.

Params: gate, `tokens` for the dialogues under 256 positions or `long_run` for the others. Inputs: folder, oracle,
checkpoint; and tables_folder where another folder's tables give the embeddings.
"""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.tables_folder import gate_tables_folder
from workflow_scripts.gates.tokens import dialogues_of, gate_dialogue, gate_tokenizer, that_fit
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release import driver
from workflow_scripts.release.plan import Plan, host_text
from workflow_scripts.release.tokenizer import ChatTokenizer
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict(job.params["gate"], job.inputs["folder"].name)
    with verdict.concluding(job.out):
        _compare(verdict, job)


def _compare(verdict: Verdict, job: Job) -> None:
    oracle, folder = Oracle.open(job.inputs["oracle"]), job.inputs["folder"]
    of_its_kind = dialogues_of(verdict, oracle, job.params["gate"] == "long_run")
    if not of_its_kind:
        return
    plan = Plan.open(folder)
    dialogues = that_fit(verdict, of_its_kind, plan.context)
    if not dialogues:
        return
    gate_tables_folder(verdict, plan.tables_elsewhere(folder), job.inputs.get("tables_folder"))
    tokenizer = ChatTokenizer.open(folder / plan.tokenizer)
    config = Checkpoint.open(job.inputs["checkpoint"]).config
    shape = plan.text == host_text(config)
    verdict.check("plan: shape of the decoder", shape, "the checkpoint's", "equal" if shape else "another")
    stops = sorted({*config.eos_token_ids, *tokenizer.stop_token_ids})
    found = sorted(plan.stop_token_ids)
    verdict.check("plan: stop tokens", found == stops, str(stops), str(found))
    for dialogue in dialogues:
        if dialogue.messages:
            encoded = tokenizer.encode_chat(dialogue.messages)
            gate_tokenizer(verdict, dialogue, encoded, tokenizer.decode(dialogue.output_ids))
    ids = {dialogue.name: dialogue.fed_ids for dialogue in dialogues}
    chosen = isolated(driver.follow, folder=str(folder), dialogues=ids)
    for dialogue in dialogues:
        gate_dialogue(verdict, dialogue, chosen[dialogue.name])
