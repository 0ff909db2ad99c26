"""Stage `rehearsal`: a checkpoint folder as it is published, in a real model's shape and with random weights.

Inputs: `config.json` with that shape, and the files of a small tokenizer (`TOKENIZER_FILES`), each under its name.
Params: `seed`; `shard_bytes`, None for one file.
"""

from workflow_scripts.checkpoint.config_json import parse_text_config
from workflow_scripts.checkpoint.needed import CONFIG, read_json_object
from workflow_scripts.checkpoint.rehearsal import write_random_weights
from workflow_scripts.checkpoint.rehearsal_files import TOKENIZER_FILES, write_small_files
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the folder; what the config.json does not allow is refused before any weight is made."""
    path, seed = job.inputs[CONFIG], job.params["seed"]
    config = parse_text_config(read_json_object(path), str(path))
    tokenizer = {name: job.inputs[name] for name in TOKENIZER_FILES}
    write_small_files(job.out, path, tokenizer, config.vocab_size, config.max_position_embeddings, seed)
    write_random_weights(job.out, config, seed, job.params["shard_bytes"])
