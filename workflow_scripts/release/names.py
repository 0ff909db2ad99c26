"""Names of the files that a release adds to the published bundles, and the format number of its records."""

FORMAT = 1

# At the top of a release. Only SHA256SUMS lists release.json, and nothing lists SHA256SUMS and measured.json.
RELEASE = "release.json"
MEASURED = "measured.json"
SUMS = "SHA256SUMS"
README = "README.md"
RECORDS = (RELEASE, MEASURED, SUMS)

# In each of its folders.
PROVENANCE = "provenance.json"
TOKENIZER = "tokenizer"
PLAN = "gemma4_plan.json"
CHUNKS_PLAN = "gemma4_chunks_plan.json"  # where the decoder is in chunks
METADATA = "metadata.json"  # where the folder is a language bundle
