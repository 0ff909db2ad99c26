"""What the gates over dialogues check of a packaged folder itself: its plan, its tables, its tokenizer and template."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.oracle import Dialogue
from workflow_scripts.gates.tables_folder import gate_tables_folder
from workflow_scripts.gates.tokens import gate_tokenizer
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release.plan import Plan, host_text
from workflow_scripts.release.tokenizer import ChatTokenizer


def check_folder(verdict: Verdict, inputs: Mapping[str, Path], dialogues: Sequence[Dialogue]) -> None:
    """The inputs `folder`, `checkpoint` and, where it takes its tables from there, `tables_folder`."""
    folder = inputs["folder"]
    plan = Plan.open(folder)
    gate_tables_folder(verdict, plan.tables_elsewhere(folder), inputs.get("tables_folder"))
    tokenizer = ChatTokenizer.open(folder / plan.tokenizer)
    config = Checkpoint.open(inputs["checkpoint"]).config
    shape = plan.text == host_text(config)
    verdict.check("plan: shape of the decoder", shape, "the checkpoint's", "equal" if shape else "another")
    stops = sorted({*config.eos_token_ids, *tokenizer.stop_token_ids})
    found = sorted(plan.stop_token_ids)
    verdict.check("plan: stop tokens", found == stops, str(stops), str(found))
    for dialogue in dialogues:
        if dialogue.messages:
            encoded = tokenizer.encode_chat(dialogue.messages)
            gate_tokenizer(verdict, dialogue, encoded, tokenizer.decode(dialogue.output_ids))
